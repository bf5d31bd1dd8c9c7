"""What the master knows, under one lock, and its way into etcd.

The lock is never held across I/O: a request changes the state under it, notes the state's revision, and waits outside
until :class:`~flightedl.master.durable.DurableState` has that revision in etcd; only then it is answered.

Whoever reads or changes a field holds ``changed``, but for those that are set once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from msgspec.structs import replace as replace_fields

from flightedl.config import MasterSettings
from flightedl.coordination.keeper import HeldKey
from flightedl.coordination.keys import JobKeys
from flightedl.domain.membership import Membership
from flightedl.domain.store_history import Sighting
from flightedl.domain.tasks import TaskQueue
from flightedl.domain.tasks_values import QueueSettings
from flightedl.errors import NotReadyError, UnregisteredError, UsageError
from flightedl.master.checkpointing import Checkpointing
from flightedl.master.dispatch import Dispatch
from flightedl.master.durable import DurableState
from flightedl.master.evaluations import Evaluations
from flightedl.master.indexing import IndexedDataset
from flightedl.master.progress import JobProgress
from flightedl.master.recovery import RecoveredState
from flightedl.master.replay import Replay
from flightedl.messages.base import Sender, encode
from flightedl.messages.declarations import DatasetReply, JobDeclaration, ModelDeclaration, ModelReply
from flightedl.ports import Clock, Coordinator

#: How long a request waits for etcd before the trainer is told to ask again.
_DURABLE_S = 3.0


class JobState:
    """One job's state in one master."""

    def __init__(
        self,
        chosen: MasterSettings,
        pserver_count: int,
        coordinator: Coordinator,
        keys: JobKeys,
        clock: Clock,
        evaluations: Evaluations,
    ) -> None:
        self.clock = clock
        self.pserver_count = pserver_count
        self._attempts_limit = chosen.attempts_limit
        self._coordinator = coordinator
        self._keys = keys
        #: Guards everything; notified when work may have become available or the membership moved.
        self.changed = threading.Condition()
        #: Counts changes of the durable state.
        self.revision = 0
        self.declaration = JobDeclaration()
        #: Its stored form, made once: it goes into every comparison with what is in etcd.
        self._encoded_declaration = (self.declaration, b"")
        self.dataset: IndexedDataset | None = None
        self.queue: TaskQueue | None = None
        #: So many of the dataset's arrivals are in etcd for certain; they are not looked at again.
        self.arrivals_saved = 0
        #: What is wrong with the files of a dataset that grows; empty: nothing.
        self.dataset_alarm = ""
        #: The dataset and the queue, once both are there.
        self.dispatch: Dispatch | None = None
        #: None until the model is declared: before that nobody waits for anybody.
        self.membership: Membership | None = None
        #: name -> generation of the trainers whose lease is alive, as of ``trainers_revision`` of etcd or later.
        self.trainers: dict[str, int] = {}
        self.trainers_revision = 0
        #: index -> generation of the pservers whose lease is alive.
        self.pservers: dict[int, int] = {}
        self.progress = JobProgress()
        self.evaluations = evaluations
        #: Whether a trainer has ended the job before all of its data was trained.
        self.is_stopped = False
        self.replay = Replay(pserver_count, "replay", None)
        self.checkpointing: Checkpointing | None = None
        #: The ticket of the checkpoint that has everything; None: not everything is done.
        self.final_ticket: int | None = None
        self._durable: DurableState | None = None

    @property
    def plan_hash(self) -> str:
        """Locked: of the declared model; empty: none is declared."""
        model = self.declaration.model
        return "" if model is None else model.plan_hash

    def begin_queue(
        self, dataset: IndexedDataset, stored: bytes | None, failures: bytes | None, *, may_reseed: bool = False
    ) -> None:
        """Locked: the dataset's tasks are known; ``stored`` and ``failures`` as a predecessor left them.

        ``may_reseed``: as of ``TaskQueue.decode``.
        """
        declared = dataset.reply.declaration
        settings = QueueSettings(
            task_count=dataset.layout.task_count,
            batch_counts=self._batch_count,
            epochs=declared.epochs,
            seed=declared.seed,
            shuffle=declared.shuffle,
            attempts_limit=self._attempts_limit,
            follow=declared.follow,
        )
        self.dataset = dataset
        if stored:
            self.queue = TaskQueue.decode(stored, settings, failures, may_reseed=may_reseed)
        else:
            self.queue = TaskQueue(settings)
        if self.dispatch is None:
            self.dispatch = Dispatch(dataset, self.queue)
        else:
            # Who waits for work has the dispatch in hand.
            self.dispatch.dataset, self.dispatch.queue = dataset, self.queue
        self.dispatch.is_stopped = self.is_stopped

    def stop(self) -> None:
        """Locked: nothing more is handed out."""
        self.is_stopped = True
        if self.dispatch is not None:
            self.dispatch.is_stopped = True
        self.touch()

    @property
    def is_over(self) -> bool:
        """Locked: whether all training is done that will ever be."""
        return self.dispatch is not None and self.dispatch.is_over

    def redeclare_dataset(self, reply: DatasetReply) -> None:
        """Locked: the same dataset with another number of epochs or another seed, while nobody works on it.

        Raises:
            UsageError: the queue is in a later epoch; nothing was changed.
        """
        assert self.queue is not None, "a declared dataset has a queue"
        assert self.dataset is not None, "likewise"
        before = self.dataset
        try:
            self.begin_queue(replace(before, reply=reply), *self.queue.encode_parts(), may_reseed=True)
        except UsageError:
            self.dataset = before
            raise

    def adopt_model(self, declared: ModelDeclaration) -> ModelReply:
        """Locked: the model of a job that was resumed is this one from now on, also for pservers."""
        model = self.declaration.model
        assert model is not None, "a former model is one"
        model = replace_fields(model, declaration=declared, is_former=False)
        self.declaration = replace_fields(self.declaration, model=model)
        self.touch()
        return model

    @property
    def has_former_model(self) -> bool:
        """Locked: whether the model waits for a trainer that declares it again, and pservers wait with it."""
        return self.declaration.model is not None and self.declaration.model.is_former

    def grow_queue(self, dataset: IndexedDataset) -> None:
        """Locked: the dataset has grown to this; its first tasks are those it had."""
        assert self.queue is not None, "a dataset grows after it was declared"
        assert self.dispatch is not None, "likewise"
        self.queue.grow(dataset.layout.task_count)
        self.dataset = self.dispatch.dataset = dataset
        self.touch()

    def _batch_count(self, task: int) -> int:
        assert self.dataset is not None, "a queue has a dataset"
        return self.dataset.layout.batch_count(task)

    # durability

    def start_writing(self, held: HeldKey, recovered: RecoveredState, step_down: Callable[[str], None]) -> None:
        """From here on the state is written to etcd when it is waited for."""
        self._durable = DurableState(held, self._coordinator, self.clock, self._snapshot, step_down, recovered.known)

    def close(self) -> None:
        """Write nothing any more."""
        if self._durable is not None:
            self._durable.close()

    def touch(self) -> None:
        """Locked: the durable state has changed."""
        self.revision += 1
        self.changed.notify_all()

    def wait_durable(self, revision: int) -> None:
        """Return when the state of a revision is in etcd. Called without the lock.

        Raises:
            NotReadyError: etcd cannot be written; the request may be repeated.
        """
        assert self._durable is not None
        self._durable.wait(revision, _DURABLE_S)

    def persist(self) -> None:
        """Return when what is decided now is in etcd. Called without the lock.

        Raises:
            NotReadyError: etcd cannot be written.
        """
        with self.changed:
            self.touch()
            revision = self.revision
        self.wait_durable(revision)

    def _snapshot(self) -> tuple[int, dict[str, bytes]]:
        with self.changed:
            values: dict[str, bytes] = {}
            if self.membership is not None:
                values[self._keys.membership] = self.membership.encode()
                values[self._keys.pserver_recovery] = self.replay.encode()
            if self.checkpointing is not None and self.checkpointing.is_kept:
                values[self._keys.checkpoint_latest] = self.checkpointing.encode()
            if self.queue is not None:
                dispatch, failures = self.queue.encode_parts()
                values |= {self._keys.task_queues: dispatch, self._keys.task_failures: failures}
            if self.dataset is not None:
                for number in range(self.arrivals_saved, len(self.dataset.arrivals)):
                    values[self._keys.arrival(number)] = encode(self.dataset.arrivals[number])
            if self.is_stopped:
                values[self._keys.stopped] = b"{}"
            if self.evaluations:
                values[self._keys.evaluations] = self.evaluations.encode()
            if self.declaration.dataset is not None or self.declaration.model is not None:
                if self._encoded_declaration[0] is not self.declaration:
                    self._encoded_declaration = (self.declaration, encode(self.declaration))
                values[self._keys.job] = self._encoded_declaration[1]
            return self.revision, values

    def sighting(self) -> Sighting | None:
        """Etcd as this master saw it at last."""
        return self._coordinator.sighting()

    # trainers

    def require_trainer(self, sender: Sender) -> None:
        """Locked: only a trainer whose lease is alive may hold work, or be waited for.

        Ask each time the lock has been taken, also after a wait: what a trainer that is gone is given in between
        nobody takes back.

        Raises:
            UnregisteredError: its lease has ended.
            NotReadyError: the master has not seen it yet.
        """
        if self.trainers.get(sender.trainer) == sender.generation:
            return
        if sender.generation > self.trainers_revision:
            raise NotReadyError(f"the master has not seen trainer {sender.trainer} yet")
        raise UnregisteredError(
            f"trainer {sender.trainer} has no lease of generation {sender.generation}: register anew"
        )
