"""The master's calls to the pservers. For each pserver, a thread makes the calls that the core returns.

If the core returns no call, the thread polls the pserver's status. If a call fails, the thread asks the core for the
next call. If a pserver is replaced during a call, the call is aborted, because the old process may be frozen.
"""

from __future__ import annotations

import logging
import math
import threading

from flightedl.coordination.directory import Directory
from flightedl.domain.master import events
from flightedl.domain.master.effects import ControlCall, ControlRequest, Done, Effect, NoCallDue
from flightedl.errors import FlightedlError, MessageError, NotReadyError
from flightedl.master.state import JobState
from flightedl.messages.base import decode, encode
from flightedl.messages.control import (
    AppliedReply,
    AppliedRequest,
    ReloadRequest,
    SealRequest,
    SnapshotReply,
    SnapshotRequest,
    ViewReply,
    ViewRequest,
)
from flightedl.messages.status import PserverStatusReply
from flightedl.process import tracing
from flightedl.rpc.client import Connection
from flightedl.rpc.connector import Connector
from flightedl.rpc.identity import ServerIdentity

_log = logging.getLogger(__name__)

_CALL_S = 10.0
#: Timeout in seconds for calls that a pserver answers immediately.
_QUICK_CALL_S = 5.0
_RETRY_S = 0.1
_NOT_READY_S = 0.05
_STATUS_S = 1.0


class PserverLinks:
    """Connections to all pservers of one job. Thread-safe."""

    def __init__(self, state: JobState, job: str, directory: Directory, connector: Connector) -> None:
        self._state = state
        self._job = job
        self._directory = directory
        self._connector = connector
        self._links: list[PserverLink] = []

    def follow(self, count: int) -> None:
        """Also follow the pservers with indexes below this number."""
        for index in range(len(self._links), count):
            self._links.append(PserverLink(index, self._job, self._state, self._directory, self._connector))

    def close(self) -> None:
        for link in self._links:
            link.close()

    def wake(self, index: int) -> None:
        if index < len(self._links):
            self._links[index].wake()

    @property
    def statuses(self) -> list[PserverStatusReply | None]:
        return [link.status for link in self._links]


class PserverLink:
    """The thread of one pserver."""

    def __init__(self, index: int, job: str, state: JobState, directory: Directory, connector: Connector) -> None:
        self._index = index
        self._job = job
        self._state = state
        self._directory = directory
        self._connector = connector
        self._wake = threading.Event()
        self._is_stopping = False
        self._connection: tuple[str, int, Connection] | None = None
        #: Latest status of the pserver; None if the pserver is unreachable.
        self.status: PserverStatusReply | None = None
        self._asked_at = -math.inf
        self._thread = threading.Thread(target=self._run, name=f"flightedl-pserver-{index}", daemon=True)
        self._thread.start()
        directory.subscribe(self._leave_replaced)

    def wake(self) -> None:
        self._wake.set()

    def close(self) -> None:
        self._is_stopping = True
        self._wake.set()
        self._thread.join(_QUICK_CALL_S + 1)
        if self._connection is not None:
            self._connection[2].close()

    def _leave_replaced(self) -> None:
        """Abort calls to processes that have been replaced. Called by the directory after every change."""
        connection, record = self._connection, self._directory.pservers().get(self._index)
        if connection is not None and (record is None or record.generation != connection[1]):
            connection[2].abort_calls()

    def _run(self) -> None:
        pause_s = _STATUS_S
        while not self._is_stopping:
            self._wake.wait(pause_s)
            self._wake.clear()
            try:
                pause_s = self._make_calls()
            except NotReadyError as error:
                pause_s = _NOT_READY_S
                _log.debug("pserver %d: %s", self._index, error)
            except FlightedlError as error:
                self.status = None
                pause_s = _RETRY_S
                _log.debug("pserver %d is unreachable: %s", self._index, error)

    def _make_calls(self) -> float:
        """Make all calls that are due. Return the number of seconds until the next one."""
        record = self._directory.pservers().get(self._index)
        if record is None:
            self.status = None
            return _STATUS_S
        connection = self._connect(record.address, record.generation)
        while not self._is_stopping:
            call = self._next(record.generation)
            if isinstance(call, NoCallDue):
                if call.pause_s >= _STATUS_S or self.status is None:
                    self._ask_status(connection)
                return call.pause_s
            try:
                answered = self._call(call, connection)
            except NotReadyError:
                # The pserver may take minutes to become ready; show its current state until then.
                if self._state.clock.now() - self._asked_at >= _STATUS_S:
                    self._ask_status(connection)
                raise
            self._state.apply(answered)
            if isinstance(answered.reply, AppliedReply):
                # Store the reopened tasks now. Otherwise, the next request would store them, and it may arrive much
                # later.
                self._state.store()
            if call.pause_s:
                return call.pause_s
        return _STATUS_S

    def _ask_status(self, connection: Connection) -> None:
        self._asked_at = self._state.clock.now()
        self.status = decode(connection.action("status", b"", timeout_s=_QUICK_CALL_S), PserverStatusReply)

    def _next(self, generation: int) -> ControlCall | NoCallDue:
        found: list[Effect] = []
        self._state.apply(events.ControlAsked(self._index, generation), found.append)
        (call,) = [each for each in found if isinstance(each, ControlCall | NoCallDue)]
        return call

    def _call(self, call: ControlCall, connection: Connection) -> events.Answered:
        """Make a call as soon as the state that led to it is durable. Return the answer.

        Raises:
            FlightedlError: the call failed, or its outcome is unknown.
        """
        request, identity = call.request, (call.index, call.generation, call.request)
        try:
            self._state.wait_durable(call.revision)
            return events.Answered(*identity, self._ask(request, connection), call.audit)
        except Exception:
            if isinstance(request, ViewRequest):
                self._state.clock.sleep(_RETRY_S)
                self._state.apply(events.Answered(*identity, None))
            raise

    def _ask(self, request: ControlRequest, connection: Connection) -> ViewReply | AppliedReply | SnapshotReply | Done:
        def ask(verb: str, timeout_s: float = _CALL_S) -> bytes:
            return connection.action(verb, encode(request), timeout_s=timeout_s)

        match request:
            case ViewRequest():
                return decode(ask("view", _QUICK_CALL_S), ViewReply)
            case AppliedRequest():
                return decode(ask("applied"), AppliedReply)
            case SnapshotRequest(order=order):
                with tracing.lasting("checkpoint", order.number):
                    return decode(ask("snapshot"), SnapshotReply)
            case SealRequest(epochs=epochs):
                try:
                    ask("seal")
                except MessageError as error:
                    # This only costs memory.
                    first, last = epochs[0][0], epochs[-1][0]
                    _log.warning("pserver %d cannot seal epochs %d to %d: %s", self._index, first, last, error)
            case ReloadRequest():
                ask("reload")
        return Done()

    def _connect(self, address: str, generation: int) -> Connection:
        if self._connection is not None:
            if self._connection[:2] == (address, generation):
                return self._connection[2]
            self._connection[2].close()
        expected = ServerIdentity(self._job, "pserver", self._index, generation)
        connection = self._connector.connect(address, expected)
        self._connection = (address, generation, connection)
        return connection
