"""A simulated master's calls to one pserver. Like a thread, it makes one call at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flightedl.domain.master import effects as out
from flightedl.domain.master import events
from flightedl.errors import FlightedlError
from flightedl.messages.control import AppliedReply, SnapshotReply, ViewReply, ViewRequest
from flightedl.messages.status import PserverStatusReply
from tests.simulation.cores.world import Violation

if TYPE_CHECKING:
    from tests.simulation.cores.master import Master

_CALL_S = 1.0
_RETRY_S = 0.1
_STATUS_S = 0.5


class PserverLink:
    """A connection to the pserver with this index, no matter which process holds the index."""

    def __init__(self, master: Master, index: int) -> None:
        self._master = master
        self._index = index
        self._is_busy = False
        #: True if there may be a new message to send since the link became busy.
        self._is_woken = False
        #: Incremented at each call and each pause. Answers to earlier calls are ignored.
        self._token = 0
        #: Generation of the process that is being called.
        self._generation = 0
        #: The pserver's last status; None if the pserver is unreachable.
        self.status: PserverStatusReply | None = None

    @property
    def key(self) -> Any:
        """Key of the process that holds the index, as far as the master knows; None if no process does."""
        return self._master.directory.get(f"ps/{self._index}")

    def looked_around(self) -> None:
        """Handle a change of processes. A call to a replaced process is dropped, because that process may be frozen."""
        if self._is_busy and (self.key is None or self.key.created != self._generation):
            self.pause(0.0)

    def wake(self) -> None:
        if self._is_busy:
            self._is_woken = True
        elif self._master.is_leading:
            self.pause(0.0)

    def pause(self, pause_s: float) -> None:
        """Pause, then call the pserver again."""
        self._is_busy = False
        self._token += 1
        token = self._token
        pause_s, self._is_woken = 0.0 if self._is_woken else pause_s, False
        self._master.later(pause_s, lambda: self.talk() if self._token == token else None)

    def talk(self) -> None:
        key = self.key
        if not self._master.is_held():
            return
        if key is None:
            self.pause(1.0)
            return
        effects = self._master.core.apply(events.ControlAsked(self._index, key.created), self._master.world.now)
        self._master.carry_out(effects)
        (call,) = [each for each in effects if isinstance(each, out.ControlCall | out.NoCallDue)]
        if isinstance(call, out.NoCallDue):
            self._poll_status(key, call.pause_s)
            return
        self._is_busy, self._generation = True, key.created
        self._token += 1
        token, made_at = self._token, self._master.core.revision
        self._master.after_stored(call.revision, lambda: self._call_pserver(call, key.value, token, made_at))

    def _poll_status(self, key: Any, pause_s: float) -> None:
        """Request the pserver's status if there is enough time, then pause."""
        if pause_s < _STATUS_S:
            self.pause(pause_s)
            return
        self._is_busy, self._generation = True, key.created
        self._token += 1
        token = self._token

        def answered(reply: PserverStatusReply | None) -> None:
            if self._token == token:
                self.status = reply
                self.pause(pause_s)

        self._master.world.call(
            self._master, key.value, key.value.status, key.created, answered, lambda: answered(None), timeout_s=_CALL_S
        )

    def _call_pserver(self, call: out.ControlCall, pserver: Any, token: int, made_at: int) -> None:
        if isinstance(call.request, ViewRequest) and self._master.durable < made_at:
            raise Violation(f"{self._master.name} sends a pserver members that a successor would not know")

        def over(pause_s: float) -> None:
            if self._token == token:
                self.pause(pause_s)

        def failed() -> None:
            if isinstance(call.request, ViewRequest):
                lost = events.Answered(call.index, call.generation, call.request, None)
                self._master.later(_RETRY_S, lambda: self._master.apply(lost))
            over(_RETRY_S)

        def answered(reply: Any) -> None:
            if isinstance(reply, FlightedlError):
                failed()
            elif self._master.is_held():
                outcome = reply if isinstance(reply, ViewReply | AppliedReply | SnapshotReply) else out.Done()
                self._master.apply(events.Answered(call.index, call.generation, call.request, outcome, call.audit))
                over(call.pause_s)

        # No caller is waiting for this answer any longer, so ignore it.
        self._master.world.call(
            self._master,
            pserver,
            pserver.control,
            (call.generation, call.request),
            lambda reply: answered(reply) if self._token == token else None,
            lambda: failed() if self._token == token else None,
            timeout_s=_CALL_S,
        )
