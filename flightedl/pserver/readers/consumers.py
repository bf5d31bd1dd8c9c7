"""Storing of what named consumers acknowledge, in etcd and under the consumers' leases.

A thread of its own writes to etcd, at most once in two seconds, so neither answers nor training wait for etcd. It
writes the acknowledgements of all consumers together, because all processes of the job receive each write. If a write
fails, it is dropped, and the consumer's next acknowledgement is written instead.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import NamedTuple

from flightedl.coordination.directory import Directory
from flightedl.coordination.keys import JobKeys
from flightedl.domain.feed.consumers import Consumers, may_replace
from flightedl.errors import FlightedlError
from flightedl.messages.base import decode, encode
from flightedl.messages.feed import Acknowledgement, ChangesTicket, Position
from flightedl.ports import Clock, Condition, Coordinator, CreatedAt, LeaseLostError, ModifiedAt, Put

_log = logging.getLogger(__name__)

#: Seconds between two writes.
_PAUSE_S = 2.0
#: Maximum number of acknowledgements in a write; a transaction has two conditions for each.
_TOGETHER = 60


class _Write(NamedTuple):
    name: str
    generation: int
    acknowledgement: Acknowledgement


class ConsumerPositions:
    """Stores what named consumers acknowledge to this pserver. Thread-safe.

    Args:
        coordinator: Access to etcd.
        directory: Copy of the job's keys, with the consumers.
        keys: The job's keys.
        clock: Source of the time in the stored values.
    """

    def __init__(self, coordinator: Coordinator, directory: Directory, keys: JobKeys, clock: Clock) -> None:
        self._coordinator = coordinator
        self._directory = directory
        self._keys = keys
        self._clock = clock
        self._lock = threading.Lock()
        self._consumers = Consumers()
        self._index = -1
        self._is_needed, self._stop = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        #: Name and generation of a consumer -> revision of its last write.
        self._written: dict[tuple[str, int], int] = {}
        self._has_warned = False

    def start(self, index: int) -> None:
        """Start writing, as the pserver with this index. The index may change when the model starts over."""
        self._index = index
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="flightedl-consumers", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._is_needed.set()
        if self._thread is not None:
            self._thread.join(1.0)

    def acknowledged(self, ticket: ChangesTicket, position: Position, newest: int) -> None:
        """Note the acknowledgement in a request; see ``Consumers.acknowledged``."""
        if self._has_name(ticket):
            with self._lock:
                self._consumers.acknowledged(ticket.consumer, ticket.consumer_generation, position, newest)
            self._is_needed.set()

    def answered(self, ticket: ChangesTicket, number: int, as_of: float) -> None:
        """Note the answer to a request, whose state is not older than the instant ``as_of``."""
        if self._has_name(ticket):
            at_s = self._clock.wall_time() - (self._clock.now() - as_of)
            with self._lock:
                self._consumers.answered(ticket.consumer, ticket.consumer_generation, number, at_s)
            self._is_needed.set()

    def _has_name(self, ticket: ChangesTicket) -> bool:
        """True if the sender of a request holds the name. Acknowledgements of others would hide those of the holder."""
        entry = self._directory.entry(self._keys.consumer(ticket.consumer)) if ticket.consumer else None
        return entry is not None and entry.create_revision == ticket.consumer_generation

    def _run(self) -> None:
        while self._is_needed.wait():
            self._is_needed.clear()
            # ``close`` sets this event first, so its other event is not cleared unseen.
            if self._stop.is_set():
                return
            holders = {name: record.generation for name, record in self._directory.consumers().items()}
            self._written = {held: revision for held, revision in self._written.items() if held in holders.items()}
            with self._lock:
                found = self._consumers.take(holders)
            writes = [_Write(name, holders[name], acknowledgement) for name, acknowledgement in found.items()]
            for start in range(0, len(writes), _TOGETHER):
                self._store(writes[start : start + _TOGETHER])
            self._stop.wait(_PAUSE_S)

    def _store(self, writes: Sequence[_Write]) -> None:
        """Store acknowledgements in one transaction. If one of them is refused, store each on its own."""
        trouble: Exception | None = None
        try:
            is_refused = not self._are_stored(writes)
        except (FlightedlError, LeaseLostError) as error:
            is_refused, trouble = isinstance(error, LeaseLostError), error
        if is_refused and len(writes) > 1:
            for each in writes:
                self._store([each])
        elif trouble is not None and not self._has_warned:
            names = ", ".join(each.name for each in writes)
            _log.warning("the position of consumer %s could not be stored: %s", names, trouble)
            self._has_warned = True

    def _are_stored(self, writes: Sequence[_Write]) -> bool:
        conditions: list[Condition] = []
        puts = []
        for name, generation, acknowledgement in writes:
            holder, key = self._keys.consumer(name), self._keys.acknowledgement(name, self._index)
            entry = self._directory.entry(holder)
            # Without an entry, the first condition does not hold.
            conditions += [CreatedAt(holder, generation), ModifiedAt(key, self._written.get((name, generation), 0))]
            puts.append(Put(key, encode(acknowledgement), 0 if entry is None else entry.lease_id))
        result = self._coordinator.transact(conditions, puts)
        for (name, generation, acknowledgement), put in zip(writes, puts, strict=True):
            found = result.entries.get(put.key)
            if result.committed:
                self._written[name, generation] = result.revision
            # A former process of this pserver may have written the key.
            elif found is not None and may_replace(decode(found.value, Acknowledgement), acknowledgement.position):
                self._written[name, generation] = found.mod_revision
        return result.committed
