"""Evaluations: second datasets, handed out beside the training queue and without touching it.

An evaluation has a name, a dataset of its own and a queue of one epoch over it. The first trainer that declares a name
begins it; whoever declares the same later helps, or gets the result when it is there. Trainers report the metrics of
a piece of work together with its end, as sums and weights; they are added up when the queue takes the report as the
piece's first, so that a piece done twice counts once, and both are written to etcd together.

The newest ``KEPT`` results are kept, without their queues. Whoever calls holds the service's lock, but for ``index``,
which may take long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from flightedl.domain.tasks import TaskQueue
from flightedl.domain.tasks_values import QueueSettings
from flightedl.errors import DataError, NotFoundError, UsageError
from flightedl.master.declarations import require_same
from flightedl.master.dispatch import Dispatch
from flightedl.master.indexing import DatasetIndexing, IndexedDataset
from flightedl.messages.base import decode, encode
from flightedl.messages.declarations import DatasetReply, EvaluationDeclaration, EvaluationRecord, EvaluationsRecord
from flightedl.messages.status import EvaluationStatus, TaskCounts

KEPT = 16


@dataclass(slots=True)
class Evaluation:
    """One of them."""

    name: str
    declared: DatasetReply
    #: name -> (weighted sum, weight) over all finished pieces.
    sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    #: None: recovered and not indexed again yet, or done.
    dispatch: Dispatch | None = None
    #: The queue as a predecessor left it, until it is taken up again.
    stored: str = ""
    is_done: bool = False
    #: Pieces that failed for good.
    failed: int = 0

    @property
    def metrics(self) -> dict[str, float]:
        """Weighted means so far."""
        return {name: total / weight for name, (total, weight) in sorted(self.sums.items()) if weight}

    def take(self, metrics: Mapping[str, tuple[float, float]]) -> None:
        """Metrics of a piece that is done now."""
        for name, (total, weight) in metrics.items():
            known = self.sums.get(name, (0.0, 0.0))
            self.sums[name] = (known[0] + total, known[1] + weight)


class Evaluations:
    """All evaluations of a job. Not thread-safe but for ``index``."""

    def __init__(self, indexing: Callable[[], DatasetIndexing], attempts_limit: int) -> None:
        self._new_indexing = indexing
        self._attempts_limit = attempts_limit
        self._indexing: dict[str, DatasetIndexing] = {}
        self._known: dict[str, Evaluation] = {}

    def __bool__(self) -> bool:
        return bool(self._known)

    def declared(self, request: EvaluationDeclaration) -> DatasetReply | None:
        """The dataset of the evaluation of this name, None when there is none yet.

        Raises:
            DeclarationError: it has another one.
        """
        found = self._known.get(request.name)
        if found is None:
            return None
        require_same(f"dataset of the evaluation {request.name!r}", found.declared.declaration, request.dataset)
        return found.declared

    def index(self, name: str, wanted: DatasetReply | EvaluationDeclaration) -> IndexedDataset:
        """Its chunks. Called without the lock.

        Raises:
            NotReadyError: they are being found; ask again.
            DataError: a file cannot be used, or is not what a predecessor found.
        """
        declaration = wanted.dataset if isinstance(wanted, EvaluationDeclaration) else wanted.declaration
        if declaration.follow:
            raise UsageError("an evaluation has an end: it cannot follow files that are to come")
        indexed = self._indexing.setdefault(name, self._new_indexing()).index(declaration)
        if isinstance(wanted, DatasetReply) and indexed.reply.index_hash != wanted.index_hash:
            raise DataError(f"the files of the evaluation {name!r} have changed since it began: use another name")
        return indexed

    def begin(self, name: str, indexed: IndexedDataset, alive: Mapping[str, int], now: float) -> DatasetReply:
        """Begin it, or take it up where a predecessor left it; nothing when it runs.

        What it is taken up with by trainers that are not ``alive`` goes back.
        """
        found = self._known.setdefault(name, Evaluation(name, indexed.reply))
        self._indexing.pop(name, None)
        if found.dispatch is None and not found.is_done:
            settings = QueueSettings(
                task_count=indexed.layout.task_count,
                batch_counts=indexed.layout.batch_count,
                attempts_limit=self._attempts_limit,
            )
            queue = TaskQueue.decode(found.stored.encode(), settings) if found.stored else TaskQueue(settings)
            found.dispatch, found.stored = Dispatch(indexed, queue, found.take), ""
            found.dispatch.forget_the_dead(alive, now)
            self.settle(found)
        for old in [each.name for each in self._known.values() if each.is_done][:-KEPT]:
            del self._known[old]
        return found.declared

    def find(self, name: str) -> Evaluation:
        """The evaluation of this name.

        Raises:
            NotFoundError: there is none.
        """
        if name not in self._known:
            raise NotFoundError(f"there is no evaluation {name!r}: it is not declared, or forgotten")
        return self._known[name]

    def settle(self, found: Evaluation) -> None:
        """Let go of the queue of one that has come to its end."""
        if found.dispatch is not None and found.dispatch.queue.is_done:
            found.is_done = True
            found.failed = found.dispatch.queue.counts().failed
            found.dispatch = None

    def trainer_gone(self, trainer: str, now: float, *, is_graceful: bool = False) -> None:
        """What a trainer held that is gone goes back; ``is_graceful``: it did not die."""
        for found in self._known.values():
            if found.dispatch is not None:
                found.dispatch.trainer_gone(trainer, now, is_graceful=is_graceful)
                self.settle(found)

    def tick(self, now: float) -> bool:
        """What is out for too long goes back; whether anything did."""
        has_changed = False
        for found in self._known.values():
            if found.dispatch is not None and found.dispatch.tick(now):
                has_changed = True
                self.settle(found)
        return has_changed

    def status(self) -> list[EvaluationStatus]:
        """For people."""
        return [
            EvaluationStatus(name=each.name, is_done=each.is_done, metrics=each.metrics, tasks=_counts(each))
            for each in self._known.values()
        ]

    def encode_results(self) -> bytes | None:
        """The stored form of those that are through, for a checkpoint; None: there are none.

        One that is under way is begun anew by who restores it, for it has to measure one model and not two.
        """
        done = [self._record(each) for each in self._known.values() if each.is_done]
        return encode(EvaluationsRecord(evaluations=done)) if done else None

    def encode(self) -> bytes:
        """The stored form."""
        return encode(EvaluationsRecord(evaluations=[self._record(each) for each in self._known.values()]))

    @staticmethod
    def _record(each: Evaluation) -> EvaluationRecord:
        return EvaluationRecord(
            name=each.name,
            declared=each.declared,
            sums=each.sums,
            queue=each.stored if each.dispatch is None else each.dispatch.queue.encode().decode(),
            is_done=each.is_done,
            failed=each.failed,
        )

    def recover(self, stored: bytes) -> None:
        """Know what a predecessor knew; queues are taken up when a trainer asks."""
        for each in decode(stored, EvaluationsRecord).evaluations:
            self._known[each.name] = Evaluation(
                each.name, each.declared, dict(each.sums), None, each.queue, each.is_done, each.failed
            )


def _counts(found: Evaluation) -> TaskCounts:
    total = found.declared.task_count
    if found.dispatch is None:
        return TaskCounts(total=total, done=total - found.failed if found.is_done else 0, failed=found.failed)
    counts = found.dispatch.queue.counts()
    return TaskCounts(todo=counts.todo, pending=counts.pending, done=counts.done, failed=counts.failed, total=total)
