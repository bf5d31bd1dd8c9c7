"""Which batches each block has taken in: the memory that makes a push happen once.

Rules:

* A batch is known by ``Batch(epoch, task, batch)``; the number of batches of its task travels beside it. It is marked
  on a block in the same critical section that adds its gradient to the block (or to the block's open round).
* A block's set belongs to the block: it is copied, stored, and moved to another pserver with the block's values.

Representation. Almost always all blocks of a pserver have the same batches. So blocks form *cohorts*, whose sets are
kept together (``cohorts``). Memory is one bit per task of an unfinished epoch, plus the tasks in flight. A
pserver starts with one cohort; blocks that come from several pservers, or are added later, bring their own, and cohorts
that have become equal are merged.

Blocks are positions 0 to ``block_count`` - 1 here; the caller maps its block numbers.

Not guaranteed: an epoch collapses to its number only when its task count was told (``seal``), and never while a task of
it is incomplete, as one that was given up for failed is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import and_, itemgetter

import msgspec
import numpy as np

from flightedl.domain.exactly_once.batches import MAX_TASKS, Batch
from flightedl.domain.exactly_once.cohorts import Cohort, CohortRecord, differing
from flightedl.errors import CorruptError, MessageError
from flightedl.messages.decoding import from_msgpack

_FORMAT = 1


class _Record(msgspec.Struct, array_like=True):
    format: int
    #: Cohort of each block; its bit there is the number of earlier blocks of the same cohort.
    cohort_of: list[int]
    cohorts: list[CohortRecord]


class AppliedBatches:
    """The applied sets of the blocks of one pserver. Not thread-safe."""

    __slots__ = ("_bits", "_cohorts", "_masks", "_of")

    def __init__(self, block_count: int) -> None:
        self._cohorts: list[Cohort] = []
        #: Cohort of each block.
        self._of: list[Cohort] = []
        #: Bit of each block in its cohort's masks.
        self._bits: list[int] = []
        #: Stretches of blocks that were asked for -> their masks.
        self._masks: dict[range, list[tuple[Cohort, int]]] = {}
        self.add_blocks(block_count)

    @property
    def block_count(self) -> int:
        return len(self._of)

    def mark(self, blocks: Iterable[int], batch: Batch, batch_count: int) -> int:
        """Note that the blocks have taken in the batch; return how many did not have it.

        Raises:
            MessageError: the batch cannot be one of a task of ``batch_count`` batches, or the count was another before;
                nothing was done.
        """
        masks = self._masks_of(blocks)
        for cohort, _ in masks:
            cohort.require_possible(batch, batch_count)
        return sum(cohort.add(batch, batch_count, mask).bit_count() for cohort, mask in masks)

    def mark_together(self, blocks: Sequence[int], batches: Sequence[tuple[Batch, int]]) -> list[int]:
        """Note that the blocks have taken in the sum of several batches, if none of them has any of it.

        Args:
            blocks: Which.
            batches: Each with the number of batches of its task.

        Returns:
            How many of the blocks had each batch. All are marked when all of these are 0, else nothing is.

        Raises:
            MessageError: as ``mark``, or a batch is named twice; nothing was done.
        """
        masks = (self._masks.get(blocks) if isinstance(blocks, range) else None) or self._masks_of(blocks)
        if len(batches) == len(masks) == 1:
            # Nearly every push: one call does all of it.
            ((cohort, mask),), ((batch, batch_count),) = masks, batches
            new = cohort.add(batch, batch_count, mask)
            if new and new != mask:
                cohort.remove(batch, batch_count, new)
            return [(mask ^ new).bit_count()]
        return self._mark_sum(masks, batches)

    @staticmethod
    def _mark_sum(masks: Sequence[tuple[Cohort, int]], batches: Sequence[tuple[Batch, int]]) -> list[int]:
        if len(set(map(itemgetter(0), batches))) != len(batches):
            raise MessageError("a sum names a batch twice")
        for cohort, _ in masks:
            for batch, batch_count in batches:
                cohort.require_possible(batch, batch_count)
        marked: list[tuple[Cohort, Batch, int, int]] = []
        having: list[int] = []
        for batch, batch_count in batches:
            count = 0
            for cohort, mask in masks:
                new = cohort.add(batch, batch_count, mask)
                count += (mask ^ new).bit_count()
                if new:
                    marked.append((cohort, batch, batch_count, new))
            having.append(count)
        if any(having):
            for cohort, batch, batch_count, new in marked:
                cohort.remove(batch, batch_count, new)
        return having

    def count_having(self, blocks: Iterable[int], batch: Batch) -> int:
        return sum((cohort.mask(batch) & mask).bit_count() for cohort, mask in self._masks_of(blocks))

    def alike(self, blocks: range) -> list[range]:
        """Neighbouring blocks in stretches whose blocks all have the same batches."""
        found: list[range] = []
        masks = {id(cohort): cohort.partial_masks() for cohort in self._cohorts}
        last: tuple[int, tuple[bool, ...]] | None = None
        for block in blocks:
            cohort, bit = id(self._of[block]), self._bits[block]
            present = (cohort, tuple(bool(mask & bit) for mask in masks[cohort]))
            if present == last:
                found[-1] = range(found[-1].start, block + 1)
            else:
                found.append(range(block, block + 1))
            last = present
        return found

    def _masks_of(self, blocks: Iterable[int]) -> list[tuple[Cohort, int]]:
        """The blocks' bits in each of their cohorts; of stretches they are kept: each push asks for the same ones."""
        known = self._masks.get(blocks) if isinstance(blocks, range) else None
        if known is not None:
            return known
        masks: dict[int, tuple[Cohort, int]] = {}
        for block in blocks:
            cohort = self._of[block]
            masks[id(cohort)] = (cohort, masks.get(id(cohort), (cohort, 0))[1] | self._bits[block])
        found = list(masks.values())
        if isinstance(blocks, range):
            self._masks[blocks] = found
        return found

    def unmark(self, blocks: Iterable[int], batch: Batch, batch_count: int) -> None:
        """Take marks back: in a snapshot, of batches whose gradients wait in an open round that is not part of it."""
        for cohort, mask in self._masks_of(blocks):
            if having := cohort.mask(batch) & mask:
                cohort.remove(batch, batch_count, having)

    def has(self, block: int, batch: Batch) -> bool:
        return self._of[block].mask(batch) & self._bits[block] != 0

    def seal(self, epoch: int, task_count: int) -> None:
        """Tell how many tasks the epoch has; lets it collapse once all blocks have all of them.

        Raises:
            MessageError: not a possible number of tasks.
        """
        if not 0 < task_count <= MAX_TASKS:
            raise MessageError(f"an epoch cannot have {task_count} tasks; the limit is {MAX_TASKS}")
        if any(cohort.known_task_count(epoch) > task_count for cohort in self._cohorts):
            raise MessageError(f"epoch {epoch} cannot have {task_count} tasks: a later one has arrived")
        for cohort in self._cohorts:
            cohort.tell_task_count(epoch, task_count)

    def done_tasks(self, epoch: int) -> list[int]:
        """Tasks of which every block has every batch, ascending."""
        bitmap = np.unpackbits(np.frombuffer(self.done_bitmap(epoch), np.uint8), bitorder="little")
        return [int(task) for task in np.flatnonzero(bitmap)]

    def done_bitmap(self, epoch: int) -> bytes:
        """``done_tasks`` as bits, lowest first; as long as needed."""
        bits = reduce(and_, [cohort.done_bits(epoch) for cohort in self._cohorts] or [0])
        return bits.to_bytes((bits.bit_length() + 7) >> 3, "little")

    def in_part(self, epoch: int) -> dict[int, bytes]:
        """Tasks that some block has, but not every block wholly.

        Returns:
            task -> the batches that every block has, as bits, lowest first; empty if blocks have different ones.
        """
        tasks = {task for cohort in self._cohorts if epoch in cohort.epochs for task in cohort.epochs[epoch].tasks}
        tasks.update(differing([cohort.done_bits(epoch) for cohort in self._cohorts]))
        found: dict[int, bytes] = {}
        for task in sorted(tasks):
            having = {cohort.batches(epoch, task) for cohort in self._cohorts}
            found[task] = having.pop() if len(having) == 1 else b""
        return found

    def epochs(self) -> list[int]:
        """Epochs of which some block has something, ascending."""
        return sorted({epoch for cohort in self._cohorts for epoch in (*cohort.finished, *cohort.epochs)})

    def through_task_count(self, epoch: int) -> int | None:
        """How many tasks the epoch has, if every block has all of them and that was told (``seal``); else None."""
        counts = {cohort.finished.get(epoch) for cohort in self._cohorts}
        return counts.pop() if len(counts) == 1 else None

    def add_blocks(self, count: int) -> None:
        if count:
            cohort = Cohort(count)
            self._append([cohort] * count, [1 << i for i in range(count)])
            self.merge()

    def _append(self, cohorts: Sequence[Cohort], bits: Sequence[int]) -> None:
        self._masks.clear()
        for cohort, bit in zip(cohorts, bits, strict=True):
            if not any(known is cohort for known in self._cohorts):
                self._cohorts.append(cohort)
            self._of.append(cohort)
            self._bits.append(bit)

    def merge(self) -> None:
        """Join cohorts whose blocks all have the same batches."""
        kept: list[tuple[CohortRecord | None, Cohort]] = []
        shifts: dict[int, tuple[Cohort, int]] = {}
        for cohort in self._cohorts:
            content = None
            if len(self._cohorts) > 1 and cohort.is_uniform():
                content = cohort.content()
                content.block_count = 0
            same = next((other for known, other in kept if content is not None and known == content), None)
            if same is None:
                kept.append((content, cohort))
            else:
                shifts[id(cohort)] = (same, same.block_count)
                same.block_count += cohort.block_count
                same.full = (1 << same.block_count) - 1
        for block, cohort in enumerate(self._of):
            if id(cohort) in shifts:
                self._of[block], shift = shifts[id(cohort)]
                self._bits[block] <<= shift
        self._cohorts = [cohort for _, cohort in kept]
        if shifts:
            self._masks.clear()

    @classmethod
    def rebuilt(cls, blocks: Sequence[tuple[AppliedBatches, int]]) -> AppliedBatches:
        """The sets of blocks that come from elsewhere: block i is block ``blocks[i][1]`` of ``blocks[i][0]``.

        A block that is cut anew brings the set of the block it is cut from. Sources are not changed.
        """
        chosen: dict[int, tuple[Cohort, list[int]]] = {}
        for source, block in blocks:
            cohort = source._of[block]  # noqa: SLF001 - of the same class
            chosen.setdefault(id(cohort), (cohort, []))[1].append(source._bits[block].bit_length() - 1)  # noqa: SLF001
        new = {key: cohort.restricted(positions) for key, (cohort, positions) in chosen.items()}
        counts = dict.fromkeys(new, 0)
        result = cls(0)
        for source, block in blocks:
            key = id(source._of[block])  # noqa: SLF001
            result._append([new[key]], [1 << counts[key]])
            counts[key] += 1
        result.merge()
        return result

    def copy(self) -> AppliedBatches:
        """An independent copy: what a snapshot takes under the lock."""
        other = AppliedBatches(0)
        new = {id(cohort): cohort.copy() for cohort in self._cohorts}
        other._append([new[id(cohort)] for cohort in self._of], self._bits)
        return other

    def encode(self) -> bytes:
        """Compact bytes; equal sets with equal histories give equal bytes."""
        self.merge()
        numbers = {id(cohort): i for i, cohort in enumerate(self._cohorts)}
        # The bits are stored as ranks: a cohort's blocks are renumbered in the order of the blocks.
        cohorts = []
        for cohort in self._cohorts:
            positions = [bit.bit_length() - 1 for of, bit in zip(self._of, self._bits, strict=True) if of is cohort]
            in_order = positions == list(range(cohort.block_count))
            cohorts.append((cohort if in_order else cohort.restricted(positions)).content())
        return msgspec.msgpack.encode(_Record(_FORMAT, [numbers[id(cohort)] for cohort in self._of], cohorts))

    @classmethod
    def decode(cls, data: bytes) -> AppliedBatches:
        """What ``encode`` wrote.

        Raises:
            CorruptError: anything else.
        """
        try:
            record = from_msgpack(data, _Record)
            if record.format != _FORMAT:
                raise CorruptError(f"applied sets of format {record.format}; this version reads format {_FORMAT}")
            cohorts = [Cohort.of(stored) for stored in record.cohorts]
            result = cls(0)
            counts = [0] * len(cohorts)
            for number in record.cohort_of:
                result._append([cohorts[number]], [1 << counts[number]])
                counts[number] += 1
            result.check()
        except (msgspec.DecodeError, AssertionError, IndexError, OverflowError, ValueError) as error:
            raise CorruptError(f"not the applied sets of a pserver: {str(error)[:200]}") from None
        return result

    def check(self) -> None:
        for cohort in self._cohorts:
            cohort.check()
            bits = [bit for of, bit in zip(self._of, self._bits, strict=True) if of is cohort]
            assert sorted(bits) == [1 << i for i in range(cohort.block_count)], "blocks and bits of a cohort differ"
