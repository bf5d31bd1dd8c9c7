"""The master's side of the pservers: who is there, what each has to be told, and what each says it has.

Each pserver has a thread (``views.ViewSender``) that carries views and *errands*: to reload, to announce what it has
applied, to make a snapshot. A pserver that came back is *settled* when what it lacks is in the queue again.
"""

from __future__ import annotations

import logging

from flightedl.coordination.directory import Directory
from flightedl.domain.tasks import TaskQueue
from flightedl.errors import MessageError, NotFoundError, NotReadyError
from flightedl.master.beginning import Beginning
from flightedl.master.members import Members
from flightedl.master.state import JobState
from flightedl.master.views import ViewSender
from flightedl.messages.base import decode, encode
from flightedl.messages.control import AppliedReply, AppliedRequest, ReloadRequest, SealRequest
from flightedl.messages.status import PserverStatusReply
from flightedl.rpc.authentication import Credentials
from flightedl.rpc.client import Connection

_log = logging.getLogger(__name__)

_ERRAND_S = 10.0
_UNSETTLED_S = 0.05
_SEALED_AT_ONCE = 64
_LACKING_S = 0.2


class Pservers:
    """All pservers of one job. Thread-safe but for what is marked *locked*: called under the state's lock.

    Args:
        state: Has what is known of them.
        job: The job's name.
        directory: Says where they are.
        credentials: To reach them.
        generation: The master's.
        beginning: What follows when they have lost their values.
    """

    def __init__(
        self,
        state: JobState,
        job: str,
        directory: Directory,
        credentials: Credentials | None,
        beginning: Beginning,
        generation: int,
    ) -> None:
        self._state = state
        self._job = job
        self._directory = directory
        self._credentials = credentials
        self._beginning = beginning
        self._generation = generation
        self._senders: list[ViewSender] = []
        #: index -> (generation, epochs below this that it was told the size of).
        self._sealed: dict[int, tuple[int, int]] = {}

    def start(self, members: Members) -> None:
        """Begin to talk to them."""
        self._senders = [
            ViewSender(
                index,
                self._job,
                self._directory,
                self._state.clock,
                self._credentials,
                members.next_view,
                members.view_answered,
                members.view_failed,
                self._errand,
            )
            for index in range(self._state.pserver_count)
        ]

    def close(self) -> None:
        """Talk to nobody any more."""
        for sender in self._senders:
            sender.close()

    def wake(self, index: int) -> None:
        """There is something to tell a pserver."""
        if index < len(self._senders):
            self._senders[index].wake()

    def wake_all(self) -> None:
        """There is something to tell, or to ask, all of them."""
        for sender in self._senders:
            sender.wake()

    @property
    def said(self) -> list[PserverStatusReply | None]:
        """What each last said of itself; None: it is not reached."""
        return [sender.status for sender in self._senders]

    def look(self, found: dict[int, int], members: Members) -> None:
        """Locked: the directory has these generations now."""
        state = self._state
        known, state.pservers = state.pservers, found
        for index, generation in known.items():
            if index not in found:
                members.pserver_down(index)
            if found.get(index) != generation and state.checkpointing is not None:
                state.checkpointing.down(index)
        for index, generation in found.items():
            if known.get(index) != generation and index < state.pserver_count:
                _log.info("pserver is there index=%d generation=%d", index, generation)
                state.replay.seen(index, generation)
                self.wake(index)
                members.pserver_up(index, generation)

    def settled(self, index: int, generation: int) -> None:
        """Locked: it takes part in checkpoints, unless it is about to go back to one."""
        state = self._state
        assert state.checkpointing is not None
        if state.pservers.get(index) == generation and state.replay.is_settled(index, generation):
            if state.replay.must_reload(index) is None:
                state.checkpointing.settled(index, generation)
            state.changed.notify_all()

    def _errand(self, index: int, generation: int, connection: Connection) -> float:
        """What has to be said to a pserver beside views; on the thread that talks to it."""
        state = self._state
        with state.changed:
            checkpointing = state.checkpointing
            is_settled = state.membership is None or state.replay.is_settled(index, generation)
            reload = None if state.membership is None else state.replay.must_reload(index)
            reload = self._beginning.must_end(index) if reload is None else reload
            audit = state.replay.audit_wanted(index, generation)
            plan_hash = state.plan_hash
        assert checkpointing is not None
        try:
            if reload == generation:
                order = ReloadRequest(plan_hash=plan_hash, master_generation=self._generation)
                connection.action("reload", encode(order), timeout_s=_ERRAND_S)
                return _UNSETTLED_S
            if not is_settled or audit is not None:
                request = encode(AppliedRequest(plan_hash=plan_hash))
                reply = decode(connection.action("applied", request, timeout_s=_ERRAND_S), AppliedReply)
                if reply.lacks_election is not None:
                    self._lacks(index, generation, reply.lacks_election)
                    return _LACKING_S
                if audit is None:
                    self._announced(index, generation, reply)
                else:
                    self._audited(index, generation, audit, reply)
            self._seal(index, generation, connection)
            return checkpointing.errand(index, generation, connection, plan_hash)
        except NotReadyError as error:
            _log.debug("pserver %d: %s", index, error)
            return _UNSETTLED_S

    def _seal(self, index: int, generation: int, connection: Connection) -> None:
        """Tell how many tasks the epochs have that are over since it was told the last time."""
        state = self._state
        with state.changed:
            queue = state.queue
            plan_hash = state.plan_hash
            if queue is None or not plan_hash or not state.replay.is_settled(index, generation):
                return
            known, first = self._sealed.get(index, (0, 0))
            end = queue.epoch
            first = max(first if known == generation else 0, end - _SEALED_AT_ONCE)
            epochs = [(epoch, size) for epoch in range(first, end) if (size := _size(queue, epoch))]
        try:
            if epochs:
                order = SealRequest(plan_hash=plan_hash, master_generation=self._generation, epochs=epochs)
                connection.action("seal", encode(order), timeout_s=_ERRAND_S)
        except MessageError as error:
            # It costs memory, and nothing else.
            _log.warning("pserver %d does not close epochs %d to %d: %s", index, first, end - 1, error)
        self._sealed[index] = (generation, end)

    def _lacks(self, index: int, generation: int, election: int) -> None:
        """A pserver has no values and no checkpoint to take them from: when all are so, the model begins anew."""
        state = self._state
        with state.changed:
            assert state.checkpointing is not None
            self._beginning.said(index, generation, election)
            present = {i: g for i, g in state.pservers.items() if i < state.pserver_count}
            settled, may_be_saved = state.replay.settled(), state.checkpointing.may_be_saved
            step = self._beginning.next_step(present, settled, may_be_saved=may_be_saved)
            if step is None:
                for other in present:
                    if self._beginning.must_end(other) is not None:
                        self.wake(other)
                return
            state.replay.begin_anew()
            state.final_ticket = None
        state.persist()
        self._beginning.delete_election(step)

    def _announced(self, index: int, generation: int, reply: AppliedReply) -> None:
        state = self._state
        with state.changed:
            self._beginning.said(index, generation, None)
            assert state.checkpointing is not None
            if state.replay.announced(index, generation, reply, state.queue):
                state.final_ticket = None
                state.checkpointing.rejected(reply.rejected)
                state.touch()
            revision = state.revision
        state.wait_durable(revision)
        with state.changed:
            self.settled(index, generation)

    def _audited(self, index: int, generation: int, serial: int, reply: AppliedReply) -> None:
        state = self._state
        with state.changed:
            if state.queue is not None and state.replay.audited(index, generation, serial, reply, state.queue):
                state.final_ticket = None
                state.touch()
            # The audit may have been what somebody waits for.
            state.changed.notify_all()


def _size(queue: TaskQueue, epoch: int) -> int:
    """Tasks of an epoch that is over; 0: so long ago that it is forgotten."""
    try:
        return queue.epoch_size(epoch)
    except NotFoundError:
        return 0
