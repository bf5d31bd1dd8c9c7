"""How many pieces a trainer holds: the shares, and what it asks for."""

from hypothesis import given
from hypothesis import strategies as st

from flightedl.domain.queue.fair_share import HOLDING_CEILING, HOLDING_FLOOR, count_to_ask_for, wanted_count
from flightedl.domain.queue.tasks import TaskQueue
from flightedl.domain.queue.values import QueueSettings, TaskGiven


def test_what_is_wanted_covers_the_time():
    assert wanted_count(None, 3.5) == 2
    assert wanted_count(60.0, 3.5) == 2, "the one that runs and the next, as long as they take"
    assert wanted_count(0.5, 3.5) == 11
    assert wanted_count(0.1, 3.5) == 53
    assert wanted_count(0.0, 3.5) == HOLDING_CEILING


def test_it_is_asked_for_when_a_third_is_missing():
    assert [count_to_ask_for(6, held) for held in (6, 5, 4, 0)] == [0, 0, 2, 6]


@given(pace_s=st.floats(0.001, 100.0), cover_s=st.floats(0.0, 60.0))
def test_whenever_it_does_not_ask_enough_are_left(pace_s, cover_s):
    wanted = wanted_count(pace_s, cover_s)
    assert HOLDING_FLOOR <= wanted <= HOLDING_CEILING
    needed = min(cover_s / pace_s, HOLDING_CEILING * 2 // 3)
    for held in range(wanted + 1):
        asks = count_to_ask_for(wanted, held)
        assert asks in (0, wanted - held)
        assert asks or held > needed - 1, "the one that just began is among them"


@given(
    wants=st.lists(st.integers(2, 64), min_size=1, max_size=6),
    chooses=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=300),
)
def test_nobody_holds_more_rows_than_are_stored_in_200_bytes(wants, chooses):
    """Trainers ask as the feed does, finish in their order, and some die; whatever they do, the state stays small."""
    settings = QueueSettings(task_count=1_000_000, batch_counts=lambda _: 1000, shuffle=True, epochs=None)
    queue = TaskQueue(settings)
    queue._state.epoch, queue._state.cursor, queue._state.next_attempt = 100, 900_000, 10**9
    names = [f"trainer-{number:05d}.worker-7f9c4b5d8-xk2lp.namespace" for number in range(len(wants))]
    for number, kind in chooses:
        index = number % len(names)
        name = names[index]
        held = queue.holders().get(name, ())
        if kind == 0:
            queue.trainer_gone(name, 1.0)
        elif held:
            queue.finish(name, held[0].epoch, held[0].position, held[0].attempt, 1.0)
        for _ in range(count_to_ask_for(wants[index], queue.held_count(name))):
            if not isinstance(queue.request(name, 1.0, HOLDING_CEILING, trainer_count=len(names)), TaskGiven):
                break
        assert len(queue._state.pending.backlog_of(name).rows) <= 4
    queue.check()
    assert len(queue.encode_parts()[0]) < 4096 + 200 * len(names)
    assert TaskQueue.decode(queue.encode(), settings).holders() == queue.holders()
