"""Sums of batches: in any company and with any repetition, each block applies each batch once."""

from __future__ import annotations

import random

import pytest

from flightedl.domain.exactly_once.accumulation import BatchGroup, applied_bits, mean_batches, missing_places
from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.exactly_once.batches import Batch
from flightedl.errors import MessageError
from tests.domain.bitmaps import tasks_in

BLOCKS, TASKS, BATCHES = 3, 3, 5


def _batches(*numbers: int) -> list[tuple[Batch, int]]:
    return [(Batch(0, 0, number), BATCHES) for number in numbers]


def test_a_sum_is_marked_completely_or_not_at_all() -> None:
    applied = AppliedBatches(range(BLOCKS))
    assert applied.mark_together([0, 1], _batches(0, 1, 2)) == [0, 0, 0]
    assert applied.mark_together([0, 1], _batches(0, 1, 2)) == [2, 2, 2]
    assert applied.mark_together([0, 1, 2], _batches(2, 3)) == [2, 0]
    assert not applied.has(2, Batch(0, 0, 3))
    assert applied.mark_together([2], _batches(2, 3)) == [0, 0]
    applied.check()


@pytest.mark.parametrize(
    ("batches", "text"),
    [
        (_batches(1, 1), "twice"),
        ([(Batch(0, 0, 1), 5), (Batch(0, 0, 2), 4)], "5 batches, not 4"),
        (_batches(5), "cannot"),
    ],
)
def test_an_impossible_sum_marks_nothing(batches: list[tuple[Batch, int]], text: str) -> None:
    applied = AppliedBatches(range(1))
    applied.mark([0], Batch(0, 0, 4), BATCHES)
    before = applied.encode()
    with pytest.raises(MessageError, match=text):
        applied.mark_together([0], batches)
    assert applied.encode() == before


@pytest.mark.parametrize("count", [1, 7, 8, 9, 1024])
def test_a_block_answers_with_bits(count: int) -> None:
    having = [place % 3 == 0 for place in range(count)]
    assert missing_places(applied_bits(having), count) == tuple(place for place in range(count) if place % 3)
    assert len(applied_bits(having)) == (count + 7) // 8


def test_a_group_is_pushed_when_it_is_full_and_settled_by_the_batches_that_blocks_lack() -> None:
    group: BatchGroup[str] = BatchGroup(3)
    for name in "abc":
        assert not group.is_full
        group.add(name)
    assert group.is_full
    settled = group.settle([{1}], is_lost=False)
    assert (settled.done, settled.again) == (("a", "c"), (("b",),))
    group.add("d")
    assert group.settle((), is_lost=True).again == (("d",),)
    assert len(group) == 0


def test_the_first_batch_of_a_refused_sum_is_repeated_like_any_other() -> None:
    assert missing_places(applied_bits([False, True, False]), 3) == (0, 2)
    group: BatchGroup[str] = BatchGroup(3)
    for name in "abc":
        group.add(name)
    settled = group.settle([(0, 2)], is_lost=False)
    assert (settled.done, settled.again) == (("b",), (("a", "c"),))


def test_batches_that_the_same_blocks_lack_are_repeated_as_one_sum() -> None:
    group: BatchGroup[str] = BatchGroup(6)
    for name in "abcdef":
        group.add(name)
    settled = group.settle([(0, 1, 3), (0, 1, 4), (0, 1, 4)], is_lost=False)
    assert settled.done == ("c", "f")
    assert settled.again == (("a", "b"), ("d",), ("e",))


def test_a_lost_sum_is_repeated_unchanged_whatever_blocks_have_answered() -> None:
    group: BatchGroup[str] = BatchGroup(3)
    for name in "abc":
        group.add(name)
    assert group.settle([(1,)], is_lost=True).again == (("a", "b", "c"),)


def test_a_repeated_sum_is_full_with_exactly_its_batches() -> None:
    group: BatchGroup[str] = BatchGroup(8)
    group.add("a", 2)
    assert not group.is_full
    group.add("b", 2)
    assert group.is_full
    group.clear()
    group.add("c")
    assert not group.is_full


def test_a_repeated_single_batch_is_a_complete_sum() -> None:
    group: BatchGroup[str] = BatchGroup(8)
    group.add("a", 1)
    assert group.is_full


class _Blocks:
    """Pservers that apply sums; their values count how often each batch is in a block."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.applied = AppliedBatches(range(BLOCKS))
        self.values: list[dict[Batch, int]] = [{} for _ in range(BLOCKS)]
        self.saved = self.save()

    def save(self) -> tuple[bytes, list[dict[Batch, int]]]:
        return self.applied.encode(), [values.copy() for values in self.values]

    def restart(self) -> None:
        """Restart a process from its checkpoint."""
        self.applied = AppliedBatches.decode(self.saved[0], range(BLOCKS))
        self.values = [values.copy() for values in self.saved[1]]

    def push(self, block: int, batches: list[tuple[Batch, int]]) -> tuple[int, ...] | None:
        """Return the places that the block lacks, if it refuses, or None if it has all of them now."""
        having = self.applied.mark_together([block], batches)
        if not any(having):
            for batch, _ in batches:
                self.values[block][batch] = self.values[block].get(batch, 0) + 1
                assert self.values[block][batch] == 1, f"{batch} is in block {block} twice"
        elif not all(having):
            return missing_places(applied_bits(map(bool, having)), len(having))
        return None


class _Trainer:
    """Work through a task with sums of its own size; may stop anywhere."""

    def __init__(self, blocks: _Blocks, task: int) -> None:
        self.blocks, self.chance, self.task = blocks, blocks.chance, task
        self.group: BatchGroup[int] = BatchGroup(self.chance.randint(1, 4))
        self.todo = list(range(BATCHES))
        self.again: list[tuple[int, ...]] = []
        self.is_done = False

    def push(self, numbers: tuple[int, ...]) -> tuple[set[tuple[int, ...]], bool]:
        """Push to all blocks, in any order, partly twice; return the missing places, and if the membership was lost."""
        refusals: set[tuple[int, ...]] = set()
        batches = [(Batch(0, self.task, number), BATCHES) for number in numbers]
        order = [*range(BLOCKS), self.chance.randrange(BLOCKS)]
        self.chance.shuffle(order)
        for block in order:
            if self.chance.random() < 0.03:
                return set(), True
            if (lacking := self.blocks.push(block, batches)) is not None:
                refusals.add(lacking)
        return refusals, False

    def step(self) -> None:
        if self.again:
            batches = self.again.pop(0)
            again: BatchGroup[int] = BatchGroup(len(batches))
            for batch in batches:
                again.add(batch)
            refusals, is_lost = self.push(batches)
            smaller = again.settle(refusals, is_lost=is_lost).again
            assert is_lost or all(len(each) < len(batches) for each in smaller), "it may never end"
            self.again[:0] = smaller
            self.is_done = not self.todo and not self.again
            return
        if self.todo:
            self.group.add(self.todo.pop(0))
        if len(self.group) and (self.group.is_full or not self.todo):
            refusals, is_lost = self.push(self.group.members)
            self.again = list(self.group.settle(refusals, is_lost=is_lost).again)
        self.is_done = not self.todo and not self.again


@pytest.mark.parametrize(
    ("tasks", "push_every", "mean"),
    [
        ([(8, 3)], 4, 4.0),
        # Pushes of 4 and 1 batches, and of 1 batch.
        ([(5, 1), (1, 1)], 4, 2.0),
        ([(2, 10), (0, 5)], 8, 2.0),
        ([], 8, 8.0),
    ],
)
def test_a_sum_has_batches_of_one_task_only(tasks: list[tuple[int, int]], push_every: int, mean: float) -> None:
    assert mean_batches(tasks, push_every) == mean


@pytest.mark.parametrize("seed", range(150))
def test_each_block_applies_each_batch_once_in_any_company_repetition_or_restart(seed: int) -> None:
    chance = random.Random(seed)
    blocks = _Blocks(chance)
    trainers: list[_Trainer] = []
    done: set[int] = set()
    for turn in range(100_000):
        if len(done) == TASKS:
            break
        if not trainers or (len(trainers) < 3 and chance.random() < 0.2):
            trainers.append(_Trainer(blocks, chance.choice(sorted(set(range(TASKS)) - done))))
        trainer = chance.choice(trainers)
        trainer.step()
        if trainer.is_done or chance.random() < 0.05:
            trainers.remove(trainer)
        if trainer.is_done:
            done.add(trainer.task)
        draw = chance.random() if turn < 300 else 1.0
        if draw < 0.03:
            blocks.saved = blocks.save()
        elif draw < 0.06:
            # Trainers notice it, because their pushes are refused; missing batches are assigned again.
            blocks.restart()
            trainers.clear()
            done = set(tasks_in(blocks.applied.done_bitmap(0)))
    blocks.applied.check()
    for values in blocks.values:
        assert values == {Batch(0, task, number): 1 for task in range(TASKS) for number in range(BATCHES)}
