"""Blocks that have almost always the same batches, and what they have, kept once for all of them.

A cohort keeps a bit per batch of a task in flight, a bit per finished task of an epoch, and of a finished epoch
nothing but its number. Only for batches on their way it keeps a mask of the blocks that have them. Who belongs to which
cohort is ``applied``'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import and_, or_

import msgspec
import numpy as np

from flightedl.domain.exactly_once.batches import MAX_BATCHES_PER_TASK, MAX_TASKS, Batch
from flightedl.errors import MessageError


class _Task:
    """A task in flight."""

    __slots__ = ("batch_count", "complete", "complete_count", "partial")

    def __init__(self, batch_count: int) -> None:
        self.batch_count = batch_count
        #: Bit per batch that all blocks of the cohort have.
        self.complete = bytearray((batch_count + 7) >> 3)
        self.complete_count = 0
        #: batch -> mask of the blocks that have it; never empty, never full.
        self.partial: dict[int, int] = {}

    def has_all(self, batch: int) -> bool:
        return bool(self.complete[batch >> 3] & (1 << (batch & 7)))

    def copy(self) -> _Task:
        other = _Task.__new__(_Task)
        other.batch_count = self.batch_count
        other.complete = self.complete.copy()
        other.complete_count = self.complete_count
        other.partial = self.partial.copy()
        return other


class _Epoch:
    """An epoch that is not finished."""

    __slots__ = ("done", "done_count", "task_count", "tasks")

    def __init__(self) -> None:
        #: Bit per task that all blocks have every batch of; grows as needed.
        self.done = bytearray()
        self.done_count = 0
        #: Tasks of the whole epoch; 0: not told.
        self.task_count = 0
        #: Tasks of which some block has some batch, and that are not in ``done``.
        self.tasks: dict[int, _Task] = {}

    def is_done(self, task: int) -> bool:
        place = task >> 3
        return place < len(self.done) and bool(self.done[place] & (1 << (task & 7)))

    def set_done(self, task: int) -> None:
        place = task >> 3
        if place >= len(self.done):
            self.done.extend(bytes(max(place + 1 - len(self.done), len(self.done) >> 1)))
        self.done[place] |= 1 << (task & 7)
        self.done_count += 1

    def clear_done(self, task: int) -> None:
        self.done[task >> 3] &= ~(1 << (task & 7)) & 0xFF
        self.done_count -= 1

    def copy(self) -> _Epoch:
        other = _Epoch.__new__(_Epoch)
        other.done = self.done.copy()
        other.done_count = self.done_count
        other.task_count = self.task_count
        other.tasks = {number: task.copy() for number, task in self.tasks.items()}
        return other


class Cohort:
    """Blocks (bits 0 to ``block_count`` - 1 of the masks) whose sets are kept together."""

    __slots__ = ("block_count", "epochs", "finished", "full")

    def __init__(self, block_count: int) -> None:
        self.block_count = block_count
        self.full = (1 << block_count) - 1
        #: Epoch -> task count, of epochs that all blocks have wholly.
        self.finished: dict[int, int] = {}
        self.epochs: dict[int, _Epoch] = {}

    def mask(self, batch: Batch) -> int:
        """Blocks that have the batch."""
        number, task, position = batch
        if number in self.finished:
            return self.full
        epoch = self.epochs.get(number)
        if epoch is None:
            return 0
        if epoch.is_done(task):
            return self.full
        flight = epoch.tasks.get(task)
        if flight is None or position >= flight.batch_count:
            return 0
        return self.full if flight.has_all(position) else flight.partial.get(position, 0)

    def require_possible(self, batch: Batch, batch_count: int) -> None:
        """Raise MessageError unless this can be a batch of a task of ``batch_count`` batches."""
        number, task, position = batch
        if not 0 <= position < batch_count <= MAX_BATCHES_PER_TASK or not 0 <= task < MAX_TASKS or number < 0:
            raise MessageError(f"{batch} cannot be one of {batch_count} batches of a task")
        epoch = self.epochs.get(number)
        task_count = self.finished.get(number, 0) if epoch is None else epoch.task_count
        if task_count and task >= task_count:
            raise MessageError(f"{batch}: the epoch has {task_count} tasks only")
        if epoch is not None and (flight := epoch.tasks.get(task)) is not None and flight.batch_count != batch_count:
            raise MessageError(f"{batch}: the task has {flight.batch_count} batches, not {batch_count}")

    def add(self, batch: Batch, batch_count: int, blocks: int) -> int:
        """Give the batch to the blocks of a mask; return the mask of those that did not have it.

        Raises:
            MessageError: as ``require_possible``; nothing was done.
        """
        number, task, position = batch
        epoch = self.epochs.get(number)
        flight = None if epoch is None else epoch.tasks.get(task)
        if flight is None or flight.batch_count != batch_count or not 0 <= position < batch_count:
            self.require_possible(batch, batch_count)
            if number in self.finished or (epoch is not None and epoch.is_done(task)):
                return 0
            epoch = self.epochs.setdefault(number, _Epoch()) if epoch is None else epoch
            flight = epoch.tasks[task] = _Task(batch_count)
        assert epoch is not None, "a task in flight is of an epoch"
        if flight.complete[position >> 3] & (1 << (position & 7)):
            return 0
        before = flight.partial.get(position, 0)
        after = before | blocks
        if after != self.full:
            flight.partial[position] = after
            return after ^ before
        if before:
            del flight.partial[position]
        flight.complete[position >> 3] |= 1 << (position & 7)
        flight.complete_count += 1
        if flight.complete_count == batch_count:
            del epoch.tasks[task]
            epoch.set_done(task)
            self._collapse(number, epoch)
        return after ^ before

    def _collapse(self, number: int, epoch: _Epoch) -> None:
        if epoch.task_count and epoch.done_count == epoch.task_count:
            del self.epochs[number]
            self.finished[number] = epoch.task_count

    def remove(self, batch: Batch, batch_count: int, blocks: int) -> None:
        """Remove the batch from the blocks of a mask."""
        remaining = self.mask(batch) & ~blocks
        number, task, position = batch
        if number in self.finished:
            task_count = self.finished.pop(number)
            epoch = self.epochs[number] = _Epoch()
            epoch.task_count = epoch.done_count = task_count
            epoch.done = bytearray(np.packbits(np.ones(task_count, np.uint8), bitorder="little").tobytes())
        epoch = self.epochs[number]
        if epoch.is_done(task):
            epoch.clear_done(task)
            flight = epoch.tasks[task] = _Task(batch_count)
            flight.complete[:] = np.packbits(np.ones(batch_count, np.uint8), bitorder="little").tobytes()
            flight.complete_count = batch_count
        flight = epoch.tasks[task]
        if flight.has_all(position):
            flight.complete[position >> 3] &= ~(1 << (position & 7)) & 0xFF
            flight.complete_count -= 1
        flight.partial.pop(position, None)
        if remaining:
            flight.partial[position] = remaining
        elif not flight.complete_count and not flight.partial:
            del epoch.tasks[task]

    def tell_task_count(self, number: int, task_count: int) -> None:
        if number not in self.finished:
            epoch = self.epochs.setdefault(number, _Epoch())
            epoch.task_count = task_count
            self._collapse(number, epoch)

    def known_task_count(self, number: int) -> int:
        """Return one more than the highest task known of the epoch."""
        if number in self.finished:
            return self.finished[number]
        epoch = self.epochs.get(number)
        if epoch is None:
            return 0
        return max(int.from_bytes(epoch.done, "little").bit_length(), max(epoch.tasks, default=-1) + 1)

    def copy(self) -> Cohort:
        other = Cohort(self.block_count)
        other.finished = self.finished.copy()
        other.epochs = {number: epoch.copy() for number, epoch in self.epochs.items()}
        return other

    def restricted(self, positions: Sequence[int]) -> Cohort:
        """The sets of some blocks; block ``positions[i]`` here is block i there."""
        other = Cohort(len(positions))
        other.finished = self.finished.copy()
        for number, epoch in self.epochs.items():
            new = other.epochs[number] = epoch.copy()
            for task, flight in epoch.tasks.items():
                new.tasks[task].partial.clear()
                for batch, mask in flight.partial.items():
                    blocks = sum(1 << i for i, position in enumerate(positions) if mask >> position & 1)
                    if blocks:
                        other.add(Batch(number, task, batch), flight.batch_count, blocks)
                if (left := new.tasks.get(task)) is not None and not left.complete_count and not left.partial:
                    del new.tasks[task]
        return other

    def is_uniform(self) -> bool:
        return not any(task.partial for epoch in self.epochs.values() for task in epoch.tasks.values())

    def done_bits(self, number: int) -> int:
        """A bit for each task of an epoch that all blocks have wholly, lowest first."""
        if number in self.finished:
            return (1 << self.finished[number]) - 1
        return int.from_bytes(epoch.done, "little") if (epoch := self.epochs.get(number)) else 0

    def batches(self, number: int, task: int) -> bytes:
        """Batches of a task in flight that all blocks have, as bits; empty if the blocks differ, or it is none."""
        epoch = self.epochs.get(number)
        flight = None if epoch is None else epoch.tasks.get(task)
        return b"" if flight is None or flight.partial else bytes(flight.complete)

    def partial_masks(self) -> list[int]:
        """Of each batch that some blocks have and others lack: those that have it."""
        flights = [flight for epoch in self.epochs.values() for flight in epoch.tasks.values()]
        return [mask for flight in flights for mask in flight.partial.values()]

    def content(self) -> CohortRecord:
        return CohortRecord(
            self.block_count,
            sorted(self.finished.items()),
            [
                _EpochRecord(
                    number,
                    epoch.task_count,
                    bytes(epoch.done).rstrip(b"\0"),
                    [
                        _TaskRecord(task, flight.batch_count, bytes(flight.complete), _masks(flight.partial))
                        for task, flight in sorted(epoch.tasks.items())
                    ],
                )
                for number, epoch in sorted(self.epochs.items())
                if epoch.done_count or epoch.tasks or epoch.task_count
            ],
        )

    @classmethod
    def of(cls, record: CohortRecord) -> Cohort:
        cohort = cls(record.block_count)
        cohort.finished = dict(record.finished)
        for stored in record.epochs:
            epoch = cohort.epochs[stored.number] = _Epoch()
            epoch.task_count = stored.task_count
            epoch.done = bytearray(stored.done)
            epoch.done_count = int.from_bytes(stored.done, "little").bit_count()
            for kept in stored.tasks:
                task = epoch.tasks[kept.number] = _Task(kept.batch_count)
                task.complete = bytearray(kept.complete)
                task.complete_count = int.from_bytes(kept.complete, "little").bit_count()
                task.partial = {batch: int.from_bytes(mask, "little") for batch, mask in kept.partial}
        cohort.check()
        return cohort

    def check(self) -> None:
        assert self.block_count > 0, "a cohort without blocks"
        assert not self.finished.keys() & self.epochs.keys(), "an epoch is both finished and not"
        for epoch in self.epochs.values():
            assert epoch.done_count == int.from_bytes(epoch.done, "little").bit_count(), "wrong count of done tasks"
            assert not epoch.task_count or epoch.done_count < epoch.task_count, "an epoch is finished but not collapsed"
            for number, task in epoch.tasks.items():
                assert not epoch.is_done(number), "a task is both done and in flight"
                assert 0 < task.batch_count <= MAX_BATCHES_PER_TASK, "wrong batch count"
                assert len(task.complete) == (task.batch_count + 7) >> 3, "wrong size of a bitmap"
                bits = int.from_bytes(task.complete, "little")
                assert bits >> task.batch_count == 0, "a batch beyond the task"
                assert task.complete_count == bits.bit_count() < task.batch_count, "wrong count of batches"
                assert task.complete_count or task.partial, "an empty task is kept"
                for batch, mask in task.partial.items():
                    assert 0 <= batch < task.batch_count, "a batch beyond the task"
                    assert not bits >> batch & 1, "a batch is both complete and partial"
                    assert 0 < mask < self.full, "a mask is empty or full"


def differing(sets: Sequence[int]) -> list[int]:
    """Return the numbers of the bits that are set in some of ``sets``, but not in all of them."""
    bits = reduce(or_, sets, 0) & ~reduce(and_, sets, -1)
    data = np.frombuffer(bits.to_bytes((bits.bit_length() + 7) >> 3, "little"), np.uint8)
    return [int(number) for number in np.flatnonzero(np.unpackbits(data, bitorder="little"))]


class _TaskRecord(msgspec.Struct, array_like=True):
    number: int
    batch_count: int
    complete: bytes
    partial: list[tuple[int, bytes]]


class _EpochRecord(msgspec.Struct, array_like=True):
    number: int
    task_count: int
    done: bytes
    tasks: list[_TaskRecord]


class CohortRecord(msgspec.Struct, array_like=True):
    """A cohort as it is stored."""

    block_count: int
    finished: list[tuple[int, int]]
    epochs: list[_EpochRecord]


def _masks(partial: dict[int, int]) -> list[tuple[int, bytes]]:
    return [(batch, mask.to_bytes((mask.bit_length() + 7) >> 3, "little")) for batch, mask in sorted(partial.items())]
