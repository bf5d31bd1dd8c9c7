"""Connections to the master and the pservers. Calls are retried while a server restarts.

Each call carries the generation of the server for which it is intended. When a server is replaced, its new address and
generation come from the directory (a watch on etcd), and calls go to the new process. Calls in flight to the old
process are aborted, because it may be frozen and would block them until their deadlines.

All requests are idempotent: each carries its identity, so it can safely be repeated if its outcome is unknown.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from flightedl.client.waiting import Waiting
from flightedl.coordination.directory import Directory
from flightedl.coordination.records import ServerRecord
from flightedl.domain.retries import is_transient
from flightedl.domain.trainer.first_values import FollowedElection
from flightedl.errors import FlightedlError, NotReadyError
from flightedl.rpc.client import Connection
from flightedl.rpc.connector import Connector
from flightedl.rpc.identity import ServerIdentity

Result = TypeVar("Result")

#: Maximum duration of a single call on the user's thread, in seconds. It bounds the delay of Ctrl-C.
SLICE_S = 4.0


class Servers:
    """Connections to the job's servers, at most one per server. When a server is replaced, so is its connection.

    Args:
        job: The job's name.
        directory: Source of the servers' addresses.
        connector: Opens the connections.
        calls: Called with the name of the server that the calling thread is about to call.
    """

    def __init__(
        self,
        job: str,
        directory: Directory,
        connector: Connector,
        calls: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._job = job
        self._directory = directory
        self._connector = connector
        self._calls = calls
        self._lock = threading.Lock()
        self._connections: dict[tuple[str, int], tuple[ServerRecord, Connection]] = {}
        #: Cache: index -> (state of the directory, result of the lookup in that state). The state rarely changes
        #: between steps.
        self._pservers: dict[int, tuple[object, tuple[int, Connection]]] = {}
        #: Connections to servers that have been replaced; other threads may still be using them.
        self._retired: list[Connection] = []
        #: True after ``abort_calls``.
        self._is_aborted = False
        #: Key and result of the election of the model's initial values; None until both are known.
        self._election: tuple[str, FollowedElection] | None = None
        directory.subscribe(self._leave_replaced)

    def _leave_replaced(self) -> None:
        present = self._present()
        with self._lock:
            left = [
                connection for place, (record, connection) in self._connections.items() if present.get(place) != record
            ]
        for connection in left:
            connection.abort_calls()

    def _present(self) -> dict[tuple[str, int], ServerRecord]:
        present = {("pserver", index): record for index, record in self._directory.pservers().items()}
        if (master := self._directory.master()) is not None:
            present["master", 0] = master
        return present

    def follow(self, key: str, election: FollowedElection) -> None:
        """Reject all calls once the model has been initialized again. The model's election is the etcd key ``key``."""
        self._election = key, election

    @property
    def life(self) -> int:
        """Number of times that the trained model has been initialized; 0 if there is no model."""
        return 0 if self._election is None else self._election[1].life

    def _require_same_model(self) -> None:
        directory = self._directory
        directory.require_followed()
        if self._election is None:
            return
        key, followed = self._election
        # Read the revision before the key, so that the next call detects a change made between the two reads.
        revision = directory.revision
        now = directory.entry(key)
        followed.require_same(None if now is None else now.create_revision, revision)

    def master(self) -> Connection:
        """Return the connection to the current master.

        Raises:
            NotReadyError: no master is known.
            BegunAnewError: the model has been initialized again since this trainer joined.
            RolledBackError: etcd was restored from an older state.
        """
        self._require_same_model()
        record = self._directory.master()
        if record is None:
            raise NotReadyError("no master serves this job yet; if none was started, start one with `flightedl master`")
        self._calls("the master")
        return self._connection("master", 0, record)

    def pserver(self, index: int) -> tuple[int, Connection]:
        """Return the generation of a pserver and the connection to it.

        Raises:
            NotReadyError: no pserver holds the index.
            BegunAnewError: the model has been initialized again since this trainer joined.
            RolledBackError: etcd was restored from an older state.
        """
        state = self._directory.state
        known = self._pservers.get(index)
        if known is None or known[0] is not state:
            self._require_same_model()
            record = self._directory.pservers().get(index)
            if record is None:
                raise NotReadyError(f"no pserver holds index {index} at the moment")
            known = state, (record.generation, self._connection("pserver", index, record))
            self._pservers[index] = known
        self._calls(f"pserver {index}")
        return known[1]

    def _connection(self, role: str, index: int, record: ServerRecord) -> Connection:
        with self._lock:
            known = self._connections.get((role, index))
            if known is not None and (known[0] is record or known[0] == record):
                return known[1]
            expected = ServerIdentity(job=self._job, role=role, index=index, generation=record.generation)
            connection = self._connector.connect(record.address, expected, record.integrity)
            self._connections[role, index] = (record, connection)
            if known is not None:
                self._retired.append(known[1])
        if known is not None:
            # The directory's subscriber runs later, and finds no connections that are already retired.
            known[1].abort_calls()
        if self._is_aborted or self._present().get((role, index)) != record:
            # The server was replaced before this connection was registered, so its calls have not been aborted.
            connection.abort_calls()
        return connection

    def abort_calls(self) -> None:
        """Abort the calls of all threads, even to servers that the directory no longer has, and all later calls."""
        with self._lock:
            self._is_aborted = True
            connections = [*self._retired, *(connection for _, connection in self._connections.values())]
        for connection in connections:
            connection.abort_calls()

    def close(self) -> None:
        with self._lock:
            connections = [*self._retired, *(connection for _, connection in self._connections.values())]
            self._connections.clear()
            self._retired.clear()
            self._pservers.clear()
        for connection in connections:
            connection.close()


def persistently(waiting: Waiting, attempt: Callable[[], Result]) -> Result:
    """Call ``attempt``, which must be idempotent, until it succeeds or raises an error that cannot be retried.

    Raises:
        UnavailableError: ``waiting`` gave up.
        FlightedlError: the first error that is not worth a retry.
    """
    try:
        while True:
            try:
                return attempt()
            except FlightedlError as error:
                if not is_transient(error):
                    raise
                waiting.because(error)
            waiting.pause()
    finally:
        waiting.over()
