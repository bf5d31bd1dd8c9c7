"""The requests of trainers and people: what they are answered, and which of them wait.

A request that has to wait (for work, to become a member, for a mode to be agreed, for a checkpoint) waits in here. It
is looked at again whenever something has changed that it may wait for, and when its time is up (``WaitEnded``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from flightedl.domain.consistency.modes import Mode
from flightedl.domain.master import effects as out
from flightedl.domain.master import events
from flightedl.domain.master.declaring import Declaring
from flightedl.domain.master.epoch_ends import EpochEnds
from flightedl.domain.master.groups import GroupRequests
from flightedl.domain.master.members import Members
from flightedl.domain.master.state import MasterState
from flightedl.domain.master.work import Work
from flightedl.domain.queue.values import FailedSelector
from flightedl.errors import FlightedlError, JobFailedError, NotReadyError, UnregisteredError, UsageError
from flightedl.messages.base import Sender
from flightedl.messages.checkpoints import CheckpointReply, CheckpointRequest
from flightedl.messages.declarations import DatasetDeclaration, EvaluationDeclaration, ModelDeclaration
from flightedl.messages.groups import GroupLeaveRequest, GroupPlaceRequest, GroupStartRequest
from flightedl.messages.tasks import (
    MOMENT_S,
    Assignment,
    DroppedTasksRequest,
    FailedTasksReply,
    FailedTasksRequest,
    JoinReply,
    JoinRequest,
    ModeRequest,
    ReturnedTask,
    StopRecord,
    StopRequest,
    TasksReply,
    TasksTicket,
)

#: How soon a trainer asks again that has nothing to do but to hear that all is done.
_END_RETRY_S = 0.1
_SCHEDULE_RETRY_S = 0.5
#: Who joins as an epoch begins starts so many rounds later than the others, which do not wait until that is agreed.
_MARGIN = 2
_NOT_ALL = "the other trainers, to begin the epoch together (deterministic=True)"


#: Takes whether a request's time is up, and gives the answer or None.
_Look = Callable[[bool], msgspec.Struct | None]


@dataclass(slots=True)
class _Waiting:
    """A request that is not answered yet."""

    call: int
    look: _Look


class Requests:
    """Answers requests, at once or later."""

    def __init__(self, state: MasterState, declaring: Declaring) -> None:
        self._state = state
        self._waiting: dict[int, _Waiting] = {}
        self._epoch_ends = EpochEnds()
        self.groups = GroupRequests(state)
        self._looks: Mapping[type, Callable[[Any], _Look]] = {
            TasksTicket: self._work,
            JoinRequest: self._join,
            ModeRequest: self._mode,
            FailedTasksRequest: self._failed_work,
            DroppedTasksRequest: self._failed_work,
            StopRequest: self._stop,
            **dict.fromkeys((GroupStartRequest, GroupPlaceRequest, GroupLeaveRequest), self._of_group),
            DatasetDeclaration: lambda declared: lambda _: declaring.dataset(declared) or out.Undeclared(),
            ModelDeclaration: lambda declared: lambda _: declaring.model(declared) or out.Undeclared(),
            EvaluationDeclaration: lambda declared: lambda _: declaring.evaluation(declared) or out.Undeclared(),
        }

    def asked(self, event: events.Asked) -> None:
        """Answer a request, or let it wait."""
        request = event.request
        if isinstance(request, CheckpointRequest):
            look = self._checkpoint(request, may_give_up=event.is_last)
        else:
            look = self._looks[type(request)](request)
        self._look_at(_Waiting(event.call, look), is_last=False)

    def trainer_gone(self, trainer: str) -> None:
        """A trainer's lease has ended; what waits of it is answered when it is looked at."""
        self._epoch_ends.gone(trainer)

    def look_at_all(self) -> None:
        for waiting in tuple(self._waiting.values()):
            self._look_at(waiting, is_last=False)

    def _look_at(self, waiting: _Waiting, *, is_last: bool) -> None:
        """Answer a request if that is possible, or its time is up."""
        state = self._state
        try:
            reply: msgspec.Struct | FlightedlError | None = waiting.look(is_last)
        except FlightedlError as error:
            reply = error
        if reply is None:
            assert not is_last, "a request whose time is up is answered"
            self._waiting[waiting.call] = waiting
        else:
            self._waiting.pop(waiting.call, None)
            revision = 0 if isinstance(reply, FlightedlError) else state.revision
            state.outbox.effects.append(out.Answer(waiting.call, reply, revision))

    def wait_ended(self, event: events.WaitEnded) -> None:
        if event.call in self._waiting:
            self._look_at(self._waiting[event.call], is_last=True)

    def _work(self, ticket: TasksTicket) -> _Look:
        lost: list[ReturnedTask] | None = None

        def look(is_last: bool) -> TasksReply | None:
            nonlocal lost
            if ticket.evaluation:
                return self._evaluation_work(ticket)
            self.require_trainer(ticket)
            work = self._training_work(ticket)
            lost = self._take_reports(work, ticket) if lost is None else lost
            return self._work_reply(work, ticket, lost, is_last=is_last or not ticket.wait_s)

        return look

    def _training_work(self, ticket: TasksTicket) -> Work:
        state = self._state
        if state.work is None:
            raise NotReadyError("no trainer has declared the dataset yet")
        if state.pservers.refusal:
            raise JobFailedError(state.pservers.refusal)
        if state.group.has_started:
            raise UsageError("the data of this job goes to a group: give job.dataset the same group= in all processes")
        if ticket.want:
            state.ending.work_asked(state.now)
        elif state.ending.unfinished:
            raise UsageError(state.ending.unfinished)
        return state.work

    def _take_reports(self, work: Work, ticket: TasksTicket) -> list[ReturnedTask]:
        """What the ticket reports becomes part of the state; what the trainer has to drop comes back."""
        state = self._state
        before = work.queue.revision
        if state.members is not None:
            state.members.membership.note_round(ticket.trainer, ticket.round)
            self._epoch_ends.asked(ticket)
        ticket, disbelieved = self._without_lost_work(ticket)
        lost = disbelieved + work.take_reports(ticket, state.now)
        lost += work.take_back_unbegun(ticket, state.now)
        state.checkpointing.checkpoints.tasks_finished(work.take_finished())
        if work.queue.revision != before:
            # Those who wait for work are looked at after reports only: what is handed out gives nobody else any.
            state.touch()
        return lost

    def _without_lost_work(self, ticket: TasksTicket) -> tuple[TasksTicket, list[ReturnedTask]]:
        """Finished work that went with a pserver is given back instead."""
        state = self._state
        if state.members is None:
            return ticket, []
        lost = [
            ReturnedTask(epoch=report.epoch, position=report.position, attempt=report.attempt)
            for report in ticket.finished
            if not state.pservers.counts(report)
        ]
        if not lost:
            return ticket, []
        text = "finished work was lost with a pserver trainer=%s pieces=%d"
        state.outbox.note(out.Kind.WORK_LOST, ticket.trainer, text, ticket.trainer, len(lost))
        kept = [report for report in ticket.finished if state.pservers.counts(report)]
        return replace(ticket, finished=kept, returned=[*ticket.returned, *lost]), lost

    def _work_reply(
        self, work: Work, ticket: TasksTicket, lost: list[ReturnedTask], *, is_last: bool
    ) -> TasksReply | None:
        """Decide what the trainer gets, apply what follows from that, and reply; None: it waits."""
        given, outcome, retry_after_s = self._hand_out(work, ticket)
        waits = not given and outcome == "none_now" and ticket.want > 0 and not is_last
        self._apply_handed_out(work, ticket, given, is_over=outcome == "epochs_done", waits=waits)
        return None if waits else self._reply_to(work, ticket, lost, given, outcome, retry_after_s)

    def _apply_handed_out(
        self, work: Work, ticket: TasksTicket, given: list[Assignment], *, is_over: bool, waits: bool
    ) -> None:
        """If the trainer got nothing, let it leave, else let it join with its work. Then check if the job has ended."""
        state = self._state
        is_moment = waits and ticket.wait_s <= MOMENT_S
        if not (is_moment and self._epoch_ends.should_stay(work.queue, ticket, state.now)):
            self._leave_if_idle(work, ticket.trainer)
        if given:
            self._join_with(ticket, given[0])
            state.outbox.revision += 1
        if is_over:
            if state.has_former_model:
                # Nobody needs to declare the model again: what the checkpoint has is looked at, and the job ends.
                assert state.declaration.model is not None
                state.adopt_model(state.declaration.model.declaration)
            state.look_at_end()

    def _reply_to(
        self,
        work: Work,
        ticket: TasksTicket,
        lost: list[ReturnedTask],
        given: list[Assignment],
        outcome: str,
        retry_after_s: float,
    ) -> TasksReply:
        members = self._state.members
        if is_ending := outcome == "epochs_done" and not self._state.ending.may_end:
            outcome, retry_after_s = "none_now", _END_RETRY_S
        has_none_left = len(given) < ticket.want and not (members is not None and members.is_deterministic)
        ahead = work.promise(ticket.trainer) if has_none_left else []
        self._epoch_ends.told_ahead(ticket, ahead)
        return TasksReply(
            assignments=given,
            outcome=outcome,
            ahead=ahead,
            retry_after_s=retry_after_s,
            member=self._member_of(ticket.trainer),
            pservers=self._final_pservers() if outcome == "epochs_done" else [],
            is_ending=is_ending,
            lost=lost,
            epoch=work.queue.epoch,
        )

    def _hand_out(self, work: Work, ticket: TasksTicket) -> tuple[list[Assignment], str, float]:
        """As ``Work.hand_out``; of a deterministic run, no more than the trainer may have now."""
        state = self._state
        members, count = state.members, len(state.trainers)
        if members is None or not members.is_deterministic or not ticket.want or work.queue.is_stopped:
            return work.hand_out(ticket, state.now, count)
        if state.schedule.begins(work.queue, ticket.trainer, state.trainers.keys(), state.now):
            members.leave_all()
            state.outbox.is_stirred = True
        want = state.schedule.pieces_for(work.queue, ticket.trainer, ticket.want)
        if not want:
            return [], "none_now", _SCHEDULE_RETRY_S
        return work.hand_out(replace(ticket, want=want), state.now, count)

    def _leave_if_idle(self, work: Work, trainer: str) -> None:
        """Nobody waits for a trainer that has no work."""
        state = self._state
        if state.members is not None and not work.queue.holds(trainer):
            state.members.leave(trainer)

    def _join_with(self, ticket: TasksTicket, first: Assignment) -> None:
        """Rounds wait again for a trainer that had left, from when it gets what it has read ahead."""
        members = self._state.members
        if self._epoch_ends.joins_with(ticket, first) and members is not None and not members.is_deterministic:
            members.perform(members.membership.join(ticket.trainer, ticket.generation, _MARGIN))

    def _member_of(self, trainer: str) -> int:
        state = self._state
        return 0 if state.members is None else state.members.member_of(trainer)

    def _final_pservers(self) -> list[int]:
        """The processes that were looked at before trainers are told that all is done."""
        state = self._state
        count = state.settings.pserver_count
        return [] if state.members is None else [state.pservers.present.get(i, 0) for i in range(count)]

    def _evaluation_work(self, ticket: TasksTicket) -> TasksReply:
        """As ``_work_reply``, for an evaluation; does not wait for work."""
        state = self._state
        self.require_trainer(ticket)
        state.evaluations.enter(ticket.life)
        found = state.evaluations.find(ticket.evaluation)
        work = found.work
        given: list[Assignment] = []
        lost: list[ReturnedTask] = []
        outcome, retry_after_s = "epochs_done", 0.0
        if work is None and not found.is_done:
            raise NotReadyError(f"the files of the evaluation {ticket.evaluation!r} are looked at again")
        if work is not None:
            before = work.queue.revision
            lost = work.take_reports(ticket, state.now)
            given, outcome, retry_after_s = work.hand_out(ticket, state.now, len(state.trainers))
            state.evaluations.settle(found)
            if work.queue.revision != before:
                state.touch()
        return TasksReply(
            assignments=given,
            outcome=outcome,
            retry_after_s=retry_after_s,
            member=self._member_of(ticket.trainer),
            lost=lost,
            metrics=found.metrics if outcome == "epochs_done" else {},
            failed=found.failed,
        )

    def _join(self, request: JoinRequest) -> _Look:
        state = self._state

        def look(is_last: bool) -> JoinReply | None:
            self.require_trainer(request)
            members = state.members
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

        return look

    def _holds_work(self, trainer: str, generation: int, attempt: int | None) -> bool:
        state = self._state
        if state.work is None:
            return False
        if attempt is None:
            return state.work.queue.holds(trainer)
        return state.work.queue.is_current(trainer, attempt, generation)

    def _propose(self, members: Members, trainer: str, generation: int) -> None:
        state = self._state
        if not members.is_deterministic or state.is_stopped:
            members.perform(members.membership.join(trainer, generation))
        elif not members.member_of(trainer):
            assert state.work is not None, "who holds work has it of a queue"
            joins = state.schedule.joins(state.work.queue, trainer, generation, state.trainers, state.now)
            members.perform(members.membership.join_together(joins))

    def _mode(self, request: ModeRequest) -> _Look:
        state = self._state
        is_proposed = False

        def look(is_last: bool) -> msgspec.Struct | None:
            nonlocal is_proposed
            model = state.declaration.model
            members = state.members
            if members is None:
                raise NotReadyError("no trainer has declared the model yet: give job.parameters the mode to begin with")
            assert model is not None, "who is a member works on a model"
            mode = None if request.mode is None else Mode.from_json(request.mode)
            if mode is not None and mode != members.membership.mode and not is_proposed:
                if state.is_over:
                    raise JobFailedError("all epochs are done: there is no round left to change the mode at")
                text = "mode changes from=%s to=%s"
                state.outbox.note(out.Kind.CHANGED_BY_HAND, "", text, members.membership.mode, mode)
                state.declaration = replace(state.declaration, model=replace(model, mode=mode.to_json()))
                members.switch(mode)
            is_proposed = True
            if members.membership.late_to_switch and not is_last and request.wait_s:
                return None
            return members.mode_reply()

        return look

    def _checkpoint(self, request: CheckpointRequest, *, may_give_up: bool) -> _Look:
        state = self._state
        ticket = request.ticket

        def look(is_last: bool) -> CheckpointReply | None:
            nonlocal ticket
            checkpointing = state.checkpointing
            checkpoints = checkpointing.checkpoints
            if not checkpointing.is_kept:
                raise UsageError("this job keeps no checkpoints: start it with --checkpoint URL")
            if state.declaration.model is None or state.has_former_model:
                raise NotReadyError("no trainer has declared the model yet")
            if ticket is None and may_give_up:
                # The one at the end of the job will have everything.
                ticket = state.ending.final_ticket
            if ticket is None:
                if may_give_up:
                    ticket = checkpoints.request_last(request.reason)
                else:
                    ticket = checkpoints.request(request.reason, is_waited_for=True)
                state.tick_checkpoints()
            is_complete = checkpoints.is_satisfied(ticket)
            is_hopeless = may_give_up and checkpoints.is_over(ticket)
            if not (is_complete or is_hopeless or is_last) and request.wait_s:
                return None
            return CheckpointReply(
                ticket=ticket, complete=is_complete, latest=checkpointing.latest, trouble=checkpoints.trouble
            )

        return look

    def _failed_work(self, request: FailedTasksRequest) -> _Look:
        state = self._state

        def look(_: bool) -> FailedTasksReply:
            if state.work is None:
                raise NotReadyError("no trainer has declared the dataset yet")
            queue = state.work.queue
            change = queue.drop_failed if isinstance(request, DroppedTasksRequest) else queue.retry_failed
            count = change(FailedSelector(request.epoch, request.task, request.batch))
            text = "failed tasks were changed by hand batches=%d request=%s"
            state.outbox.note(out.Kind.CHANGED_BY_HAND, "", text, count, request)
            state.touch()
            return FailedTasksReply(batches=count)

        return look

    def _stop(self, request: StopRequest) -> _Look:
        state = self._state

        def look(_: bool) -> msgspec.Struct:
            self.require_trainer(request)
            if not state.is_stopped:
                text = "trainer %s stops the job: %s"
                who = request.name or request.trainer
                state.outbox.note(out.Kind.JOB_STOPPED, request.trainer, text, who, request.reason)
                state.stop = StopRecord(who=who, reason=request.reason)
                if state.work is not None:
                    state.work.queue.stop()
                state.touch()
            return out.Done()

        return look

    def _of_group(self, request: GroupStartRequest | GroupPlaceRequest | GroupLeaveRequest) -> _Look:
        def look(is_last: bool) -> msgspec.Struct | None:
            self.require_trainer(request)
            return self.groups.answer(request, is_last=is_last)

        return look

    def require_trainer(self, sender: Sender) -> None:
        """Only a trainer whose lease is alive may hold work, or be waited for.

        Asked each time that a request is looked at: what a trainer that is gone is given nobody takes back.

        Raises:
            UnregisteredError: its lease has ended.
            NotReadyError: the master has not seen it yet.
        """
        state = self._state
        if state.trainers.get(sender.trainer) == sender.generation:
            return
        if sender.generation > state.leases_revision:
            raise NotReadyError(f"the master has not seen trainer {sender.trainer} yet")
        raise UnregisteredError(
            f"trainer {sender.trainer} has no lease of generation {sender.generation}: register anew"
        )
