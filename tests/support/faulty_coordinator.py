"""A connection to the coordinator in memory with planned faults and outages, whose store can be restored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Self, TypeVar

from flightedl.adapters import memory
from flightedl.errors import UnavailableError
from flightedl.ports import Clock, Entry

Reply = TypeVar("Reply")

#: Ways in which a request can fail: the request is refused, the request is lost, or its reply is lost.
FaultKind = Literal["unavailable", "lost_request", "lost_reply"]


@dataclass(frozen=True, slots=True)
class Backup:
    """Copy of a store's contents."""

    revision: int
    entries: Mapping[str, Entry]
    leases: Mapping[int, tuple[float, float]]


class FaultyCoordinator(memory.MemoryCoordinator):
    """See ``adapters.memory``."""

    def __init__(self, clock: Clock, store: memory.MemoryStore | None = None) -> None:
        super().__init__(clock, store)
        self._faults: list[FaultKind] = []

    def another(self) -> Self:
        """Return a new connection to the same store."""
        return type(self)(self._store.clock, self._store)

    def fail_next(self, kind: FaultKind) -> None:
        """Plan a fault for the next request without a planned fault."""
        with self._store.condition:
            self._faults.append(kind)

    def disconnect(self) -> None:
        """Refuse this connection's requests and silence its watches, until ``reconnect``."""
        self.is_connected = False

    def reconnect(self) -> None:
        """Undo ``disconnect``. Watches then deliver what they have missed."""
        with self._store.condition:
            self.is_connected = True
            self._store.condition.notify_all()

    def compact(self) -> None:
        with self._store.condition:
            self._store.compacted = self._store.revision
            self._store.history.clear()
            self._store.condition.notify_all()

    def end_lease(self, lease_id: int) -> None:
        """End a lease without telling its holder."""
        with self._store.condition:
            self._store.end(lease_id)

    def backup(self) -> Backup:
        with self._store.condition:
            return Backup(self._store.revision, dict(self._store.entries), dict(self._store.leases))

    def restore(self, backup: Backup | None = None, cluster: str | None = None) -> None:
        """Restore a backup (None: an empty store) for all connections. ``cluster`` changes the cluster id."""
        backup = backup or Backup(1, {}, {})
        with self._store.condition:
            self._store.cluster = cluster or self._store.cluster
            self._store.revision = self._store.compacted = backup.revision
            self._store.entries, self._store.leases = dict(backup.entries), dict(backup.leases)
            self._store.history.clear()
            self._store.condition.notify_all()

    def request(self, carry_out: Callable[[memory.MemoryStore], Reply], lost: Exception | None = None) -> Reply:
        """Carry out a request unless a fault is planned. Raises ``lost`` if the caller cannot know the outcome."""
        if not self._faults:
            return super().request(carry_out, lost)
        with self._store.condition:
            self.require_same()
            fault = self._faults.pop(0)
            if fault == "unavailable":
                raise UnavailableError("etcd cannot be reached: start it, or set FLIGHTEDL_ETCD")
            if fault == "lost_request" and self.is_connected:
                self._store.expire()
                raise lost or UnavailableError("etcd did not answer")
            reply = super().request(carry_out, lost)
            if fault == "lost_reply":
                raise lost or UnavailableError("etcd did not answer")
            return reply
