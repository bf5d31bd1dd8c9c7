"""Evaluations: additional datasets whose tasks are assigned independently of the training data's.

An evaluation has a name, its own dataset and a queue of one epoch. The first trainer to declare the name starts the
evaluation; trainers that declare it later take part, or get the result.

When a trainer finishes a piece, it reports the piece's metrics as sums and weights. The master adds them only if the
queue accepts this report as the first one for the piece, so a repeated piece is counted once. The queue and the metrics
are stored together.

The newest ``KEPT`` results, without their queues, are kept until the model is initialized again
(``domain.recovery.lives``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from flightedl.domain.master.differences import require_same
from flightedl.domain.master.effects import Outbox
from flightedl.domain.master.work import Sums, Work
from flightedl.domain.queue.tasks import TaskQueue
from flightedl.domain.queue.values import QueueSettings
from flightedl.domain.recovery.lives import PresentLife
from flightedl.errors import NotFoundError, NotReadyError
from flightedl.messages.base import decode, encode
from flightedl.messages.declarations import (
    DeclaredDataset,
    EvaluationDeclaration,
    EvaluationRecord,
    EvaluationsRecord,
)
from flightedl.messages.status import EvaluationStatus, TaskCounts
from flightedl.messages.tasks import Assignment, ReturnedTask, TasksReply, TasksTicket

KEPT = 16


@dataclass(slots=True)
class Evaluation:
    """An evaluation: its stored record and, while it is in use, its queue."""

    #: While ``work`` is None, this record contains a predecessor's queue.
    record: EvaluationRecord
    #: None if the evaluation is done, or if this master has taken over and not yet indexed the dataset.
    work: Work | None = None

    @property
    def is_done(self) -> bool:
        return self.record.is_done

    @property
    def metrics(self) -> dict[str, float]:
        return {name: total / weight for name, (total, weight) in sorted(self.record.sums.items()) if weight}

    def add_up(self) -> None:
        for metrics in () if self.work is None else self.work.take_finished():
            self.add(metrics)

    def add(self, metrics: Sums) -> None:
        for name, (total, weight) in metrics.items():
            known = self.record.sums.get(name, (0.0, 0.0))
            self.record.sums[name] = (known[0] + total, known[1] + weight)

    def stored(self) -> EvaluationRecord:
        return self.record if self.work is None else replace(self.record, queue=self.work.queue.encode().decode())


class Evaluations:
    """All evaluations of a job."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._known: dict[str, Evaluation] = {}
        self._life = PresentLife()

    def __bool__(self) -> bool:
        return bool(self._known or self._life.number)

    def enter(self, life: int) -> bool:
        """Adopt the life of the model that a trainer reports. If it is new, drop older evaluations and return True.

        Raises:
            BegunAnewError: the life is over.
        """
        is_new = self._life.enter(life)
        if is_new:
            self._known.clear()
        return is_new

    def reinitialize(self, election: int) -> None:
        """Drop all evaluations, because the model that this election initialized no longer exists."""
        self._life.end(election)
        self._known.clear()

    def declared(self, declared: EvaluationDeclaration) -> DeclaredDataset | None:
        """Return the dataset of a known evaluation, or None if the evaluation is unknown.

        Raises:
            BegunAnewError: the declaration's life of the model is over.
            DeclarationError: the evaluation has a different dataset.
        """
        if self.enter(declared.life):
            self._outbox.touch()
        found = self.known(declared.name)
        if found is None:
            return None
        require_same(
            f"dataset of the evaluation {declared.name!r}", found.record.declared.declaration, declared.dataset
        )
        return found.record.declared

    def known(self, name: str) -> Evaluation | None:
        return self._known.get(name)

    def find(self, name: str) -> Evaluation:
        """Return the evaluation with this name.

        Raises:
            NotFoundError: it does not exist.
        """
        if name not in self._known:
            raise NotFoundError(f"there is no evaluation {name!r}: it was not declared, or was dropped")
        return self._known[name]

    def begin(
        self, name: str, declared: DeclaredDataset, settings: QueueSettings, alive: Mapping[str, int], now: float
    ) -> Evaluation:
        """Begin an evaluation, or continue a predecessor's. Does nothing if the evaluation is already running.

        Pieces held by trainers that are not in ``alive`` are taken back.
        """
        record = EvaluationRecord(name=name, declared=declared, sums={}, queue="", is_done=False)
        found = self._known.setdefault(name, Evaluation(record))
        if found.work is None and not found.is_done:
            stored = found.record.queue
            queue = TaskQueue.decode(stored.encode(), settings) if stored else TaskQueue(settings)
            found.work = Work(queue, self._outbox, name)
            found.work.forget_the_dead(alive, now)
            self.settle(found)
        for old in [name for name, each in self._known.items() if each.is_done][:-KEPT]:
            del self._known[old]
        return found

    def handle_ticket(self, ticket: TasksTicket, now: float, trainer_count: int) -> TasksReply:
        """Apply a ticket's reports and assign tasks. Reply immediately, even if there are no tasks.

        Raises:
            BegunAnewError: the ticket's life of the model is over.
            NotFoundError: there is no such evaluation.
            NotReadyError: its dataset is not indexed yet.
        """
        self.enter(ticket.life)
        found = self.find(ticket.evaluation)
        work = found.work
        given: list[Assignment] = []
        lost: list[ReturnedTask] = []
        outcome, retry_after_s = "epochs_done", 0.0
        if work is None and not found.is_done:
            raise NotReadyError(f"the master is indexing the files of the evaluation {ticket.evaluation!r} again")
        if work is not None:
            before = work.queue.revision
            lost = work.apply_reports(ticket, now)
            given, outcome, retry_after_s = work.hand_out(ticket, now, trainer_count)
            self.settle(found)
            if work.queue.revision != before:
                self._outbox.touch()
        return TasksReply(
            assignments=given,
            outcome=outcome,
            retry_after_s=retry_after_s,
            lost=lost,
            metrics=found.metrics if outcome == "epochs_done" else {},
            failed=found.record.failed,
        )

    def settle(self, found: Evaluation) -> None:
        """Add the metrics of finished pieces, and drop the queue once the evaluation is done."""
        found.add_up()
        if found.work is not None and found.work.queue.is_done:
            failed = found.work.queue.counts().failed
            found.record, found.work = replace(found.record, queue="", is_done=True, failed=failed), None

    def trainer_departed(self, trainer: str, now: float, *, is_graceful: bool = False) -> None:
        for found in self._known.values():
            if found.work is not None:
                found.work.trainer_departed(trainer, now, is_graceful=is_graceful)
                self.settle(found)

    def tick(self, now: float, *, is_held_up: bool = False, progressed: Collection[str] = ()) -> bool:
        has_changed = False
        for found in self._known.values():
            if found.work is not None and found.work.tick(now, is_held_up=is_held_up, progressed=progressed):
                has_changed = True
                self.settle(found)
        return has_changed

    def status(self) -> list[EvaluationStatus]:
        return [
            EvaluationStatus(name=name, is_done=each.is_done, metrics=each.metrics, tasks=_counts(each))
            for name, each in self._known.items()
        ]

    def encode_results(self) -> bytes | None:
        """Return the finished evaluations, encoded for a checkpoint, or None if there are none.

        Running evaluations are left out, because each must measure a single model. They start again after a restore.
        """
        done = [each.record for each in self._known.values() if each.is_done]
        return encode(EvaluationsRecord(evaluations=done)) if done else None

    def encode(self) -> bytes:
        known = [each.stored() for each in self._known.values()]
        return encode(EvaluationsRecord(evaluations=known, life=self._life.number))

    def recover(self, stored: bytes) -> None:
        """Load a predecessor's evaluations. Each queue continues once a trainer declares its evaluation."""
        record = decode(stored, EvaluationsRecord)
        self._life = PresentLife(record.life)
        self._known.update((each.name, Evaluation(each)) for each in record.evaluations)


def _counts(found: Evaluation) -> TaskCounts:
    total, failed = found.record.declared.task_count, found.record.failed
    if found.work is None:
        return TaskCounts(total=total, done=total - failed if found.is_done else 0, failed=failed)
    counts = found.work.queue.counts()
    return TaskCounts(todo=counts.todo, pending=counts.pending, done=counts.done, failed=counts.failed, total=total)
