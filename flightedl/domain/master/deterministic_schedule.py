"""What makes runs with the same number of trainers bit-identical, beside the order in which a round is added up.

A round adds up what its members push, so every run has to put the same batches into each round. That is so when

* an epoch begins with all trainers at once: no task is handed out before so many trainers ask for one, and they are
  admitted at one round, together;
* a trainer gets its next task when it has finished the one before, and no sooner: then tasks are handed out in the
  order of the rounds in which trainers become free. Those who become free in one round get the next tasks in any order,
  which changes who does what, and nothing else;
* nobody gets a copy of a task that another one has.

Only for ``Sync(deterministic=True)``, and only where the master is told how many trainers there are. Without faults:
where trainers are lost or stay away, the others go on after a while, exactly once as always, but not bit-identically.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from flightedl.domain.consistency.modes import Mode, Sync
from flightedl.domain.queue.tasks import TaskQueue

#: After so long, an epoch begins with those who are there.
_PATIENCE_S = 60.0


class DeterministicSchedule:
    """Who waits for whom at the beginning of an epoch.

    Args:
        trainer_count: How many trainers there are; 0: not known, and nobody waits.
    """

    def __init__(self, trainer_count: int) -> None:
        self._trainer_count = trainer_count
        #: The epoch whose tasks are handed out.
        self._begun = -1
        #: The epoch whose trainers were admitted.
        self._admitted = -1
        self._asking: set[str] = set()
        self._joining: dict[str, int] = {}
        self._since_s: float | None = None

    def is_on(self, mode: Mode | None) -> bool:
        return bool(self._trainer_count) and isinstance(mode, Sync) and mode.deterministic

    def begins(self, queue: TaskQueue, trainer: str, alive: Collection[str], now: float) -> bool:
        """A trainer asks for work; True: with it, all are there, and the epoch begins: all have to join again."""
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
        """How many pieces the trainer may be given now."""
        if queue.is_done:
            return want
        is_free = self._begun == queue.epoch and not queue.holds(trainer)
        return min(want, 1) if is_free and queue.has_todo else 0

    def joins(
        self, queue: TaskQueue, trainer: str, generation: int, alive: Mapping[str, int], now: float
    ) -> dict[str, int]:
        """A trainer with work wants to be a member; who is to be admitted now, together with it, if anybody."""
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
