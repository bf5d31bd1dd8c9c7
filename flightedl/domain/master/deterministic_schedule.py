"""A task schedule that makes runs with the same number of trainers bit-identical.

A round sums its members' gradients in a fixed order, so each round must also contain the same batches in every run.
Three rules ensure this:

* All trainers begin an epoch together. No task is assigned until the expected number of trainers have requested one,
  and all of them are admitted at the same round.
* A trainer gets its next task only after it has finished the previous one, so tasks are assigned in the order of the
  rounds in which trainers become idle. Trainers that become idle in the same round may get the next tasks in any order.
  That order determines which trainer computes a batch, but not which batches a round contains.
* Tasks are not copied to idle trainers near the end of an epoch.

The schedule applies only to ``Sync(deterministic=True)``, and requires a configured number of trainers. If trainers are
missing, the others continue after a timeout. Every batch is then still applied exactly once, but the result is no
longer bit-identical.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from flightedl.domain.consistency.modes import Mode, Sync
from flightedl.domain.queue.tasks import TaskQueue

#: Seconds after which an epoch begins even if trainers are missing.
_PATIENCE_S = 60.0


class DeterministicSchedule:
    """Makes trainers wait for each other at the beginning of each epoch.

    Args:
        trainer_count: Expected number of trainers; 0 if unknown, which disables the schedule.
    """

    def __init__(self, trainer_count: int) -> None:
        self._trainer_count = trainer_count
        #: The epoch whose tasks are being assigned.
        self._begun = -1
        #: The epoch for which the trainers have been admitted.
        self._admitted = -1
        self._asking: set[str] = set()
        self._joining: dict[str, int] = {}
        self._since_s: float | None = None

    def is_on(self, mode: Mode | None) -> bool:
        return bool(self._trainer_count) and isinstance(mode, Sync) and mode.deterministic

    def begins(self, queue: TaskQueue, trainer: str, alive: Collection[str], now: float) -> bool:
        """Record a trainer's request for tasks. True if the epoch begins with this request."""
        if queue.is_done or self._begun == queue.epoch or queue.holds(trainer):
            return False
        self._asking.add(trainer)
        if len(self._asking.intersection(alive)) < self._trainer_count and not self._is_late(now):
            return False
        self._begun = queue.epoch
        self._since_s = None
        self._asking.clear()
        self._joining.clear()
        return True

    def pieces_for(self, queue: TaskQueue, trainer: str, want: int) -> int:
        if queue.is_done:
            return want
        is_free = self._begun == queue.epoch and not queue.holds(trainer)
        return min(want, 1) if is_free and queue.has_todo else 0

    def joins(
        self, queue: TaskQueue, trainer: str, generation: int, alive: Mapping[str, int], now: float
    ) -> dict[str, int]:
        """Record a trainer's request to join. Return the trainers to admit now; empty if this trainer must wait."""
        if self._admitted == queue.epoch:
            return {trainer: generation}
        self._joining[trainer] = generation
        here = {name: number for name, number in self._joining.items() if alive.get(name) == number}
        expected = min(self._trainer_count, queue.epoch_size(queue.epoch))
        if not queue.has_todo:
            expected = min(expected, queue.pending.trainer_count)
        if len(here) < expected and not self._is_late(now):
            return {}
        self._admitted = queue.epoch
        self._since_s = None
        self._joining.clear()
        return here

    def _is_late(self, now: float) -> bool:
        self._since_s = now if self._since_s is None else self._since_s
        return now - self._since_s > _PATIENCE_S
