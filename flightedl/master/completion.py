"""When the job makes checkpoints, and when it may end.

Trainers are told that all is done only when nothing that is done can get lost any more: every pserver is there and what
it has was compared with what is done, every round is closed, and a last checkpoint has everything. A pserver that is
away is waited for. A store that fails again and again is not; a job that keeps no checkpoints has none to wait for.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from flightedl.config import MasterSettings
from flightedl.coordination.keeper import HeldKey
from flightedl.domain.checkpoints import Checkpoints
from flightedl.domain.checkpoints_manifest import Manifest
from flightedl.domain.checkpoints_values import OpenRounds
from flightedl.domain.modes import Sync
from flightedl.domain.tasks import TaskQueue
from flightedl.errors import NotReadyError, UsageError
from flightedl.master.checkpointing import Checkpointing, settings_of
from flightedl.master.pservers import Pservers
from flightedl.master.recovery import RecoveredState
from flightedl.master.replay import Replay
from flightedl.master.state import JobState
from flightedl.messages.base import encode
from flightedl.messages.checkpoints import CheckpointReply, CheckpointRequest
from flightedl.messages.declarations import JobDeclaration
from flightedl.ports import Storage

_DRAIN_POLL_S = 0.05


class Completion:
    """Thread-safe but for what is marked *locked*: called under the state's lock.

    Args:
        chosen: What the process was told.
        state: Of the job.
        pservers: They make the snapshots.
        held: The master's lock.
        storage: Where checkpoints go; None: none are kept.
    """

    def __init__(
        self, chosen: MasterSettings, state: JobState, pservers: Pservers, held: HeldKey, storage: Storage | None
    ) -> None:
        self._settings = chosen
        self._state = state
        self._pservers = pservers
        self._held = held
        self._storage = storage
        self._epoch_seen = 0

    def start(self, recovered: RecoveredState) -> None:
        """Go on from what the predecessor knew of pservers and checkpoints."""
        state = self._state
        recovery: Literal["replay", "rollback"] = "rollback" if self._settings.recovery == "rollback" else "replay"
        state.replay = Replay(state.pserver_count, recovery, recovered.pserver_recovery)
        chosen, generation, count = settings_of(self._settings), self._held.generation, state.pserver_count
        now = state.clock.now()
        state.checkpointing = Checkpointing(
            self._storage,
            Checkpoints(chosen, generation, count, now)
            if recovered.checkpoints is None
            else Checkpoints.restore(recovered.checkpoints, chosen, generation, count, now),
            state.changed,
            state.persist,
            self._manifest,
            self._pservers.wake,
            state.clock,
        )
        self._epoch_seen = 0 if state.queue is None else state.queue.epoch

    def close(self) -> None:
        """Stop making checkpoints."""
        if self._state.checkpointing is not None:
            self._state.checkpointing.close()

    def tick(self) -> None:
        """Locked: time has passed."""
        state = self._state
        checkpointing = state.checkpointing
        if checkpointing is None or state.membership is None or state.has_former_model:
            return
        said = self._pservers.said
        for index, generation in state.pservers.items():
            self._pservers.settled(index, generation)
            status = said[index] if index < len(said) else None
            if status is not None and status.is_draining:
                checkpointing.is_draining(index)
        if state.queue is not None and state.queue.epoch > self._epoch_seen:
            self._epoch_seen = state.queue.epoch
            if not state.queue.is_done:
                checkpointing.epoch_finished(self._epoch_seen - 1)
        if state.queue is not None:
            self._audit(state.queue)
        self.may_end()
        checkpointing.tick(self._open_rounds(), may_order=True)

    def may_end(self) -> bool:
        """Locked: whether trainers may be told that all is done: nothing that is done can get lost any more."""
        state = self._state
        queue, checkpointing, membership = state.queue, state.checkpointing, state.membership
        if not state.is_over or checkpointing is None or membership is None:
            state.final_ticket = None
            return state.is_over
        if not self._is_everybody_settled():
            return False
        # A stopped job has no last epoch that could be looked at as a whole.
        if queue is not None and queue.is_done and not self._is_audited(queue):
            return False
        if state.final_ticket is None:
            # What waits in an open round is neither in the values nor in a checkpoint: all rounds are closed first.
            if membership.members or not membership.is_quiet:
                return False
            if not checkpointing.is_kept:
                return True
            state.final_ticket = checkpointing.request_last("the end of the job")
        return checkpointing.is_over(state.final_ticket)

    def _is_everybody_settled(self) -> bool:
        """Whether every pserver is there, and what it has is taken into the queue's account."""
        state = self._state
        return state.replay.is_all_settled and all(
            index in state.pservers and state.replay.is_settled(index, state.pservers[index])
            for index in range(state.pserver_count)
        )

    def _is_audited(self, queue: TaskQueue) -> bool:
        """Whether the pservers have said once more, after all was done, that they lack nothing of it."""
        self._audit(queue)
        return self._state.replay.is_audited(queue)

    def _audit(self, queue: TaskQueue) -> None:
        """Have the pservers asked, if an audit is due."""
        if self._state.replay.audit(queue):
            self._pservers.wake_all()

    def _open_rounds(self) -> OpenRounds | None:
        model, membership = self._state.declaration.model, self._state.membership
        if model is None or membership is None or not isinstance(membership.mode, Sync):
            return None
        known = [each.highest_version for each in self._pservers.said if each is not None]
        return OpenRounds(max(known, default=0), has_members=bool(membership.members))

    def _manifest(self, checkpoints: Checkpoints) -> Manifest:
        state = self._state
        model = state.declaration.model
        assert model is not None, "a checkpoint without a model"
        return checkpoints.manifest(
            self._settings.job,
            model.plan_hash,
            model.cut_for or model.pservers,
            encode(self._whole_declaration()),
            None if state.queue is None else state.queue.encode(),
            state.clock.wall_time(),
            state.evaluations.encode_results(),
            state.sighting(),
        )

    def _whole_declaration(self) -> JobDeclaration:
        """With the files that had joined by now: their keys in etcd will not be there when the job is resumed."""
        state = self._state
        arrivals = [] if state.dataset is None else list(state.dataset.arrivals)
        return msgspec.structs.replace(state.declaration, arrivals=arrivals)

    def order(self, request: CheckpointRequest) -> CheckpointReply:
        """Order a checkpoint of what there is now, or wait for one ordered before.

        Raises:
            UsageError: the job keeps no checkpoints.
            NotReadyError: there is no model yet.
        """
        state = self._state
        deadline = state.clock.now() + request.wait_s
        with state.changed:
            checkpointing = state.checkpointing
            if checkpointing is None or not checkpointing.is_kept:
                raise UsageError("this job keeps no checkpoints: start it with --checkpoint URL")
            if state.declaration.model is None or state.has_former_model:
                raise NotReadyError("no trainer has declared the model yet")
            ticket = checkpointing.request(request.reason) if request.ticket is None else request.ticket
            while not (is_complete := checkpointing.is_satisfied(ticket)) and deadline > state.clock.now():
                state.changed.wait(min(0.5, deadline - state.clock.now()))
            return CheckpointReply(
                ticket=ticket, complete=is_complete, latest=checkpointing.latest, trouble=checkpointing.trouble
            )

    def drain(self, timeout_s: float) -> None:
        """This master was told to end: make a last checkpoint, if everybody is still there to do it."""
        state = self._state
        deadline = state.clock.now() + timeout_s
        with state.changed:
            checkpointing = state.checkpointing
            if checkpointing is None or not checkpointing.is_kept or state.membership is None:
                return
            if state.has_former_model:
                return
            if state.final_ticket is not None and checkpointing.is_satisfied(state.final_ticket):
                return
            ticket = checkpointing.request_last("the master is about to end")
        while state.clock.now() < deadline and self._held.is_held and len(state.pservers) >= state.pserver_count:
            with state.changed:
                self.tick()
                if checkpointing.is_over(ticket):
                    return
                state.changed.wait(_DRAIN_POLL_S)
