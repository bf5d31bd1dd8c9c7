"""Rounds of a group: the same global batches for any number of ranks, and each record once, from any position."""

from collections import Counter

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flightedl.domain.groups.plan import BEGINNING, EpochEnd, Order, Piece, Position, RoundPlan

from .calls import calls_of

remainders = st.sampled_from(["split", "drop", "pad"])
#: (batch size, number of lanes that divides it)
shapes = st.sampled_from([(b, k) for b in (1, 2, 4, 6, 8, 12, 30, 31, 48, 64) for k in range(1, 17) if b % k == 0])
sizes = st.integers(1, 6) | st.integers(7, 40)


class Group:
    """All ranks of one start, in step."""

    def __init__(self, records, world_size, shape, remainder="split", start=BEGINNING, *, epochs=1):
        self.batch_size, lanes = shape
        self.order = start.order if start.records else Order(lanes, 5)
        self.plans = [
            RoundPlan(
                lambda _: records,
                epochs=epochs,
                order=Order(lanes, 5),
                world_size=world_size,
                rank=rank,
                batch_size=self.batch_size,
                remainder=remainder,
                start=start,
            )
            for rank in (*range(world_size), 0)
        ]
        self.counted = self.plans.pop()

    def next(self):
        steps = [plan.next() for plan in self.plans]
        assert len({type(step) for step in steps}) == 1, "all ranks get a batch, or none does"
        assert len({plan.position() for plan in self.plans}) == 1, "the position is the same on every rank"
        if not isinstance(steps[0], EpochEnd | None):
            self.counted.count()
            assert self.counted.position() == self.plans[0].position()
        if isinstance(steps[0], EpochEnd) or steps[0] is None:
            assert len(set(steps)) == 1
            return steps[0]
        assert len({(step.epoch, step.number, step.records, step.end, step.order) for step in steps}) == 1
        return steps

    def rounds(self):
        """Return the remaining rounds of the epoch, each with the records of every rank, and the epoch's end."""
        found = []
        while not isinstance(step := self.next(), EpochEnd):
            found.append([records_of(each) for each in step])
        return found, step

    @property
    def position(self):
        return msgspec.json.decode(msgspec.json.encode(self.plans[0].position()), type=Position)


def records_of(step):
    """Return the records of a rank's round as (lane, number in the lane)."""
    return [(piece.lane, number) for piece in step.pieces for number in range(piece.first_record, piece.end_record)]


def all_records(records, lanes):
    return Counter((i % lanes, i // lanes) for i in range(records))


def batches_by_the_rules(records, shape, remainder):
    """Return an epoch's global batches as sets of (lane, number), computed with lists."""
    batch_size, lanes = shape
    left = [[(lane, n) for n in range(records // lanes + (lane < records % lanes))] for lane in range(lanes)]
    full, rest = divmod(records, batch_size)
    shares = remainder == "split" and 0 < rest < max(lanes, batch_size / 2) and full > 0
    found = []
    for _ in range(full - shares):
        found.append({record for lane in left for record in lane[: batch_size // lanes]})
        left = [lane[batch_size // lanes :] for lane in left]
    last = sorted((record for lane in left for record in lane), key=lambda record: record[::-1])
    if shares:
        half = -(-len(last) // 2)
        found += [set(last[:half]), set(last[half:])]
    elif rest and remainder != "drop":
        found.append(set(last))
    return found


@settings(max_examples=400, deadline=None)
@given(st.integers(1, 400), shapes, remainders)
def test_global_batches_follow_the_rules_for_any_number_of_ranks(records, shape, remainder):
    assume(records >= shape[1])
    (batch_size, lanes), expected = shape, batches_by_the_rules(records, shape, remainder)
    for world_size in {1, 2, 3, 4, 5, 8, 16, batch_size}:
        if world_size > batch_size:
            continue
        rounds, end = Group(records, world_size, shape, remainder).rounds()

        assert [set().union(*batches) for batches in rounds][: len(expected) - 1] == expected[:-1]
        assert remainder == "pad" or [set().union(*batches) for batches in rounds] == expected
        for batches in rounds:
            counts = [len(batch) for batch in batches]
            assert max(counts) <= -(-batch_size // world_size)
            if sum(counts) >= max(lanes, world_size):
                assert min(counts) > 0, "a rank has no records"
        found = Counter(record for batches in rounds for batch in batches for record in batch)
        assert sum(found.values()) == records - end.left_out + end.repeated
        assert end.records == len(found)
        if remainder != "drop":
            assert set(found) == set(all_records(records, lanes))
        if remainder != "pad":
            assert set(found.values()) <= {1}


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 400), st.lists(st.tuples(sizes, shapes, st.integers(0, 9)), max_size=4), sizes, shapes)
def test_an_epoch_has_each_record_once_over_starts_with_other_ranks_and_batches(records, starts, last, last_shape):
    """The lanes of the first start that trains hold to the end of the epoch."""
    found, position, lanes = Counter(), BEGINNING, 1
    for world_size, shape, limit in [*starts, (last, last_shape, None)]:
        if world_size > shape[0] or shape[1] > records:
            continue
        group = Group(records, world_size, shape, "split", position)
        lanes, done = lanes if position.epoch else group.order.lanes, 0
        while done != limit and position.epoch == 0:
            step = group.next()
            if isinstance(step, EpochEnd):
                break
            done += 1
            assert all(each.record_count <= -(-shape[0] // world_size) for each in step)
            found.update(record for each in step for record in records_of(each))
            position = group.position
            assert position.epoch == 1 or position.records == sum(found.values())
            assert position.epoch == 1 or position.order == Order(lanes, 5)
    if last <= last_shape[0] and last_shape[1] <= records:
        assert position == Position(1)
        assert found == all_records(records, lanes)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 300), shapes, st.integers(0, 20), remainders)
def test_global_batches_are_the_same_after_a_resume(records, shape, taken, remainder):
    assume(records >= shape[1])
    batch_size = shape[0]
    rounds, _ = Group(records, 1, shape, remainder).rounds()
    before = Group(records, min(4, batch_size), shape, remainder)
    for _ in range(taken % (len(rounds) or 1)):
        before.next()
    after, _ = Group(records, min(3, batch_size), shape, remainder, before.position).rounds()
    expected = [set().union(*batches) for batches in rounds[taken % (len(rounds) or 1) :]]
    assert [set().union(*batches) for batches in after] == expected or remainder == "pad"
    assert [set().union(*batches) for batches in after][:-1] == expected[:-1]


@given(st.integers(1, 400), shapes, st.integers(1, 8))
def test_a_rank_reads_the_same_lanes_in_every_round(records, shape, world_size):
    batch_size, lanes = shape
    assume(world_size <= lanes <= records)
    for plan in Group(records, world_size, shape).plans:
        first = {piece.lane for piece in step.pieces} if not isinstance(step := plan.next(), EpochEnd) else set()
        used = set(first)
        while not isinstance(step := plan.next(), EpochEnd | None):
            used |= {piece.lane for piece in step.pieces}
        assert used == first or records < 2 * batch_size
        assert len(first) <= (-(-lanes // world_size) + (lanes % world_size > 0))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 100), shapes, remainders)
def test_epochs_follow_one_another(records, shape, remainder):
    assume(records >= shape[1])
    group = Group(records, 1, shape, remainder, epochs=3)
    ends = []
    while (step := group.next()) is not None:
        if isinstance(step, EpochEnd):
            ends.append(step.epoch)

    assert ends == [0, 1, 2]
    assert group.position == Position(3)
    assert Group(records, 1, shape, remainder, group.position, epochs=3).next() is None


def test_the_plan_of_some_records_never_changes():
    """Positions in users' checkpoints depend on it."""
    group = Group(70, 2, (8, 4))
    rounds = [[[msgspec.structs.astuple(piece) for piece in each.pieces] for each in group.next()] for _ in range(4)]

    assert rounds == [[[(0, n, n + 2), (1, n, n + 2)], [(2, n, n + 2), (3, n, n + 2)]] for n in range(0, 8, 2)]
    assert group.position == Position(0, 32, Order(4, 5))


@pytest.mark.parametrize(
    ("records", "world_size", "shape", "remainder", "counts"),
    [
        (8, 2, (8, 1), "split", [[4, 4]]),
        (13, 2, (8, 1), "split", [[4, 4], [3, 2]]),
        (9, 2, (8, 1), "split", [[3, 2], [2, 2]]),
        (17, 2, (8, 2), "split", [[4, 4], [3, 2], [2, 2]]),
        (1, 2, (8, 1), "split", [[1, 0]]),
        (5, 4, (4, 1), "split", [[1, 1, 1, 0], [1, 0, 1, 0]]),
        (9, 2, (8, 1), "drop", [[4, 4]]),
        (9, 2, (8, 2), "pad", [[4, 4], [4, 4]]),
        (3, 2, (2, 1), "pad", [[1, 1], [1, 1]]),
        (9, 4, (10, 2), "pad", [[3, 3, 3, 3]]),
    ],
)
def test_sizes_of_the_last_batches(records, world_size, shape, remainder, counts):
    rounds, _ = Group(records, world_size, shape, remainder).rounds()
    assert [[len(batch) for batch in batches] for batches in rounds] == counts


def test_padding_repeats_the_last_records_of_the_ranks_own_lanes():
    group = Group(18, 2, (16, 4), "pad")
    group.next()
    assert [each.pieces for each in group.next()] == [
        (Piece(0, 4, 5), Piece(1, 4, 5), Piece(0, 0, 5), Piece(1, 4, 5)),
        (Piece(2, 0, 4), Piece(3, 0, 4)),
    ]


@pytest.mark.parametrize(("rank", "batch_size"), [(2, 2), (-1, 2), (0, 1)])
def test_a_rank_outside_the_group_and_too_small_batches_are_rejected(rank, batch_size):
    with pytest.raises(ValueError, match=f"there is no rank {rank} of 2 with global batches of {batch_size} records"):
        RoundPlan(lambda _: 1, epochs=1, order=Order(1), world_size=2, rank=rank, batch_size=batch_size)


def test_a_round_of_a_large_dataset_makes_few_calls():
    start = Position(0, 500_000_000, Order(64, 4096))

    def rounds():
        plan = RoundPlan(
            lambda _: 10**9, epochs=1, order=Order(64, 4096), world_size=64, rank=3, batch_size=16384, start=start
        )
        for _ in range(100):
            plan.next()

    assert calls_of(rounds) < 10_000
