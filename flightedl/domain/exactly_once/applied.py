"""The batches that each block has applied. This record makes pushes idempotent.

Rules:

* A batch is identified by ``Batch(epoch, task, batch)``; messages also carry the number of batches in its task. A block
  marks a batch in the same critical section in which it adds the batch's gradient to its values or its open round.
* Each block has its own set, which is copied, stored, and moved to another pserver together with the block's values
  (``release``, ``adopt``).

Representation: all blocks of a pserver almost always have the same batches. Blocks therefore form *cohorts*, whose sets
are stored together (``cohorts``), at a cost of one bit per task of an unfinished epoch plus the tasks in flight. A
pserver starts with one cohort. Blocks from other pservers bring their own cohorts, and equal cohorts are merged.

Blocks are identified by their numbers in the shard plan. Stored sets are in ascending order of block numbers.

Memory: an epoch is reduced to its number once its task count is known (``set_task_count``) and all of its tasks are
complete. If a task remains incomplete, for example because it failed, the epoch's memory is not freed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import and_, itemgetter

import msgspec

from flightedl.domain.exactly_once.batches import MAX_TASKS, Batch
from flightedl.domain.exactly_once.cohorts import Cohort, CohortRecord, differing
from flightedl.errors import CorruptError, MessageError
from flightedl.messages.decoding import from_msgpack

_FORMAT = 1


class _Record(msgspec.Struct, array_like=True):
    format: int
    #: Block -> (its cohort, its bit in that cohort's masks: the number of preceding blocks in the same cohort).
    cohort_of: list[int]
    cohorts: list[CohortRecord]


class AppliedBatches:
    """Applied sets of the blocks of one pserver. Not thread-safe.

    Args:
        numbers: Numbers of the blocks. Their sets are empty.
    """

    __slots__ = ("_cohorts", "_masks", "_places")

    def __init__(self, numbers: Iterable[int]) -> None:
        self._cohorts: list[Cohort] = []
        #: Block number -> its cohort, and its bit in that cohort's masks.
        self._places: dict[int, tuple[Cohort, int]] = {}
        #: Range of blocks -> its masks, cached when the range is first requested.
        self._masks: dict[range, list[tuple[Cohort, int]]] = {}
        if own := list(numbers):
            self._put(own, Cohort(len(own)))

    def _put(self, numbers: Sequence[int], cohort: Cohort) -> None:
        """Add all blocks of a cohort, in the order of its bits."""
        self._cohorts.append(cohort)
        self._places.update((number, (cohort, 1 << bit)) for bit, number in enumerate(numbers))
        self._masks.clear()

    @property
    def numbers(self) -> list[int]:
        return sorted(self._places)

    def mark(self, blocks: Iterable[int], batch: Batch, batch_count: int) -> int:
        """Mark a batch as applied on the blocks. Return how many of them had not applied it.

        Raises:
            MessageError: the batch cannot belong to a task of ``batch_count`` batches, or the task's known count is
                different; nothing was marked.
        """
        masks = self._masks_of(blocks)
        for cohort, _ in masks:
            cohort.require_possible(batch, batch_count)
        return sum(cohort.add(batch, batch_count, mask).bit_count() for cohort, mask in masks)

    def mark_together(self, blocks: Sequence[int], batches: Sequence[tuple[Batch, int]]) -> list[int]:
        """Mark all batches of a sum as applied on the blocks, unless any block has already applied any of them.

        Args:
            blocks: Numbers of the blocks.
            batches: Each batch with the number of batches of its task.

        Returns:
            For each batch, the number of blocks that already had it. All are marked if all of these are 0, else none.

        Raises:
            MessageError: as for ``mark``, or a batch is named twice; nothing was marked.
        """
        masks = (self._masks.get(blocks) if isinstance(blocks, range) else None) or self._masks_of(blocks)
        if len(batches) == len(masks) == 1:
            # Nearly every push takes this fast path.
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
        """Divide the blocks into ranges of adjacent blocks that have applied the same batches."""
        found: list[range] = []
        masks = {id(cohort): cohort.partial_masks() for cohort in self._cohorts}
        last: tuple[int, tuple[bool, ...]] | None = None
        for block in blocks:
            cohort, bit = self._places[block]
            present = (id(cohort), tuple(bool(mask & bit) for mask in masks[id(cohort)]))
            if present == last:
                found[-1] = range(found[-1].start, block + 1)
            else:
                found.append(range(block, block + 1))
            last = present
        return found

    def _masks_of(self, blocks: Iterable[int]) -> list[tuple[Cohort, int]]:
        """Return the blocks' mask in each cohort. Masks are cached, because every push needs them."""
        known = self._masks.get(blocks) if isinstance(blocks, range) else None
        if known is not None:
            return known
        masks: dict[int, tuple[Cohort, int]] = {}
        for block in blocks:
            cohort, bit = self._places[block]
            masks[id(cohort)] = (cohort, masks.get(id(cohort), (cohort, 0))[1] | bit)
        found = list(masks.values())
        if isinstance(blocks, range):
            self._masks[blocks] = found
        return found

    def unmark(self, blocks: Iterable[int], batch: Batch, batch_count: int) -> None:
        """Remove marks. Used by snapshots for batches in an open round, which snapshots exclude."""
        for cohort, mask in self._masks_of(blocks):
            if having := cohort.mask(batch) & mask:
                cohort.remove(batch, batch_count, having)

    def has(self, block: int, batch: Batch) -> bool:
        cohort, bit = self._places[block]
        return cohort.mask(batch) & bit != 0

    def are_alike(self, one: int, other: int) -> bool:
        """True if two blocks have applied the same batches."""
        places = (self._places[number] for number in (one, other))
        first, second = (cohort.restricted([bit.bit_length() - 1]).content() for cohort, bit in places)
        return first == second

    def set_task_count(self, epoch: int, task_count: int) -> None:
        """Set the number of tasks in an epoch. The epoch is reduced to its number once all blocks have all its tasks.

        Raises:
            MessageError: the number is impossible.
        """
        if not 0 < task_count <= MAX_TASKS:
            raise MessageError(f"an epoch cannot have {task_count} tasks; the limit is {MAX_TASKS}")
        _require_counts(self._cohorts, {epoch: task_count})
        for cohort in self._cohorts:
            cohort.set_task_count(epoch, task_count)

    def done_bitmap(self, epoch: int) -> bytes:
        """Return the tasks whose batches every block has applied: bits, lowest task first, no trailing zero bytes."""
        bits = reduce(and_, [cohort.done_bits(epoch) for cohort in self._cohorts] or [0])
        return bits.to_bytes((bits.bit_length() + 7) >> 3, "little")

    def incomplete_tasks(self, epoch: int) -> dict[int, bytes]:
        """Return the partly applied tasks: some block has applied one of the task's batches, and some block lacks one.

        Returns:
            Task -> the batches that every block has, as bits, lowest first; empty if the blocks' batches differ.
        """
        tasks = {task for cohort in self._cohorts if epoch in cohort.epochs for task in cohort.epochs[epoch].tasks}
        tasks.update(differing([cohort.done_bits(epoch) for cohort in self._cohorts]))
        found: dict[int, bytes] = {}
        for task in sorted(tasks):
            having = {cohort.batches(epoch, task) for cohort in self._cohorts}
            found[task] = having.pop() if len(having) == 1 else b""
        return found

    def epochs(self) -> list[int]:
        """Return the epochs from which any block has applied a batch, in ascending order."""
        return sorted({epoch for cohort in self._cohorts for epoch in (*cohort.finished, *cohort.epochs)})

    def completed_task_count(self, epoch: int) -> int | None:
        """Return an epoch's task count if every block has applied all of the epoch's batches, otherwise None."""
        counts = {cohort.finished.get(epoch) for cohort in self._cohorts}
        return counts.pop() if len(counts) == 1 else None

    def is_finished(self, blocks: range, epoch: int) -> bool:
        """True if the blocks and all others of their cohorts have applied all of an epoch's batches."""
        return all(epoch in cohort.finished for cohort, _ in self._masks_of(blocks))

    def release(self, blocks: Sequence[int]) -> bytes:
        """Remove blocks and return their sets, which another pserver can ``adopt``."""
        released, gone = self.encoded(blocks), set(blocks)
        kept = AppliedBatches.rebuilt({number: self for number in self.numbers if number not in gone})
        self._cohorts, self._places = kept._cohorts, kept._places  # noqa: SLF001 - same class
        self._masks.clear()
        return released

    def adopt(self, blocks: Sequence[int], released: bytes) -> None:
        """Add blocks that another pserver released. Task counts known to either side then apply to all blocks.

        Args:
            blocks: Their numbers, ascending.
            released: Their sets.

        Raises:
            CorruptError: the sets are damaged.
            MessageError: a block is already here, or an epoch here has another number of tasks; nothing was done.
        """
        if not self._places.keys().isdisjoint(blocks):
            raise MessageError(f"some of the blocks {blocks} are already here")
        other = AppliedBatches.decode(released, blocks)
        cohorts = other._cohorts  # noqa: SLF001 - same class
        here, there = _task_counts(self._cohorts), _task_counts(cohorts)
        _require_counts(self._cohorts, there)
        _require_counts(cohorts, here)
        if any(here.get(epoch, task_count) != task_count for epoch, task_count in there.items()):
            raise MessageError(f"the blocks {blocks} have other numbers of tasks for epochs than the blocks here")
        for cohort in (*self._cohorts, *cohorts):
            for epoch, task_count in (here | there).items():
                cohort.set_task_count(epoch, task_count)
        self._cohorts += cohorts
        self._places.update(other._places)  # noqa: SLF001
        self._masks.clear()
        self.merge()

    def merge(self) -> None:
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
        if not shifts:
            return
        for block, (cohort, bit) in self._places.items():
            if id(cohort) in shifts:
                same, shift = shifts[id(cohort)]
                self._places[block] = (same, bit << shift)
        self._cohorts = [cohort for _, cohort in kept]
        self._masks.clear()

    @classmethod
    def rebuilt(cls, sources: Mapping[int, AppliedBatches]) -> AppliedBatches:
        """Return new sets that give each block a copy of its source block's set."""
        chosen: dict[int, tuple[Cohort, list[int], list[int]]] = {}
        for number, source in sources.items():
            cohort, bit = source._places[number]  # noqa: SLF001 - same class
            _, numbers, bits = chosen.setdefault(id(cohort), (cohort, [], []))
            numbers.append(number)
            bits.append(bit.bit_length() - 1)
        result = cls(())
        for cohort, numbers, bits in chosen.values():
            result._put(numbers, cohort.restricted(bits))
        result.merge()
        return result

    def encoded(self, blocks: Sequence[int]) -> bytes:
        """Return the sets of some blocks, for ``adopt``."""
        return AppliedBatches.rebuilt(dict.fromkeys(blocks, self)).encode()

    def copy(self) -> AppliedBatches:
        """Return an independent copy. Snapshots call this under the lock."""
        other = AppliedBatches(())
        new = {id(cohort): cohort.copy() for cohort in self._cohorts}
        other._cohorts = list(new.values())
        other._places = {number: (new[id(cohort)], bit) for number, (cohort, bit) in self._places.items()}
        return other

    def encode(self) -> bytes:
        """Encode the sets compactly. Equal sets with equal histories are encoded as equal bytes."""
        self.merge()
        numbers = {id(cohort): i for i, cohort in enumerate(self._cohorts)}
        places = [self._places[number] for number in self.numbers]
        # The blocks of a cohort are renumbered in ascending order before their bits are stored.
        cohorts = []
        for cohort in self._cohorts:
            bits = [bit.bit_length() - 1 for of, bit in places if of is cohort]
            in_order = bits == list(range(cohort.block_count))
            cohorts.append((cohort if in_order else cohort.restricted(bits)).content())
        return msgspec.msgpack.encode(_Record(_FORMAT, [numbers[id(cohort)] for cohort, _ in places], cohorts))

    @classmethod
    def decode(cls, data: bytes, numbers: Iterable[int]) -> AppliedBatches:
        """Decode the output of ``encode``; ``numbers`` are the blocks' numbers, ascending.

        Raises:
            CorruptError: for anything else, or for sets of another number of blocks.
        """
        try:
            record = from_msgpack(data, _Record)
            if record.format != _FORMAT:
                raise CorruptError(f"applied sets of format {record.format}; this version reads format {_FORMAT}")
            cohorts = [Cohort.of(stored) for stored in record.cohorts]
            members: list[list[int]] = [[] for _ in cohorts]
            for number, place in zip(numbers, record.cohort_of, strict=True):
                members[place].append(number)
            result = cls(())
            for cohort, own in zip(cohorts, members, strict=True):
                result._put(own, cohort)
            result.check()
        except (msgspec.DecodeError, AssertionError, IndexError, OverflowError, ValueError) as error:
            raise CorruptError(f"not the applied sets of a pserver: {str(error)[:200]}") from None
        return result

    def check(self) -> None:
        for cohort in self._cohorts:
            cohort.check()
            bits = [bit for of, bit in self._places.values() if of is cohort]
            assert sorted(bits) == [1 << i for i in range(cohort.block_count)], "blocks and bits of a cohort differ"
        assert len({id(cohort) for cohort, _ in self._places.values()}) == len(self._cohorts), "a cohort has no blocks"


def _task_counts(cohorts: Iterable[Cohort]) -> dict[int, int]:
    return {epoch: count for cohort in cohorts for epoch, count in cohort.task_counts()}


def _require_counts(cohorts: Sequence[Cohort], counts: Mapping[int, int]) -> None:
    for epoch, task_count in counts.items():
        if any(cohort.known_task_count(epoch) > task_count for cohort in cohorts):
            raise MessageError(f"epoch {epoch} cannot have {task_count} tasks: a task with a higher number was applied")
