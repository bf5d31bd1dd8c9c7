"""A pserver's copies: when each block is cut, and which batches are in it."""

from __future__ import annotations

import random

import pytest

from flightedl.domain.checkpoint.manifest import ShardFile
from flightedl.domain.checkpoint.snapshot import PserverSnapshots, SnapshotCut
from flightedl.domain.consistency.modes import Sync
from flightedl.domain.consistency.rounds import BlockRounds
from flightedl.domain.consistency.rounds_values import Accumulate
from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.exactly_once.batches import Batch
from flightedl.messages.base import decode, encode
from flightedl.messages.control import OrderNumber, SnapshotReply, SnapshotRequest

from .checkpoint_shell import shard_file

BLOCKS = 3
STEPS = 6


def order(number=1, serial=1, at_round=None, master=1) -> SnapshotRequest:
    return SnapshotRequest(OrderNumber(master, number, serial), at_round, f"c-{number}/x", plan_hash="p")


def test_only_the_newest_order_counts():
    snapshots = PserverSnapshots()
    assert snapshots.take(order(2, 1, master=3), [0], 0)
    for older in (order(2, 1, master=3), order(1, 9, master=3), order(5, 5, master=2)):
        assert not snapshots.take(older, [0], 0)
    assert snapshots.progress.order == OrderNumber(3, 2, 1)
    assert snapshots.take(order(2, 2, master=3), [0], 0)
    assert not snapshots.taken(OrderNumber(3, 2, 1)), "the copies of the previous proposal are dropped"


def test_an_order_is_current_until_a_newer_one_arrives():
    snapshots = PserverSnapshots()
    assert not snapshots.is_current(order().order)
    snapshots.take(order(), [0], 0)
    assert snapshots.is_current(order().order)
    snapshots.take(order(serial=2), [0], 0)
    assert not snapshots.is_current(order().order)


@pytest.mark.parametrize("file", [None, shard_file(3, 10, "c-1/shard", b"abc")])
def test_progress_is_reported_unchanged(file):
    heard = decode(encode(SnapshotReply(order().order, "written", 7, file, "why")), SnapshotReply)
    assert (heard.order, heard.state, heard.highest_open_round, heard.reason) == (order().order, "written", 7, "why")
    assert (None if heard.file is None else ShardFile.of(3, 10, heard.file)) == file


def test_a_passed_round_is_refused_with_the_highest_open_round():
    snapshots = PserverSnapshots()
    assert not snapshots.take(order(at_round=4), [4, 5], 5)
    assert (snapshots.progress.state, snapshots.progress.highest_open_round) == ("refused", 5)


def test_a_block_is_cut_when_its_round_opens():
    cut = SnapshotCut(range(2), 4)
    assert not cut.is_due(0, 3)
    assert cut.is_due(1, 4)
    assert cut.cut((1,), 4, ()) == 4
    assert not cut.is_due(1, 4)
    assert cut.is_due(0, 9), "it jumped past its round without an update"
    assert cut.cut((0,), 9, ()) == 4
    assert cut.is_complete
    assert list(cut.versions) == [4, 4]


class Pushed:
    """A few blocks, two members that push in any order, and one snapshot."""

    def __init__(self, at_round: int | None) -> None:
        self.at_round = at_round
        self.rounds = [BlockRounds(Sync()) for _ in range(BLOCKS)]
        for block in self.rounds:
            block.change({1: 0, 2: 0}, ())
        self.applied = AppliedBatches(range(BLOCKS))
        self.values: list[set[Batch]] = [set() for _ in range(BLOCKS)]
        self.copies: list[set[Batch]] = [set() for _ in range(BLOCKS)]
        self.steps = {(member, block): 0 for member in (1, 2) for block in range(BLOCKS)}
        self.cut: SnapshotCut | None = None
        self.saved: AppliedBatches | None = None

    def order(self) -> None:
        self.cut = SnapshotCut(range(BLOCKS), self.at_round)
        for block in range(BLOCKS):
            self.look(block)

    def look(self, block: int) -> None:
        rounds = self.rounds[block]
        if self.cut is not None and self.cut.is_due(block, rounds.version):
            self.cut.cut((block,), rounds.version, rounds.held)
            self.copies[block] = self.values[block].copy()

    def push(self, member: int, block: int) -> None:
        rounds, step = self.rounds[block], self.steps[member, block]
        if rounds.version != step or step == STEPS:
            return
        batch = Batch(0, member, step)
        outcome = rounds.arrive(member, step, 1.0, already_applied=False, batch=batch, batch_count=STEPS)
        assert isinstance(outcome, Accumulate)
        assert self.applied.mark([block], batch, STEPS)
        if self.cut is not None and self.saved is None:
            self.cut.marked((block,), [(batch, STEPS)])
        self.steps[member, block] += 1
        if rounds.closable():
            self.values[block] |= {held for held, _ in rounds.held}
            rounds.close()
        self.look(block)


@pytest.mark.parametrize("at_round", [None, 2])
def test_batches_in_an_accumulator_and_after_the_cut_are_not_in_the_copy(at_round):
    saved = 0
    for seed in range(60):
        rng = random.Random(seed)
        world = Pushed(at_round)
        order_at, save_after = rng.randrange(12), rng.randrange(8)
        for event in range(80):
            if event == order_at:
                world.order()
            world.push(*rng.choice(list(world.steps)))
            if world.cut is not None and world.cut.is_complete and world.saved is None:
                save_after -= 1
                if save_after < 0:
                    world.saved = world.cut.applied(world.applied)
                    world.saved.check()
        if world.saved is None:
            continue
        saved += 1
        everything = [Batch(0, member, step) for member in (1, 2) for step in range(STEPS)]
        for block in range(BLOCKS):
            kept = {batch for batch in everything if world.saved.has(block, batch)}
            assert kept == world.copies[block], f"seed {seed}"
    assert saved > 40


def test_a_failure_is_reported_and_a_later_order_starts_again():
    snapshots = PserverSnapshots()
    assert snapshots.take(order(1), [0], 0)
    assert snapshots.taken(order(1).order)
    assert snapshots.failed(order(1).order, "full")
    assert (snapshots.progress.state, snapshots.progress.reason) == ("failed", "full")
    assert snapshots.take(order(2), [0], 0)
    assert not snapshots.failed(order(1).order, "late")
    assert snapshots.progress.state == "waiting"
