"""Access to etcd, the master and the other pservers, for a pserver whose blocks move."""

from __future__ import annotations

import threading
from typing import NamedTuple

from flightedl.coordination.directory import Directory
from flightedl.coordination.keys import JobKeys
from flightedl.coordination.records import ServerRecord
from flightedl.domain.moving.values import Acknowledged, Intent, StoredIntent, Transaction, placement_in
from flightedl.errors import NotReadyError
from flightedl.messages.base import decode, encode
from flightedl.messages.declarations import JobDeclaration, Placement
from flightedl.messages.moving import MovedRequest
from flightedl.messages.scaling import ScaleReply, ScaleRequest
from flightedl.ports import Coordinator, CreatedAt, Delete
from flightedl.rpc.client import Connection
from flightedl.rpc.connector import Connector
from flightedl.rpc.identity import ServerIdentity

_ACTION_S = 2.0


class Reading(NamedTuple):
    """Values read from etcd at a single revision."""

    revision: int
    placement: Placement
    stored: StoredIntent | None
    #: Generation of the process that holds the reader's index.
    holder: int | None


class Peers:
    """Access to etcd and to the other servers of a job. Thread-safe.

    Args:
        directory: Copy of the job's state in etcd.
        keys: The job's keys.
        coordinator: Access to etcd for transactions.
        connector: Opens connections to the other servers.
    """

    def __init__(self, directory: Directory, keys: JobKeys, coordinator: Coordinator, connector: Connector) -> None:
        self._directory = directory
        self._keys = keys
        self._coordinator = coordinator
        self._connector = connector
        self._lock = threading.Lock()
        #: (role, index) -> the newest connection, with its server.
        self._connections: dict[tuple[str, int], tuple[ServerRecord, Connection]] = {}

    def read(self, index: int) -> Reading | None:
        """Return the newest known placement and intent; None if no placement is stored."""
        keys = self._keys
        revision, found = self._directory.entries(keys.job, keys.placement, keys.moving, keys.pserver(index))
        job, stored, moving, holder = found
        model = None if job is None else decode(job.value, JobDeclaration).model
        placement = placement_in(model, None if stored is None else stored.value)
        if placement is None:
            return None
        intent = None if moving is None else StoredIntent(moving.create_revision, decode(moving.value, Intent))
        return Reading(revision, placement, intent, None if holder is None else holder.create_revision)

    def pserver(self, index: int, generation: int) -> Connection:
        """Return a connection to this generation of a process. Raises NotReadyError if the process was replaced."""
        record = self._directory.pservers().get(index)
        if record is None or record.generation != generation:
            raise NotReadyError(f"pserver {index} was replaced")
        return self._connection("pserver", index, record)

    def source(self, index: int) -> Connection:
        """Return a connection to the present process of a pserver. Raises NotReadyError if there is none."""
        record = self._directory.pservers().get(index)
        if record is None:
            raise NotReadyError(f"there is no pserver {index}")
        return self._connection("pserver", index, record)

    def dismiss_standby(self, index: int) -> None:
        """End the standby of this pserver, because its copy must not be used. Raises the errors of a transaction."""
        self._coordinator.transact([], [Delete(self._keys.standby(index))])

    def acknowledge(self, acknowledged: Acknowledged, generation: int) -> None:
        """Inform the master that a unit has been staged completely. Raises the same errors as any action."""
        request = MovedRequest(attempt=acknowledged.attempt, block=acknowledged.block, generation=generation)
        self._master().action("moved", encode(request), timeout_s=_ACTION_S)

    def scale(self, request: ScaleRequest) -> ScaleReply:
        """Ask the master to change the pservers. Raises the same errors as any action."""
        return decode(self._master().action("scale", encode(request), timeout_s=_ACTION_S), ScaleReply)

    def give_up(self, transaction: Transaction) -> None:
        """Delete the intent if it still belongs to the attempt. Raises UnavailableError if etcd is unreachable."""
        key = self._keys.moving
        self._coordinator.transact([CreatedAt(key, transaction.attempt)], [Delete(key)])

    def _master(self) -> Connection:
        record = self._directory.master()
        if record is None:
            raise NotReadyError("there is no master")
        return self._connection("master", 0, record)

    def _connection(self, role: str, index: int, record: ServerRecord) -> Connection:
        with self._lock:
            known = self._connections.get((role, index))
            if known is None or known[0] != record:
                identity = ServerIdentity(self._keys.job_name, role, index, record.generation)
                known = record, self._connector.connect(record.address, identity, record.integrity)
                self._connections[role, index] = known
            return known[1]
