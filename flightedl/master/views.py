"""Carries the membership to the pservers, and their answers back. One thread for each pserver.

A view goes out only when the state it came from is durable, so that a master's successor knows of every member that a
pserver may have admitted. What cannot be delivered is tried again with whatever is newest by then. In quiet times the
thread asks the pserver how it is, for ``status``. Whatever else has to be said to a pserver is an *errand*, done before
views are sent. A call that is under way when the pserver is replaced ends then: the old one may be frozen.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from flightedl.coordination.directory import Directory
from flightedl.errors import FlightedlError
from flightedl.messages.base import decode, encode
from flightedl.messages.control import ViewReply, ViewRequest
from flightedl.messages.status import PserverStatusReply
from flightedl.ports import Clock
from flightedl.rpc.authentication import Credentials
from flightedl.rpc.client import Connection
from flightedl.rpc.identity import Caller, ServerIdentity

_log = logging.getLogger(__name__)

_CALL_S = 5.0
_RETRY_S = 0.1
_STATUS_S = 1.0


class ViewSender:
    """The thread of one pserver.

    Args:
        index: Of the pserver.
        next_view: The newest view that the process (index, generation) has not answered, durable by the time it is
            returned; or None. What becomes of it is told by ``answered`` or ``failed``.
        answered: Takes (index, generation, answer).
        failed: Takes (index, generation, serial) of a view that got no answer.
        errand: Takes (index, generation, connection); says after how many seconds to come again.
    """

    def __init__(
        self,
        index: int,
        job: str,
        directory: Directory,
        clock: Clock,
        credentials: Credentials | None,
        next_view: Callable[[int, int], ViewRequest | None],
        answered: Callable[[int, int, ViewReply], None],
        failed: Callable[[int, int, int], None],
        errand: Callable[[int, int, Connection], float],
    ) -> None:
        self._index = index
        self._job = job
        self._directory = directory
        self._clock = clock
        self._credentials = credentials
        self._next_view = next_view
        self._answered = answered
        self._failed = failed
        self._errand = errand
        self._wake = threading.Event()
        self._is_stopping = False
        self._connection: tuple[str, int, Connection] | None = None
        #: What the pserver last said of itself; None: it cannot be reached.
        self.status: PserverStatusReply | None = None
        self._thread = threading.Thread(target=self._run, name=f"flightedl-view-{index}", daemon=True)
        self._thread.start()
        directory.subscribe(self._leave_replaced)

    def wake(self) -> None:
        """There may be a new view."""
        self._wake.set()

    def close(self) -> None:
        """Stop the thread."""
        self._is_stopping = True
        self._wake.set()
        self._thread.join(_CALL_S + 1)
        if self._connection is not None:
            self._connection[2].close()

    def _leave_replaced(self) -> None:
        """Called by the directory after changes."""
        connection, record = self._connection, self._directory.pservers().get(self._index)
        if connection is not None and (record is None or record.generation != connection[1]):
            connection[2].sever()

    def _run(self) -> None:
        pause_s = _STATUS_S
        while not self._is_stopping:
            self._wake.wait(pause_s)
            self._wake.clear()
            try:
                pause_s = self._deliver()
            except FlightedlError as error:
                self.status = None
                pause_s = _RETRY_S
                _log.debug("pserver %d not reached: %s", self._index, error)
            except Exception:  # noqa: BLE001 - without this thread rounds would wait for ever
                _log.exception("pserver %d: what it has to be told could not be told", self._index)
                self.status = None
                pause_s = _STATUS_S

    def _deliver(self) -> float:
        """Everything there is for the pserver now; after how many seconds to look again."""
        record = self._directory.pservers().get(self._index)
        if record is None:
            self.status = None
            return _STATUS_S
        connection = self._connect(record.address, record.generation)
        pause_s = self._errand(self._index, record.generation, connection)
        while not self._is_stopping and (view := self._next_view(self._index, record.generation)) is not None:
            try:
                answer = decode(connection.action("view", encode(view), timeout_s=_CALL_S), ViewReply)
            except Exception:
                self._clock.sleep(_RETRY_S)
                self._failed(self._index, record.generation, view.serial)
                raise
            self._answered(self._index, record.generation, answer)
        if pause_s >= _STATUS_S or self.status is None:
            self.status = decode(connection.action("status", b"", timeout_s=_CALL_S), PserverStatusReply)
        return pause_s

    def _connect(self, address: str, generation: int) -> Connection:
        if self._connection is not None:
            if self._connection[:2] == (address, generation):
                return self._connection[2]
            self._connection[2].close()
        expected = ServerIdentity(self._job, "pserver", self._index, generation)
        connection = Connection(
            address,
            expected=expected,
            caller=Caller("master", self._job),
            credentials=self._credentials,
        )
        self._connection = (address, generation, connection)
        return connection
