"""In-memory twin of the Coordinator: one store with any number of connections, which can be disconnected individually.

The given clock determines when leases expire. The store reads the clock at every request and, while a watch waits,
every few milliseconds. To make a lease expire, a test therefore only has to advance a FakeClock.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from flightedl.domain.recovery.store_history import Sighting, Witness
from flightedl.errors import OutcomeUnknownError, RolledBackError, UnavailableError, UsageError
from flightedl.ports import (
    Absent,
    Clock,
    CompactedError,
    Condition,
    CreatedAt,
    Delete,
    Entry,
    LeaseLostError,
    Listing,
    Operation,
    Put,
    Removed,
    TransactionResult,
    WatchEvent,
    Written,
)

#: Ways in which a request can fail: the request is refused, the request is lost, or its reply is lost.
FaultKind = Literal["unavailable", "lost_request", "lost_reply"]

Reply = TypeVar("Reply")

_OPERATIONS_LIMIT = 128
_POLL_S = 0.005


class _Store:
    """State shared by all connections. Access requires ``condition``."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.condition = threading.Condition()
        self.cluster = "1" * 16
        self.revision = 1
        self.compacted = 0
        self.entries: dict[str, Entry] = {}
        #: All events since ``compacted``, in revision order.
        self.history: list[tuple[int, WatchEvent]] = []
        #: Lease id -> (time to live, time at which it expires).
        self.leases: dict[int, tuple[float, float]] = {}
        self.lease_count = 0

    def expire(self) -> None:
        now = self.clock.now()
        for lease_id in [lease_id for lease_id, (_, end) in self.leases.items() if end <= now]:
            self.end(lease_id)

    def end(self, lease_id: int) -> None:
        if self.leases.pop(lease_id, None) is not None:
            self.change([Delete(key) for key, entry in self.entries.items() if entry.lease_id == lease_id])

    def change(self, operations: Sequence[Operation]) -> None:
        """Carry out all operations as one revision. If nothing changes, the revision stays the same."""
        revision = self.revision + 1
        for operation in operations:
            old = self.entries.get(operation.key)
            if isinstance(operation, Put):
                created = old.create_revision if old else revision
                entry = Entry(operation.key, bytes(operation.value), created, revision, operation.lease_id)
                self.entries[operation.key] = entry
                self.history.append((revision, Written(entry)))
            elif old is not None:
                del self.entries[operation.key]
                self.history.append((revision, Removed(operation.key, revision)))
        if self.history and self.history[-1][0] == revision:
            self.revision = revision
            self.condition.notify_all()

    def holds(self, condition: Condition) -> bool:
        entry = self.entries.get(condition.key)
        match condition:
            case Absent():
                return entry is None
            case CreatedAt(create_revision=revision):
                return (entry.create_revision if entry else 0) == revision
            case _:
                return (entry.mod_revision if entry else 0) == condition.mod_revision


class MemoryCoordinator:
    """See ``ports.Coordinator``."""

    def __init__(self, clock: Clock, store: _Store | None = None) -> None:
        self._store = store or _Store(clock)
        self._faults: list[FaultKind] = []
        self._is_connected = True
        self._watches: set[MemoryWatch] = set()
        self._witness = Witness()

    def another(self) -> MemoryCoordinator:
        """Return a new connection to the same store."""
        return MemoryCoordinator(self._store.clock, self._store)

    # --- faults ---

    def fail_next(self, kind: FaultKind) -> None:
        """Plan a fault for the next request without a planned fault."""
        with self._store.condition:
            self._faults.append(kind)

    def disconnect(self) -> None:
        """Refuse this connection's requests and silence its watches, until ``reconnect``."""
        self._is_connected = False

    def reconnect(self) -> None:
        """Undo ``disconnect``. Watches then deliver what they have missed."""
        with self._store.condition:
            self._is_connected = True
            self._store.condition.notify_all()

    @property
    def is_connected(self) -> bool:
        return self._is_connected

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

    # --- the port ---

    def sighting(self) -> Sighting | None:
        return self._witness.seen

    def get(self, key: str) -> Entry | None:
        return self.request(lambda store: store.entries.get(key))

    def list(self, prefix: str) -> Listing:
        return self.request(
            lambda store: Listing(
                tuple(store.entries[key] for key in sorted(store.entries) if key.startswith(prefix)), store.revision
            )
        )

    def transact(self, when: Sequence[Condition], then: Sequence[Operation]) -> TransactionResult:
        if len(when) > _OPERATIONS_LIMIT or len(then) > _OPERATIONS_LIMIT:
            raise UsageError(f"a transaction has at most {_OPERATIONS_LIMIT} conditions and operations: split it")
        if any(count > 1 for count in Counter(operation.key for operation in then).values()):
            raise UsageError("a transaction does not write the same key twice")

        def carry_out(store: _Store) -> TransactionResult:
            if not all(store.holds(condition) for condition in when):
                entries = {condition.key: store.entries.get(condition.key) for condition in when}
                return TransactionResult(committed=False, revision=store.revision, entries=entries)
            for operation in then:
                if isinstance(operation, Put) and operation.lease_id and operation.lease_id not in store.leases:
                    raise LeaseLostError("the lease has ended")
            store.change(then)
            return TransactionResult(committed=True, revision=store.revision, entries={})

        return self.request(carry_out, lost=OutcomeUnknownError("the transaction may or may not have been executed"))

    def grant(self, ttl_s: float) -> MemoryLease:
        def carry_out(store: _Store) -> MemoryLease:
            store.lease_count += 1
            store.leases[store.lease_count] = (ttl_s, store.clock.now() + ttl_s)
            return MemoryLease(self, store.lease_count, ttl_s)

        return self.request(carry_out)

    def lease_ttl_s(self, lease_id: int) -> float | None:
        return self.request(lambda store: store.leases[lease_id][0] if lease_id in store.leases else None)

    def watch(self, prefix: str, after_revision: int) -> MemoryWatch:
        watch = MemoryWatch(self, self._store, prefix, after_revision, self._watches)
        with self._store.condition:
            self._watches.add(watch)
        return watch

    def close(self) -> None:
        self.disconnect()
        with self._store.condition:
            watches = list(self._watches)
        for watch in watches:
            watch.close()

    def request(self, carry_out: Callable[[_Store], Reply], lost: Exception | None = None) -> Reply:
        """Carry out a request unless a fault is planned. Raises ``lost`` if the caller cannot know the outcome."""
        with self._store.condition:
            self.require_same()
            fault = self._faults.pop(0) if self._faults else None
            if fault == "unavailable" or not self._is_connected:
                raise UnavailableError("etcd cannot be reached: start it, or set FLIGHTEDL_ETCD")
            self._store.expire()
            if fault == "lost_request":
                raise lost or UnavailableError("etcd did not answer")
            self.look()
            reply = carry_out(self._store)
            self.look()
            if fault == "lost_reply":
                raise lost or UnavailableError("etcd did not answer")
            return reply

    def look(self) -> None:
        """Record that this connection has seen the store's current cluster and revision. The caller holds the lock."""
        self._witness.saw(self._witness.seen, Sighting(self._store.cluster, self._store.revision))
        self.require_same()

    def require_same(self) -> None:
        """Raise RolledBackError if the store is older than the state that this connection has seen."""
        if self._witness.broken_because:
            raise RolledBackError(self._witness.broken_because)


@dataclass(frozen=True, slots=True)
class Backup:
    """Copy of a store's contents."""

    revision: int
    entries: Mapping[str, Entry]
    leases: Mapping[int, tuple[float, float]]


class MemoryLease:
    """See ``ports.Lease``."""

    def __init__(self, coordinator: MemoryCoordinator, lease_id: int, ttl_s: float) -> None:
        self._coordinator = coordinator
        self._id = lease_id
        self._ttl_s = ttl_s

    @property
    def id(self) -> int:
        return self._id

    @property
    def ttl_s(self) -> float:
        return self._ttl_s

    def renew(self) -> None:
        def carry_out(store: _Store) -> None:
            if self._id not in store.leases:
                raise LeaseLostError(f"lease {self._id:x} has ended")
            store.leases[self._id] = (self._ttl_s, store.clock.now() + self._ttl_s)

        self._coordinator.request(carry_out)

    def revoke(self) -> None:
        self._coordinator.request(lambda store: store.end(self._id))


class MemoryWatch:
    """See ``ports.Watch``."""

    def __init__(
        self,
        coordinator: MemoryCoordinator,
        store: _Store,
        prefix: str,
        after_revision: int,
        siblings: set[MemoryWatch],
    ) -> None:
        self._coordinator = coordinator
        self._store = store
        self._prefix = prefix
        self._revision = after_revision
        self._is_closed = False
        self._siblings = siblings

    def next(self, timeout_s: float) -> tuple[WatchEvent, ...]:
        deadline = time.monotonic() + timeout_s
        with self._store.condition:
            while not self._is_closed:
                self._store.expire()
                self._coordinator.require_same()
                if self._coordinator.is_connected:
                    self._coordinator.look()
                    if self._revision < self._store.compacted:
                        raise CompactedError("the events after the last one seen are gone: list again")
                    events = tuple(
                        event
                        for revision, event in self._store.history
                        if revision > self._revision and _key(event).startswith(self._prefix)
                    )
                    self._revision = self._store.revision
                    if events:
                        return events
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return ()
                self._store.condition.wait(min(left_s, _POLL_S))
        return ()

    def close(self) -> None:
        with self._store.condition:
            self._is_closed = True
            self._siblings.discard(self)
            self._store.condition.notify_all()


def _key(event: WatchEvent) -> str:
    return event.entry.key if isinstance(event, Written) else event.key
