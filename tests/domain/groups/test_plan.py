"""Rounds of a group: each record once, with any number of ranks and any starting position."""

from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flightedl.domain.groups.plan import BEGINNING, EpochEnd, Piece, Position, Round, RoundPlan, Shares

from .calls import calls_of

layouts = st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(any)
groups = st.tuples(st.integers(1, 6), st.integers(1, 9))
remainders = st.sampled_from(["split", "drop", "pad"])


class Group:
    """All ranks of one start, in step."""

    def __init__(self, sizes, world_size, batch_size, remainder="split", start=BEGINNING, *, seed=7, epochs=1):
        array = np.array(sizes, np.int64)
        self.plans = [
            RoundPlan(
                array,
                epochs=epochs,
                seed=seed,
                world_size=world_size,
                rank=rank,
                batch_size=batch_size,
                remainder=remainder,
                start=start,
            )
            for rank in range(world_size)
        ]

    def next(self):
        steps = [plan.next() for plan in self.plans]
        assert len({type(step) for step in steps}) == 1, "all ranks get a batch, or none does"
        assert len({plan.position() for plan in self.plans}) == 1, "the position is the same on every rank"
        if not isinstance(steps[0], Round):
            assert len(set(steps)) == 1
            return steps[0]
        assert len({(step.epoch, step.number) for step in steps}) == 1
        return steps

    @property
    def position(self):
        return msgspec.json.decode(msgspec.json.encode(self.plans[0].position()), type=Position)


def records_of(steps):
    return [
        (piece.task, record)
        for step in steps
        for piece in step.pieces
        for record in range(piece.first_record, piece.end_record)
    ]


def all_records(sizes):
    return Counter((task, record) for task, size in enumerate(sizes) for record in range(size))


@settings(max_examples=400, deadline=None)
@given(layouts, st.lists(st.tuples(groups, st.integers(0, 12)), max_size=4), groups, remainders, st.none() | st.just(3))
def test_an_epoch_has_each_record_once_over_any_starts(sizes, starts, last, remainder, seed):
    """Groups of changing sizes and batch sizes each do a few rounds and continue from the previous position."""
    found, position, most = Counter(), BEGINNING, max([last[0], *(each[0][0] for each in starts)])
    end = None
    for (world_size, batch_size), limit in [*starts, (last, None)]:
        group = Group(sizes, world_size, batch_size, remainder, position, seed=seed)
        done = 0
        while done != limit or position.epoch == 1:
            step = group.next()
            if isinstance(step, EpochEnd):
                end = step
                break
            done += 1
            assert all(each.record_count <= batch_size + (batch_size == 1) for each in step)
            found.update(records_of(step))
            position = group.position
            assert len(position.opened) <= most + 1
            assert position.epoch == 1 or position.records == sum(found.values())
        if end is not None:
            break

    total, wanted = sum(sizes), all_records(sizes)
    assert end is not None
    assert group.position == Position(1)
    assert set(found) <= set(wanted)
    assert end.repeated == sum(found.values()) - len(found)
    assert end.left_out == total - len(found)
    assert end.records == len(found)
    if remainder == "split":
        assert found == wanted
    elif remainder == "drop":
        assert max(found.values(), default=1) == 1
        assert end.left_out < world_size * batch_size
    else:
        assert set(found) == set(wanted)
        assert end.repeated < world_size * batch_size


@settings(max_examples=200, deadline=None)
@given(layouts, groups)
def test_split_gives_every_rank_a_record_in_every_round(sizes, group):
    world_size, batch_size = group
    ranks = Group(sizes, world_size, batch_size)
    rounds = []
    while not isinstance(step := ranks.next(), EpochEnd):
        rounds.append([each.record_count for each in step])

    if sum(sizes) >= world_size:
        assert min(map(min, rounds)) >= 1
    else:
        assert rounds == [[1] * sum(sizes) + [0] * (world_size - sum(sizes))]
    # Only the last two rounds may be smaller.
    assert all(counts == [batch_size] * world_size for counts in rounds[:-2])


@settings(max_examples=100, deadline=None)
@given(layouts, groups)
def test_pad_fills_every_batch_and_drop_gives_only_full_ones(sizes, group):
    world_size, batch_size = group
    for remainder in ("pad", "drop"):
        ranks = Group(sizes, world_size, batch_size, remainder)
        while not isinstance(step := ranks.next(), EpochEnd):
            assert [each.record_count for each in step] == [batch_size] * world_size


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 7), st.integers(1, 9))
def test_few_records_are_decoded_by_several_ranks(task_count, size, world_size, batch_size):
    """With tasks of one size, ranks decode at most 1 + W(W-1)/N of the data."""
    ranks = Group([size] * task_count, world_size, batch_size)
    decoded = [set() for _ in range(world_size)]
    while not isinstance(step := ranks.next(), EpochEnd):
        for tasks, each in zip(decoded, step, strict=True):
            tasks.update(piece.task for piece in each.pieces)

    rows = size * sum(map(len, decoded))
    assert rows <= step.decoded <= task_count * size * (1 + world_size * (world_size - 1) / task_count)


@settings(max_examples=60, deadline=None)
@given(layouts, groups, remainders)
def test_consecutive_epochs_have_different_orders(sizes, group, remainder):
    ranks = Group(sizes, *group, remainder, epochs=3)
    ends = []
    while (step := ranks.next()) is not None:
        if isinstance(step, EpochEnd):
            ends.append(step.epoch)

    assert ends == [0, 1, 2]
    assert ranks.position == Position(3)
    assert Group(sizes, *group, remainder, ranks.position, epochs=3).next() is None


def test_the_plan_of_a_seed_never_changes():
    """Positions in users' checkpoints depend on it."""
    ranks = Group([10] * 7, 2, 4, seed=42)
    first = [[[msgspec.structs.astuple(piece) for piece in each.pieces] for each in ranks.next()] for _ in range(4)]

    assert first == GOLDEN
    assert ranks.position == Position(0, 32, 4, ((2, 6), (3, 6)))


GOLDEN = [
    [[(4, 0, 4)], [(2, 0, 4)]],
    [[(4, 4, 8)], [(2, 4, 8)]],
    [[(4, 8, 10), (3, 0, 2)], [(2, 8, 10), (6, 0, 2)]],
    [[(3, 2, 6)], [(6, 2, 6)]],
]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 400), st.integers(1, 9), st.integers(1, 9), remainders)
def test_shares_add_up(records, world_size, batch_size, remainder):
    shares = Shares(records, world_size, batch_size, remainder)
    ends = [shares.before(shares.rounds, rank) for rank in range(world_size)]

    assert sum(ends) == shares.given
    assert sum(ends) + shares.repeated == (records if remainder == "split" else shares.rounds * world_size * batch_size)


@pytest.mark.parametrize(
    ("records", "world_size", "batch_size", "remainder", "rounds"),
    [
        (8, 2, 4, "split", [[4, 4]]),
        (10, 2, 4, "split", [[4, 4], [1, 1]]),
        (9, 2, 4, "split", [[3, 2], [2, 2]]),
        (17, 2, 4, "split", [[4, 4], [3, 2], [2, 2]]),
        (1, 2, 4, "split", [[1, 0]]),
        (1, 2, 1, "split", [[1, 0]]),
        (3, 2, 1, "split", [[2, 1]]),
        (5, 2, 1, "split", [[1, 1], [2, 1]]),
        (9, 2, 4, "drop", [[4, 4]]),
        (9, 2, 4, "pad", [[4, 4], [1, 0]]),
        (3, 2, 1, "pad", [[1, 1], [1, 0]]),
    ],
)
def test_shares_of_different_records(records, world_size, batch_size, remainder, rounds):
    shares = Shares(records, world_size, batch_size, remainder)
    ends = [[shares.before(number, rank) for rank in range(world_size)] for number in range(shares.rounds + 1)]

    assert np.diff(ends, axis=0).tolist() == rounds
    assert [shares.before_all(number) for number in range(shares.rounds)] == [sum(each) for each in ends[:-1]]
    assert shares.repeated == (len(rounds) * world_size * batch_size - records if remainder == "pad" else 0)


def test_tasks_that_end_with_a_round_are_closed_after_it():
    ranks = Group([10] * 6, 2, 5, seed=None)
    rounds = [[[msgspec.structs.astuple(piece) for piece in each.pieces] for each in ranks.next()] for _ in range(2)]

    assert rounds == [[[(0, 0, 5)], [(1, 0, 5)]], [[(0, 5, 10)], [(1, 5, 10)]]]
    assert ranks.position == Position(0, 20, 2)
    assert [msgspec.structs.astuple(each.pieces[0]) for each in ranks.next()] == [(2, 0, 5), (3, 0, 5)]


def test_padding_begins_with_the_first_task_also_after_a_position():
    (order,) = [each.pieces for each in Group([10] * 3, 1, 30, seed=42).next()]
    ranks = Group([10] * 3, 1, 7, "pad", Position(0, 10, 1), seed=42)
    steps = [ranks.next()[0] for _ in range(3)]

    assert [step.record_count for step in steps] == [7, 7, 7]
    assert steps[-1].pieces[-1] == Piece(order[0].task, 0, 1)


@pytest.mark.parametrize(("rank", "batch_size"), [(2, 1), (-1, 1), (0, 0)])
def test_a_rank_outside_the_group_and_an_empty_batch_are_rejected(rank, batch_size):
    with pytest.raises(ValueError, match=f"there is no rank {rank} of 2 with batches of {batch_size} records"):
        RoundPlan(np.array([1]), epochs=1, seed=None, world_size=2, rank=rank, batch_size=batch_size)


def test_a_round_of_a_million_tasks_makes_few_calls():
    """A complete epoch is never computed at once: neither at its beginning nor at a position in its middle."""
    sizes = np.full(1_000_000, 1000, np.int64)

    def rounds():
        plan = RoundPlan(
            sizes, epochs=1, seed=1, world_size=64, rank=3, batch_size=256, start=Position(0, 500_000_000, 500_000)
        )
        for _ in range(100):
            plan.next()

    assert calls_of(rounds) < 200_000
