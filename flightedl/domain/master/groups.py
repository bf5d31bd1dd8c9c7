"""Requests of a group's ranks: asked of ``domain.groups``, with the news of them for people."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from flightedl.domain.groups.incarnation import OVER, RUNNING, Group
from flightedl.domain.master import effects as out
from flightedl.domain.master.state import MasterState
from flightedl.errors import NotReadyError, UsageError
from flightedl.messages.groups import (
    GroupLeaveRequest,
    GroupPlaceReply,
    GroupPlaceRequest,
    GroupStartReply,
    GroupStartRequest,
)

_Result = TypeVar("_Result")


class GroupRequests:
    """Answers to the requests of a group's ranks."""

    def __init__(self, state: MasterState) -> None:
        self._state = state

    def answer(
        self, request: GroupStartRequest | GroupPlaceRequest | GroupLeaveRequest, *, is_last: bool
    ) -> GroupStartReply | GroupPlaceReply | out.Done | None:
        """Return the answer, or None if it has to wait.

        Raises:
            NotReadyError: no dataset is declared.
            FlightedlError: as of ``Group``.
        """
        state = self._state
        if isinstance(request, GroupPlaceRequest):
            return self._act(lambda group: group.at(request, state.now))
        if isinstance(request, GroupLeaveRequest):
            self._act(lambda group: group.leave(request))
            return out.Done()
        if state.work is None:
            raise NotReadyError("no rank has declared the dataset yet")
        if state.declaration.model is not None:
            raise UsageError("a job with parameters has no groups: its trainers share them, so leave group= out")
        reply = self._act(lambda group: group.enter(request))
        return reply if reply.incarnation or is_last or not request.wait_s else None

    def gone(self, trainer: str, generation: int) -> None:
        """Note that the lease of a process has ended."""
        self._act(lambda group: group.gone(trainer, generation))

    def forget_the_dead(self) -> None:
        """Note the ends of processes that died while there was no master."""
        state = self._state
        for each in tuple(state.group.record.ranks.values()):
            if state.trainers.get(each.trainer) != each.generation:
                self.gone(each.trainer, each.generation)

    def _act(self, act: Callable[[Group], _Result]) -> _Result:
        before = self._state.group.record
        try:
            return act(self._state.group)
        finally:
            after = self._state.group.record
            if after is not before:
                self._state.touch()
                note = self._state.outbox.note
                if after.phase == RUNNING != before.phase:
                    text = "a group runs incarnation=%d ranks=%d start=%d"
                    note(out.Kind.GROUP_RUNS, "", text, after.incarnation, after.size, after.starts)
                if before.phase == RUNNING and (after.phase == OVER or after.incarnation != before.incarnation):
                    text = "a group has ended and has to start again incarnation=%d"
                    note(out.Kind.GROUP_OVER, "", text, before.incarnation)
                for each in after.convicted[len(before.convicted) :]:
                    text = "no rank gets these records any more: groups ended there starts=%d records=%s error=%s"
                    values = each.deaths, [tuple(piece) for piece in each.pieces], each.error
                    note(out.Kind.WORK_QUARANTINED, "", text, *values, is_warning=True)
