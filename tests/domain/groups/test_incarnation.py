"""Incarnations of a group: explored exhaustively if they are small, at random if they are not."""

from dataclasses import dataclass, replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flightedl.domain.groups.incarnation import DONE, OVER, RUNNING, Group, without
from flightedl.domain.groups.plan import Order, Piece, Round
from flightedl.errors import FencedError, FlightedlError, UsageError
from flightedl.messages.groups import (
    GroupLeaveRequest,
    GroupPlaceRequest,
    GroupRecord,
    GroupStartRequest,
)

LIMIT = 3
#: Number of records in a round.
ROUND = 20


def part(lane, first, end, epoch=0, order=(4, 8)):
    """Return a range of records of a lane, as in messages."""
    return (epoch, *order, lane, first, end)


HARMLESS = part(0, 0, 10)


@dataclass(frozen=True)
class Process:
    start: str
    rank: int
    generation: int
    size: int = 2
    token: str = ""

    @property
    def trainer(self):
        return f"{self.start}-{self.rank}-{self.generation}"

    def _own(self):
        return {"trainer": self.trainer, "generation": self.generation, "job": "j", "rank": self.rank}

    def enter(self, **more):
        told = {"start": self.start, "size": self.size, "token": self.token, "position": self.token} | more
        return GroupStartRequest(**self._own(), **told)

    def at(self, incarnation, at=0, pieces=(HARMLESS,), count=ROUND):
        return GroupPlaceRequest(**self._own(), incarnation=incarnation, at=at, end=at + count, pieces=list(pieces))

    def stopping(self, incarnation, at):
        return msgspec.structs.replace(self.at(incarnation, at), is_stopping=True)

    def leave(self, incarnation, **more):
        told = {"is_clean": True, "has_finished": True} | more
        return GroupLeaveRequest(**self._own(), incarnation=incarnation, **told)


def pair(start, first, tokens=("", ""), size=2):
    return [Process(start, rank, first + rank, size, token) for rank, token in enumerate(tokens)]


def begin(group, processes):
    """Let all of them join; return the incarnation."""
    replies = [group.enter(each.enter()) for each in (*processes, *processes)]
    assert len({reply.incarnation for reply in replies[-len(processes) :]}) == 1
    return replies[-1].incarnation


def as_stored(group):
    """Return a successor's group, which knows only the stored state."""
    return Group(LIMIT, msgspec.json.decode(msgspec.json.encode(group.record), type=GroupRecord))


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"size": 3}, "rank 1 was started in a group of 3 ranks, but rank 0 in one of 2"),
        ({"plan": "batch_size=4"}, "rank 1 has declared the data with batch_size=4, but rank 0 with batch_size=8"),
    ],
)
def test_ranks_with_different_plans_do_not_start_together(more, sentence):
    group, (zero, one) = Group(LIMIT), pair("a", 10)
    group.enter(zero.enter(plan="batch_size=8"))
    with pytest.raises(UsageError, match=sentence):
        group.enter(one.enter(**{"plan": "batch_size=8"} | more))
    group.check()
    assert group.enter(one.enter(plan="batch_size=8")).incarnation == 10


# exhaustively


@dataclass(frozen=True)
class View:
    """A process as it sees itself."""

    state: str = "new"  # new, started, left, raised, gone
    incarnation: int = 0
    token: str = ""


def copy_of(group):
    after = Group(2, group.record)
    after.places = dict(group.places)
    return after


def _key(group, views):
    return msgspec.json.encode(group.record), tuple(sorted(group.places)), views


def _steps(group, views, processes):
    """Yield all states that one event leads to."""
    for number, (process, view) in enumerate(zip(processes, views, strict=True)):
        if view.state in {"new", "started"}:
            after = copy_of(group)
            try:
                reply = after.enter(process.enter())
            except FlightedlError:
                seen = view
            else:
                seen = View("started", reply.incarnation, reply.token) if reply.incarnation else view
            yield "enter", number, after, _with(views, number, seen)
            after = copy_of(group)
            after.gone(process.trainer, process.generation)
            yield "gone", number, after, _with(views, number, replace(view, state="gone"))
        if view.state == "started":
            after = copy_of(group)
            is_current = after.at(process.at(view.incarnation), 0.0).is_current
            assert is_current == (view.incarnation == group.record.incarnation and group.record.phase == RUNNING)
            yield "at", number, after, views
        yield from _leaving(group, views, number, process, view)


def _leaving(group, views, number, process, view):
    """Yield the states after a process leaves, once or twice, because the message may be repeated."""
    if view.state in {"started", "left"}:
        after = copy_of(group)
        try:
            after.leave(process.leave(view.incarnation))
        except FencedError:
            # It ends by this error.
            assert view.state == "started" or view.incarnation < after.record.incarnation
            yield "fenced", number, after, _with(views, number, replace(view, state="raised"))
        else:
            yield "left", number, after, _with(views, number, replace(view, state="left"))
    if view.state in {"started", "raised"}:
        after = copy_of(group)
        after.leave(process.leave(view.incarnation, is_clean=False, error="E"))
        yield "raised", number, after, _with(views, number, replace(view, state="raised"))
    if view.state in {"left", "raised"}:
        after = copy_of(group)
        after.gone(process.trainer, process.generation)
        yield "gone", number, after, views


def _with(views, number, view):
    return (*views[:number], view, *views[number + 1 :])


@pytest.mark.parametrize("names", [("a", "b"), ("", "")])
@pytest.mark.parametrize("tokens", [("", "", "", ""), ("A", "", "", "B"), ("A", "B", "A", "A")])
def test_every_order_of_two_starts_of_two_ranks_is_correct(names, tokens):
    processes = [*pair(names[0], 10, tokens[:2]), *pair(names[1], 20, tokens[2:])]
    first = Group(2), (View(),) * 4
    known, open_ = {_key(*first)}, [first]
    phases = set()
    while open_:
        group, views = open_.pop()
        for what, number, after, seen in _steps(group, views, processes):
            key = _key(after, seen)
            if key in known:
                continue
            known.add(key)
            open_.append((after, seen))
            phases.add(after.record.phase)
            after.check()
            assert after.record.incarnation >= group.record.incarnation
            started = seen[number]
            if what == "enter" and started.state == "started":
                # Only the newest incarnation starts any rank.
                assert started.incarnation == after.record.incarnation
                group_of = {
                    p.start for p, v in zip(processes, seen, strict=True) if v.incarnation == started.incarnation
                }
                assert group_of == {processes[number].start}
                assert {v.token for v in seen if v.incarnation == started.incarnation} == {after.record.token}
            if after.record.phase == DONE:
                ended = [v.state for v in seen if v.incarnation == after.record.incarnation]
                assert ended == ["left", "left"]
            # A successor decides the same.
            assert as_stored(after).record == after.record
    is_refused = tokens[0] and tokens[1] and tokens[0] != tokens[1]
    assert phases == {"gathering", RUNNING, OVER, DONE}
    assert len(known) > 100
    assert not is_refused or any(b"has loaded" in key[0] for key in known)


# by example


def test_waiting_ranks_are_checked_cheaply_and_report_rarely_if_they_are_many():
    group = Group(LIMIT)
    processes = pair("a", 10, ("",) * 500, size=500)
    for number, each in enumerate(processes):
        assert not group.waits(each.enter())
        group.enter(each.enter())
        assert group.waits(each.enter()) == (number < 499)
    assert not group.waits(pair("b", 900)[1].enter())
    assert group.at(processes[7].at(10), 0.0).every_s == 2.5
    small = Group(LIMIT)
    begin(small, pair("a", 10))
    assert small.at(pair("a", 10)[0].at(10), 0.0).every_s == 0.5


def test_one_token_counts_for_ranks_without_a_token():
    group = Group(LIMIT)
    zero, one, two = processes = pair("a", 10, ("", "T", ""), size=3)
    assert group.enter(two.enter()).is_stale
    assert group.enter(zero.enter()).waiting_for == "rank 1, 2 of 3 to ask for its first batch"
    assert not group.enter(two.enter()).is_stale
    assert group.enter(one.enter()).token == "T"
    assert {group.enter(each.enter()).token for each in processes} == {"T"}


def test_two_tokens_are_refused_with_both_named_in_every_rank():
    group = Group(LIMIT)
    zero, one = pair("a", 10, ("epoch 1, record 300", "epoch 2, record 5"))
    group.enter(zero.enter())
    for each in (one, zero):
        with pytest.raises(UsageError, match=r"rank 0 .* epoch 1, record 300 and rank 1 epoch 2, record 5: load"):
            group.enter(each.enter())
    assert begin(group, pair("b", 20, ("T", "T"))) == 20


def test_loading_another_token_later_is_refused():
    group = Group(LIMIT)
    zero, _ = processes = pair("a", 10)
    begin(group, processes)
    with pytest.raises(UsageError, match="another token before"):
        group.enter(zero.enter(token="T"))


def test_ranks_that_disagree_about_the_size_are_refused():
    group = Group(LIMIT)
    zero, one = pair("a", 10)
    group.enter(zero.enter())
    with pytest.raises(UsageError, match="in a group of 3 ranks, but rank 0 in one of 2"):
        group.enter(one.enter(size=3))
    for rank in (2, 7):
        with pytest.raises(UsageError, match="not below"):
            group.enter(msgspec.structs.replace(one.enter(), rank=rank))


def test_a_group_has_started_with_its_rank_zero():
    group = Group(LIMIT)
    assert not group.has_started
    zero, one = processes = pair("a", 1)
    group.enter(one.enter())
    assert not group.has_started
    begin(group, processes)
    assert group.has_started
    assert group.enter(zero.enter()).watched_until == 0, "no start has ended before"


def test_missing_ranks_are_named_up_to_eight():
    for size, named in ((9, "rank 1, 2, 3, 4, 5, 6, 7, 8 of 9 to"), (10, "rank 1, 2, 3, 4, 5, 6, 7, 8, ... of 10 to")):
        reply = Group(LIMIT).enter(Process("a", 0, 10, size).enter())
        assert reply.waiting_for.startswith(named)


def test_only_a_newer_process_takes_the_place_of_a_rank_that_waits():
    group = Group(LIMIT)
    zero, one, two = (Process("a", rank, 10 + rank, 3) for rank in range(3))
    for each in (zero, one):
        group.enter(each.enter())
    assert group.enter(Process("a", 1, 9, 3).enter()).is_stale
    same = msgspec.structs.replace(one.enter(), trainer="another")
    assert group.enter(same).is_stale
    newer = Process("a", 1, 20, 3)
    assert not group.enter(newer.enter()).is_stale
    group.enter(two.enter())
    assert group.at(newer.at(10), 0.0).is_current
    assert not group.at(one.at(10), 0.0).is_current


def test_a_rank_that_dies_before_the_others_arrive_is_missing_again():
    group = Group(LIMIT)
    zero, one, two = (Process("a", rank, 10 + rank, 3) for rank in range(3))
    for each in (zero, one):
        group.enter(each.enter())
    group.gone(one.trainer, one.generation)
    assert group.enter(zero.enter()).waiting_for.startswith("rank 1, 2 of 3 to")
    assert not group.enter(two.enter()).incarnation


def test_another_rank_zero_of_the_same_generation_is_refused():
    group = Group(LIMIT)
    begin(group, pair("a", 10))
    with pytest.raises(FencedError, match="later start"):
        group.enter(Process("b", 0, 10).enter())


def test_a_later_start_ends_the_previous_one():
    group = Group(LIMIT)
    old, new = pair("a", 10), pair("b", 20)
    assert begin(group, old) == 10
    assert begin(group, new) == 20
    assert not group.at(old[1].at(10), 1.0).is_current
    for each in old:
        with pytest.raises(FencedError, match="start this process again"):
            group.leave(each.leave(10))
    assert group.record.phase == RUNNING
    assert group.at(new[1].at(20), 1.0).is_current
    assert group.enter(old[1].enter()).is_stale
    with pytest.raises(FencedError, match="later start"):
        group.enter(old[0].enter())


def test_a_death_in_the_last_save_is_not_the_end():
    group = Group(LIMIT)
    zero, one = processes = pair("a", 10)
    begin(group, processes)
    group.leave(zero.leave(10))
    group.gone(zero.trainer, zero.generation)
    assert group.record.phase == RUNNING
    group.gone(one.trainer, one.generation)
    assert group.record.phase == OVER
    again = pair("b", 20, ("T", "T"))
    begin(group, again)
    for each in again:
        group.leave(each.leave(20))
    assert group.is_done


def test_a_stopped_group_ends_after_the_highest_round_that_a_rank_may_have_started():
    group = Group(LIMIT)
    zero, one = processes = pair("a", 10)
    begin(group, processes)
    assert not group.at(zero.at(10, 16), 0.0).is_stopping
    group.is_stopped = True
    # Rank 0 may have started rounds that it has not reported, until it reports each round first.
    assert group.at(one.at(10, 16), 1.0).is_stopping
    assert group.at(one.stopping(10, 32), 2.0).stop_after is None
    assert group.at(zero.at(10, 48), 2.0).stop_after is None
    assert group.at(one.stopping(10, 64), 3.0).stop_after is None
    # An outdated report of the rank's other thread changes nothing.
    assert group.at(one.stopping(10, 48), 3.0).stop_after is None
    assert group.at(zero.stopping(10, 64), 4.0).stop_after == 64
    assert group.at(one.stopping(10, 80), 5.0).stop_after == 64
    successor = as_stored(group)
    successor.is_stopped = True
    assert successor.at(zero.stopping(10, 64), 0.0).stop_after == 64
    for each in processes:
        assert not group.is_done
        group.leave(each.leave(10))
    group.check()
    assert group.is_done


@pytest.mark.parametrize("finished", [False, True])
def test_a_rank_that_has_left_a_stopped_group_holds_up_no_other(finished):
    group = Group(LIMIT)
    zero, one = processes = pair("a", 10)
    begin(group, processes)
    group.is_stopped = True
    group.at(one.at(10, 32), 0.0)
    group.leave(one.leave(10, has_finished=finished))
    assert group.at(zero.stopping(10, 16), 1.0).stop_after == 32
    group.leave(zero.leave(10))
    group.check()
    assert group.is_done


def test_a_new_start_of_a_stopped_group_ends_after_its_first_rounds():
    group = Group(LIMIT)
    zero, one = processes = pair("a", 10)
    begin(group, processes)
    group.is_stopped = True
    for each in processes:
        group.at(each.stopping(10, 640), 0.0)
    group.leave(one.leave(10, is_clean=False))
    again = pair("b", 20)
    begin(group, again)
    assert group.enter(again[0].enter()).is_stopping
    assert [group.at(each.stopping(20, 0), 1.0).stop_after for each in again] == [None, 0]
    assert not group.at(zero.stopping(10, 0), 2.0).is_current


def test_leaving_before_the_end_of_the_data_does_not_end_the_job():
    group = Group(LIMIT)
    processes = pair("a", 10)
    begin(group, processes)
    for each in processes:
        group.leave(each.leave(10, has_finished=False))
    assert group.record.phase == OVER


# harmful records


def dies(group, start, first, at, pieces, how="gone"):
    """Start a group whose rank 1 dies at ``pieces``, while rank 0 is at other records of the same round."""
    zero, one = pair(start, first)
    begin(group, [zero, one])
    group.at(zero.at(first, at, [part(9, 0, 10)]), 2.0)
    group.at(one.at(first, at, pieces), 1.0)
    if how == "raises":
        group.leave(one.leave(first, is_clean=False, error="ValueError: odd"))
        group.gone(zero.trainer, zero.generation)
    elif how == "gone":
        group.gone(one.trainer, one.generation)
        group.gone(zero.trainer, zero.generation)
    elif how == "collective":
        group.leave(zero.leave(first, is_clean=False))
        group.gone(zero.trainer, zero.generation)
        group.gone(one.trainer, one.generation)
    else:
        assert how == "replaced"


BAD = [part(3, 20, 30)]


@pytest.mark.parametrize("how", ["raises", "gone", "collective", "replaced"])
def test_records_that_kill_their_rank_repeatedly_are_convicted(how):
    group = Group(LIMIT)
    for number in range(LIMIT):
        assert not group.record.convicted
        dies(group, f"s{number}", 10 * (number + 1), 40, BAD, how)
    zero, one = pair("last", 100)
    begin(group, [zero, one])
    (convicted,) = group.record.convicted
    assert [tuple(piece) for piece in convicted.pieces] == BAD
    assert convicted.deaths == LIMIT
    assert group.enter(one.enter()).left_out == [BAD[0]]
    assert not group.record.suspects


def test_records_that_are_in_several_pieces_are_convicted_once():
    """A rank reports all rounds that may kill it, and rounds of a padded epoch repeat records."""
    group = Group(LIMIT)
    reported = [part(3, 24, 30), part(2, 0, 4), part(3, 20, 26), part(3, 20, 26)]
    for number in range(LIMIT):
        dies(group, f"s{number}", 10 * (number + 1), 40, reported, "gone")
    (convicted,) = group.record.convicted
    assert [tuple(piece) for piece in convicted.pieces] == [part(2, 0, 4), part(3, 20, 30)]


def test_records_of_two_convictions_are_left_out_once():
    group = Group(LIMIT)
    for number in range(2 * LIMIT):
        pieces = [part(3, 24 if number < LIMIT else 20, 26)]
        dies(group, f"s{number}", 10 * (number + 1), 40, pieces, "gone")
    assert len(group.record.convicted) == 2
    zero, one = pair("last", 100)
    begin(group, [zero, one])
    assert group.enter(one.enter()).left_out == [part(3, 20, 26)]


def test_records_that_every_rank_has_passed_are_no_longer_suspect():
    group = Group(LIMIT)
    dies(group, "a", 10, 40, BAD)
    zero, one = pair("b", 20)
    begin(group, [zero, one])
    assert group.enter(zero.enter()).watched_until == 60
    group.at(zero.at(20, 60), 3.0)
    assert group.record.suspects
    group.at(one.at(20, 40, BAD), 3.0)
    assert group.record.suspects
    group.at(one.at(20, 60), 3.0)
    assert not group.record.suspects
    assert group.enter(zero.enter()).watched_until == 1, "for a moment"


def test_suspects_at_the_round_of_the_slowest_rank_stay():
    group = Group(LIMIT)
    dies(group, "a", 10, 60, [part(4, 0, 10)])
    dies(group, "b", 20, 40, BAD)
    assert [each.end for each in group.record.suspects] == [80, 60]
    processes = pair("c", 30)
    begin(group, processes)
    for each in processes:
        group.at(each.at(30, 60), 3.0)
    assert [each.end for each in group.record.suspects] == [80]
    before = group.record
    group.at(processes[0].at(30, 60), 4.0)
    assert group.record is before, "nothing to store"


def test_a_rank_that_has_left_cleanly_is_not_reported_as_dead():
    group = Group(LIMIT)
    zero, one = processes = pair("a", 10)
    begin(group, processes)
    group.at(zero.at(10, 40, [part(9, 0, 10)]), 1.0)
    group.at(one.at(10, 40, BAD), 2.0)
    group.leave(zero.leave(10))
    begin(group, pair("b", 20))
    assert [[tuple(piece) for piece in each.pieces] for each in group.record.suspects] == [BAD]


def test_deaths_at_different_records_convict_nothing():
    group = Group(LIMIT)
    for number in range(4 * LIMIT):
        dies(group, f"s{number}", 10 * (number + 1), 40, [part(number, 0, 10)])
    assert not group.record.convicted


def test_deaths_of_ranks_with_other_batches_add_up_at_the_records_that_they_share():
    group = Group(LIMIT)
    dies(group, "a", 10, 40, [part(2, 10, 20), part(3, 10, 20)])
    dies(group, "b", 20, 40, [part(3, 10, 15), part(4, 10, 15)])
    assert [(each.deaths, each.pieces) for each in group.record.suspects] == [(2, [part(3, 10, 15)])]
    dies(group, "c", 30, 40, [part(3, 0, 12, order=(4, 9)), part(3, 0, 12, epoch=1)])
    assert len(group.record.suspects) == 2, "these are other records"
    dies(group, "d", 40, 20, [part(3, 0, 12)])
    (convicted,) = group.record.convicted
    assert (convicted.deaths, convicted.pieces) == (3, [part(3, 10, 12)])


def test_a_suspect_is_passed_when_its_last_record_is_whatever_the_batch_size():
    group = Group(LIMIT)
    dies(group, "a", 10, 40, BAD)
    processes = pair("b", 20)
    begin(group, processes)
    for each in processes:
        group.at(each.at(20, 50, [part(3, 25, 27)], count=10), 3.0)
    assert group.record.suspects
    for each in processes:
        group.at(each.at(20, 60, count=10), 4.0)
    assert not group.record.suspects


def test_a_death_before_the_first_round_raises_no_suspicion():
    group = Group(LIMIT)
    processes = pair("a", 10)
    begin(group, processes)
    group.gone(processes[1].trainer, processes[1].generation)
    assert not group.record.suspects
    assert group.record.phase == OVER


stretches = st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 30), st.integers(1, 12))


@given(st.lists(stretches, max_size=4), st.lists(stretches, max_size=4))
def test_a_round_keeps_the_records_that_are_not_excluded(taken, left_out):
    pieces = tuple(Piece(lane, first, first + count) for _, lane, first, count in taken)
    step = Round(0, 3, 12, 32, Order(4, 8), pieces)
    out = [part(lane, first, first + count, epoch) for epoch, lane, first, count in left_out]
    out += [part(lane, 0, 100, order=(4, 7)) for lane in range(3)]
    forbidden = {
        (lane, number)
        for epoch, _, size, lane, first, end in out
        for number in range(first, end)
        if (epoch, size) == (0, 8)
    }
    records = [(p.lane, number) for p in step.pieces for number in range(p.first_record, p.end_record)]

    kept = without(step, out)

    assert (kept.epoch, kept.number, kept.records) == (0, 3, 12)
    found = [(p.lane, number) for p in kept.pieces for number in range(p.first_record, p.end_record)]
    assert found == [each for each in records if each not in forbidden]
    assert all(p.first_record < p.end_record for p in kept.pieces)


# at random


class Starts(RuleBasedStateMachine):
    """Many starts of groups of any size, with replaced masters."""

    def __init__(self):
        super().__init__()
        self.group, self.generation = Group(LIMIT), 0
        self.processes, self.started, self.left = [], {}, set()

    @rule(size=st.integers(1, 4), token=st.sampled_from(["", "A", "B"]), order=st.randoms(use_true_random=False))
    def start(self, size, token, order):
        name = f"s{self.generation}"
        ranks = list(range(size))
        order.shuffle(ranks)
        for rank in ranks:
            self.generation += 1
            self.processes.append(Process(name, rank, self.generation, size, token if order.random() < 0.8 else ""))

    @precondition(lambda self: self.processes)
    @rule(data=st.data())
    def enter(self, data):
        process = data.draw(st.sampled_from(self.processes[-8:]))
        try:
            reply = self.group.enter(process.enter())
        except FlightedlError:
            return
        if reply.incarnation:
            assert reply.incarnation == self.group.record.incarnation
            self.started[process] = reply.incarnation

    @precondition(lambda self: self.started)
    @rule(data=st.data(), at=st.integers(0, 5))
    def work(self, data, at):
        process = data.draw(st.sampled_from(sorted(self.started, key=lambda each: each.generation)))
        self.group.at(process.at(self.started[process], at), float(at))

    @precondition(lambda self: self.started)
    @rule(data=st.data(), is_clean=st.booleans())
    def leave(self, data, is_clean):
        process = data.draw(st.sampled_from(sorted(self.started, key=lambda each: each.generation)))
        incarnation = self.started.pop(process)
        self.processes.remove(process)
        try:
            self.group.leave(process.leave(incarnation, is_clean=is_clean))
        except FencedError:
            return
        if is_clean:
            self.left.add((incarnation, process.rank))

    @precondition(lambda self: self.processes)
    @rule(data=st.data())
    def dies(self, data):
        process = data.draw(st.sampled_from(self.processes))
        self.processes.remove(process)
        self.started.pop(process, None)
        self.group.gone(process.trainer, process.generation)

    @rule()
    def another_master(self):
        self.group = as_stored(self.group)

    @invariant()
    def holds(self):
        self.group.check()
        record = self.group.record
        if record.phase == DONE:
            assert all((record.incarnation, rank) in self.left for rank in range(record.size))


TestStarts = Starts.TestCase
TestStarts.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_start_with_another_master_inherits_the_suspects_and_their_deaths():
    record = GroupRecord()
    for start in ("a", "b", "c"):
        group = Group(LIMIT, record)
        first, second = pair(start, 5)
        incarnation = begin(group, (first, second))
        # Rank 1 ends first, because its last report is the oldest one.
        group.at(second.at(incarnation, pieces=(part(1, 0, 10),)), 1.0)
        group.at(first.at(incarnation), 2.0)
        before = group.record
        record = msgspec.json.decode(msgspec.json.encode(group.inheritance()), type=GroupRecord)
        assert group.record is before
    assert (record.suspects, record.starts, record.incarnation) == ([], LIMIT, 0)
    assert [(each.pieces, each.deaths) for each in record.convicted] == [([part(1, 0, 10)], LIMIT)]
