"""The master's calls to pservers, and the handling of the answers. Each process gets at most one call at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flightedl.domain.master import effects as out
from flightedl.domain.master import events
from flightedl.domain.master.checkpointing import Checkpointing
from flightedl.domain.master.members import Members
from flightedl.domain.master.pserver_warnings import PserverWarnings
from flightedl.domain.master.pservers import Pservers
from flightedl.domain.master.training import Training
from flightedl.domain.recovery.reinitialization import Reinitialize
from flightedl.messages.control import (
    AppliedReply,
    AppliedRequest,
    ReloadRequest,
    SealRequest,
    SnapshotReply,
    ViewReply,
    ViewRequest,
)
from flightedl.messages.status import PserverStatusReply

#: Seconds between two polls of a pserver that is not settled or is writing a snapshot.
_POLL_S = 0.05
#: Seconds between two polls of a pserver that has lost its values.
_LACKING_S = 0.2
_IDLE_S = 1.0


class Consequences(NamedTuple):
    """Consequences that a pserver's answer has for the whole job."""

    #: The next step in reinitializing the model, or None.
    reinitialization: Reinitialize | None = None
    #: True if finished work may be missing from the pservers.
    has_lost: bool = False


class PserverControl:
    """Chooses the next call to each pserver, and handles the answers.

    Args:
        generation: Generation of the master.
        pservers: State of the pservers.
        checkpointing: The orders of snapshots.
        outbox: Receives notes and counts changes to the stored state.
    """

    def __init__(self, generation: int, pservers: Pservers, checkpointing: Checkpointing, outbox: out.Outbox) -> None:
        self._generation = generation
        self._pservers = pservers
        self._checkpointing = checkpointing
        self._outbox = outbox
        self._pserver_warnings = PserverWarnings()
        #: Pserver index -> number of repeated pieces when the pserver was last asked for its applied batches.
        self._repeated_when_asked: dict[int, int] = {}

    def look_at_all(self, now: float) -> None:
        """Let pservers take part in checkpoints once they are settled, unless they must reload a checkpoint first."""
        for index, generation in self._pservers.present.items():
            if self._pservers.must_reload(index):
                self._checkpointing.down(index, now)
            elif self._pservers.is_settled(index, generation):
                self._checkpointing.settled(index, generation, now)

    def next_call(
        self, event: events.ControlAsked, members: Members | None, training: Training, plan_hash: str, now: float
    ) -> out.ControlCall | out.NoCallDue:
        """Return the next call to a pserver's process, or the number of seconds until this should be asked again."""
        index, generation = event.index, event.generation
        pservers, revision = self._pservers, self._outbox.revision
        if members is None:
            return out.NoCallDue(index, generation, _IDLE_S)
        if pservers.must_end(index, generation):
            reload = ReloadRequest(plan_hash=plan_hash, master_generation=self._generation)
            return out.ControlCall(index, generation, reload, pause_s=_POLL_S, revision=revision)
        must_ask, audit = pservers.must_be_audited(index, generation)
        pause_s = pservers.seconds_until_asked(index, now) if must_ask else _IDLE_S
        if must_ask and not pause_s:
            # Always delay the next request for applied batches, so that other calls can be made first.
            pservers.ask_again(index, now + _POLL_S)
            self._repeated_when_asked[index] = training.repeated_count
            return out.ControlCall(index, generation, AppliedRequest(plan_hash=plan_hash), audit)
        work = training.work
        epochs, open_epoch = ([], 0) if work is None else pservers.epochs_to_seal(index, generation, work.queue)
        if epochs:
            seal = SealRequest(
                plan_hash=plan_hash, master_generation=self._generation, epochs=epochs, open_epoch=open_epoch
            )
            return out.ControlCall(index, generation, seal, revision=revision)
        if view := members.next_view(index, generation, plan_hash):
            return out.ControlCall(index, generation, view, revision=revision)
        if order := self._checkpointing.order_for(index, generation, plan_hash):
            return out.ControlCall(index, generation, order, pause_s=_POLL_S, revision=revision)
        return out.NoCallDue(index, generation, pause_s)

    def answered(self, event: events.Answered, members: Members | None, training: Training, now: float) -> Consequences:
        index, generation = event.index, event.generation
        match event.request, event.reply:
            case ViewRequest(), ViewReply() as view if members is not None:
                members.view_answered(index, generation, view)
            case ViewRequest(serial=serial), None if members is not None:
                members.view_lost(index, generation, serial)
            case _, AppliedReply() as applied:
                return self._applied(event, applied, training, now)
            case _, SnapshotReply() as snapshot:
                self._checkpointing.answered(index, generation, snapshot, now)
            case SealRequest(epochs=epochs, open_epoch=open_epoch), out.Done():
                self._pservers.sealed(index, generation, epochs[-1][0] + 1, open_epoch)
        return Consequences()

    def _applied(self, event: events.Answered, reply: AppliedReply, training: Training, now: float) -> Consequences:
        pservers, checkpoints, index = self._pservers, self._checkpointing.checkpoints, event.index
        if (election := reply.lacks_election) is not None:
            pservers.ask_again(index, now + _LACKING_S)
            step = pservers.lacks(index, event.generation, election, may_be_saved=checkpoints.may_be_saved)
            return Consequences(reinitialization=step)
        if event.audit is not None and training.repeated_count != self._repeated_when_asked.get(index):
            # Work was repeated after the request was sent, so the answer may be outdated. Ask the pserver again.
            return Consequences()
        queue = None if training.work is None else training.work.queue
        before = self._outbox.revision
        if pservers.answered(index, event.generation, event.audit, reply, queue):
            checkpoints.rejected(reply.rejected)
        has_lost = self._outbox.revision != before
        # If one pserver has lost updates, the others may also have to reload a checkpoint.
        self.look_at_all(now)
        # This answer may complete requests that wait for the end of the job.
        self._outbox.wakes_requests = True
        return Consequences(has_lost=has_lost)

    def status_received(
        self, replies: Sequence[PserverStatusReply | None], trainers: Mapping[int, str], now: float
    ) -> None:
        """Handle the latest status of all pservers. ``trainers`` maps member ids to trainers' names."""
        known = [each for each in replies if each is not None]
        self._pservers.highest_version = max((each.highest_version for each in known), default=0)
        for index, reply in enumerate(replies):
            if reply is not None and reply.is_draining and index in self._pservers.present:
                self._checkpointing.is_draining(index)
        self._pserver_warnings.update(replies, trainers, now, self._outbox)
