"""Work in and out: reports, assignments, and what has failed, for the training data and for evaluations.

A request changes the queue under the lock and is answered when the change is durable, so that no trainer knows of work
that a successor has not heard of.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import msgspec

from flightedl.domain.tasks import TaskQueue
from flightedl.domain.tasks_values import FailedSelector
from flightedl.errors import JobFailedError, NotReadyError
from flightedl.formats.chunks import Chunk
from flightedl.master.dispatch import Dispatch
from flightedl.master.members import Members
from flightedl.master.state import JobState
from flightedl.messages.declarations import DatasetReply, EvaluationDeclaration
from flightedl.messages.tasks import (
    Assignment,
    FailedTasksReply,
    FailedTasksRequest,
    ReturnedTask,
    TasksReply,
    TasksTicket,
)

_log = logging.getLogger(__name__)

#: How soon a trainer asks again that has nothing to do but to hear that all is done.
_END_RETRY_S = 0.1
_LOCKSTEP_RETRY_S = 0.5

#: What a trainer is told, and the chunks of each assignment.
Work = tuple[TasksReply, list[list[Chunk]]]


class Tasks:
    """What trainers ask the master for. Thread-safe.

    Args:
        state: Has the queues.
        members: A trainer without work is no member.
        may_end: Called under the lock: whether trainers may be told that all is done.
    """

    def __init__(self, state: JobState, members: Members, may_end: Callable[[], bool]) -> None:
        self._state = state
        self._members = members
        self._may_end = may_end

    def exchange(self, ticket: TasksTicket, closing: threading.Event) -> Work:
        """Take reports and hand out work; durable before it returns.

        Raises:
            UnregisteredError: the trainer's lease has ended, or ended while it waited.
            JobFailedError: too much has failed, or is missing however often it is done.
            NotReadyError: there is no dataset yet, or etcd cannot be written.
        """
        state = self._state
        if ticket.evaluation:
            return self._evaluation_tasks(ticket)
        deadline = state.clock.now() + ticket.wait_s
        with state.changed:
            state.require_trainer(ticket)
            dispatch = state.dispatch
            if dispatch is None:
                raise NotReadyError("no trainer has declared the dataset yet")
            if state.replay.refusal:
                raise JobFailedError(state.replay.refusal)
            queue = dispatch.queue
            before = queue.revision
            ticket, disbelieved = self._without_lost_work(ticket)
            state.progress.failed(ticket.failed, state.clock.now())
            lost = disbelieved + dispatch.take_reports(ticket, state.clock.now())
            lost += dispatch.take_back_unbegun(ticket, state.clock.now())
            if queue.revision != before:
                # Those who wait for work are woken by reports only: what is handed out gives nobody else any.
                state.touch()
            given, outcome, retry_after_s = self._hand_out(dispatch, ticket)
            while not given and outcome == "none_now" and ticket.want and not closing.is_set():
                self._members.leave_if_idle(ticket.trainer)
                remaining = deadline - state.clock.now()
                if remaining <= 0:
                    break
                state.changed.wait(min(remaining, 0.5))
                state.require_trainer(ticket)
                given, outcome, retry_after_s = self._hand_out(dispatch, ticket)
            self._members.leave_if_idle(ticket.trainer)
            if given:
                state.revision += 1
            if outcome == "epochs_done" and state.has_former_model:
                # Nobody needs to declare the model again: what the checkpoint has is looked at, and the job ends.
                assert state.declaration.model is not None
                state.adopt_model(state.declaration.model.declaration)
            is_ending = outcome == "epochs_done" and not self._may_end()
            if is_ending:
                outcome, retry_after_s = "none_now", _END_RETRY_S
            revision = state.revision
            reply = TasksReply(
                assignments=given,
                outcome=outcome,
                retry_after_s=retry_after_s,
                member=self._members.member_of(ticket.trainer),
                pservers=self._final_pservers() if outcome == "epochs_done" else [],
                is_ending=is_ending,
                lost=lost,
                epoch=queue.epoch,
            )
        state.wait_durable(revision)
        return reply, [dispatch.dataset.layout.chunks_of(assignment.task) for assignment in given]

    def _final_pservers(self) -> list[int]:
        """The processes that were looked at before trainers are told that all is done."""
        state = self._state
        return [] if state.membership is None else [state.pservers.get(i, 0) for i in range(state.pserver_count)]

    def _hand_out(self, dispatch: Dispatch, ticket: TasksTicket) -> tuple[list[Assignment], str, float]:
        """As ``Dispatch.hand_out``; in lockstep, no more than the trainer may have now."""
        lockstep, now = self._members.lockstep, self._state.clock.now()
        if lockstep is None or not lockstep.is_on or not ticket.want or dispatch.is_stopped:
            return dispatch.hand_out(ticket, now, len(self._state.trainers))
        if lockstep.begins(ticket.trainer):
            self._members.leave_all()
            self._state.changed.notify_all()
        want = lockstep.pieces_for(ticket.trainer, ticket.want)
        if not want:
            return [], "none_now", _LOCKSTEP_RETRY_S
        return dispatch.hand_out(msgspec.structs.replace(ticket, want=want), now, len(self._state.trainers))

    def stop(self) -> None:
        """Hand out no more training data, for good: a trainer says that the job is to end. Durable before it returns.

        Raises:
            NotReadyError: etcd cannot be written.
        """
        state = self._state
        with state.changed:
            if not state.is_stopped:
                _log.info("a trainer stops the job")
                state.stop()
            revision = state.revision
        state.wait_durable(revision)

    def _without_lost_work(self, ticket: TasksTicket) -> tuple[TasksTicket, list[ReturnedTask]]:
        """Finished work that went with a pserver is given back instead."""
        if self._state.membership is None:
            return ticket, []
        lost = [
            ReturnedTask(epoch=report.epoch, position=report.position, attempt=report.attempt)
            for report in ticket.finished
            if not self._state.replay.counts(report)
        ]
        if not lost:
            return ticket, []
        _log.info("finished work was lost with a pserver trainer=%s pieces=%d", ticket.trainer, len(lost))
        kept = [report for report in ticket.finished if self._state.replay.counts(report)]
        return msgspec.structs.replace(ticket, finished=kept, returned=[*ticket.returned, *lost]), lost

    def declare_evaluation(self, request: EvaluationDeclaration) -> DatasetReply:
        """First declaration of a name wins.

        Raises:
            DataError: a file cannot be used.
            DeclarationError: the evaluation of this name has another dataset.
            NotReadyError: the index is being built; ask again.
        """
        state = self._state
        with state.changed:
            known = state.evaluations.declared(request)
        if known is not None:
            return known
        indexed = state.evaluations.index(request.name, request)
        with state.changed:
            state.evaluations.begin(request.name, indexed, state.trainers, state.clock.now())
            known = state.evaluations.declared(request)
            state.touch()
            revision = state.revision
        assert known is not None
        state.wait_durable(revision)
        return known

    def _evaluation_tasks(self, ticket: TasksTicket) -> Work:
        """As ``tasks``, for an evaluation; does not wait for work."""
        state = self._state
        with state.changed:
            state.require_trainer(ticket)
            found = state.evaluations.find(ticket.evaluation)
        if found.dispatch is None and not found.is_done:
            indexed = state.evaluations.index(found.name, found.declared)
            with state.changed:
                state.evaluations.begin(found.name, indexed, state.trainers, state.clock.now())
        with state.changed:
            state.require_trainer(ticket)
            dispatch = found.dispatch
            given: list[Assignment] = []
            lost: list[ReturnedTask] = []
            outcome, retry_after_s = "epochs_done", 0.0
            if dispatch is not None:
                before = dispatch.queue.revision
                lost = dispatch.take_reports(ticket, state.clock.now())
                given, outcome, retry_after_s = dispatch.hand_out(ticket, state.clock.now(), len(state.trainers))
                state.evaluations.settle(found)
                if dispatch.queue.revision != before:
                    state.touch()
            reply = TasksReply(
                assignments=given,
                outcome=outcome,
                retry_after_s=retry_after_s,
                member=self._members.member_of(ticket.trainer),
                lost=lost,
                metrics=found.metrics if outcome == "epochs_done" else {},
                failed=found.failed,
            )
            revision = state.revision
        state.wait_durable(revision)
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
        state = self._state
        with state.changed:
            if state.queue is None:
                raise NotReadyError("no trainer has declared the dataset yet")
            count = change(state.queue, FailedSelector(request.epoch, request.task, request.batch))
            state.touch()
            revision = state.revision
        state.wait_durable(revision)
        _log.info("failed tasks were changed by hand batches=%d request=%s", count, request)
        return FailedTasksReply(batches=count)
