"""A trainer's membership in the view: when it is asked for, when it is over, and the mode that it begins under.

Rules:

* A membership is taken between two batches only, and begins with values pulled as its member. What tells that it is
  over (a push that was refused, an answer of the master, a lease that ended) makes the trainer forget it; the next
  batch joins again.
* The mode is the one that a membership begins under.
* A trainer joins to work on one attempt. That it does not hold this one says nothing about its other work.

One thread reads and another writes while calls are under way, so ``member`` is read once where it is used twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from flightedl.domain.consistency.modes import Mode
from flightedl.messages.tasks import JoinReply, JoinRequest, TasksReply

#: How long the master may hold the request to join while the pservers agree.
JOIN_WAIT_S = 2.0
_AFTER_ALL = 1 << 62
_WAITING_FOR = "the pservers to agree on this trainer's first round"


class Begun(msgspec.Struct, frozen=True):
    """A batch is begun as this member (0: none), the ``step``-th one under the membership."""

    member: int
    step: int


@dataclass(frozen=True, slots=True)
class Joined:
    """The trainer is a member: pull fresh values, under this mode from now on where it is another one."""

    member: int
    new_mode: Mode | None


@dataclass(frozen=True, slots=True)
class Denied:
    """The attempt is not this trainer's any more."""


@dataclass(frozen=True, slots=True)
class NotYet:
    """Ask again."""

    waiting_for: str


class TrainerMembership:
    """Thread-safe as far as is said above."""

    def __init__(self) -> None:
        #: The membership in the view; 0: none.
        self.member = 0
        #: Of the newest batch; above all others when all epochs are done.
        self.epoch = 0
        #: None: there is nothing to push to, and so nobody to wait for this trainer.
        self._mode: Mode | None = None
        #: Batches begun under the present membership.
        self._steps = 0

    def has_model(self, mode: Mode) -> None:
        """The job has a model, so batches are begun as a member."""
        self._mode = mode

    def lost(self) -> None:
        """Join again before the next batch is handed out."""
        self.member = 0

    def begin_batch(self, epoch: int) -> Begun | None:
        """A batch of this epoch is about to be handed out; None: join first, and have fresh values."""
        # Read once: an answer to another request may end the membership at any time.
        member = self.member
        if member == 0 and self._mode is not None:
            return None
        self._steps += 1
        self.epoch = epoch
        return Begun(member, self._steps)

    @staticmethod
    def join_request(trainer: str, generation: int, attempt: int) -> JoinRequest:
        """Return the request for a membership, to work on this attempt."""
        return JoinRequest(trainer=trainer, generation=generation, attempt=attempt, wait_s=JOIN_WAIT_S)

    def join_answered(self, reply: JoinReply) -> Joined | Denied | NotYet:
        """The master has answered."""
        if not reply.member:
            return NotYet(reply.waiting_for or _WAITING_FOR) if reply.holds_work else Denied()
        self.member, self._steps = reply.member, 0
        # A membership begins under the mode of now: between two batches is where it changes.
        mode = self._mode if reply.mode is None else Mode.from_json(reply.mode)
        is_new = mode != self._mode
        self._mode = mode
        return Joined(reply.member, mode if is_new else None)

    def tasks_answered(self, member_then: int, reply: TasksReply) -> None:
        """An answer to the feed, which was asked when the membership was ``member_then``."""
        if reply.member != member_then and self.member == member_then:
            # A new membership begins with fresh values, so it is taken by joining, between two batches.
            self.member = 0

    def all_done(self) -> None:
        """All epochs are done: what is saved from now on is of none of them."""
        self.epoch = _AFTER_ALL
