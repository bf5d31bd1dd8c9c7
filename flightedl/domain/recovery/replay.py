"""Repetition of tasks after a pserver has restarted from an older state.

**Replay.** ``PserverRecovery`` knows the current process (generation) of each pserver index. A process is *settled*
once the master has compared its applied batches with the queue's done tasks and reopened the missing tasks.

* For each pserver, a report of a finished piece names the *lowest* generation that acknowledged one of the piece's
  batches. The report is accepted only if none of these generations is older than the pserver's current process.
  Otherwise everything that the older process applied since its last checkpoint is lost, so the piece is taken back
  (``give_back``), and the report is answered as lost.
* A report that names a newer process than the master knows is accepted. That process will announce its applied batches,
  which include the batches in the report.
* A pserver repeats its announcement until the master has stored, *in one transaction*, both the reopened queue and the
  fact that the process is settled. The pserver may serve trainers even before that.
* The master reports the job as done only when all pservers are settled, because tasks may be reopened until then.

Invariant for each index: its process is settled and has applied all done tasks, or it is going to announce its applied
batches.

**Rollback.** With ``recovery="rollback"``, the other pservers return to the checkpoint that the new process loaded.
Each of them restarts and thus gets a new generation, above the *floor*. The new generations fence off pushes and
reports in flight, and the new processes' announcements update the queue.

A pserver without blocks has loaded no checkpoint, so its restart causes no rollback.

The rollback is over when all processes are above the floor and settled. Until then no checkpoint is ordered:
``Checkpoints.pserver_up`` is called only for settled processes that need not reload.
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
from flightedl.domain.recovery.replacements import Process, Replacements
from flightedl.errors import CorruptError, NotFoundError
from flightedl.marks import sometimes
from flightedl.messages.decoding import from_msgpack

_FORMAT = 1


class AppliedSummary(msgspec.Struct, frozen=True, array_like=True):
    """The tasks that all blocks of a pserver have applied, and the applied batches of incomplete tasks.

    Takes one bit per task of an incomplete epoch, and a few bytes for all complete epochs together.
    """

    #: Complete epochs in increasing order: (first epoch, end epoch, number of tasks in each).
    through: list[tuple[int, int, int]] = []
    #: Epoch -> bitmap of its tasks, lowest task first, without trailing zero bytes.
    done: dict[int, bytes] = {}
    #: False if the pserver has no blocks, so that it lacks nothing.
    has_blocks: bool = True
    #: Epoch -> incomplete task -> bitmap of the batches that every block has applied; empty if blocks differ.
    parts: dict[int, dict[int, bytes]] = {}

    @classmethod
    def of(cls, applied: AppliedBatches) -> AppliedSummary:
        through: list[tuple[int, int, int]] = []
        done: dict[int, bytes] = {}
        parts: dict[int, dict[int, bytes]] = {}
        for epoch in applied.epochs():
            task_count = applied.completed_task_count(epoch)
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
        """Return an incomplete epoch's tasks as a bitmap."""
        return int.from_bytes(self.done.get(epoch, b""), "little")

    def encode(self) -> bytes:
        return msgspec.msgpack.encode((_FORMAT, self))

    @classmethod
    def decode(cls, data: bytes) -> AppliedSummary:
        """Decode the output of ``encode``. Raises CorruptError for anything else."""
        try:
            version, summary = from_msgpack(data, tuple[int, cls])  # type: ignore[valid-type]
        except (msgspec.DecodeError, RecursionError) as error:
            raise CorruptError(f"not a summary of applied batches: {str(error)[:200]}") from None
        if version != _FORMAT:
            raise CorruptError(f"a summary has format {version}, but this version reads format {_FORMAT}")
        found: AppliedSummary = summary
        return found


def tasks_to_reopen(
    summary: AppliedSummary, begun_epochs: int, task_count_of: Callable[[int], int]
) -> dict[int, IntervalSet]:
    """Return the tasks that a pserver lacks. ``TaskQueue.reopen`` reopens the tasks that are done.

    Returns:
        Epoch -> its missing tasks; never empty ones. Costs O(tasks / 8) for each incomplete epoch.

    Raises:
        NotFoundError: the pserver lacks an epoch whose size was forgotten.
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
    """Return epoch -> torn tasks (see ``audit``). Omit epochs without torn tasks."""
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
    """Return the number of tasks in a complete epoch, or ``known`` if the epoch was forgotten."""
    try:
        return task_count_of(epoch)
    except NotFoundError:
        return known


def _clear_bits(bitmap: bytes, count: int) -> IntervalSet:
    bits = np.zeros(count + 2, np.int8)
    known = np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little")[:count]
    bits[1 : count + 1] = 1
    bits[1 : 1 + len(known)] -= known.astype(np.int8)
    edges = np.flatnonzero(np.diff(bits))
    return IntervalSet(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class Reload:
    """Restart this process, so that it loads this checkpoint, or the initial values if ``checkpoint`` is None."""

    generation: int
    checkpoint: int | None


class _Record(msgspec.Struct, array_like=True):
    format: int
    settled: list[tuple[int, int]]
    floor: int
    #: List with the one checkpoint that all pservers must load; empty if they may load any checkpoint.
    pinned: list[int | None]
    #: State for ``Replacements``; empty if it was stored by a version that could not move blocks.
    processes: tuple[Process, ...] = ()


class PserverRecovery:
    """Current and settled processes of all pservers; see the module's docstring. Stored together with the queue.

    Args:
        pserver_count: Number of pservers.
        recovery: "replay" to leave other pservers unchanged when one is restored, "rollback" to restore them, too.
    """

    def __init__(self, pserver_count: int, recovery: Literal["replay", "rollback"] = "replay") -> None:
        self._pserver_count = pserver_count
        self._is_rollback = recovery == "rollback"
        self._known = Replacements()
        #: Index -> settled generation.
        self._settled: dict[int, int] = {}
        #: Processes with lower generations must restart for a rollback.
        self._floor = 0
        #: (checkpoint that restarted processes load,); None if there is no rollback.
        self._pinned: tuple[int | None] | None = None

    def seen(self, index: int, generation: int, placement: int = 0) -> None:
        """Record the current process of a pserver. For ``placement`` see ``Replacements``."""
        if 0 <= index < self._pserver_count:
            self._known = self._known.seen(index, generation, placement)

    def resize(self, pserver_count: int) -> None:
        self._pserver_count = pserver_count
        self._settled = {index: each for index, each in self._settled.items() if index < pserver_count}

    def placement_read(self, placement: int) -> None:
        """Record the version of the stored placement. No transaction that could change it may be in progress."""
        self._known = self._known.confirmed(placement)

    def generation_of(self, index: int) -> int | None:
        return self._known.generation_of(index)

    def is_settled(self, index: int) -> bool:
        generation = self._known.generation_of(index)
        return generation is not None and self._settled.get(index) == generation

    @property
    def is_all_settled(self) -> bool:
        return not self.to_reload() and all(self.is_settled(index) for index in range(self._pserver_count))

    def accepts(self, pservers: Sequence[int], placement: int = 0) -> bool:
        """True if a report is accepted (see ``Replacements``). It names every pserver that has blocks."""
        return len(pservers) >= self._pserver_count and self._known.accepts(pservers, placement)

    def announced(
        self,
        index: int,
        generation: int,
        summary: AppliedSummary,
        begun_epochs: int,
        task_count_of: Callable[[int], int],
        checkpoint: int | None = None,
        placement: int = 0,
    ) -> dict[int, IntervalSet] | None:
        """Handle a process's announcement: its applied batches, and the checkpoint that it loaded.

        Returns:
            Epoch -> tasks to reopen. The reopened queue and this state must be stored together before the process gets
            an answer. None if nothing has changed, because the process is already settled or is not the current one.

        Raises:
            NotFoundError: the process lacks an epoch whose size was forgotten; nothing was changed.
        """
        self.seen(index, generation, placement)
        if self._known.generation_of(index) != generation or self._settled.get(index) == generation:
            return None
        lacking = tasks_to_reopen(summary, begun_epochs, task_count_of)
        if self._is_rollback and summary.has_blocks:
            self._roll_back(index, generation, checkpoint)
        self._settled[index] = generation
        return lacking

    def _roll_back(self, index: int, generation: int, checkpoint: int | None) -> None:
        before = self._settled.get(index)
        if before is None:
            # The first process of an index has lost nothing.
            return
        if before < self._floor and self._pinned == (checkpoint,):
            # The master restarted this process.
            return
        sometimes("all pservers were rolled back")
        self._floor = generation
        self._pinned = (checkpoint,)

    def settled(self) -> dict[int, int]:
        return dict(self._settled)

    def reinitialize(self) -> None:
        """Forget which processes are settled, and any rollback, because all values are lost."""
        self._settled.clear()
        self._floor = 0
        self._pinned = None

    def to_reload(self) -> dict[int, Reload]:
        """Return the processes that must restart for a rollback, by index."""
        if self._pinned is None:
            return {}
        return {
            each.index: Reload(each.generation, self._pinned[0])
            for each in self._known.processes
            if each.generation < self._floor and each.index < self._pserver_count
        }

    # storage

    def encode(self) -> bytes:
        """Return the state for a successor. Store it in the same transaction as the queue."""
        pinned = [] if self._pinned is None else list(self._pinned)
        settled = sorted(self._settled.items())
        return msgspec.msgpack.encode(_Record(_FORMAT, settled, self._floor, pinned, self._known.processes))

    @classmethod
    def restore(
        cls, encoded: bytes, pserver_count: int, recovery: Literal["replay", "rollback"] = "replay"
    ) -> PserverRecovery:
        """Decode the output of ``encode``. Raises CorruptError for anything else."""
        try:
            record = from_msgpack(encoded, _Record)
        except msgspec.DecodeError as error:
            raise CorruptError(f"not a stored state of recovery: {str(error)[:200]}") from None
        if record.format != _FORMAT:
            raise CorruptError(f"a recovery has format {record.format}, but this version reads format {_FORMAT}")
        result = cls(pserver_count, recovery)
        result._settled = {index: generation for index, generation in record.settled if index < pserver_count}
        result._known = Replacements(record.processes)
        for index, generation in record.settled:
            result._known = result._known.seen(index, generation, 0)
        result._floor = record.floor
        result._pinned = (record.pinned[0],) if record.pinned else None
        return result

    def check(self) -> None:
        for index, generation in self._settled.items():
            assert generation <= (self._known.generation_of(index) or 0), "an unknown process is settled"
