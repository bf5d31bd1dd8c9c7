"""What is said to pservers, one thing at a time, and what their answers mean."""

from __future__ import annotations

from collections.abc import Collection

from flightedl.domain.master import effects as out
from flightedl.domain.master import events
from flightedl.domain.master.state import MasterState
from flightedl.domain.master.vigil import Vigil
from flightedl.messages.control import (
    AppliedReply,
    AppliedRequest,
    ReloadRequest,
    SealRequest,
    SnapshotReply,
    ViewReply,
    ViewRequest,
)

#: How soon a pserver is asked again that is not settled, and one that makes a snapshot.
_POLL_S = 0.05
_LACKING_S = 0.2
_IDLE_S = 1.0


class PserverControl:
    """The conversation with the pservers."""

    def __init__(self, state: MasterState) -> None:
        self._state = state
        self._vigil = Vigil(self._trainers_of)
        #: pserver index -> how much had been done again when it was asked what it has.
        self._repeated_when_asked: dict[int, int] = {}

    def _trainers_of(self, members: Collection[int]) -> list[str]:
        known = () if self._state.members is None else self._state.members.membership.members
        return sorted(each.trainer for each in known if each.member_id in members)

    def look_at(self, index: int, generation: int) -> None:
        """A pserver that is settled takes part in checkpoints, unless it is about to go back to one."""
        state = self._state
        if state.pservers.goes_back(index):
            state.checkpointing.down(index, state.now)
        elif state.pservers.present.get(index) == generation and state.pservers.is_settled(index, generation):
            state.checkpointing.settled(index, generation, state.now)

    def look_at_all(self) -> None:
        """Who takes part in checkpoints may have changed."""
        for index, generation in self._state.pservers.present.items():
            self.look_at(index, generation)

    def asked(self, event: events.ControlAsked) -> None:
        state = self._state
        state.outbox.effects.append(self._next_control_call(event.index, event.generation))

    def _next_control_call(self, index: int, generation: int) -> out.ControlCall | out.NothingToSay:
        state = self._state
        master, plan_hash = state.settings.generation, state.plan_hash
        if state.members is None:
            return out.NothingToSay(index, generation, _IDLE_S)
        if state.pservers.must_end(index, generation):
            reload = ReloadRequest(plan_hash=plan_hash, master_generation=master)
            return out.ControlCall(index, generation, reload, pause_s=_POLL_S, revision=state.revision)
        must_ask, audit = state.pservers.must_be_asked(index, generation)
        pause_s = state.pservers.asked_again_in(index, state.now) if must_ask else _IDLE_S
        if must_ask and not pause_s:
            # Whatever it answers, there may be other things to say before it is asked the next time.
            state.pservers.ask_again(index, state.now + _POLL_S)
            self._repeated_when_asked[index] = 0 if state.work is None else state.work.repeated_count
            return out.ControlCall(index, generation, AppliedRequest(plan_hash=plan_hash), audit)
        if state.work is not None and (epochs := state.pservers.epochs_to_seal(index, generation, state.work.queue)):
            seal = SealRequest(plan_hash=plan_hash, master_generation=master, epochs=epochs)
            return out.ControlCall(index, generation, seal, revision=state.revision)
        if view := state.members.next_view(index, generation, plan_hash):
            return out.ControlCall(index, generation, view, revision=state.revision)
        if order := state.checkpointing.order_for(index, generation, plan_hash):
            return out.ControlCall(index, generation, order, pause_s=_POLL_S, revision=state.revision)
        return out.NothingToSay(index, generation, pause_s)

    def answered(self, event: events.Answered) -> None:
        state, index, generation = self._state, event.index, event.generation
        match event.request, event.reply:
            case ViewRequest(), ViewReply() as view if state.members is not None:
                state.members.view_answered(index, generation, view)
            case ViewRequest(serial=serial), None if state.members is not None:
                state.members.view_lost(index, generation, serial)
            case _, AppliedReply() as applied:
                self._applied(index, generation, event.audit, applied)
            case _, SnapshotReply() as snapshot:
                state.checkpointing.answered(index, generation, snapshot, state.now)
            case SealRequest(epochs=epochs), out.Done():
                state.pservers.sealed(index, generation, epochs[-1][0] + 1)

    def _applied(self, index: int, generation: int, audit: int | None, reply: AppliedReply) -> None:
        state = self._state
        checkpoints = state.checkpointing.checkpoints
        if reply.lacks_election is not None:
            state.pservers.ask_again(index, state.now + _LACKING_S)
            election, may_be_saved = reply.lacks_election, checkpoints.may_be_saved
            step = state.pservers.lacks(index, generation, election, may_be_saved=may_be_saved)
            if step is not None:
                state.ending.lost()
                state.evaluations.begin_anew(step.election)
                if state.work is not None:
                    state.pservers.reopen_all(state.work.queue)
                state.touch()
                state.outbox.effects.append(out.DeleteElection(step, state.revision))
            return
        repeated = 0 if state.work is None else state.work.repeated_count
        if audit is not None and repeated != self._repeated_when_asked.get(index):
            # What was done again meanwhile is not in an answer that is older: the pserver is asked once more.
            return
        queue = None if state.work is None else state.work.queue
        before = state.revision
        if state.pservers.answered(index, generation, audit, reply, queue):
            checkpoints.rejected(reply.rejected)
        if state.revision != before:
            state.ending.lost()
        # One that has come back with less may send the others back, too.
        self.look_at_all()
        # Who waits for the end of the job may have waited for this answer.
        state.outbox.is_stirred = True

    def status_told(self, event: events.StatusTold) -> None:
        state = self._state
        known = [each for each in event.replies if each is not None]
        state.pservers.highest_version = max((each.highest_version for each in known), default=0)
        for index, reply in enumerate(event.replies):
            if reply is not None and reply.is_draining and index in state.pservers.present:
                state.checkpointing.is_draining(index)
        self._vigil.look(event.replies, state.now, state.outbox)
