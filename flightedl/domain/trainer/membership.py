"""A trainer's membership in the view: when to join, when the membership is over, and which mode it has.

Rules:

* A membership begins only between two batches, with values pulled for it. At any sign that the membership is over (a
  rejected push, an answer of the master, a lost lease), the trainer drops it, and joins again for the next batch.
* A membership keeps the mode with which it began.
* A trainer joins in order to work on an attempt. If it loses this attempt before it has joined, it may still hold
  others.

While calls are in flight, one thread writes ``member`` and another reads it, so methods read it only once.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from flightedl.domain.consistency.modes import Mode
from flightedl.messages.tasks import JoinReply, JoinRequest, TasksReply

#: Seconds for which the master may hold a request to join while the pservers come to an agreement.
JOIN_WAIT_S = 2.0
#: Epoch of a trainer whose job has no more epochs.
AFTER_ALL = 1 << 62
_WAITING_FOR = "the pservers to agree on this trainer's first round"


class Begun(msgspec.Struct, frozen=True):
    """A batch begins as number ``step`` of this membership (0 if there is no membership)."""

    member: int
    step: int


@dataclass(frozen=True, slots=True)
class Joined:
    """The trainer is a member. Pull current values, and use ``new_mode`` if it is given."""

    member: int
    new_mode: Mode | None


@dataclass(frozen=True, slots=True)
class Denied:
    """The trainer no longer holds the attempt for which it wanted to join."""


@dataclass(frozen=True, slots=True)
class NotYet:
    """Request the membership again."""

    waiting_for: str


class TrainerMembership:
    """A trainer's membership. The module's docstring describes the limits of its thread safety."""

    def __init__(self) -> None:
        #: Id of the membership in the view; 0 if there is none.
        self.member = 0
        #: Epoch of the newest batch. When all epochs are done, this number is higher than any epoch.
        self.epoch = 0
        #: None if there is no model, so that no membership is needed.
        self._mode: Mode | None = None
        #: Number of batches begun under the current membership.
        self._steps = 0

    def has_model(self, mode: Mode) -> None:
        """Begin batches only as a member from now on, because the job has a model."""
        self._mode = mode

    def lost(self) -> None:
        """Join again before the next batch is handed out."""
        self.member = 0

    def begin_batch(self, epoch: int) -> Begun | None:
        """Begin a batch of this epoch. None if the trainer must join and pull values first."""
        # An answer to a different request may end the membership at any time.
        member = self.member
        if member == 0 and self._mode is not None:
            return None
        self._steps += 1
        self.epoch = epoch
        return Begun(member, self._steps)

    @staticmethod
    def join_request(trainer: str, generation: int, attempt: int) -> JoinRequest:
        """Return the request to join in order to work on this attempt."""
        return JoinRequest(trainer=trainer, generation=generation, attempt=attempt, wait_s=JOIN_WAIT_S)

    def join_answered(self, reply: JoinReply) -> Joined | Denied | NotYet:
        if not reply.member:
            return NotYet(reply.waiting_for or _WAITING_FOR) if reply.holds_work else Denied()
        self.member, self._steps = reply.member, 0
        # The mode may have changed since the last membership.
        mode = self._mode if reply.mode is None else Mode.from_json(reply.mode)
        is_new = mode != self._mode
        self._mode = mode
        return Joined(reply.member, mode if is_new else None)

    def tasks_answered(self, member_then: int, reply: TasksReply) -> None:
        """Handle an answer to a request that the feed sent during membership ``member_then``."""
        if reply.member != member_then and self.member == member_then:
            # A new membership requires current values, so the trainer joins between two batches.
            self.member = 0

    def all_done(self) -> None:
        """Record that all epochs are done. Models saved after this belong to no epoch."""
        self.epoch = AFTER_ALL
