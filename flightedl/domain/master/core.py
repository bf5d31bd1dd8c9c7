"""The master as a pure state machine: events in, effects out.

Requests that have to wait (for work, to become a member, for a mode to be agreed, for a checkpoint) wait in here: each
is looked at again whenever something has changed that it may wait for, and when its time is up (``WaitEnded``).

Not in here, as it is not decided by events but by files: the datasets' chunks. Whoever drives the core tells it of a
dataset once these are known (``begin_training``, ``grow``, ``begin_evaluation``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from flightedl.domain.checkpoint.checkpoints import Checkpoints
from flightedl.domain.checkpoint.values import CheckpointSettings
from flightedl.domain.consistency.membership import Membership
from flightedl.domain.consistency.modes import Mode
from flightedl.domain.master import effects as out
from flightedl.domain.master import events
from flightedl.domain.master.checkpointing import Checkpointing
from flightedl.domain.master.deterministic_schedule import DeterministicSchedule
from flightedl.domain.master.ending import Ending
from flightedl.domain.master.evaluations import Evaluation, Evaluations
from flightedl.domain.master.members import Members
from flightedl.domain.master.pservers import Pservers
from flightedl.domain.master.work import Work
from flightedl.domain.queue.tasks import TaskQueue
from flightedl.domain.queue.values import FailedSelector, QueueSettings
from flightedl.errors import FlightedlError, JobFailedError, NotReadyError, UnregisteredError, UsageError
from flightedl.messages.base import Sender, encode
from flightedl.messages.checkpoints import CheckpointReply
from flightedl.messages.control import AppliedRequest, ReloadRequest, SealRequest
from flightedl.messages.declarations import DeclaredDataset, DeclaredModel, JobDeclaration, ModelDeclaration
from flightedl.messages.tasks import Assignment, FailedTasksReply, JoinReply, ReturnedTask, TasksReply, TasksTicket

#: How soon a trainer asks again that has nothing to do but to hear that all is done.
_END_RETRY_S = 0.1
_SCHEDULE_RETRY_S = 0.5
_NOT_ALL = "the other trainers, to begin the epoch together (deterministic=True)"
#: How soon a pserver is asked again that is not settled, and one that makes a snapshot.
_POLL_S = 0.05
_LACKING_S = 0.2
_IDLE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSettings:
    """What stays the same for the life of a master.

    Args:
        generation: The master's.
        pserver_count: Of the job.
        trainer_count: For deterministic runs; 0: it is not known.
        recovery: What is done when a pserver comes back with less than it had.
        checkpoints: When they are made.
        keeps_checkpoints: Whether there is anywhere to keep them.
    """

    generation: int
    pserver_count: int
    trainer_count: int = 0
    recovery: Literal["replay", "rollback"] = "replay"
    checkpoints: CheckpointSettings = field(default_factory=CheckpointSettings)
    keeps_checkpoints: bool = True


@dataclass(slots=True)
class _Waiting:
    """A request that is not answered yet; ``look`` takes whether its time is up, and gives the answer or None."""

    call: int
    look: Callable[[bool], msgspec.Struct | None]


class MasterCore:
    """What one master knows and decides. Not thread-safe.

    Args:
        settings: See there.
        now: The instant; times are seconds of a clock that only rises.
        recovery: What a predecessor knew of the pservers; None: there was none.
        checkpoints: What it knew of the checkpoints, as ``Checkpoints.encode`` gave it, or as it is to begin.
        is_stopped: Whether a trainer has stopped the job.
    """

    def __init__(
        self,
        settings: CoreSettings,
        now: float,
        *,
        recovery: bytes | None = None,
        checkpoints: bytes | Checkpoints | None = None,
        is_stopped: bool = False,
    ) -> None:
        self._settings = settings
        self._now = now
        self.outbox = out.Outbox()
        self.declaration = JobDeclaration()
        #: Its stored form, made once: it goes into every comparison with what is stored.
        self._encoded_declaration = (self.declaration, b"")
        #: The training data's queue; None: no dataset is declared.
        self.work: Work | None = None
        #: None until the model is declared: before that nobody waits for anybody.
        self.members: Members | None = None
        self._schedule = DeterministicSchedule(settings.trainer_count)
        #: Trainer -> generation, and pservers, whose lease is alive, as of this revision of etcd or later.
        self.trainers: Mapping[str, int] = {}
        self._leases_revision = 0
        self.pservers = Pservers(settings.pserver_count, settings.recovery, recovery, self.outbox)
        generation, count = settings.generation, settings.pserver_count
        if not isinstance(checkpoints, Checkpoints):
            checkpoints = (
                Checkpoints(settings.checkpoints, generation, count, now)
                if checkpoints is None
                else Checkpoints.restore(checkpoints, settings.checkpoints, generation, count, now)
            )
        self.checkpointing = Checkpointing(checkpoints, is_kept=settings.keeps_checkpoints, outbox=self.outbox)
        self.ending = Ending(self.pservers, self.checkpointing)
        self.evaluations = Evaluations(self.outbox)
        self.is_stopped = is_stopped
        self._waiting: dict[int, _Waiting] = {}
        #: pserver index -> how much had been done again when it was asked what it has.
        self._repeated_when_asked: dict[int, int] = {}
        self._handlers: dict[type, Callable[[Any], None]] = {
            events.TimePassed: self._time_passed,
            events.LeasesSeen: self._leases_seen,
            events.WorkAsked: self._work_asked,
            events.JoinAsked: self._join_asked,
            events.ModeAsked: self._mode_asked,
            events.CheckpointAsked: self._checkpoint_asked,
            events.FailedWorkAsked: self._failed_work_asked,
            events.StopAsked: self._stop_asked,
            events.WaitEnded: self._wait_ended,
            events.ControlAsked: self._control_asked,
            events.ViewAnswered: self._view_answered,
            events.ViewLost: self._view_lost,
            events.AppliedAnswered: self._applied_answered,
            events.SealAnswered: lambda e: self.pservers.sealed(e.index, e.generation, e.end_epoch),
            events.ReloadAnswered: lambda _: None,
            events.SnapshotAnswered: self._snapshot_answered,
            events.StatusTold: self._status_told,
            events.ManifestWritten: self._manifest_written,
            events.ManifestFailed: self._manifest_failed,
            events.PointerStored: self._pointer_stored,
        }

    # events

    def apply(self, event: events.Event, now: float) -> list[out.Effect]:
        """What follows from an event, in the order in which it is to be done."""
        self._now = now
        self._handlers[type(event)](event)
        return self.settle(now)

    def settle(self, now: float) -> list[out.Effect]:
        """What follows from what was done to the core itself since the last event."""
        self._now = now
        self.ending.look(self.work, self._serving_members)
        while self.outbox.is_stirred:
            self.outbox.is_stirred = False
            for waiting in tuple(self._waiting.values()):
                self._look_at(waiting, is_last=False)
            self.ending.look(self.work, self._serving_members)
        return self.outbox.take()

    def touch(self) -> None:
        """The stored state has changed."""
        self.outbox.touch()

    @property
    def revision(self) -> int:
        """Counts changes of the state that is stored."""
        return self.outbox.revision

    # what is declared

    @property
    def plan_hash(self) -> str:
        """Of the declared model; empty: none is declared."""
        model = self.declaration.model
        return "" if model is None else model.plan_hash

    @property
    def has_former_model(self) -> bool:
        """Whether the model waits for a trainer that declares it again, and pservers wait with it."""
        return self.declaration.model is not None and self.declaration.model.is_former

    @property
    def _serving_members(self) -> Members | None:
        """The members, where pservers may have values."""
        return None if self.has_former_model and not self.is_over else self.members

    def begin_training(
        self, settings: QueueSettings, stored: bytes | None, failures: bytes | None, *, may_reseed: bool = False
    ) -> None:
        """The dataset's tasks are known; ``stored`` and ``failures`` as a predecessor left them.

        Raises:
            UsageError: what is stored is of other settings; nothing was changed. With ``may_reseed``, another seed
                is fine.
        """
        queue = TaskQueue.decode(stored, settings, failures, may_reseed=may_reseed) if stored else TaskQueue(settings)
        self.work = Work(queue, partial(self.outbox.news, ""))
        self.work.is_stopped = self.is_stopped

    def begin_membership(self, model: DeclaredModel, stored: bytes | None) -> None:
        """There is a model, so there is somebody to wait for."""
        self.begin_mode(Mode.from_json(model.present_mode), stored)

    def begin_mode(self, mode: Mode, stored: bytes | None) -> None:
        """As ``begin_membership``.

        Raises:
            FencedError: ``stored`` is a newer master's.
        """
        generation, count = self._settings.generation, self._settings.pserver_count
        membership = (
            Membership(generation, count, mode=mode)
            if stored is None
            else Membership.restore(stored, generation, count, mode=mode)
        )
        self.members = Members(membership, self._schedule, self.outbox)
        for index, each in self.pservers.present.items():
            if index < count:
                self.members.pserver_up(index, each)

    def adopt_model(self, declared: ModelDeclaration) -> DeclaredModel:
        """The model of a job that was resumed is this one from now on, also for pservers."""
        model = self.declaration.model
        assert model is not None, "a former model is one"
        model = replace(model, declaration=declared, is_former=False)
        self.declaration = replace(self.declaration, model=model)
        self.touch()
        return model

    def grow(self, task_count: int) -> None:
        """The dataset has grown to so many tasks; the first ones are those it had."""
        assert self.work is not None, "a dataset grows after it was declared"
        self.work.queue.grow(task_count)
        self.touch()

    def end_growth(self) -> None:
        """No more tasks are to come."""
        assert self.work is not None, "a dataset that grows has a queue"
        self.outbox.news("", self.work.queue.end_growth())
        self.touch()

    def begin_evaluation(self, name: str, declared: DeclaredDataset, settings: QueueSettings) -> Evaluation:
        """Begin an evaluation, or go on with it; nothing when it runs."""
        found = self.evaluations.begin(name, declared, settings, self.trainers, self._now)
        self.touch()
        return found

    @property
    def is_over(self) -> bool:
        """Whether all training is done that will ever be."""
        return self.work is not None and self.work.is_over

    def forget_the_dead(self, *, is_graceful: bool) -> None:
        """Trainers that died while there was no master lose what the predecessor's state says they have.

        Of trainers of a run that was stopped (``is_graceful``), nobody knows that they died.
        """
        if self.work is not None and self.work.forget_the_dead(self.trainers, self._now, is_graceful=is_graceful):
            self.touch()
        if self.members is not None:
            for member in self.members.membership.members:
                if self.trainers.get(member.trainer) != member.generation:
                    self.members.leave(member.trainer)

    # leases

    def _leases_seen(self, event: events.LeasesSeen) -> None:
        before, self.trainers, self._leases_revision = self.trainers, event.trainers, event.revision
        for trainer, generation in before.items():
            if event.trainers.get(trainer) != generation:
                self._trainer_gone(trainer, is_alive=trainer in event.trainers)
        known, self.pservers.present = self.pservers.present, dict(event.pservers)
        for index, generation in known.items():
            if index not in event.pservers and self.members is not None:
                self.members.pserver_down(index)
            if event.pservers.get(index) != generation:
                self.checkpointing.down(index, self._now)
        for index, generation in event.pservers.items():
            if known.get(index) != generation and index < self._settings.pserver_count:
                self.pservers.seen(index, generation)
                if self.members is not None:
                    self.members.pserver_up(index, generation)
        self.outbox.is_stirred = True

    def _trainer_gone(self, trainer: str, *, is_alive: bool) -> None:
        """``is_alive``: it lost its lease, and has registered again: its work is not to blame."""
        self.outbox.note("trainer is gone trainer=%s is_alive=%s", trainer, is_alive)
        if self.work is not None:
            self.work.trainer_gone(trainer, self._now, is_graceful=is_alive)
        self.evaluations.trainer_gone(trainer, self._now, is_graceful=is_alive)
        self.touch()
        if self.members is not None:
            self.members.leave(trainer)

    def _require_trainer(self, sender: Sender) -> None:
        """Only a trainer whose lease is alive may hold work, or be waited for.

        Asked each time that a request is looked at: what a trainer that is gone is given nobody takes back.

        Raises:
            UnregisteredError: its lease has ended.
            NotReadyError: the master has not seen it yet.
        """
        if self.trainers.get(sender.trainer) == sender.generation:
            return
        if sender.generation > self._leases_revision:
            raise NotReadyError(f"the master has not seen trainer {sender.trainer} yet")
        raise UnregisteredError(
            f"trainer {sender.trainer} has no lease of generation {sender.generation}: register anew"
        )

    # requests

    def _look_at(self, waiting: _Waiting, *, is_last: bool) -> None:
        """Answer a request if that is possible, or its time is up."""
        try:
            reply: msgspec.Struct | FlightedlError | None = waiting.look(is_last)
        except FlightedlError as error:
            reply = error
        if reply is None:
            assert not is_last, "a request whose time is up is answered"
            self._waiting[waiting.call] = waiting
        else:
            self._waiting.pop(waiting.call, None)
            revision = 0 if isinstance(reply, FlightedlError) else self.revision
            self.outbox.effects.append(out.Answer(waiting.call, reply, revision))

    def _wait_ended(self, event: events.WaitEnded) -> None:
        if event.call in self._waiting:
            self._look_at(self._waiting[event.call], is_last=True)

    def _work_asked(self, event: events.WorkAsked) -> None:
        ticket = event.ticket
        lost: list[ReturnedTask] | None = None

        def look(is_last: bool) -> TasksReply | None:
            nonlocal lost
            if ticket.evaluation:
                return self._evaluation_work(ticket)
            self._require_trainer(ticket)
            work = self._training_work()
            lost = self._take_reports(work, ticket) if lost is None else lost
            return self._work_reply(work, ticket, lost, is_last=is_last or not ticket.wait_s)

        self._look_at(_Waiting(event.call, look), is_last=False)

    def _training_work(self) -> Work:
        if self.work is None:
            raise NotReadyError("no trainer has declared the dataset yet")
        if self.pservers.refusal:
            raise JobFailedError(self.pservers.refusal)
        return self.work

    def _take_reports(self, work: Work, ticket: TasksTicket) -> list[ReturnedTask]:
        """What the ticket reports becomes part of the state; what the trainer has to drop comes back."""
        before = work.queue.revision
        ticket, disbelieved = self._without_lost_work(ticket)
        lost = disbelieved + work.take_reports(ticket, self._now)
        lost += work.take_back_unbegun(ticket, self._now)
        self.checkpointing.checkpoints.tasks_finished(work.take_finished())
        if work.queue.revision != before:
            # Those who wait for work are looked at after reports only: what is handed out gives nobody else any.
            self.touch()
        return lost

    def _without_lost_work(self, ticket: TasksTicket) -> tuple[TasksTicket, list[ReturnedTask]]:
        """Finished work that went with a pserver is given back instead."""
        if self.members is None:
            return ticket, []
        lost = [
            ReturnedTask(epoch=report.epoch, position=report.position, attempt=report.attempt)
            for report in ticket.finished
            if not self.pservers.counts(report)
        ]
        if not lost:
            return ticket, []
        self.outbox.note("finished work was lost with a pserver trainer=%s pieces=%d", ticket.trainer, len(lost))
        kept = [report for report in ticket.finished if self.pservers.counts(report)]
        return replace(ticket, finished=kept, returned=[*ticket.returned, *lost]), lost

    def _work_reply(
        self, work: Work, ticket: TasksTicket, lost: list[ReturnedTask], *, is_last: bool
    ) -> TasksReply | None:
        """What the trainer is told, or None: it waits."""
        given, outcome, retry_after_s = self._hand_out(work, ticket)
        self._leave_if_idle(work, ticket.trainer)
        if not given and outcome == "none_now" and ticket.want and not is_last:
            return None
        if given:
            self.outbox.revision += 1
        if outcome == "epochs_done":
            if self.has_former_model:
                # Nobody needs to declare the model again: what the checkpoint has is looked at, and the job ends.
                assert self.declaration.model is not None
                self.adopt_model(self.declaration.model.declaration)
            self.ending.look(work, self._serving_members)
        is_ending = outcome == "epochs_done" and not self.ending.may_end
        if is_ending:
            outcome, retry_after_s = "none_now", _END_RETRY_S
        return TasksReply(
            assignments=given,
            outcome=outcome,
            retry_after_s=retry_after_s,
            member=self._member_of(ticket.trainer),
            pservers=self._final_pservers() if outcome == "epochs_done" else [],
            is_ending=is_ending,
            lost=lost,
            epoch=work.queue.epoch,
        )

    def _hand_out(self, work: Work, ticket: TasksTicket) -> tuple[list[Assignment], str, float]:
        """As ``Work.hand_out``; of a deterministic run, no more than the trainer may have now."""
        members, count = self.members, len(self.trainers)
        if members is None or not members.is_deterministic or not ticket.want or work.is_stopped:
            return work.hand_out(ticket, self._now, count)
        if self._schedule.begins(work.queue, ticket.trainer, self.trainers.keys(), self._now):
            members.leave_all()
            self.outbox.is_stirred = True
        want = self._schedule.pieces_for(work.queue, ticket.trainer, ticket.want)
        if not want:
            return [], "none_now", _SCHEDULE_RETRY_S
        return work.hand_out(replace(ticket, want=want), self._now, count)

    def _leave_if_idle(self, work: Work, trainer: str) -> None:
        """Nobody waits for a trainer that has no work."""
        if self.members is not None and not work.queue.holds(trainer):
            self.members.leave(trainer)

    def _member_of(self, trainer: str) -> int:
        return 0 if self.members is None else self.members.member_of(trainer)

    def _final_pservers(self) -> list[int]:
        """The processes that were looked at before trainers are told that all is done."""
        count = self._settings.pserver_count
        return [] if self.members is None else [self.pservers.present.get(i, 0) for i in range(count)]

    def _evaluation_work(self, ticket: TasksTicket) -> TasksReply:
        """As ``_work_reply``, for an evaluation; does not wait for work."""
        self._require_trainer(ticket)
        found = self.evaluations.find(ticket.evaluation)
        work = found.work
        given: list[Assignment] = []
        lost: list[ReturnedTask] = []
        outcome, retry_after_s = "epochs_done", 0.0
        if work is None and not found.is_done:
            raise NotReadyError(f"the files of the evaluation {ticket.evaluation!r} are looked at again")
        if work is not None:
            before = work.queue.revision
            lost = work.take_reports(ticket, self._now)
            given, outcome, retry_after_s = work.hand_out(ticket, self._now, len(self.trainers))
            self.evaluations.settle(found)
            if work.queue.revision != before:
                self.touch()
        return TasksReply(
            assignments=given,
            outcome=outcome,
            retry_after_s=retry_after_s,
            member=self._member_of(ticket.trainer),
            lost=lost,
            metrics=found.metrics if outcome == "epochs_done" else {},
            failed=found.failed,
        )

    def _join_asked(self, event: events.JoinAsked) -> None:
        request = event.request

        def look(is_last: bool) -> JoinReply | None:
            self._require_trainer(request)
            members = self.members
            if members is None:
                raise NotReadyError("the model is not declared yet")
            if not self._holds_work(request.trainer, request.generation, request.attempt):
                return JoinReply(member=0, holds_work=False)
            self._propose(members, request.trainer, request.generation)
            member = members.member_of(request.trainer)
            if member:
                return JoinReply(member=member, mode=members.membership.mode.to_json())
            if not is_last and request.wait_s:
                return None
            return JoinReply(member=0, waiting_for=members.membership.waiting_for(request.trainer) or _NOT_ALL)

        self._look_at(_Waiting(event.call, look), is_last=False)

    def _holds_work(self, trainer: str, generation: int, attempt: int | None) -> bool:
        if self.work is None:
            return False
        if attempt is None:
            return self.work.queue.holds(trainer)
        return self.work.queue.is_current(trainer, attempt, generation)

    def _propose(self, members: Members, trainer: str, generation: int) -> None:
        if not members.is_deterministic:
            members.perform(members.membership.join(trainer, generation))
        elif not members.member_of(trainer):
            assert self.work is not None, "who holds work has it of a queue"
            joins = self._schedule.joins(self.work.queue, trainer, generation, self.trainers, self._now)
            members.perform(members.membership.join_together(joins))

    def _mode_asked(self, event: events.ModeAsked) -> None:
        is_proposed = False

        def look(is_last: bool) -> msgspec.Struct | None:
            nonlocal is_proposed
            model = self.declaration.model
            members = self.members
            if members is None or model is None:
                raise NotReadyError("no trainer has declared the model yet: give job.parameters the mode to begin with")
            mode = None if event.request.mode is None else Mode.from_json(event.request.mode)
            if mode is not None and mode != members.membership.mode and not is_proposed:
                if self.is_over:
                    raise JobFailedError("all epochs are done: there is no round left to change the mode at")
                self.outbox.note("mode changes from=%s to=%s", members.membership.mode, mode)
                self.declaration = replace(self.declaration, model=replace(model, mode=mode.to_json()))
                members.switch(mode)
            is_proposed = True
            if members.membership.late_to_switch and not is_last and event.request.wait_s:
                return None
            return members.mode_reply()

        self._look_at(_Waiting(event.call, look), is_last=False)

    def _checkpoint_asked(self, event: events.CheckpointAsked) -> None:
        request = event.request
        ticket = request.ticket

        def look(is_last: bool) -> CheckpointReply | None:
            nonlocal ticket
            checkpointing = self.checkpointing
            checkpoints = checkpointing.checkpoints
            if not checkpointing.is_kept:
                raise UsageError("this job keeps no checkpoints: start it with --checkpoint URL")
            if self.declaration.model is None or self.has_former_model:
                raise NotReadyError("no trainer has declared the model yet")
            if ticket is None and event.is_last:
                # The one at the end of the job will have everything.
                ticket = self.ending.final_ticket
            if ticket is None:
                ask = checkpoints.request_last if event.is_last else checkpoints.request
                ticket = ask(request.reason)
                self._tick_checkpoints()
            is_complete = checkpoints.is_satisfied(ticket)
            is_hopeless = event.is_last and checkpoints.is_over(ticket)
            if not (is_complete or is_hopeless or is_last) and request.wait_s:
                return None
            return CheckpointReply(
                ticket=ticket, complete=is_complete, latest=checkpointing.latest, trouble=checkpoints.trouble
            )

        self._look_at(_Waiting(event.call, look), is_last=False)

    def _failed_work_asked(self, event: events.FailedWorkAsked) -> None:
        def look(_: bool) -> FailedTasksReply:
            if self.work is None:
                raise NotReadyError("no trainer has declared the dataset yet")
            request, queue = event.request, self.work.queue
            change = queue.drop_failed if event.is_dropped else queue.retry_failed
            count = change(FailedSelector(request.epoch, request.task, request.batch))
            self.outbox.note("failed tasks were changed by hand batches=%d request=%s", count, request)
            self.touch()
            return FailedTasksReply(batches=count)

        self._look_at(_Waiting(event.call, look), is_last=False)

    def _stop_asked(self, event: events.StopAsked) -> None:
        def look(_: bool) -> msgspec.Struct:
            if not self.is_stopped:
                self.outbox.note("a trainer stops the job")
                self.is_stopped = True
                if self.work is not None:
                    self.work.is_stopped = True
                self.touch()
            return out.Done()

        self._look_at(_Waiting(event.call, look), is_last=False)

    # time

    def _time_passed(self, _: events.TimePassed) -> None:
        if self.work is not None and self.work.tick(self._now):
            self.touch()
        if self.evaluations.tick(self._now):
            self.touch()
        for index, generation in self.pservers.present.items():
            self._look_at_pserver(index, generation)
        self.ending.look(self.work, self._serving_members)
        self._tick_checkpoints()
        self.outbox.is_stirred = True

    def _tick_checkpoints(self) -> None:
        members = self._serving_members
        if members is not None:
            self.checkpointing.tick(self._now, self.ending.open_rounds(members))

    # pservers

    def _look_at_pserver(self, index: int, generation: int) -> None:
        """A pserver that is settled takes part in checkpoints, unless it is about to go back to one."""
        if (
            self.pservers.present.get(index) == generation
            and self.pservers.is_settled(index, generation)
            and not self.pservers.goes_back(index)
        ):
            self.checkpointing.settled(index, generation, self._now)

    def _control_asked(self, event: events.ControlAsked) -> None:
        self.outbox.effects.append(self._next_control_call(event.index, event.generation))

    def _next_control_call(self, index: int, generation: int) -> out.ControlCall | out.NothingToSay:
        master, plan_hash = self._settings.generation, self.plan_hash
        if self.members is None:
            return out.NothingToSay(index, generation, _IDLE_S)
        if self.pservers.must_end(index, generation):
            reload = ReloadRequest(plan_hash=plan_hash, master_generation=master)
            return out.ControlCall(index, generation, reload, pause_s=_POLL_S, revision=self.revision)
        must_ask, audit = self.pservers.must_be_asked(index, generation)
        pause_s = self.pservers.asked_again_in(index, self._now) if must_ask else _IDLE_S
        if must_ask and not pause_s:
            # Whatever it answers, there may be other things to say before it is asked the next time.
            self.pservers.ask_again(index, self._now + _POLL_S)
            self._repeated_when_asked[index] = 0 if self.work is None else self.work.repeated_count
            return out.ControlCall(index, generation, AppliedRequest(plan_hash=plan_hash), audit)
        if self.work is not None and (epochs := self.pservers.epochs_to_seal(index, generation, self.work.queue)):
            seal = SealRequest(plan_hash=plan_hash, master_generation=master, epochs=epochs)
            return out.ControlCall(index, generation, seal, revision=self.revision)
        if view := self.members.next_view(index, generation, plan_hash):
            return out.ControlCall(index, generation, view, revision=self.revision)
        if order := self.checkpointing.order_for(index, generation, plan_hash):
            return out.ControlCall(index, generation, order, pause_s=_POLL_S, revision=self.revision)
        return out.NothingToSay(index, generation, pause_s)

    def _view_answered(self, event: events.ViewAnswered) -> None:
        if self.members is not None:
            self.members.view_answered(event.index, event.generation, event.reply)

    def _view_lost(self, event: events.ViewLost) -> None:
        if self.members is not None:
            self.members.view_lost(event.index, event.generation, event.serial)

    def _applied_answered(self, event: events.AppliedAnswered) -> None:
        index, generation, reply = event.index, event.generation, event.reply
        checkpoints = self.checkpointing.checkpoints
        if reply.lacks_election is not None:
            self.pservers.ask_again(index, self._now + _LACKING_S)
            election, may_be_saved = reply.lacks_election, checkpoints.may_be_saved
            step = self.pservers.lacks(index, generation, election, may_be_saved=may_be_saved)
            if step is not None:
                self.ending.lost()
                self.outbox.effects.append(out.DeleteElection(step, self.revision))
            return
        repeated = 0 if self.work is None else self.work.repeated_count
        if event.audit is not None and repeated != self._repeated_when_asked.get(index):
            # What was done again meanwhile is not in an answer that is older: the pserver is asked once more.
            return
        queue = None if self.work is None else self.work.queue
        before = self.revision
        if self.pservers.answered(index, generation, event.audit, reply, queue):
            checkpoints.rejected(reply.rejected)
        if self.revision != before:
            self.ending.lost()
        self._look_at_pserver(index, generation)
        # Who waits for the end of the job may have waited for this answer.
        self.outbox.is_stirred = True

    def _snapshot_answered(self, event: events.SnapshotAnswered) -> None:
        self.checkpointing.answered(event.index, event.generation, event.reply, self._now)

    def _status_told(self, event: events.StatusTold) -> None:
        known = [each for each in event.replies if each is not None]
        self.pservers.highest_version = max((each.highest_version for each in known), default=0)
        for index, reply in enumerate(event.replies):
            if reply is not None and reply.is_draining and index in self.pservers.present:
                self.checkpointing.is_draining(index)

    # the checkpoints' storage

    def _manifest_written(self, event: events.ManifestWritten) -> None:
        self.checkpointing.perform(self.checkpointing.checkpoints.manifest_written(event.number, event.checksum))

    def _manifest_failed(self, event: events.ManifestFailed) -> None:
        checkpoints = self.checkpointing.checkpoints
        self.checkpointing.perform(checkpoints.manifest_failed(event.number, event.reason, self._now))

    def _pointer_stored(self, event: events.PointerStored) -> None:
        self.checkpointing.perform(self.checkpointing.checkpoints.pointer_moved(event.number, self._now))
        self.outbox.note("checkpoint complete number=%d", event.number)
        self.outbox.is_stirred = True

    # storage

    def encode(self) -> dict[str, bytes]:
        """What a later master goes on from, by name; all of it belongs into one transaction.

        ``declaration``, ``queue``, ``failures``, ``evaluations``, ``membership``, ``recovery`` (of pservers),
        ``checkpoints`` and ``stopped``; what there is nothing of is left out.
        """
        values: dict[str, bytes] = {}
        if self.members is not None:
            values["membership"] = self.members.membership.encode()
            values["recovery"] = self.pservers.encode()
        if self.checkpointing.is_kept:
            values["checkpoints"] = self.checkpointing.checkpoints.encode()
        if self.work is not None:
            values["queue"], values["failures"] = self.work.queue.encode_parts()
        if self.is_stopped:
            values["stopped"] = b"{}"
        if self.evaluations:
            values["evaluations"] = self.evaluations.encode()
        if self.declaration.dataset is not None or self.declaration.model is not None:
            if self._encoded_declaration[0] is not self.declaration:
                self._encoded_declaration = (self.declaration, encode(self.declaration))
            values["declaration"] = self._encoded_declaration[1]
        return values

    def check(self) -> None:
        """Assert every invariant of what it is made of."""
        if self.work is not None:
            self.work.queue.check()
        if self.members is not None:
            self.members.membership.check()
        self.checkpointing.checkpoints.check()
        self.pservers.check()
