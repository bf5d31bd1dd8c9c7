"""The job's members. This module carries out the effects of ``domain.consistency.membership``.

The module keeps the next view for each pserver. A view is sent only after the corresponding state has been stored. A
successor therefore knows every member that a pserver may have admitted.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from flightedl.domain.consistency.membership import Membership
from flightedl.domain.consistency.membership_values import Admitted, SendView
from flightedl.domain.consistency.membership_values import Effect as MembershipEffect
from flightedl.domain.consistency.modes import Mode
from flightedl.domain.master.effects import Kind, Outbox
from flightedl.messages.control import ViewReply, ViewRequest
from flightedl.messages.tasks import ModeReply


class Members:
    """The membership of a job with a model."""

    def __init__(self, membership: Membership, outbox: Outbox) -> None:
        self.membership = membership
        self._outbox = outbox
        #: Pserver index -> (generation of the process, next view for it).
        self._views: dict[int, tuple[int, ViewRequest]] = {}

    @classmethod
    def of(cls, stored: bytes | None, generation: int, pserver_count: int, mode: Mode, outbox: Outbox) -> Members:
        """Restore a stored membership, or start a new one. ``generation`` is this master's.

        Raises:
            FencedError: a newer master wrote ``stored``.
        """
        if stored is None:
            return cls(Membership(generation, pserver_count, mode=mode), outbox)
        return cls(Membership.restore(stored, generation, pserver_count, mode=mode), outbox)

    def perform(self, effects: Sequence[MembershipEffect]) -> None:
        if not effects:
            return
        self._outbox.touch()
        for effect in effects:
            if isinstance(effect, SendView):
                self._views[effect.index] = (effect.generation, effect.view)
                self._outbox.wake(effect.index)
            elif isinstance(effect, Admitted):
                text = "trainer joined the rounds trainer=%s member=%d"
                self._outbox.note(Kind.MEMBER_JOINED, effect.trainer, text, effect.trainer, effect.member_id)

    def pserver_up(self, index: int, generation: int) -> None:
        self.perform(self.membership.pserver_up(index, generation, 0))

    def pserver_down(self, index: int) -> None:
        self.perform(self.membership.pserver_down(index))

    def leave(self, trainer: str) -> None:
        if effects := self.membership.leave(trainer):
            text = "trainer left the rounds trainer=%s"
            self._outbox.note(Kind.MEMBER_LEFT, trainer, text, trainer)
            self.perform(effects)

    def leave_all(self) -> None:
        for member in self.membership.members:
            self.leave(member.trainer)

    def member_of(self, trainer: str) -> int:
        """Return the trainer's member id, or 0 if the trainer is not a member."""
        return self.membership.member_id_of(trainer) or 0

    def switch(self, mode: Mode) -> None:
        """Begin to change the mode. The pservers must first agree on the round of the change."""
        self.perform(self.membership.switch(mode))

    def mode_reply(self) -> ModeReply:
        membership = self.membership
        return ModeReply(
            mode=membership.mode.to_json(),
            is_agreed=not membership.late_to_switch,
            round=membership.switch_round,
            waiting_for=waiting_for_mode(membership),
        )

    # views

    def next_view(self, index: int, generation: int, plan_hash: str) -> ViewRequest | None:
        """Return the newest view for this process of a pserver, or None. Each view is returned once.

        A view for the process's successor is kept until the successor asks for it.
        """
        found = self._views.get(index)
        if found is None or found[0] != generation:
            return None
        del self._views[index]
        return replace(found[1], plan_hash=plan_hash)

    def view_answered(self, index: int, generation: int, reply: ViewReply) -> None:
        """Handle a pserver's answer to a view. The answer accepts the view or rejects it as outdated."""
        if reply.outdated:
            self.view_lost(index, generation, reply.serial)
            return
        self.perform(
            self.membership.answered(
                index,
                generation,
                reply.serial,
                reply.refused,
                reply.highest_open_round,
                refuses_mode=reply.refuses_mode,
            )
        )
        # Requests may be waiting until all pservers have changed the mode.
        self._outbox.wakes_requests = True

    def view_lost(self, index: int, generation: int, serial: int) -> None:
        self.perform(self.membership.send_failed(index, generation, serial))


def waiting_for_mode(membership: Membership) -> str:
    """Describe the pservers that must still answer before the mode changes; empty if no change is pending."""
    late = ", ".join(map(str, membership.late_to_switch))
    return f"pserver {late} to begin {membership.mode} at round {membership.switch_round}" if late else ""
