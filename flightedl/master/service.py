"""All decisions of the master, under one lock.

The lock is never held across I/O: a handler changes the state under it, notes the state's revision, and waits outside
until :class:`~flightedl.master.durable.DurableState` has that revision in etcd; only then it answers. Views go to the
pservers from threads of their own.

What trainers are is taken from the directory (leases in etcd): a trainer whose key is gone loses its tasks and its
membership at once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from flightedl.config import MasterSettings
from flightedl.coordination.directory import Directory
from flightedl.coordination.keeper import HeldKey
from flightedl.coordination.keys import JobKeys
from flightedl.domain.checkpoints import Checkpoints
from flightedl.domain.checkpoints_manifest import Manifest
from flightedl.domain.checkpoints_values import OpenRounds
from flightedl.domain.membership import Effect as MembershipEffect
from flightedl.domain.membership import Membership, SendView, View
from flightedl.domain.modes import Async, Mode, Sync
from flightedl.domain.optimizers import Optimizer
from flightedl.domain.parameters import ParameterSpec
from flightedl.domain.sharding import plan_for
from flightedl.domain.tasks import TaskQueue
from flightedl.domain.tasks_values import FailedSelector, QueueSettings
from flightedl.errors import FencedError, NotReadyError, UsageError
from flightedl.formats.chunks import Chunk
from flightedl.master.checkpointing import Checkpointing, settings_of
from flightedl.master.declarations import require_same
from flightedl.master.dispatch import Dispatch
from flightedl.master.durable import DurableState
from flightedl.master.evaluations import Evaluations
from flightedl.master.exporting import ModelExports
from flightedl.master.indexing import DatasetIndexing, IndexedDataset
from flightedl.master.progress import JobProgress
from flightedl.master.recovery import RecoveredState
from flightedl.master.replay import Replay
from flightedl.master.status import describe
from flightedl.master.views import ViewSender
from flightedl.ports import Clock, Coordinator, Files, Storage
from flightedl.rpc.authentication import Credentials
from flightedl.rpc.client import Connection
from flightedl.wire.messages import (
    AppliedReply,
    Assignment,
    CheckpointReply,
    CheckpointRequest,
    DatasetDeclaration,
    DatasetReply,
    EvaluationDeclaration,
    FailedTasksReply,
    FailedTasksRequest,
    JobDeclaration,
    JoinReply,
    JoinRequest,
    LogRequest,
    ModelDeclaration,
    ModelReply,
    ReturnedTask,
    Sender,
    StatusReply,
    TasksReply,
    TasksTicket,
    ViewMemberMessage,
    ViewReply,
    ViewRequest,
    decode,
    encode,
)

_log = logging.getLogger(__name__)

#: How long a request waits for etcd before the trainer is told to ask again.
_DURABLE_S = 3.0
_ERRAND_S = 10.0
_DRAIN_POLL_S = 0.05
_UNSETTLED_S = 0.05
#: How soon a trainer asks again that has nothing to do but to hear that all is done.
_END_RETRY_S = 0.1


class MasterService:
    """The master's state and what it decides. Thread-safe."""

    def __init__(
        self,
        chosen: MasterSettings,
        *,
        pserver_count: int,
        held: HeldKey,
        coordinator: Coordinator,
        directory: Directory,
        keys: JobKeys,
        files: Files,
        checkpoints: Storage | None,
        index_storage: Storage | None,
        clock: Clock,
        credentials: Credentials | None,
        step_down: Callable[[str], None],
    ) -> None:
        self._settings = chosen
        self._pserver_count = pserver_count
        self._held = held
        self._coordinator = coordinator
        self._directory = directory
        self._keys = keys
        self._clock = clock
        self._credentials = credentials
        self._step_down = step_down
        #: Guards everything below; notified when work may have become available or the membership moved.
        self._changed = threading.Condition()
        #: Counts changes of the durable state.
        self._revision = 0
        self._declaration = JobDeclaration()
        #: Its stored form, made once: it goes into every comparison with what is in etcd.
        self._encoded_declaration = (self._declaration, b"")
        self._dataset: IndexedDataset | None = None
        self._queue: TaskQueue | None = None
        #: The dataset and the queue, once both are there.
        self._dispatch: Dispatch | None = None
        #: None until the model is declared: before that nobody waits for anybody.
        self._membership: Membership | None = None
        #: pserver index -> the view to send next, with the revision that has to be durable first.
        self._outbox: dict[int, tuple[View, int]] = {}
        self._trainers: dict[str, int] = {}
        self._pservers: dict[int, int] = {}
        self._progress = JobProgress()
        self._indexing = DatasetIndexing(files, clock, index_storage)
        self._evaluations = Evaluations(lambda: DatasetIndexing(files, clock, index_storage), chosen.attempts_limit)
        self._durable: DurableState | None = None
        self._senders: list[ViewSender] = []
        self._replay = Replay(pserver_count, "replay", None)
        self._checkpoint_storage = checkpoints
        self._checkpointing: Checkpointing | None = None
        self.exports = ModelExports(checkpoints, chosen.job, self.checkpoint)
        #: The ticket of the checkpoint that has everything; None: not everything is done.
        self._final_ticket: int | None = None
        self._epoch_seen = 0

    # life

    def start(self, recovered: RecoveredState) -> None:
        """Go on from what the predecessor left, and begin to write and to send views.

        Raises:
            DataError: the dataset that was declared cannot be indexed again, or has changed.
        """
        self._declaration = recovered.declaration
        if recovered.declaration.dataset is not None:
            declared = recovered.declaration.dataset
            self._dataset = self._indexing.index_again(declared)
            settings = self._queue_settings(self._dataset, declared.declaration)
            self._queue = (
                TaskQueue.decode(recovered.queue, settings, recovered.failures)
                if recovered.queue
                else TaskQueue(settings)
            )
            self._dispatch = Dispatch(self._dataset, self._queue)
        if recovered.declaration.model is not None:
            self._membership = self._make_membership(recovered.declaration.model, recovered.membership)
        if recovered.evaluations is not None:
            self._evaluations.recover(recovered.evaluations)
        self._recover_pservers(recovered)
        self._durable = DurableState(
            self._held, self._coordinator, self._clock, self._snapshot, self._step_down, recovered.known
        )
        self._senders = [
            ViewSender(
                index,
                self._settings.job,
                self._directory,
                self._clock,
                self._credentials,
                self._next_view,
                self._view_answered,
                self._view_failed,
                self._errand,
            )
            for index in range(self._pserver_count)
        ]
        self._directory.subscribe(self.look_at_directory)
        self._forget_the_dead()
        self.look_at_directory()

    def _recover_pservers(self, recovered: RecoveredState) -> None:
        recovery: Literal["replay", "rollback"] = "rollback" if self._settings.recovery == "rollback" else "replay"
        self._replay = Replay(self._pserver_count, recovery, recovered.pserver_recovery)
        chosen, generation, count = settings_of(self._settings), self._held.generation, self._pserver_count
        now = self._clock.now()
        self._checkpointing = Checkpointing(
            self._checkpoint_storage,
            Checkpoints(chosen, generation, count, now)
            if recovered.checkpoints is None
            else Checkpoints.restore(recovered.checkpoints, chosen, generation, count, now),
            self._changed,
            self._persist,
            self._manifest,
            lambda index: self._senders[index].wake(),
            self._clock,
        )
        self._epoch_seen = 0 if self._queue is None else self._queue.epoch

    def _forget_the_dead(self) -> None:
        """Trainers that died while there was no master lose what the predecessor's state says they have."""
        while not self._directory.wait_until(lambda d: d.revision > 0 or None, _DURABLE_S):
            if not self._held.is_held:
                raise FencedError("the lock was lost before the job's keys were read")
        alive = {name: record.generation for name, record in self._directory.trainers().items()}
        with self._changed:
            for trainer in () if self._queue is None else tuple(self._queue.holders()):
                if trainer not in alive:
                    self._trainer_gone(trainer, self._clock.now())
            for member in () if self._membership is None else self._membership.members:
                if alive.get(member.trainer) != member.generation:
                    self._leave(member.trainer)

    def close(self) -> None:
        """Stop the threads; nobody is answered any more."""
        self.exports.close()
        for sender in self._senders:
            sender.close()
        if self._checkpointing is not None:
            self._checkpointing.close()
        if self._durable is not None:
            self._durable.close()
        self._indexing.close()

    def _make_membership(self, model: ModelReply, stored: bytes | None) -> Membership:
        has_rounds = not isinstance(Mode.from_json(model.declaration.mode), Async)
        generation, count = self._held.generation, self._pserver_count
        if stored is None:
            return Membership(generation, count, has_rounds=has_rounds)
        return Membership.restore(stored, generation, count, has_rounds=has_rounds)

    def _queue_settings(self, dataset: IndexedDataset, declared: DatasetDeclaration) -> QueueSettings:
        return QueueSettings(
            task_count=dataset.layout.task_count,
            batch_counts=dataset.layout.batch_count,
            epochs=declared.epochs,
            seed=declared.seed,
            shuffle=declared.shuffle,
            attempts_limit=self._settings.attempts_limit,
        )

    def _snapshot(self) -> tuple[int, dict[str, bytes]]:
        with self._changed:
            values: dict[str, bytes] = {}
            if self._membership is not None:
                values[self._keys.membership] = self._membership.encode()
                values[self._keys.pserver_recovery] = self._replay.encode()
            if self._checkpointing is not None and self._checkpointing.is_kept:
                values[self._keys.checkpoint_latest] = self._checkpointing.encode()
            if self._queue is not None:
                dispatch, failures = self._queue.encode_parts()
                values |= {self._keys.task_queues: dispatch, self._keys.task_failures: failures}
            if self._evaluations:
                values[self._keys.evaluations] = self._evaluations.encode()
            if self._declaration.dataset is not None or self._declaration.model is not None:
                if self._encoded_declaration[0] is not self._declaration:
                    self._encoded_declaration = (self._declaration, encode(self._declaration))
                values[self._keys.job] = self._encoded_declaration[1]
            return self._revision, values

    def _wait_durable(self, revision: int) -> None:
        assert self._durable is not None
        self._durable.wait(revision, _DURABLE_S)

    # what the directory tells

    def look_at_directory(self) -> None:
        """Trainers and pservers may have come or gone."""
        trainers = {name: record.generation for name, record in self._directory.trainers().items()}
        pservers = {index: record.generation for index, record in self._directory.pservers().items()}
        now = self._clock.now()
        with self._changed:
            for trainer, generation in self._trainers.items():
                if trainers.get(trainer) != generation:
                    self._trainer_gone(trainer, now)
            self._trainers = trainers
            known, self._pservers = self._pservers, pservers
            for index in known:
                if index not in pservers and self._membership is not None:
                    self._perform(self._membership.pserver_down(index))
                if pservers.get(index) != known[index] and self._checkpointing is not None:
                    self._checkpointing.down(index)
            for index, generation in pservers.items():
                if known.get(index) != generation and index < self._pserver_count:
                    _log.info("pserver is there index=%d generation=%d", index, generation)
                    self._replay.seen(index, generation)
                    if index < len(self._senders):
                        self._senders[index].wake()
                    if self._membership is not None:
                        self._perform(self._membership.pserver_up(index, generation, 0))
            self._changed.notify_all()

    def _trainer_gone(self, trainer: str, now: float) -> None:
        _log.info("trainer is gone trainer=%s", trainer)
        self._progress.gone(trainer)
        if self._dispatch is not None:
            self._dispatch.trainer_gone(trainer, now)
        self._evaluations.trainer_gone(trainer, now)
        self._touch()
        self._leave(trainer)

    def tick(self) -> None:
        """Time has passed."""
        with self._changed:
            if self._dispatch is not None and self._dispatch.tick(self._clock.now()):
                self._touch()
            if self._evaluations.tick(self._clock.now()):
                self._touch()
            self._tick_checkpoints()

    def _touch(self) -> None:
        self._revision += 1
        self._changed.notify_all()

    # declarations

    def declare_dataset(self, declared: DatasetDeclaration) -> DatasetReply:
        """First declaration wins.

        Raises:
            DataError: a file cannot be used.
            DeclarationError: the job has another dataset.
            NotReadyError: the index is being built; ask again.
        """
        with self._changed:
            known = self._declaration.dataset
        if known is not None:
            require_same("dataset", known.declaration, declared)
            return known
        dataset = self._indexing.index(declared)
        with self._changed:
            if self._declaration.dataset is None:
                self._dataset = dataset
                self._queue = TaskQueue(self._queue_settings(dataset, declared))
                self._dispatch = Dispatch(dataset, self._queue)
                self._declaration = JobDeclaration(dataset=dataset.reply, model=self._declaration.model)
                self._touch()
            known = self._declaration.dataset
            revision = self._revision
        assert known is not None
        require_same("dataset", known.declaration, declared)
        self._wait_durable(revision)
        return known

    def declare_model(self, declared: ModelDeclaration) -> ModelReply:
        """First declaration wins.

        Raises:
            UsageError: a parameter, the optimizer or the mode is not valid.
            DeclarationError: the job has another model.
        """
        with self._changed:
            known = self._declaration.model
        if known is None:
            specs = [ParameterSpec(p.name, tuple(p.shape), p.dtype) for p in declared.parameters]
            Optimizer.from_json(declared.optimizer).check_names([spec.name for spec in specs])
            Mode.from_json(declared.mode)
            plan = plan_for(specs, self._pserver_count)
            reply = ModelReply(declaration=declared, pservers=self._pserver_count, plan_hash=plan.hash)
            with self._changed:
                if self._declaration.model is None:
                    self._declaration = JobDeclaration(dataset=self._declaration.dataset, model=reply)
                    self._membership = self._make_membership(reply, None)
                    for index, generation in self._pservers.items():
                        if index < self._pserver_count:
                            self._perform(self._membership.pserver_up(index, generation, 0))
                    self._touch()
                    _log.info("model declared parameters=%d blocks=%d", len(specs), plan.block_count)
                known = self._declaration.model
        with self._changed:
            revision = self._revision
        assert known is not None
        require_same("model", known.declaration, declared)
        self._wait_durable(revision)
        return known

    def parameter_servers(self) -> tuple[str, list[str]]:
        """Plan hash and addresses of the pservers, for any Flight client."""
        model = self._declaration.model
        if model is None:
            raise NotReadyError("no trainer has declared the model yet")
        return model.plan_hash, [record.address for record in self._directory.pservers().values()]

    # tasks

    def _require_trainer(self, sender: Sender) -> None:
        """Only a trainer whose lease is alive may hold work."""
        if self._trainers.get(sender.trainer) == sender.generation:
            return
        entry = self._coordinator.get(self._keys.trainer(sender.trainer))
        if entry is None or entry.create_revision != sender.generation:
            raise FencedError(f"trainer {sender.trainer} has no lease of generation {sender.generation}: register anew")
        raise NotReadyError(f"the master has not seen trainer {sender.trainer} yet")

    def tasks(self, ticket: TasksTicket, closing: threading.Event) -> tuple[TasksReply, list[list[Chunk]]]:
        """Take reports and hand out work; durable before it returns.

        Raises:
            FencedError: the trainer's lease has ended.
            NotReadyError: there is no dataset yet, or etcd cannot be written.
        """
        self._require_trainer(ticket)
        if ticket.evaluation:
            return self._evaluation_tasks(ticket)
        deadline = self._clock.now() + ticket.wait_s
        with self._changed:
            dispatch = self._dispatch
            if dispatch is None:
                raise NotReadyError("no trainer has declared the dataset yet")
            queue = dispatch.queue
            before = queue.revision
            ticket, disbelieved = self._without_lost_work(ticket)
            lost = disbelieved + dispatch.take_reports(ticket, self._clock.now())
            if queue.revision != before:
                # Those who wait for work are woken by reports only: what is handed out gives nobody else any.
                self._touch()
            given, outcome, retry_after_s = dispatch.hand_out(ticket, self._clock.now())
            while not given and outcome == "none_now" and ticket.want and not closing.is_set():
                self._leave_if_idle(queue, ticket.trainer)
                remaining = deadline - self._clock.now()
                if remaining <= 0:
                    break
                self._changed.wait(min(remaining, 0.5))
                given, outcome, retry_after_s = dispatch.hand_out(ticket, self._clock.now())
            self._leave_if_idle(queue, ticket.trainer)
            if given:
                self._revision += 1
            if outcome == "epochs_done" and not self._may_end():
                outcome, retry_after_s = "none_now", _END_RETRY_S
            revision = self._revision
            reply = TasksReply(
                assignments=given,
                outcome=outcome,
                retry_after_s=retry_after_s,
                member=self._member_of(ticket.trainer),
                lost=lost,
                epoch=queue.epoch,
            )
        self._wait_durable(revision)
        return reply, [dispatch.dataset.layout.chunks_of(assignment.task) for assignment in given]

    def declare_evaluation(self, request: EvaluationDeclaration) -> DatasetReply:
        """First declaration of a name wins.

        Raises:
            DataError: a file cannot be used.
            DeclarationError: the evaluation of this name has another dataset.
            NotReadyError: the index is being built; ask again.
        """
        with self._changed:
            known = self._evaluations.declared(request)
        if known is not None:
            return known
        indexed = self._evaluations.index(request.name, request)
        with self._changed:
            self._evaluations.begin(request.name, indexed)
            known = self._evaluations.declared(request)
            self._touch()
            revision = self._revision
        assert known is not None
        self._wait_durable(revision)
        return known

    def _evaluation_tasks(self, ticket: TasksTicket) -> tuple[TasksReply, list[list[Chunk]]]:
        """As ``tasks``, for an evaluation; does not wait for work."""
        with self._changed:
            found = self._evaluations.find(ticket.evaluation)
        if found.dispatch is None and not found.is_done:
            indexed = self._evaluations.index(found.name, found.declared)
            with self._changed:
                self._evaluations.begin(found.name, indexed)
        with self._changed:
            dispatch = found.dispatch
            given: list[Assignment] = []
            lost: list[ReturnedTask] = []
            outcome, retry_after_s = "epochs_done", 0.0
            if dispatch is not None:
                before = dispatch.queue.revision
                lost = dispatch.take_reports(ticket, self._clock.now())
                given, outcome, retry_after_s = dispatch.hand_out(ticket, self._clock.now())
                self._evaluations.settle(found)
                if dispatch.queue.revision != before:
                    self._touch()
            reply = TasksReply(
                assignments=given,
                outcome=outcome,
                retry_after_s=retry_after_s,
                member=self._member_of(ticket.trainer),
                lost=lost,
                metrics=found.metrics if outcome == "epochs_done" else {},
                failed=found.failed,
            )
            revision = self._revision
        self._wait_durable(revision)
        return reply, [] if dispatch is None else [dispatch.dataset.layout.chunks_of(each.task) for each in given]

    def retry_failed(self, request: FailedTasksRequest) -> FailedTasksReply:
        """Make quarantined batches todo again; durable before it returns.

        Raises:
            NotFoundError: nothing quarantined is meant.
        """
        return self._change_failed(lambda queue, selector: queue.retry_failed(selector), request)

    def drop_failed(self, request: FailedTasksRequest) -> FailedTasksReply:
        """Let quarantined batches go; durable before it returns.

        Raises:
            NotFoundError: nothing quarantined is meant.
        """
        return self._change_failed(lambda queue, selector: queue.drop_failed(selector), request)

    def _change_failed(
        self, change: Callable[[TaskQueue, FailedSelector], int], request: FailedTasksRequest
    ) -> FailedTasksReply:
        with self._changed:
            if self._queue is None:
                raise NotReadyError("no trainer has declared the dataset yet")
            count = change(self._queue, FailedSelector(request.epoch, request.task, request.batch))
            self._touch()
            revision = self._revision
        self._wait_durable(revision)
        _log.info("failed tasks were changed by hand batches=%d request=%s", count, request)
        return FailedTasksReply(batches=count)

    def _leave_if_idle(self, queue: TaskQueue, trainer: str) -> None:
        """Nobody waits for a trainer that has no work."""
        if not queue.holds(trainer):
            self._leave(trainer)

    # checkpoints, and pservers that come back; see ``checkpointing`` and ``replay``

    def _without_lost_work(self, ticket: TasksTicket) -> tuple[TasksTicket, list[ReturnedTask]]:
        """Finished work that went with a pserver is given back instead."""
        if self._membership is None:
            return ticket, []
        lost = [
            ReturnedTask(epoch=report.epoch, position=report.position, attempt=report.attempt)
            for report in ticket.finished
            if not self._replay.counts(report)
        ]
        if not lost:
            return ticket, []
        _log.info("finished work was lost with a pserver trainer=%s pieces=%d", ticket.trainer, len(lost))
        kept = [report for report in ticket.finished if self._replay.counts(report)]
        return msgspec.structs.replace(ticket, finished=kept, returned=[*ticket.returned, *lost]), lost

    def _errand(self, index: int, generation: int, connection: Connection) -> float:
        """What has to be said to a pserver beside views; on the thread that talks to it."""
        with self._changed:
            checkpointing = self._checkpointing
            is_settled = self._membership is None or self._replay.is_settled(index, generation)
            reload = None if self._membership is None else self._replay.must_reload(index)
        assert checkpointing is not None
        try:
            if reload == generation:
                connection.action("reload", b"", timeout_s=_ERRAND_S)
                return _UNSETTLED_S
            if not is_settled:
                reply = decode(connection.action("applied", b"", timeout_s=_ERRAND_S), AppliedReply)
                self._announced(index, generation, reply)
            return checkpointing.errand(index, generation, connection)
        except NotReadyError as error:
            _log.debug("pserver %d: %s", index, error)
            return _UNSETTLED_S

    def _announced(self, index: int, generation: int, reply: AppliedReply) -> None:
        with self._changed:
            assert self._checkpointing is not None
            if self._replay.announced(index, generation, reply, self._queue):
                self._final_ticket = None
                self._touch()
            revision = self._revision
        self._wait_durable(revision)
        with self._changed:
            self._pserver_settled(index, generation)

    def _pserver_settled(self, index: int, generation: int) -> None:
        """It takes part in checkpoints, unless it is about to go back to one."""
        assert self._checkpointing is not None
        if self._pservers.get(index) == generation and self._replay.is_settled(index, generation):
            if self._replay.must_reload(index) is None:
                self._checkpointing.settled(index, generation)
            self._changed.notify_all()

    def _tick_checkpoints(self) -> None:
        checkpointing = self._checkpointing
        if checkpointing is None or self._declaration.model is None or self._membership is None:
            return
        for index, generation in self._pservers.items():
            self._pserver_settled(index, generation)
            status = self._senders[index].status if index < len(self._senders) else None
            if status is not None and status.is_draining:
                checkpointing.is_draining(index)
        if self._queue is not None and self._queue.epoch > self._epoch_seen:
            self._epoch_seen = self._queue.epoch
            if not self._queue.is_done:
                checkpointing.epoch_finished(self._epoch_seen - 1)
        self._may_end()
        checkpointing.tick(self._open_rounds(), may_order=True)

    def _open_rounds(self) -> OpenRounds | None:
        model, membership = self._declaration.model, self._membership
        if model is None or membership is None or not isinstance(Mode.from_json(model.declaration.mode), Sync):
            return None
        known = [sender.status.highest_version for sender in self._senders if sender.status is not None]
        return OpenRounds(max(known, default=0), has_members=bool(membership.members))

    def _may_end(self) -> bool:
        """Whether trainers may be told that all is done: nothing that is done can get lost any more."""
        queue, checkpointing, membership = self._queue, self._checkpointing, self._membership
        if queue is None or not queue.is_done or checkpointing is None or membership is None:
            self._final_ticket = None
            return queue is not None and queue.is_done
        if not self._replay.is_all_settled:
            return False
        if not checkpointing.is_kept:
            return True
        if self._final_ticket is None:
            # What waits in an open round is in no checkpoint: all rounds have to be closed first.
            if membership.members or not membership.is_quiet:
                return False
            self._final_ticket = checkpointing.request("the end of the job")
        return checkpointing.is_satisfied(self._final_ticket) or bool(checkpointing.trouble)

    def _persist(self) -> None:
        """Return when what is decided now is in etcd."""
        with self._changed:
            self._touch()
            revision = self._revision
        self._wait_durable(revision)

    def _manifest(self, checkpoints: Checkpoints) -> Manifest:
        model = self._declaration.model
        assert model is not None, "a checkpoint without a model"
        return checkpoints.manifest(
            self._settings.job,
            model.plan_hash,
            model.cut_for or model.pservers,
            encode(self._declaration),
            None if self._queue is None else self._queue.encode(),
            self._clock.wall_time(),
        )

    def checkpoint(self, request: CheckpointRequest) -> CheckpointReply:
        """Order a checkpoint of what there is now, or wait for one ordered before.

        Raises:
            UsageError: the job keeps no checkpoints.
            NotReadyError: there is no model yet.
        """
        deadline = self._clock.now() + request.wait_s
        with self._changed:
            checkpointing = self._checkpointing
            if checkpointing is None or not checkpointing.is_kept:
                raise UsageError("this job keeps no checkpoints: start it with --checkpoint URL")
            if self._declaration.model is None:
                raise NotReadyError("no trainer has declared the model yet")
            ticket = checkpointing.request(request.reason) if request.ticket is None else request.ticket
            while not (is_complete := checkpointing.is_satisfied(ticket)) and deadline > self._clock.now():
                self._changed.wait(min(0.5, deadline - self._clock.now()))
            return CheckpointReply(
                ticket=ticket, complete=is_complete, latest=checkpointing.latest, trouble=checkpointing.trouble
            )

    def drain(self, timeout_s: float) -> None:
        """This master was told to end: make a last checkpoint, if everybody is still there to do it."""
        deadline = self._clock.now() + timeout_s
        with self._changed:
            checkpointing = self._checkpointing
            if checkpointing is None or not checkpointing.is_kept or self._membership is None:
                return
            if self._final_ticket is not None and checkpointing.is_satisfied(self._final_ticket):
                return
            ticket = checkpointing.request("the master is about to end")
        while self._clock.now() < deadline and self._held.is_held and len(self._pservers) >= self._pserver_count:
            self.tick()
            with self._changed:
                if checkpointing.is_satisfied(ticket) or checkpointing.trouble:
                    return
                self._changed.wait(_DRAIN_POLL_S)

    # membership

    def _leave(self, trainer: str) -> None:
        if self._membership is not None:
            self._perform(self._membership.leave(trainer))

    def _member_of(self, trainer: str) -> int:
        return 0 if self._membership is None else self._membership.member_id_of(trainer) or 0

    def join(self, request: JoinRequest) -> JoinReply:
        """Make the trainer a member; answers 0 while the pservers have not agreed.

        Raises:
            FencedError: the trainer's lease has ended.
        """
        self._require_trainer(request)
        deadline = self._clock.now() + request.wait_s
        with self._changed:
            membership = self._membership
            if membership is None:
                raise NotReadyError("the model is not declared yet")
            if self._queue is None or not self._queue.holds(request.trainer):
                return JoinReply(member=0, holds_work=False)
            self._perform(membership.join(request.trainer, request.generation))
            while (member := membership.member_id_of(request.trainer)) is None:
                remaining = deadline - self._clock.now()
                if remaining <= 0:
                    return JoinReply(member=0, waiting_for=membership.waiting_for(request.trainer))
                self._changed.wait(remaining)
            return JoinReply(member=member)

    def _perform(self, effects: Sequence[MembershipEffect]) -> None:
        """Effects of the membership: views to be sent once they are durable."""
        if not effects:
            return
        self._touch()
        for effect in effects:
            if isinstance(effect, SendView):
                self._outbox[effect.index] = (effect.view, self._revision)
                if effect.index < len(self._senders):
                    self._senders[effect.index].wake()

    def _next_view(self, index: int) -> ViewRequest | None:
        with self._changed:
            found = self._outbox.pop(index, None)
        if found is None:
            return None
        view, revision = found
        try:
            self._wait_durable(revision)
        except NotReadyError:
            with self._changed:
                self._outbox.setdefault(index, found)
            raise
        return ViewRequest(
            master_generation=view.master_generation,
            serial=view.serial,
            members=[
                ViewMemberMessage(
                    trainer=m.trainer,
                    generation=m.trainer_generation,
                    member=m.member_id,
                    first_round=m.first_round,
                )
                for m in view.members
            ],
        )

    def _view_answered(self, index: int, generation: int, answer: ViewReply) -> None:
        if answer.outdated:
            self._view_failed(index, generation, answer.serial)
            return
        with self._changed:
            if self._membership is not None:
                self._perform(
                    self._membership.answered(
                        index, generation, answer.serial, answer.refused, answer.highest_open_round
                    )
                )

    def _view_failed(self, index: int, generation: int, serial: int) -> None:
        with self._changed:
            if self._membership is not None:
                self._perform(self._membership.send_failed(index, generation, serial))

    # progress

    def log(self, report: LogRequest) -> None:
        """A trainer's progress."""
        with self._changed:
            if report.trainer in self._trainers:
                self._progress.add(report, self._clock.now())

    def status(self) -> StatusReply:
        """The job at a glance."""
        now = self._clock.now()
        with self._changed:
            return describe(
                self._settings.job,
                declaration=self._declaration,
                queue=self._queue,
                indexed=self._dataset,
                membership=self._membership,
                trainers=self._trainers,
                records=self._directory.pservers(),
                pservers=[sender.status for sender in self._senders],
                master=self._directory.master(),
                progress=self._progress,
                indexing=self._indexing.doing,
                evaluations=self._evaluations.status(),
                checkpointing=self._checkpointing,
                may_end=self._may_end(),
                now=now,
            )
