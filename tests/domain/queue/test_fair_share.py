"""Number of pieces that a trainer holds: shares, and requests."""

from hypothesis import given
from hypothesis import strategies as st

from flightedl.domain.queue.fair_share import HOLDING_CEILING, HOLDING_FLOOR, count_to_ask_for, wanted_count
from flightedl.domain.queue.tasks import TaskQueue
from flightedl.domain.queue.values import QueueSettings, TaskGiven


def test_the_wanted_pieces_cover_the_time():
    assert wanted_count(None, 3.5) == 2
    assert wanted_count(60.0, 3.5) == 2, "the running piece and the next one, however long they take"
    assert wanted_count(0.5, 3.5) == 11
    assert wanted_count(0.1, 3.5) == 53
    assert wanted_count(0.0, 3.5) == HOLDING_CEILING


def test_pieces_are_requested_when_a_third_is_missing():
    assert [count_to_ask_for(6, held) for held in (6, 5, 4, 0)] == [0, 0, 2, 6]


@given(pace_s=st.floats(0.001, 100.0), cover_s=st.floats(0.0, 60.0))
def test_enough_pieces_are_left_whenever_none_are_requested(pace_s, cover_s):
    wanted = wanted_count(pace_s, cover_s)
    assert HOLDING_FLOOR <= wanted <= HOLDING_CEILING
    needed = min(cover_s / pace_s, HOLDING_CEILING * 2 // 3)
    for held in range(wanted + 1):
        asks = count_to_ask_for(wanted, held)
        assert asks in (0, wanted - held)
        assert asks or held > needed - 1, "the piece that just began is one of them"


@given(
    wants=st.lists(st.integers(2, 64), min_size=1, max_size=6),
    chooses=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=300),
    task_s=st.sampled_from([0.001, 1.0]),
)
def test_no_trainer_holds_more_rows_than_fit_into_200_bytes(wants, chooses, task_s):
    """Trainers ask like the feed, finish in order, and some die; the stored state remains small."""
    settings = QueueSettings(task_count=1_000_000, batch_counts=lambda _: 1000, shuffle=True, epochs=None)
    queue = TaskQueue(settings)
    queue.epoch, queue.cursor, queue.next_attempt = 100, 900_000, 10**9
    names = [f"trainer-{number:05d}.worker-7f9c4b5d8-xk2lp.namespace" for number in range(len(wants))]
    for now, (number, kind) in enumerate(chooses):
        now_s = now * task_s
        index = number % len(names)
        name = names[index]
        held = queue.holders().get(name, ())
        if kind == 0:
            queue.trainer_departed(name, now_s)
        elif held:
            queue.finish(name, held[0].epoch, held[0].position, held[0].attempt, now_s)
        for _ in range(count_to_ask_for(wants[index], queue.held_count(name))):
            if not isinstance(queue.request(name, now_s, HOLDING_CEILING, trainer_count=len(names)), TaskGiven):
                break
        assert len(queue.pending.backlog_of(name).rows) <= 4
    queue.check()
    assert len(queue.encode_parts()[0]) < 4096 + 200 * len(names)
    assert TaskQueue.decode(queue.encode(), settings).holders() == queue.holders()


def _shares_near_the_end(task_s: float, task_count: int, trainers: int) -> list[list[int]]:
    """Return what each trainer holds before all finish one piece: they ask for much, and are equally fast."""
    queue = TaskQueue(QueueSettings(task_count=task_count, batch_counts=lambda _: 3))
    names = [f"trainer-{number}" for number in range(trainers)]
    now, shares = 0.0, []
    while True:
        for name in names:
            while isinstance(queue.request(name, now, HOLDING_CEILING, trainer_count=trainers), TaskGiven):
                pass
        if queue.is_done or not any(queue.held_count(name) for name in names):
            return shares
        shares.append([queue.held_count(name) for name in names])
        now += task_s
        for name in names:
            for one in queue.holders().get(name, ())[:1]:
                queue.finish(name, one.epoch, one.position, one.attempt, now)


def test_a_trainer_holds_enough_short_tasks_until_its_report_is_answered():
    shares = _shares_near_the_end(0.01, 20, 2)
    assert shares[1:] == [[4, 4]] * 6 + [[3, 3], [2, 2], [1, 1]]


def test_a_trainer_holds_at_most_two_long_tasks_when_few_are_left():
    assert max(map(max, _shares_near_the_end(1.0, 20, 2)[5:])) == 2


@given(task_count=st.integers(1, 60), trainers=st.integers(1, 5), task_s=st.sampled_from([0.005, 0.02, 0.04]))
def test_short_tasks_are_shared_equally_until_the_end(task_count, trainers, task_s):
    shares = _shares_near_the_end(task_s, task_count, trainers)
    worked = [sum(1 for share in shares if share[index]) for index in range(trainers)]
    assert sum(worked) == task_count
    assert max(worked) - min(worked) <= 1, "trainers wait at most for the end of one task"
