"""Implementation of ``ports.Coordinator`` in this process's memory: one store with any number of connections.

Leases expire by the store's clock. The store reads the clock at every request, and a waiting watch wakes when the next
lease expires. The store keeps a limited number of past events; a watch that has missed more is told to list again. Each
store has a cluster id of its own, so a process notices if a store was replaced by an empty one.
"""

from __future__ import annotations

import math
import secrets
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TypeVar

from flightedl.adapters.clock import SystemClock
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

Reply = TypeVar("Reply")

_OPERATIONS_LIMIT = 128
#: Between once and twice as many past events are kept.
_HISTORY_LIMIT = 10_000


class MemoryStore:
    """State shared by all connections. Access requires ``condition``.

    Args:
        clock: Clock of the leases.
        poll_s: Interval at which waiting watches read the clock, for clocks that tests advance.
    """

    def __init__(self, clock: Clock, poll_s: float = math.inf) -> None:
        self.clock = clock
        #: A simulation, in which one thread runs at a time, replaces it.
        self.condition = threading.Condition()
        self._poll_s = poll_s
        self.cluster = secrets.token_hex(8)
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

    def wait(self, timeout_s: float) -> None:
        """Wait for a change. Return early when a lease expires."""
        expiry = min((end for _, end in self.leases.values()), default=math.inf)
        timeout_s = min(timeout_s, self._poll_s, max(expiry - self.clock.now(), 0.0))
        self.condition.wait(timeout_s)

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
            if len(self.history) > 2 * _HISTORY_LIMIT:
                self.compacted = self.history[_HISTORY_LIMIT - 1][0]
                del self.history[:_HISTORY_LIMIT]
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

    def __init__(self, clock: Clock, store: MemoryStore | None = None) -> None:
        self._store = store or MemoryStore(clock)
        #: False once this connection is closed.
        self.is_connected = True
        self._watches: set[MemoryWatch] = set()
        self._witness = Witness()

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

        def carry_out(store: MemoryStore) -> TransactionResult:
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
        def carry_out(store: MemoryStore) -> MemoryLease:
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
        with self._store.condition:
            self.is_connected = False
            watches = list(self._watches)
        for watch in watches:
            watch.close()

    def request(self, carry_out: Callable[[MemoryStore], Reply], lost: Exception | None = None) -> Reply:  # noqa: ARG002
        """Carry out a request. Subclasses whose replies may be lost raise ``lost`` if the outcome is unknown."""
        with self._store.condition:
            self.require_same()
            if not self.is_connected:
                raise UnavailableError("etcd cannot be reached: start it, or set FLIGHTEDL_ETCD")
            self._store.expire()
            self.look()
            reply = carry_out(self._store)
            self.look()
            return reply

    def look(self) -> None:
        """Record that this connection has seen the store's current cluster and revision. The caller holds the lock."""
        self._witness.saw(self._witness.seen, Sighting(self._store.cluster, self._store.revision))
        self.require_same()

    def require_same(self) -> None:
        """Raise RolledBackError if the store is older than the state that this connection has seen."""
        if self._witness.broken_because:
            raise RolledBackError(self._witness.broken_because)


class MemoryLease:
    """See ``ports.Lease``."""

    def __init__(self, coordinator: MemoryCoordinator, lease_id: int, ttl_s: float) -> None:
        self._coordinator = coordinator
        self.id = lease_id
        self.ttl_s = ttl_s

    def renew(self) -> None:
        def carry_out(store: MemoryStore) -> None:
            if self.id not in store.leases:
                raise LeaseLostError(f"lease {self.id:x} has ended")
            store.leases[self.id] = (self.ttl_s, store.clock.now() + self.ttl_s)

        self._coordinator.request(carry_out)

    def revoke(self) -> None:
        self._coordinator.request(lambda store: store.end(self.id))


class MemoryWatch:
    """See ``ports.Watch``."""

    def __init__(
        self,
        coordinator: MemoryCoordinator,
        store: MemoryStore,
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

    @property
    def revision(self) -> int:
        """Revision up to which all events have been returned."""
        return self._revision

    def next(self, timeout_s: float) -> tuple[WatchEvent, ...]:
        # The caller's patience is not the store's time, which tests stop.
        clock = SystemClock()
        deadline = clock.now() + timeout_s
        with self._store.condition:
            while not self._is_closed:
                self._store.expire()
                self._coordinator.require_same()
                if self._coordinator.is_connected:
                    self._coordinator.look()
                    if self._revision < self._store.compacted:
                        raise CompactedError("the events after the last one seen are gone: list again")
                    first = bisect_right(self._store.history, self._revision, key=itemgetter(0))
                    new = (event for _, event in self._store.history[first:])
                    events = tuple(event for event in new if _key(event).startswith(self._prefix))
                    self._revision = self._store.revision
                    if events:
                        return events
                left_s = deadline - clock.now()
                if left_s <= 0:
                    return ()
                self._store.wait(left_s)
        return ()

    def close(self) -> None:
        with self._store.condition:
            self._is_closed = True
            self._siblings.discard(self)
            self._store.condition.notify_all()


def _key(event: WatchEvent) -> str:
    return event.entry.key if isinstance(event, Written) else event.key
