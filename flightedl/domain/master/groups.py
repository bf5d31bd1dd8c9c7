"""Handles requests from a group's ranks. ``domain.groups`` decides; this module logs the decisions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from flightedl.domain.groups.incarnation import OVER, RUNNING, Group
from flightedl.domain.master import effects as out
from flightedl.errors import NotReadyError, UsageError
from flightedl.messages.base import decode
from flightedl.messages.groups import (
    GroupLeaveRequest,
    GroupPlaceReply,
    GroupPlaceRequest,
    GroupRecord,
    GroupStartReply,
    GroupStartRequest,
)

GroupRequest = GroupStartRequest | GroupPlaceRequest | GroupLeaveRequest

_Result = TypeVar("_Result")


class GroupRequests:
    """Answers requests from the ranks of a group.

    Args:
        attempts_limit: Number of the group's starts that the same records may end.
        stored: The group that a predecessor stored; None if there was none.
        outbox: Receives the notes.
    """

    def __init__(self, attempts_limit: int, stored: bytes | None, outbox: out.Outbox) -> None:
        self.group = Group(attempts_limit, None if stored is None else decode(stored, GroupRecord))
        self._outbox = outbox

    def answer(
        self, request: GroupRequest, now: float, *, has_dataset: bool, has_model: bool, is_last: bool
    ) -> GroupStartReply | GroupPlaceReply | out.Done | None:
        """Return the answer to a request, or None if the request must wait.

        Raises:
            NotReadyError: no dataset is declared.
            FlightedlError: as in ``Group``.
        """
        if isinstance(request, GroupPlaceRequest):
            return self._act(lambda group: group.at(request, now))
        if isinstance(request, GroupLeaveRequest):
            self._act(lambda group: group.leave(request))
            return out.Done()
        if not has_dataset:
            raise NotReadyError("no rank has declared the dataset yet")
        if has_model:
            raise UsageError("a job with parameters cannot have a group, because its trainers share them: omit group=")
        if not is_last and request.wait_s and self.group.waits(request):
            return None
        reply = self._act(lambda group: group.enter(request))
        return reply if reply.incarnation or is_last or not request.wait_s else None

    def gone(self, trainer: str, generation: int) -> None:
        self._act(lambda group: group.gone(trainer, generation))

    def forget_the_dead(self, trainers: Mapping[str, int]) -> None:
        """Record the ranks that died while no master was running. ``trainers`` are the trainers that are alive."""
        for each in tuple(self.group.record.ranks.values()):
            if trainers.get(each.trainer) != each.generation:
                self.gone(each.trainer, each.generation)

    def _act(self, act: Callable[[Group], _Result]) -> _Result:
        before = self.group.record
        try:
            return act(self.group)
        finally:
            after = self.group.record
            if after is not before:
                self._outbox.touch()
                note = self._outbox.note
                if after.phase == RUNNING != before.phase:
                    text = "a group runs incarnation=%d ranks=%d start=%d"
                    note(out.Kind.GROUP_RUNS, "", text, after.incarnation, after.size, after.starts)
                if before.phase == RUNNING and (after.phase == OVER or after.incarnation != before.incarnation):
                    text = "a group has ended and must start again incarnation=%d"
                    note(out.Kind.GROUP_OVER, "", text, before.incarnation)
                for each in after.convicted[len(before.convicted) :]:
                    text = "records are excluded because they ended the group starts=%d records=%s error=%s"
                    values = each.deaths, [tuple(piece) for piece in each.pieces], each.error
                    note(out.Kind.WORK_QUARANTINED, "", text, *values, is_warning=True)
