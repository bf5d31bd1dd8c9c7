"""The master as a pure state machine: it takes events and returns effects.

The core handles events and requests that concern several of this package's modules, and delegates the rest to them.
Each module has its own state.

The core does not read files. The driver indexes a dataset and reports the numbers of tasks and of batches per task.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from flightedl.domain.consistency.modes import Mode
from flightedl.domain.exactly_once.accumulation import described_pushes
from flightedl.domain.groups.incarnation import Group
from flightedl.domain.master import effects as out
from flightedl.domain.master import events
from flightedl.domain.master.checkpointing import Checkpointing
from flightedl.domain.master.control import PserverControl
from flightedl.domain.master.declaring import Declarations
from flightedl.domain.master.ending import Ending
from flightedl.domain.master.evaluations import Evaluations
from flightedl.domain.master.groups import GroupRequest, GroupRequests
from flightedl.domain.master.leases import Leases
from flightedl.domain.master.members import Members
from flightedl.domain.master.moves import Facts, Moves
from flightedl.domain.master.pservers import Pservers
from flightedl.domain.master.requests import Waiting
from flightedl.domain.master.state import CoreSettings, StoredState, checkpoints_of, placed_declaration
from flightedl.domain.master.training import HandedOut, Training
from flightedl.domain.master.work import Work
from flightedl.domain.model.declared import plan_of
from flightedl.domain.moving.values import StoredIntent
from flightedl.domain.queue.values import FailedSelector, QueueSettings
from flightedl.domain.recovery.reinitialization import Reinitialize
from flightedl.errors import FlightedlError, JobFailedError, NotReadyError, UsageError
from flightedl.messages.base import decode, encode
from flightedl.messages.checkpoints import CheckpointRequest
from flightedl.messages.declarations import (
    DatasetDeclaration,
    DeclaredModel,
    EvaluationDeclaration,
    JobDeclaration,
    ModelDeclaration,
)
from flightedl.messages.groups import GroupLeaveRequest, GroupPlaceRequest, GroupStartRequest
from flightedl.messages.moving import MovedRequest
from flightedl.messages.scaling import ScaleRecord, ScaleRequest
from flightedl.messages.tasks import (
    DroppedTasksRequest,
    FailedTasksReply,
    FailedTasksRequest,
    JoinReply,
    JoinRequest,
    ModeRequest,
    ReturnedTask,
    StopRecord,
    StopRequest,
    TasksTicket,
)

#: A trainer that joins at the beginning of an epoch starts this many rounds later, so that the other trainers need not
#: wait for it.
_MARGIN = 2
#: Seconds after which a pserver may be called again, while a transaction is in progress.
_STORING_S = 0.02
#: Seconds after which a pserver may be called again if the job does not use the pserver's index yet.
_UNCOUNTED_S = 1.0
_NOT_ALL = "the other trainers, to begin the epoch together (deterministic=True)"

#: (request, its waiting state, True if its timeout has expired) -> the answer, or the new waiting state.
_Answerer = Callable[[Any, Waiting, bool], msgspec.Struct]


class MasterCore:
    """State machine of one master. Not thread-safe.

    Raises:
        UsageError: the stored queue belongs to other tasks.
        FencedError: a newer master stored the membership.
    """

    def __init__(
        self,
        settings: CoreSettings,
        now: float,
        stored: StoredState | None = None,
        tasks: QueueSettings | None = None,
    ) -> None:
        stored = StoredState() if stored is None else stored
        declaration = placed_declaration(stored)
        placement = None if declaration.model is None else declaration.model.placement
        self._count = settings.pserver_count if placement is None else placement.pservers
        self._settings = settings
        self._now = now
        self._is_resumed = stored.is_resumed
        self._outbox = out.Outbox()
        self._declarations = Declarations(declaration, self._outbox)
        self.leases = Leases()
        self.training = Training(settings.trainer_count, stored.stop, self._outbox)
        #: None until a trainer has declared a model.
        self.members: Members | None = None
        self.pservers = Pservers(self._count, settings.recovery, stored.recovery, self._outbox)
        checkpoints = checkpoints_of(stored, settings, self._count, now)
        self.checkpointing = Checkpointing(checkpoints, is_kept=settings.keeps_checkpoints, outbox=self._outbox)
        self._control = PserverControl(settings.generation, self.pservers, self.checkpointing, self._outbox)
        self.ending = Ending(self.pservers, self.checkpointing)
        scaling = None if stored.scaling is None else decode(stored.scaling, ScaleRecord)
        self.moves = Moves(settings.generation, scaling, self._outbox, settings.rebalance_s)
        self._moves_revision = 0
        #: Newest placement and intent that were read while a transaction was in progress; None if there are none.
        self._moves_seen: events.MovesRead | None = None
        #: True if a checkpoint has been completed since blocks last moved.
        self._is_turn_of_moves = False
        self.evaluations = Evaluations(self._outbox)
        self._groups = GroupRequests(settings.attempts_limit, stored.group, self._outbox)
        self.group.is_stopped = self.training.is_stopped
        self._waiting: dict[int, Waiting] = {}
        if stored.evaluations is not None:
            self.evaluations.recover(stored.evaluations)
        if tasks is not None:
            self._begin_training(tasks, stored.queue, stored.failures)
            self._return_set_aside()
        if self.declaration.model is not None:
            self._begin_membership(self.declaration.model, stored.membership)
            self._begin_moves(self.declaration.model, stored.intent)
        self.ending.start(self.work)
        self._handlers: Mapping[type, Callable[[Any], None]] = {
            events.TimePassed: self._time_passed,
            events.LeasesSeen: self._leases_seen,
            events.ManifestWritten: self._manifest_written,
            events.ManifestFailed: self._manifest_failed,
            events.PointerStored: self._pointer_stored,
            events.Asked: self._asked,
            events.WaitEnded: self._wait_ended,
            events.DatasetIndexed: self._dataset_indexed,
            events.FilesJoined: self._files_joined,
            events.GrowthEnded: self._growth_ended,
            events.ModelPlanned: self._model_planned,
            events.EvaluationIndexed: self._evaluation_indexed,
            events.ControlAsked: self._control_asked,
            events.Answered: self._answered,
            events.StatusReceived: self._status_received,
            events.MovesRead: self._moves_read,
        }
        self._answerers: Mapping[type, _Answerer] = {
            TasksTicket: self._tasks,
            JoinRequest: self._join,
            ModeRequest: self._mode,
            CheckpointRequest: self._checkpoint,
            FailedTasksRequest: self._failed_tasks,
            DroppedTasksRequest: self._failed_tasks,
            StopRequest: self._stop,
            **dict.fromkeys((GroupStartRequest, GroupPlaceRequest, GroupLeaveRequest), self._of_group),
            DatasetDeclaration: self._declare_dataset,
            ModelDeclaration: self._declare_model,
            EvaluationDeclaration: self._declare_evaluation,
            ScaleRequest: self._scale,
            MovedRequest: self._moved,
        }

    def apply(self, event: events.Event, now: float) -> list[out.Effect]:
        """Return an event's effects in the order in which the driver must carry them out.

        Raises:
            UsageError: some of the new files cannot be added; the state is unchanged.
        """
        self._now = now
        self._handlers[type(event)](event)
        self._check_end()
        while self._outbox.wakes_requests:
            self._outbox.wakes_requests = False
            for waiting in tuple(self._waiting.values()):
                self._consider(waiting, is_last=False)
            self._check_end()
        self._look_at_moves(may_begin=False)
        return self._outbox.take()

    # state

    @property
    def revision(self) -> int:
        return self._outbox.revision

    @property
    def declaration(self) -> JobDeclaration:
        return self._declarations.known

    @property
    def has_former_model(self) -> bool:
        return self._declarations.has_former_model

    @property
    def trainers(self) -> Mapping[str, int]:
        return self.leases.trainers

    @property
    def work(self) -> Work | None:
        """The queue of the training data, or None if no dataset has been declared."""
        return self.training.work

    @property
    def group(self) -> Group:
        """The group whose ranks read the training data, or None if the ranks form no group."""
        return self._groups.group

    @property
    def is_over(self) -> bool:
        return self.group.is_done if self.group.has_started else self.training.is_over

    @property
    def _serving_members(self) -> Members | None:
        return None if self.has_former_model and not self.is_over else self.members

    @property
    def _is_deterministic(self) -> bool:
        return self.members is not None and self.training.is_deterministic(self.members.membership.mode)

    def encode(self) -> dict[str, bytes]:
        """Return the state for a successor (name -> value). All values must be stored in one transaction.

        The names are ``declaration``, ``queue``, ``failures``, ``evaluations``, ``membership``, ``recovery`` (of
        pservers), ``checkpoints``, ``group``, ``stopped``, ``scaling`` and ``desired`` (number of pserver processes).
        Parts without state are omitted.
        """
        values: dict[str, bytes] = {}
        if self.members is not None:
            values["membership"] = self.members.membership.encode()
            values["recovery"] = self.pservers.encode()
        if self.checkpointing.is_kept:
            values["checkpoints"] = self.checkpointing.checkpoints.encode()
        if self.work is not None:
            values["queue"], values["failures"] = self.work.queue.encode_parts()
        if self.training.stop is not None:
            values["stopped"] = encode(self.training.stop)
        if self.group.has_started:
            values["group"] = encode(self.group.record)
        if self.evaluations:
            values["evaluations"] = self.evaluations.encode()
        if (declaration := self._declarations.encode()) is not None:
            values["declaration"] = declaration
        if (record := self.moves.record) is not None and (desired := self.moves.desired) is not None:
            values["scaling"], values["desired"] = encode(record), str(desired).encode()
        return values

    def check(self) -> None:
        if self.work is not None:
            self.work.queue.check()
        if self.members is not None:
            self.members.membership.check()
        self.checkpointing.checkpoints.check()
        self.pservers.check()
        self.group.check()

    # leases

    def _leases_seen(self, event: events.LeasesSeen) -> None:
        is_first = not self.leases.are_known
        gone, new = self.leases.seen(event.trainers, event.revision)
        for trainer, generation, is_alive in gone:
            self._trainer_departed(trainer, is_alive=is_alive)
            self._groups.gone(trainer, generation)
        for trainer, generation in new.items():
            text = "trainer registered trainer=%s generation=%d"
            self._outbox.note(out.Kind.TRAINER_CAME, trainer, text, trainer, generation)
        self._pservers_seen(event.pservers)
        if is_first:
            self._forget_the_dead()
        self._outbox.wakes_requests = True

    def _pservers_seen(self, present: Mapping[int, int]) -> None:
        gone, new = self.pservers.leases_seen(present)
        for index, generation in gone.items():
            if index not in present and self.members is not None:
                self.members.pserver_down(index)
            text = "pserver is gone index=%d generation=%d"
            self._outbox.note(out.Kind.PSERVER_GONE, out.pserver_named(index), text, index, generation)
            self.checkpointing.down(index, self._now)
        for index, generation in new.items():
            self.pservers.seen(index, generation)
            if self.members is not None:
                self.members.pserver_up(index, generation)

    def _trainer_departed(self, trainer: str, *, is_alive: bool) -> None:
        text = "trainer is gone trainer=%s is_alive=%s tasks_held=%d"
        held = 0 if self.work is None else self.work.queue.held_count(trainer)
        self._outbox.note(out.Kind.TRAINER_GONE, trainer, text, trainer, is_alive, held)
        self.training.trainer_departed(trainer, self._now, is_graceful=is_alive)
        self.evaluations.trainer_departed(trainer, self._now, is_graceful=is_alive)
        self._outbox.touch()
        if self.members is not None:
            self.members.leave(trainer)

    def _forget_the_dead(self) -> None:
        self._groups.forget_the_dead(self.trainers)
        is_graceful = self._is_resumed
        if self.work is not None and self.work.forget_the_dead(self.trainers, self._now, is_graceful=is_graceful):
            self._outbox.touch()
        if self.members is not None:
            for member in self.members.membership.members:
                if self.trainers.get(member.trainer) != member.generation:
                    self.members.leave(member.trainer)

    # time, and the end

    def _time_passed(self, event: events.TimePassed) -> None:
        is_held_up = self._serving_members is not None and not self.pservers.is_everybody_settled
        if self.work is not None and self.work.tick(self._now, is_held_up=is_held_up, progressed=event.progressed):
            self._outbox.touch()
        if self.evaluations.tick(self._now, is_held_up=is_held_up, progressed=event.progressed):
            self._outbox.touch()
        self._control.look_at_all(self._now)
        self._check_end()
        may_begin = not (self.ending.may_end or self.is_over or self.has_former_model)
        if self._is_turn_of_moves:
            # Checkpoints and moves take turns. Otherwise, frequent checkpoints would prevent all moves.
            self._look_at_moves(may_begin=may_begin)
        self._tick_checkpoints()
        self._is_turn_of_moves |= self.checkpointing.checkpoints.under_way is not None
        self._look_at_moves(may_begin=may_begin)
        self._outbox.wakes_requests = True

    def _check_end(self) -> None:
        before = self.ending.may_end
        self.ending.look(self.work, self._serving_members, self._now)
        if self.group.has_started:
            self.ending.may_end = self.group.is_done
        if self.ending.may_end and not before:
            self._outbox.note(out.Kind.JOB_DONE, "", "the job is done")

    def _tick_checkpoints(self) -> None:
        if (members := self._serving_members) is not None and not self.moves.is_moving:
            self.checkpointing.tick(self._now, self.ending.open_rounds(members))

    # the checkpoints' storage

    def _manifest_written(self, event: events.ManifestWritten) -> None:
        self.checkpointing.perform(self.checkpointing.checkpoints.manifest_written(event.number, event.checksum))

    def _manifest_failed(self, event: events.ManifestFailed) -> None:
        checkpoints = self.checkpointing.checkpoints
        self.checkpointing.perform(
            checkpoints.manifest_failed(event.number, event.reason, self._now, lacks_file=event.lacks_file)
        )

    def _pointer_stored(self, event: events.PointerStored) -> None:
        self.checkpointing.perform(self.checkpointing.checkpoints.pointer_moved(event.number, self._now))
        self._outbox.note(out.Kind.CHECKPOINT_DONE, "", "checkpoint complete number=%d", event.number)
        self._outbox.wakes_requests = True

    # pservers

    def _control_asked(self, event: events.ControlAsked) -> None:
        if event.index >= self._count or self.moves.is_storing:
            pause_s = _STORING_S if self.moves.is_storing else _UNCOUNTED_S
            self._outbox.effects.append(out.NoCallDue(event.index, event.generation, pause_s))
            return
        plan_hash = self._declarations.plan_hash
        call = self._control.next_call(event, self.members, self.training, plan_hash, self._now)
        self._outbox.effects.append(call)

    def _answered(self, event: events.Answered) -> None:
        consequences = self._control.answered(event, self.members, self.training, self._now)
        if consequences.has_lost:
            self.ending.lost()
        if consequences.reinitialization is not None:
            self._reinitialize(consequences.reinitialization)

    def _reinitialize(self, step: Reinitialize) -> None:
        self.ending.lost()
        self.evaluations.reinitialize(step.election)
        if self.work is not None:
            self.pservers.reopen_all(self.work.queue)
        self._outbox.touch()
        self._outbox.effects.append(out.DeleteElection(step, self.revision))

    def _status_received(self, event: events.StatusReceived) -> None:
        members = () if self.members is None else self.members.membership.members
        self._control.status_received(event.replies, {each.member_id: each.trainer for each in members}, self._now)
        self.moves.status_received(event.replies, self.pservers.present, self._now)

    # moves of blocks

    def _begin_moves(self, model: DeclaredModel, intent: StoredIntent | None) -> None:
        if model.placement is not None:
            self.moves.begin(plan_of(model), model.placement, intent)
            self._place()

    def _place(self) -> None:
        """Adopt the newest placement, and inform the other parts about its pservers."""
        director = self.moves.director
        assert director is not None, "blocks are placed without a model"
        indexes = range(max(director.newest.pservers, director.placement.pservers))
        placements = {index: director.placement_for(index) for index in indexes}
        certain = director.placement.version if director.pending is None else None
        self.pservers.placed(placements, director.holders, certain)
        self.pservers.is_moving = self.moves.is_moving
        self._declarations.place(director.placement)
        if (count := director.placement.pservers) != self._count:
            self._resize(count)

    def _resize(self, count: int) -> None:
        text = "the job has %d pservers now before=%d"
        self._outbox.note(out.Kind.CHANGED_BY_HAND, "", text, count, self._count)
        for index in range(count, self._count):
            self.checkpointing.down(index, self._now)
        self._count = count
        self.checkpointing.checkpoints.resize(count)
        if (members := self.members) is not None:
            members.perform(members.membership.resize(count))
        self.pservers.resize(count)
        if members is not None:
            for index, generation in self.pservers.present.items():
                if index < count:
                    members.pserver_up(index, generation)
        self._outbox.touch()

    def _look_at_moves(self, *, may_begin: bool) -> None:
        members = self.members
        if members is None or not self.moves.may_look(may_begin=may_begin):
            return
        facts = Facts(
            present=self.pservers.present,
            settled=self.pservers.settled(),
            is_quiet=members.membership.is_quiet,
            is_audit_open=self.pservers.is_audit_open,
            is_checkpoint_open=self.checkpointing.checkpoints.under_way is not None,
        )
        self.moves.look(facts, self._now, may_begin=may_begin)
        if self.moves.is_storing:
            self._is_turn_of_moves = False
            self._place()

    def _moves_read(self, event: events.MovesRead) -> None:
        model, director = self.declaration.model, self.moves.director
        if model is None or model.placement is None or director is None or event.revision < self._moves_revision:
            return
        if director.pending is not None and not event.is_outcome:
            self._moves_seen = event
            return
        placement = director.placement if event.placement is None else event.placement
        if not event.is_outcome and placement != director.placement:
            # A successor has changed the placement.
            return
        self._moves_revision = event.revision
        if (placement, event.stored) == (director.placement, director.stored) and director.pending is None:
            return
        self.moves.read(placement, event.stored, self._now)
        self._place()
        if event.is_outcome and (seen := self._moves_seen) is not None:
            # A pserver may have deleted the intent before the outcome was known.
            self._moves_seen = None
            self._moves_read(seen)

    def _scale(self, request: ScaleRequest, waiting: Waiting, is_last: bool) -> msgspec.Struct:
        if request.pservers or request.drain or request.leaving or request.is_cancelled:
            if self.is_over:
                raise JobFailedError("all epochs are done, so the pservers need not change any more")
            if (model := self.declaration.model) is not None and model.placement is None:
                raise UsageError("the job was begun by an older version: restart it with --resume and --pservers N")
            self.moves.scale(request, self._now)
            waiting = replace(waiting, request=replace(request, pservers=0, drain=[], leaving=[], is_cancelled=False))
        reply = self.moves.reply()
        if reply.is_done or is_last or not request.wait_s:
            return reply
        return waiting

    def _moved(self, request: MovedRequest, *_: object) -> msgspec.Struct:
        self.moves.acknowledged(request.attempt, request.block, request.generation)
        return out.Done()

    # consequences of declarations

    def _dataset_indexed(self, event: events.DatasetIndexed) -> None:
        if self.declaration.dataset is None:
            self._begin_training(event.tasks, None, None)
            self._declarations.adopt_dataset(event.reply)
            self._outbox.touch()
            tasks, records = event.reply.task_count, event.reply.record_count
            self._outbox.note(out.Kind.DECLARED, "", "dataset declared tasks=%d records=%d", tasks, records)

    def _begin_training(self, tasks: QueueSettings, stored: bytes | None, failures: bytes | None) -> None:
        tasks = dataclasses.replace(tasks, is_deduplicated=self._declarations.has_model)
        self.training.begin(tasks, stored, failures)

    def _return_set_aside(self) -> None:
        """Return quarantined batches to the queue if the job is resumed. Dropped batches stay dropped."""
        failed = self.training.known.queue.failed
        if self._is_resumed and (failed.failed.batch_count or failed.forgotten):
            text = "batches that were set aside are retried batches=%d; ranges that are no longer known: %d"
            values = failed.failed.batch_count, failed.forgotten
            self._outbox.note(out.Kind.CHANGED_BY_HAND, "", text, *values, is_warning=failed.forgotten > 0)
            if failed.failed.batch_count:
                self.training.known.queue.retry_failed(FailedSelector())
            self._outbox.touch()

    def _files_joined(self, event: events.FilesJoined) -> None:
        self.training.known.queue.grow(event.task_count, event.batch_counts)
        self._outbox.touch()
        self._outbox.note(out.Kind.DECLARED, "", "files joined the dataset tasks=%d", event.task_count)

    def _growth_ended(self, event: events.GrowthEnded) -> None:
        if event.left_out:
            self._declarations.leave_out(event.left_out)
        self._outbox.news("", self.training.known.queue.end_growth())
        self._outbox.touch()

    def _model_planned(self, event: events.ModelPlanned) -> None:
        if self.declaration.model is not None:
            return
        declared, count = event.declared, self._count
        model = DeclaredModel(
            declaration=declared, pservers=count, plan_hash=event.plan_hash, placement=event.placement
        )
        self._declarations.adopt_model(model)
        self._begin_membership(model, None)
        self._begin_moves(model, None)
        self._outbox.touch()
        counts = (len(declared.parameters), event.block_count, len(declared.tables))
        self._outbox.note(out.Kind.DECLARED, "", "model declared parameters=%d blocks=%d tables=%d", *counts)

    def _begin_membership(self, model: DeclaredModel, stored: bytes | None) -> None:
        mode = Mode.from_json(model.present_mode)
        generation, count = self._settings.generation, self._count
        self.members = Members.of(stored, generation, count, mode, self._outbox)
        for index, each in self.pservers.present.items():
            if index < count:
                self.members.pserver_up(index, each)
        if self._declarations.has_model:
            self.training.deduplicate()

    def _evaluation_indexed(self, event: events.EvaluationIndexed) -> None:
        self.evaluations.begin(event.name, event.reply, event.tasks, self.trainers, self._now)
        self._outbox.touch()

    # requests

    def _asked(self, event: events.Asked) -> None:
        self._consider(Waiting(event.call, event.request, event.is_last), is_last=False)

    def _wait_ended(self, event: events.WaitEnded) -> None:
        if event.call in self._waiting:
            self._consider(self._waiting[event.call], is_last=True)

    def _consider(self, waiting: Waiting, *, is_last: bool) -> None:
        try:
            reply: msgspec.Struct | FlightedlError = self._answerers[type(waiting.request)](
                waiting.request, waiting, is_last
            )
        except FlightedlError as error:
            reply = error
        if isinstance(reply, Waiting):
            assert not is_last, "an expired request must be answered"
            self._waiting[waiting.call] = reply
        else:
            self._waiting.pop(waiting.call, None)
            revision = 0 if isinstance(reply, FlightedlError) else self.revision
            self._outbox.effects.append(out.Answer(waiting.call, reply, revision))

    def _declare_dataset(self, declared: DatasetDeclaration, *_: object) -> msgspec.Struct:
        known = self._declarations.dataset(declared)
        if known is not None and self.declaration.is_resumed:
            self.training.redeclare(known.declaration, declared)
            known = replace(known, declaration=declared)
            self._declarations.adopt_dataset(known)
            self._outbox.touch()
        return known or out.Undeclared()

    def _declare_model(self, declared: ModelDeclaration, *_: object) -> msgspec.Struct:
        known = self._declarations.model(declared)
        if known is not None and known.is_former:
            return self._adopt_former_model(declared)
        return known or out.Undeclared()

    def _adopt_former_model(self, declared: ModelDeclaration | None = None) -> DeclaredModel:
        model = self._declarations.adopt_former_model(declared)
        self.training.deduplicate()
        self._outbox.touch()
        return model

    def _declare_evaluation(self, declared: EvaluationDeclaration, *_: object) -> msgspec.Struct:
        return self.evaluations.declared(declared) or out.Undeclared()

    def _tasks(self, ticket: TasksTicket, waiting: Waiting, is_last: bool) -> msgspec.Struct:
        self.leases.require(ticket)
        if ticket.evaluation:
            reply = self.evaluations.handle_ticket(ticket, self._now, len(self.trainers))
            return replace(reply, member=self._member_of(ticket.trainer))
        work = self._training_work(ticket)
        lost = self._apply_reports(work, ticket) if waiting.lost is None else waiting.lost
        is_deterministic = self._is_deterministic
        handed = self.training.hand_out(ticket, self.trainers, self._now, is_deterministic=is_deterministic)
        is_over = handed.outcome == "epochs_done"
        is_waiting = not (handed.given or is_over or is_last) and ticket.want > 0 and ticket.wait_s > 0
        self._update_members(ticket, handed, is_deterministic=is_deterministic, waits=is_waiting)
        if is_over:
            if self.has_former_model:
                # The checkpoint is complete and the job is ending, so no trainer needs to declare the model again.
                self._adopt_former_model()
            self._check_end()
        if is_waiting:
            return replace(waiting, lost=lost)
        may_end = self.ending.may_end
        reply = self.training.reply(ticket, handed, is_deterministic=is_deterministic, may_end=may_end)
        pservers = self._final_pservers() if reply.outcome == "epochs_done" else []
        return replace(reply, member=self._member_of(ticket.trainer), pservers=pservers, lost=lost)

    def _training_work(self, ticket: TasksTicket) -> Work:
        if self.work is None:
            raise NotReadyError("no trainer has declared the dataset yet")
        if self.pservers.refusal:
            raise JobFailedError(self.pservers.refusal)
        if self.group.has_started:
            raise UsageError("a group reads the data of this job: pass the same group= to job.dataset in all processes")
        if ticket.want:
            self.ending.work_asked(self._now)
        elif self.ending.unfinished:
            raise UsageError(self.ending.unfinished)
        return self.work

    def _apply_reports(self, work: Work, ticket: TasksTicket) -> list[ReturnedTask]:
        before = work.queue.revision
        lost: list[ReturnedTask] = []
        if self.members is not None:
            self.members.membership.note_round(ticket.trainer, ticket.round)
            self.training.asked(ticket)
            ticket, lost = self.pservers.without_lost_work(ticket)
        lost = lost + work.apply_reports(ticket, self._now) + work.take_back_unstarted(ticket, self._now)
        self.checkpointing.checkpoints.tasks_finished(len(work.take_finished()))
        if work.queue.revision != before:
            # Only reports make tasks available to waiting trainers; assignments do not.
            self._outbox.touch()
        return lost

    def _update_members(self, ticket: TasksTicket, handed: HandedOut, *, is_deterministic: bool, waits: bool) -> None:
        """Remove a trainer without tasks from the members. Add a trainer that may rejoin without asking."""
        members = self.members
        if handed.begins_epoch and members is not None:
            members.leave_all()
            self._outbox.wakes_requests = True
        if self.training.should_leave(ticket, self._now, waits=waits) and members is not None:
            members.leave(ticket.trainer)
        if handed.given:
            joins = self.training.joins_with(ticket, handed.given[0])
            if joins and members is not None and not is_deterministic:
                members.perform(members.membership.join(ticket.trainer, ticket.generation, _MARGIN))
            self._outbox.revision += 1

    def _member_of(self, trainer: str) -> int:
        return 0 if self.members is None else self.members.member_of(trainer)

    def _final_pservers(self) -> list[int]:
        """Return the generations of the pservers. They were checked just before the job was reported as done."""
        count = self._count
        return [] if self.members is None else [self.pservers.present.get(i, 0) for i in range(count)]

    def _join(self, request: JoinRequest, waiting: Waiting, is_last: bool) -> msgspec.Struct:
        self.leases.require(request)
        members, trainer, generation = self.members, request.trainer, request.generation
        if members is None:
            raise NotReadyError("the model is not declared yet")
        if not self.training.holds_work(trainer, generation, request.attempt):
            return JoinReply(member=0, holds_work=False)
        if not self._is_deterministic or self.training.is_stopped:
            members.perform(members.membership.join(trainer, generation))
        elif not members.member_of(trainer):
            joins = self.training.joins_together(trainer, generation, self.trainers, self._now)
            members.perform(members.membership.join_together(joins))
        if member := members.member_of(trainer):
            return JoinReply(member=member, mode=members.membership.mode.to_json())
        if not is_last and request.wait_s:
            return waiting
        return JoinReply(member=0, waiting_for=members.membership.waiting_for(trainer) or _NOT_ALL)

    def _mode(self, request: ModeRequest, waiting: Waiting, is_last: bool) -> msgspec.Struct:
        model, members = self.declaration.model, self.members
        if members is None:
            raise NotReadyError("no trainer has declared the model yet: pass the first mode to job.parameters")
        assert model is not None, "a job with members has a model"
        mode = None if request.mode is None else Mode.from_json(request.mode)
        tasks = [] if self.declaration.dataset is None else self.declaration.dataset.task_batches
        pushes, is_short = described_pushes(tasks, getattr(mode or members.membership.mode, "push_every", 1))
        if mode is not None and is_short and not request.short_pushes:
            raise UsageError(f"{pushes}: choose a lower --push-every, or permit it with --short-pushes")
        if mode is not None and mode != members.membership.mode:
            if self.is_over:
                raise JobFailedError("all epochs are done, so there is no round left at which the mode could change")
            text = "mode changes from=%s to=%s"
            self._outbox.note(out.Kind.CHANGED_BY_HAND, "", text, members.membership.mode, mode)
            self._declarations.adopt_model(replace(model, mode=mode.to_json()))
            members.switch(mode)
        if members.membership.late_to_switch and not is_last and request.wait_s:
            return replace(waiting, request=replace(request, mode=None))
        return replace(members.mode_reply(), pushes=pushes)

    def _checkpoint(self, request: CheckpointRequest, waiting: Waiting, is_last: bool) -> msgspec.Struct:
        if not self.checkpointing.is_kept:
            raise UsageError("this job keeps no checkpoints: start it with --checkpoint URL")
        if not self._declarations.has_model:
            raise NotReadyError("no trainer has declared the model yet")
        may_give_up, ticket = waiting.may_give_up, request.ticket
        if ticket is None and may_give_up:
            # The job's last checkpoint contains all of its work.
            ticket = self.ending.final_ticket
        if ticket is None:
            ticket = self.checkpointing.request(request.reason, may_give_up=may_give_up)
            self._tick_checkpoints()
        may_wait = not is_last and request.wait_s > 0
        reply = self.checkpointing.reply_to(ticket, may_give_up=may_give_up, may_wait=may_wait)
        return replace(waiting, request=replace(request, ticket=ticket)) if reply is None else reply

    def _failed_tasks(self, request: FailedTasksRequest, *_: object) -> msgspec.Struct:
        if self.work is None:
            raise NotReadyError("no trainer has declared the dataset yet")
        count = self.work.change_failed(request)
        text = "failed tasks were changed by hand batches=%d request=%s"
        self._outbox.note(out.Kind.CHANGED_BY_HAND, "", text, count, request)
        self._outbox.touch()
        return FailedTasksReply(batches=count)

    def _stop(self, request: StopRequest, *_: object) -> msgspec.Struct:
        self.leases.require(request)
        if not self.training.is_stopped:
            text = "trainer %s stops the job: %s"
            who = request.name or request.trainer
            self._outbox.note(out.Kind.JOB_STOPPED, request.trainer, text, who, request.reason)
            self.training.stop_job(StopRecord(who=who, reason=request.reason))
            self.group.is_stopped = True
            self._outbox.touch()
        return out.Done()

    def _of_group(self, request: GroupRequest, waiting: Waiting, is_last: bool) -> msgspec.Struct:
        self.leases.require(request)
        has_dataset, has_model = self.work is not None, self.declaration.model is not None
        reply = self._groups.answer(request, self._now, has_dataset=has_dataset, has_model=has_model, is_last=is_last)
        return waiting if reply is None else reply
