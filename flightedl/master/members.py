"""Who is a member: the decisions of ``domain.membership``, and the views that come of them.

What the membership decides is put into an outbox, one view for each pserver, with the revision of the state that it
came from: a view is taken out only when that is durable, so that a successor knows of every member that a pserver may
have admitted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec

from flightedl.domain.membership import Membership
from flightedl.domain.membership_values import Effect as MembershipEffect
from flightedl.domain.membership_values import SendView
from flightedl.domain.modes import Mode
from flightedl.domain.views import View
from flightedl.errors import JobFailedError, NotReadyError
from flightedl.master.lockstep import Lockstep
from flightedl.master.state import JobState
from flightedl.messages.control import ViewMemberMessage, ViewReply, ViewRequest
from flightedl.messages.declarations import ModelReply
from flightedl.messages.tasks import JoinReply, JoinRequest, ModeReply, ModeRequest

_log = logging.getLogger(__name__)

_NOT_ALL = "the other trainers, to begin the epoch together (deterministic=True)"


class Members:
    """The membership of one job. Thread-safe but for what is marked *locked*: called under the state's lock.

    Args:
        state: Has the membership.
        generation: The master's.
        wake: Told the index of a pserver that has a view to get.
    """

    def __init__(self, state: JobState, generation: int, wake: Callable[[int], None]) -> None:
        self._state = state
        self._generation = generation
        self._wake = wake
        #: How trainers begin an epoch together, where the mode asks for it; set once.
        self.lockstep: Lockstep | None = None
        #: pserver index -> the view to send next: which of its processes it is for, and the revision that has to be
        #: durable first.
        self._outbox: dict[int, tuple[int, View, int]] = {}

    def begin(self, model: ModelReply, stored: bytes | None) -> None:
        """Locked: there is a model, so there is somebody to wait for."""
        mode = Mode.from_json(model.present_mode)
        count = self._state.pserver_count
        self._state.membership = (
            Membership(self._generation, count, mode=mode)
            if stored is None
            else Membership.restore(stored, self._generation, count, mode=mode)
        )

    def pserver_up(self, index: int, generation: int) -> None:
        """Locked: a process of this pserver is there."""
        if self._state.membership is not None:
            self._perform(self._state.membership.pserver_up(index, generation, 0))

    def pserver_down(self, index: int) -> None:
        """Locked: none is."""
        if self._state.membership is not None:
            self._perform(self._state.membership.pserver_down(index))

    def leave(self, trainer: str) -> None:
        """Locked: nobody waits for this trainer any more."""
        if self._state.membership is not None:
            self._perform(self._state.membership.leave(trainer))

    def leave_if_idle(self, trainer: str) -> None:
        """Locked: nobody waits for a trainer that has no work."""
        if self._state.queue is not None and not self._state.queue.holds(trainer):
            self.leave(trainer)

    def member_of(self, trainer: str) -> int:
        """Locked: the number of a member; 0: it is none."""
        return 0 if self._state.membership is None else self._state.membership.member_id_of(trainer) or 0

    def join(self, request: JoinRequest) -> JoinReply:
        """Make the trainer a member; answers 0 while the pservers have not agreed.

        Raises:
            UnregisteredError: the trainer's lease has ended, or ended while it waited.
        """
        state = self._state
        deadline = state.clock.now() + request.wait_s
        with state.changed:
            while True:
                state.require_trainer(request)
                membership = state.membership
                if membership is None:
                    raise NotReadyError("the model is not declared yet")
                if not self._holds_work(request):
                    return JoinReply(member=0, holds_work=False)
                self._propose(membership, request)
                member = membership.member_id_of(request.trainer)
                if member is not None:
                    return JoinReply(member=member, mode=membership.mode.to_json())
                remaining = deadline - state.clock.now()
                if remaining <= 0:
                    why = membership.waiting_for(request.trainer) or _NOT_ALL
                    return JoinReply(member=0, waiting_for=why)
                state.changed.wait(remaining)

    def _holds_work(self, request: JoinRequest) -> bool:
        queue = self._state.queue
        if queue is None:
            return False
        if request.attempt is None:
            return queue.holds(request.trainer)
        return queue.is_current(request.trainer, request.attempt, request.generation)

    def _propose(self, membership: Membership, request: JoinRequest) -> None:
        if self.lockstep is None or not self.lockstep.is_on:
            self._perform(membership.join(request.trainer, request.generation))
        elif membership.member_id_of(request.trainer) is None:
            self._perform(membership.join_together(self.lockstep.joins(request.trainer, request.generation)))

    def leave_all(self) -> None:
        """Locked: everybody has to join anew."""
        membership = self._state.membership
        for member in () if membership is None else membership.members:
            self.leave(member.trainer)

    def change_mode(self, request: ModeRequest) -> ModeReply:
        """Change the mode, and wait for the pservers to agree on where; durable before it returns.

        Raises:
            UsageError: it is no mode.
            NotReadyError: there is no model yet, or etcd cannot be written.
            JobFailedError: the job is done.
        """
        mode = None if request.mode is None else Mode.from_json(request.mode)
        state = self._state
        deadline = state.clock.now() + request.wait_s
        with state.changed:
            membership, model = state.membership, state.declaration.model
            if membership is None or model is None:
                raise NotReadyError("no trainer has declared the model yet: give job.parameters the mode to begin with")
            if mode is not None and mode != membership.mode:
                if state.is_over:
                    raise JobFailedError("all epochs are done: there is no round left to change the mode at")
                _log.info("mode changes from=%s to=%s", membership.mode, mode)
                state.declaration = msgspec.structs.replace(
                    state.declaration, model=msgspec.structs.replace(model, mode=mode.to_json())
                )
                self._perform(membership.switch(mode))
            while (late := membership.late_to_switch) and deadline > state.clock.now():
                state.changed.wait(min(0.5, max(0.0, deadline - state.clock.now())))
            revision = state.revision
            reply = ModeReply(
                mode=membership.mode.to_json(),
                is_agreed=not late,
                round=membership.switch_round,
                waiting_for=waiting_for_mode(membership),
            )
        state.wait_durable(revision)
        return reply

    def _perform(self, effects: Sequence[MembershipEffect]) -> None:
        """Effects of the membership: views to be sent once they are durable."""
        if not effects:
            return
        self._state.touch()
        for effect in effects:
            if isinstance(effect, SendView):
                self._outbox[effect.index] = (effect.generation, effect.view, self._state.revision)
                self._wake(effect.index)

    def next_view(self, index: int, generation: int) -> ViewRequest | None:
        """The newest view that this process of a pserver has not answered, durable by now.

        Who takes it tells what became of it, under the same generation: only then the next one is sent. So one that is
        for the process's successor stays where it is.

        Raises:
            NotReadyError: it cannot be made durable at the moment.
        """
        with self._state.changed:
            found = self._outbox.get(index)
            if found is None or found[0] != generation:
                return None
            del self._outbox[index]
            plan_hash = self._state.plan_hash
        _, view, revision = found
        try:
            self._state.wait_durable(revision)
        except NotReadyError:
            with self._state.changed:
                self._outbox.setdefault(index, found)
            raise
        return ViewRequest(
            plan_hash=plan_hash,
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
            mode=None if view.mode is None else view.mode.to_json(),
            switch_round=view.switch_round,
        )

    def view_answered(self, index: int, generation: int, answer: ViewReply) -> None:
        """A pserver took the view, or knows a newer master's."""
        if answer.outdated:
            self.view_failed(index, generation, answer.serial)
            return
        with self._state.changed:
            if self._state.membership is not None:
                self._perform(
                    self._state.membership.answered(
                        index,
                        generation,
                        answer.serial,
                        answer.refused,
                        answer.highest_open_round,
                        refuses_mode=answer.refuses_mode,
                    )
                )
                # Somebody may wait for the mode to be agreed.
                self._state.changed.notify_all()

    def view_failed(self, index: int, generation: int, serial: int) -> None:
        """A pserver did not answer."""
        with self._state.changed:
            if self._state.membership is not None:
                self._perform(self._state.membership.send_failed(index, generation, serial))


def waiting_for_mode(membership: Membership) -> str:
    """Whose answer a change of the mode waits for, for people; empty when none is under way."""
    late = ", ".join(map(str, membership.late_to_switch))
    return f"pserver {late} to begin {membership.mode} at round {membership.switch_round}" if late else ""
