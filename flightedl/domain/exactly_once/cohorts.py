"""Blocks that usually have the same applied batches, and therefore share one stored set.

A cohort stores one bit per batch of a task in flight, one bit per finished task of an epoch, and just the number of a
finished epoch. If only some blocks have applied a batch, it stores a mask of these blocks. ``applied`` decides which
blocks form a cohort.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import and_, or_

import msgspec
import numpy as np

from flightedl.domain.exactly_once.batches import MAX_BATCHES_PER_TASK, MAX_TASKS, Batch
from flightedl.errors import MessageError


class Bitmap:
    """A set of small numbers, stored as a bitmap (lowest number first) and the size of the set."""

    __slots__ = ("bits", "count")

    def __init__(self, bits: bytes) -> None:
        self.bits = bytearray(bits)
        self.count = int.from_bytes(bits, "little").bit_count()

    @classmethod
    def filled(cls, count: int) -> Bitmap:
        return cls(np.packbits(np.ones(count, np.uint8), bitorder="little").tobytes())

    def __contains__(self, number: int) -> bool:
        place = number >> 3
        return place < len(self.bits) and bool(self.bits[place] & (1 << (number & 7)))

    def add(self, number: int) -> None:
        """Add a number that the set does not contain. The bitmap grows if necessary."""
        place = number >> 3
        if place >= len(self.bits):
            self.bits.extend(bytes(max(place + 1 - len(self.bits), len(self.bits) >> 1)))
        self.bits[place] |= 1 << (number & 7)
        self.count += 1

    def discard(self, number: int) -> None:
        if number in self:
            self.bits[number >> 3] ^= 1 << (number & 7)
            self.count -= 1

    def copy(self) -> Bitmap:
        other = Bitmap(b"")
        other.bits, other.count = self.bits.copy(), self.count
        return other

    def as_int(self) -> int:
        return int.from_bytes(self.bits, "little")


class _Task:
    """A task in flight."""

    __slots__ = ("batch_count", "complete", "partial")

    def __init__(self, batch_count: int, complete: Bitmap | None = None, partial: dict[int, int] | None = None) -> None:
        self.batch_count = batch_count
        #: Batches that all blocks of the cohort have applied.
        self.complete = Bitmap(bytes((batch_count + 7) >> 3)) if complete is None else complete
        #: Batch -> mask of the blocks that have applied it; the mask is neither empty nor full.
        self.partial: dict[int, int] = {} if partial is None else partial

    def copy(self) -> _Task:
        return _Task(self.batch_count, self.complete.copy(), self.partial.copy())


class _Epoch:
    __slots__ = ("done", "task_count", "tasks")

    def __init__(self, done: Bitmap | None = None, task_count: int = 0) -> None:
        #: Tasks whose batches all blocks have applied.
        self.done = Bitmap(b"") if done is None else done
        #: Number of tasks of the epoch; 0 if unknown.
        self.task_count = task_count
        #: Tasks that are not in ``done``, but from which some block has applied a batch.
        self.tasks: dict[int, _Task] = {}

    def copy(self) -> _Epoch:
        other = _Epoch(self.done.copy(), self.task_count)
        other.tasks = {number: task.copy() for number, task in self.tasks.items()}
        return other


class Cohort:
    """Blocks whose sets are stored together. In masks, bits 0 to ``block_count`` - 1 represent them."""

    __slots__ = ("block_count", "epochs", "finished", "full")

    def __init__(self, block_count: int) -> None:
        self.block_count = block_count
        self.full = (1 << block_count) - 1
        #: Epoch -> its task count, for epochs whose batches all blocks have applied.
        self.finished: dict[int, int] = {}
        self.epochs: dict[int, _Epoch] = {}

    def mask(self, batch: Batch) -> int:
        number, task, position = batch
        if number in self.finished:
            return self.full
        epoch = self.epochs.get(number)
        if epoch is None:
            return 0
        if task in epoch.done:
            return self.full
        flight = epoch.tasks.get(task)
        if flight is None or position >= flight.batch_count:
            return 0
        return self.full if position in flight.complete else flight.partial.get(position, 0)

    def require_possible(self, batch: Batch, batch_count: int) -> None:
        """Raise MessageError if the batch cannot belong to a task of ``batch_count`` batches."""
        number, task, position = batch
        if not 0 <= position < batch_count <= MAX_BATCHES_PER_TASK or not 0 <= task < MAX_TASKS or number < 0:
            raise MessageError(f"{batch} cannot be one of {batch_count} batches of a task")
        epoch = self.epochs.get(number)
        task_count = self.finished.get(number, 0) if epoch is None else epoch.task_count
        if task_count and task >= task_count:
            raise MessageError(f"{batch}: the epoch has only {task_count} tasks")
        if epoch is not None and (flight := epoch.tasks.get(task)) is not None and flight.batch_count != batch_count:
            raise MessageError(f"{batch}: the task has {flight.batch_count} batches, not {batch_count}")

    def add(self, batch: Batch, batch_count: int, blocks: int) -> int:
        """Mark the batch on the blocks in a mask. Return the mask of those blocks that had not applied the batch.

        Raises:
            MessageError: as for ``require_possible``; nothing was done.
        """
        number, task, position = batch
        epoch = self.epochs.get(number)
        flight = None if epoch is None else epoch.tasks.get(task)
        if flight is None or flight.batch_count != batch_count or not 0 <= position < batch_count:
            self.require_possible(batch, batch_count)
            if number in self.finished or (epoch is not None and task in epoch.done):
                return 0
            epoch = self.epochs.setdefault(number, _Epoch()) if epoch is None else epoch
            flight = epoch.tasks[task] = _Task(batch_count)
        assert epoch is not None, "a task in flight has no epoch"
        # Read the bits directly, because every push runs this function.
        complete, place, bit = flight.complete, position >> 3, 1 << (position & 7)
        if complete.bits[place] & bit:
            return 0
        before = flight.partial.get(position, 0)
        after = before | blocks
        if after != self.full:
            flight.partial[position] = after
            return after ^ before
        if before:
            del flight.partial[position]
        complete.bits[place] |= bit
        complete.count += 1
        if complete.count == batch_count:
            del epoch.tasks[task]
            epoch.done.add(task)
            self._collapse(number, epoch)
        return after ^ before

    def _collapse(self, number: int, epoch: _Epoch) -> None:
        if epoch.task_count and epoch.done.count == epoch.task_count:
            del self.epochs[number]
            self.finished[number] = epoch.task_count

    def remove(self, batch: Batch, batch_count: int, blocks: int) -> None:
        remaining = self.mask(batch) & ~blocks
        number, task, position = batch
        if number in self.finished:
            task_count = self.finished.pop(number)
            self.epochs[number] = _Epoch(Bitmap.filled(task_count), task_count)
        epoch = self.epochs[number]
        if task in epoch.done:
            epoch.done.discard(task)
            epoch.tasks[task] = _Task(batch_count, Bitmap.filled(batch_count))
        flight = epoch.tasks[task]
        flight.complete.discard(position)
        flight.partial.pop(position, None)
        if remaining:
            flight.partial[position] = remaining
        elif not flight.complete.count and not flight.partial:
            del epoch.tasks[task]

    def set_task_count(self, number: int, task_count: int) -> None:
        if number not in self.finished:
            epoch = self.epochs.setdefault(number, _Epoch())
            epoch.task_count = task_count
            self._collapse(number, epoch)

    def known_task_count(self, number: int) -> int:
        """Return the highest known task of the epoch plus one."""
        if number in self.finished:
            return self.finished[number]
        epoch = self.epochs.get(number)
        if epoch is None:
            return 0
        return max(epoch.done.as_int().bit_length(), max(epoch.tasks, default=-1) + 1)

    def copy(self) -> Cohort:
        other = Cohort(self.block_count)
        other.finished = self.finished.copy()
        other.epochs = {number: epoch.copy() for number, epoch in self.epochs.items()}
        return other

    def restricted(self, positions: Sequence[int]) -> Cohort:
        """Return a cohort of some of the blocks, in which ``positions[i]`` becomes block i."""
        other = self.copy()
        other.renumber(len(positions), lambda mask: sum(1 << i for i, at in enumerate(positions) if mask >> at & 1))
        return other

    def renumber(self, block_count: int, renumbered: Callable[[int], int]) -> None:
        """Replace the cohort's blocks. ``renumbered`` converts a mask of the old blocks to a mask of the new ones."""
        self.block_count, self.full = block_count, (1 << block_count) - 1
        for number, epoch in list(self.epochs.items()):
            for task, flight in list(epoch.tasks.items()):
                partial, flight.partial = flight.partial, {}
                for batch, mask in partial.items():
                    if blocks := renumbered(mask):
                        self.add(Batch(number, task, batch), flight.batch_count, blocks)
                if not flight.complete.count and not flight.partial:
                    del epoch.tasks[task]

    def task_counts(self) -> list[tuple[int, int]]:
        known = [(number, epoch.task_count) for number, epoch in self.epochs.items() if epoch.task_count]
        return [*self.finished.items(), *known]

    def is_uniform(self) -> bool:
        return not any(task.partial for epoch in self.epochs.values() for task in epoch.tasks.values())

    def done_bits(self, number: int) -> int:
        """Return one bit per task of an epoch, lowest task first: 1 if all blocks have applied the entire task."""
        if number in self.finished:
            return (1 << self.finished[number]) - 1
        return epoch.done.as_int() if (epoch := self.epochs.get(number)) else 0

    def batches(self, number: int, task: int) -> bytes:
        """Return a bitmap of the batches that all blocks have applied, for a task in flight; empty if blocks differ."""
        epoch = self.epochs.get(number)
        flight = None if epoch is None else epoch.tasks.get(task)
        return b"" if flight is None or flight.partial else bytes(flight.complete.bits)

    def partial_masks(self) -> list[int]:
        """For each batch that only some blocks have applied, return the mask of these blocks."""
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
                    bytes(epoch.done.bits).rstrip(b"\0"),
                    [
                        _TaskRecord(task, flight.batch_count, bytes(flight.complete.bits), _masks(flight.partial))
                        for task, flight in sorted(epoch.tasks.items())
                    ],
                )
                for number, epoch in sorted(self.epochs.items())
                if epoch.done.count or epoch.tasks or epoch.task_count
            ],
        )

    @classmethod
    def of(cls, record: CohortRecord) -> Cohort:
        cohort = cls(record.block_count)
        cohort.finished = dict(record.finished)
        for stored in record.epochs:
            epoch = cohort.epochs[stored.number] = _Epoch(Bitmap(stored.done), stored.task_count)
            for kept in stored.tasks:
                partial = {batch: int.from_bytes(mask, "little") for batch, mask in kept.partial}
                epoch.tasks[kept.number] = _Task(kept.batch_count, Bitmap(kept.complete), partial)
        cohort.check()
        return cohort

    def check(self) -> None:
        assert self.block_count > 0, "a cohort without blocks"
        assert not self.finished.keys() & self.epochs.keys(), "an epoch is both finished and not"
        for epoch in self.epochs.values():
            assert epoch.done.count == epoch.done.as_int().bit_count(), "wrong count of done tasks"
            assert not epoch.task_count or epoch.done.count < epoch.task_count, "an epoch is finished but not collapsed"
            for number, task in epoch.tasks.items():
                assert number not in epoch.done, "a task is both done and in flight"
                assert 0 < task.batch_count <= MAX_BATCHES_PER_TASK, "wrong batch count"
                assert len(task.complete.bits) == (task.batch_count + 7) >> 3, "wrong size of a bitmap"
                bits = task.complete.as_int()
                assert bits >> task.batch_count == 0, "a batch beyond the task"
                assert task.complete.count == bits.bit_count() < task.batch_count, "wrong count of batches"
                assert task.complete.count or task.partial, "an empty task is kept"
                for batch, mask in task.partial.items():
                    assert 0 <= batch < task.batch_count, "a batch beyond the task"
                    assert not bits >> batch & 1, "a batch is both complete and partial"
                    assert 0 < mask < self.full, "a mask is empty or full"


def differing(sets: Sequence[int]) -> list[int]:
    """Return the numbers of the bits that are set in at least one of ``sets``, but not in all."""
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
    """A cohort in its stored form."""

    block_count: int
    finished: list[tuple[int, int]]
    epochs: list[_EpochRecord]


def _masks(partial: dict[int, int]) -> list[tuple[int, bytes]]:
    return [(batch, mask.to_bytes((mask.bit_length() + 7) >> 3, "little")) for batch, mask in sorted(partial.items())]
