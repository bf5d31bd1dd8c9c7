"""What the master does when a pserver comes back with less than it had.

**What counts.** ``PserverRecovery`` knows which process (generation) of each pserver index counts, and whether it is
*settled*: what it has applied was compared with what the queue says is done, and the difference was reopened.

* A report that a piece of work is done names the generation of every pserver that acknowledged it: of each the *lowest*
  one over the piece's batches. It counts only if none is older than the process that counts. Otherwise that process is
  gone, with what it acknowledged since its last checkpoint: the piece goes back (``give_back``), the report is answered
  as lost.
* A report that names a newer process than the master knows counts: that process will announce what it has, and did
  not have more then than it has now.
* A pserver announces what it has applied until the master has stored, *in one transaction*, the reopened queue and
  that this process is settled. It may serve meanwhile.
* Until all are settled nobody is told that all epochs are done: what was lost may still have to be reopened.

So at any time, for each index: either its process is settled, and then done ⊆ applied by it; or it is going to
announce what it has.

**Rollback.** With ``recovery="rollback"`` the others go back too, to the checkpoint that the new process loaded: each
has to end, take its index anew, and so gets a new generation, above the *floor*. Pushes and reports that are under way
are refused by that alone, and the queue is made to fit by the same announcements. It is over when all are above the
floor and settled. While it goes on no checkpoint is ordered: the caller tells ``Checkpoints.pserver_up`` only of
settled processes that need not reload.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.exactly_once.cohorts import differing
from flightedl.domain.exactly_once.intervals import IntervalSet
from flightedl.errors import CorruptError, NotFoundError
from flightedl.messages.decoding import from_msgpack

_FORMAT = 1


class AppliedSummary(msgspec.Struct, frozen=True, array_like=True):
    """Tasks that all blocks of a pserver have wholly, and the batches of those that they have in part.

    One bit for each task of an epoch that is not through, a few bytes for all that are.
    """

    #: (first epoch, end epoch, tasks): epochs that are through, with how many tasks each has; rising.
    through: list[tuple[int, int, int]] = []
    #: epoch -> bit for each task, lowest first, as long as needed.
    done: dict[int, bytes] = {}
    #: False: the pserver has no blocks, so it lacks nothing.
    has_blocks: bool = True
    #: epoch -> task -> its batches in every block, as bits; empty if blocks differ. Only tasks that are not done.
    parts: dict[int, dict[int, bytes]] = {}

    @classmethod
    def of(cls, applied: AppliedBatches) -> AppliedSummary:
        through: list[tuple[int, int, int]] = []
        done: dict[int, bytes] = {}
        parts: dict[int, dict[int, bytes]] = {}
        for epoch in applied.epochs():
            task_count = applied.through_task_count(epoch)
            if task_count is None:
                done[epoch] = applied.done_bitmap(epoch)
                parts[epoch] = applied.incomplete_tasks(epoch)
            elif through and through[-1][1:] == (epoch, task_count):
                through[-1] = (through[-1][0], epoch + 1, task_count)
            else:
                through.append((epoch, epoch + 1, task_count))
        return cls(through, done, bool(applied.numbers), parts)

    def is_through(self, epoch: int) -> bool:
        return any(first <= epoch < end for first, end, _ in self.through)

    def done_bits(self, epoch: int) -> int:
        """A bit for each task of an epoch that is not through."""
        return int.from_bytes(self.done.get(epoch, b""), "little")

    def encode(self) -> bytes:
        return msgspec.msgpack.encode((_FORMAT, self))

    @classmethod
    def decode(cls, data: bytes) -> AppliedSummary:
        """What ``encode`` wrote. CorruptError: anything else."""
        try:
            version, summary = from_msgpack(data, tuple[int, cls])  # type: ignore[valid-type]
        except (msgspec.DecodeError, RecursionError) as error:
            raise CorruptError(f"not a summary of applied batches: {str(error)[:200]}") from None
        if version != _FORMAT:
            raise CorruptError(f"a summary of format {version}; this version reads format {_FORMAT}")
        found: AppliedSummary = summary
        return found


def tasks_to_reopen(
    summary: AppliedSummary, begun_epochs: int, task_count_of: Callable[[int], int]
) -> dict[int, IntervalSet]:
    """Which tasks a pserver lacks: to be given to ``TaskQueue.reopen``, which touches only those that are done.

    Returns:
        epoch -> its tasks, without empty ones. O(tasks / 8) for each epoch that is not through, nothing for the others.

    Raises:
        NotFoundError: the pserver lacks an epoch that ``task_count_of`` does not know any more.
    """
    lacking: dict[int, IntervalSet] = {}
    if not summary.has_blocks:
        return lacking
    through = IntervalSet((first, end) for first, end, _ in summary.through)
    for first, end, known in summary.through:
        for epoch in range(first, min(end, begun_epochs)):
            if (task_count := _count_or(known, task_count_of, epoch)) > known:
                lacking[epoch] = IntervalSet([(known, task_count)])
    for first, end in through.gaps(0, begun_epochs):
        for epoch in range(first, end):
            missing = _clear_bits(summary.done.get(epoch, b""), task_count_of(epoch))
            if missing:
                lacking[epoch] = missing
    return lacking


def torn_tasks(
    summaries: Sequence[AppliedSummary], begun_epochs: int, task_count_of: Callable[[int], int]
) -> dict[int, list[int]]:
    """Find the tasks of which some blocks have batches that other blocks lack.

    Returns:
        epoch -> its torn tasks, without empty ones.
    """
    summaries = [each for each in summaries if each.has_blocks]
    open_epochs = IntervalSet()
    for each in summaries:
        open_epochs.update(IntervalSet((first, end) for first, end, _ in each.through).gaps(0, begun_epochs))
    torn: dict[int, list[int]] = {}
    for epoch in (epoch for start, end in open_epochs for epoch in range(start, end)):
        size = (1 << task_count_of(epoch)) - 1
        done = [size if each.is_through(epoch) else each.done_bits(epoch) & size for each in summaries]
        parts = [each.parts.get(epoch, {}) for each in summaries]
        found = set(differing(done))
        for task in set().union(*parts):
            having = {part.get(task, b"") for part in parts}
            if len(having) > 1 or b"" in having:
                found.add(task)
        if found:
            torn[epoch] = sorted(found)
    return torn


def _count_or(known: int, task_count_of: Callable[[int], int], epoch: int) -> int:
    """Tasks of an epoch that is through; if that is forgotten, as many as the pserver was told when it was over."""
    try:
        return task_count_of(epoch)
    except NotFoundError:
        return known


def _clear_bits(bitmap: bytes, count: int) -> IntervalSet:
    """Runs of the bits that are not set, below ``count``."""
    bits = np.zeros(count + 2, np.int8)
    known = np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little")[:count]
    bits[1 : count + 1] = 1
    bits[1 : 1 + len(known)] -= known.astype(np.int8)
    edges = np.flatnonzero(np.diff(bits))
    return IntervalSet(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class Reload:
    """This process is to end, take its index anew, and load that checkpoint (None: the first values)."""

    generation: int
    checkpoint: int | None


class _Record(msgspec.Struct, array_like=True):
    format: int
    settled: list[tuple[int, int]]
    floor: int
    #: [] : any checkpoint; else the one that all have to load.
    pinned: list[int | None]


class PserverRecovery:
    """Which process of each pserver counts; see the module. Its state is stored together with the queue's.

    Args:
        pserver_count: Indexes 0 to ``pserver_count`` - 1.
        recovery: What happens when one comes back: the others stay as they are, or go back with it.
    """

    def __init__(self, pserver_count: int, recovery: Literal["replay", "rollback"] = "replay") -> None:
        self._pserver_count = pserver_count
        self._is_rollback = recovery == "rollback"
        #: index -> newest generation seen.
        self._known: dict[int, int] = {}
        #: index -> generation that is settled.
        self._settled: dict[int, int] = {}
        #: Rollback: generations below this have to go.
        self._floor = 0
        self._pinned: tuple[int | None] | None = None

    def seen(self, index: int, generation: int) -> None:
        if 0 <= index < self._pserver_count:
            self._known[index] = max(generation, self._known.get(index, generation))

    def generation_of(self, index: int) -> int | None:
        return self._known.get(index)

    def is_settled(self, index: int) -> bool:
        """Whether what the process that counts has is taken into account."""
        return index in self._known and self._settled.get(index) == self._known[index]

    @property
    def is_all_settled(self) -> bool:
        """Whether all are, and no rollback is under way: only now the job may be said to be done."""
        return not self.to_reload() and all(self.is_settled(index) for index in range(self._pserver_count))

    def accepts(self, pservers: Sequence[int]) -> bool:
        """Whether a report of finished work counts; ``pservers``: lowest generation of each index that acknowledged."""
        return len(pservers) == self._pserver_count and all(
            generation >= self._known.get(index, 0) for index, generation in enumerate(pservers)
        )

    def announced(
        self,
        index: int,
        generation: int,
        summary: AppliedSummary,
        begun_epochs: int,
        task_count_of: Callable[[int], int],
        checkpoint: int | None = None,
    ) -> dict[int, IntervalSet] | None:
        """A process says what it has applied, and from which checkpoint it started.

        Returns:
            What to reopen, once; store that with this state before the process is answered. None: nothing changed,
            because it is settled already, or is not the one that counts; an answer needs no storing.

        Raises:
            NotFoundError: it lacks an epoch of which nothing is known any more; nothing has changed.
        """
        self.seen(index, generation)
        if self._known.get(index) != generation or self._settled.get(index) == generation:
            return None
        lacking = tasks_to_reopen(summary, begun_epochs, task_count_of)
        if self._is_rollback:
            self._roll_back(index, generation, checkpoint)
        self._settled[index] = generation
        return lacking

    def _roll_back(self, index: int, generation: int, checkpoint: int | None) -> None:
        before = self._settled.get(index)
        if before is None:
            # The first process of this index: nothing was lost.
            return
        if before < self._floor and self._pinned == (checkpoint,):
            # It goes back because it was told to.
            return
        self._floor = generation
        self._pinned = (checkpoint,)

    def settled(self) -> dict[int, int]:
        """The processes whose word was taken, by index: their generations."""
        return dict(self._settled)

    def begin_anew(self) -> None:
        """All values are gone: nobody has anything any more, and nobody goes back to anything."""
        self._settled.clear()
        self._floor = 0
        self._pinned = None

    def to_reload(self) -> dict[int, Reload]:
        """Rollback: processes that are to go back; empty in the other mode."""
        if self._pinned is None:
            return {}
        return {
            index: Reload(generation, self._pinned[0])
            for index, generation in sorted(self._known.items())
            if generation < self._floor
        }

    # storage

    def encode(self) -> bytes:
        """What a later master goes on from; belongs into the same transaction as the queue's state."""
        pinned = [] if self._pinned is None else list(self._pinned)
        return msgspec.msgpack.encode(_Record(_FORMAT, sorted(self._settled.items()), self._floor, pinned))

    @classmethod
    def restore(
        cls, encoded: bytes, pserver_count: int, recovery: Literal["replay", "rollback"] = "replay"
    ) -> PserverRecovery:
        """Go on from what an earlier master stored. CorruptError: not what ``encode`` writes."""
        try:
            record = from_msgpack(encoded, _Record)
        except msgspec.DecodeError as error:
            raise CorruptError(f"not a stored state of recovery: {str(error)[:200]}") from None
        if record.format != _FORMAT:
            raise CorruptError(f"a recovery of format {record.format}; this version reads format {_FORMAT}")
        result = cls(pserver_count, recovery)
        result._settled = {index: generation for index, generation in record.settled if index < pserver_count}
        result._known = dict(result._settled)
        result._floor = record.floor
        result._pinned = (record.pinned[0],) if record.pinned else None
        return result

    def check(self) -> None:
        for index, generation in self._settled.items():
            assert generation <= self._known[index], "a process is settled that nobody has seen"
