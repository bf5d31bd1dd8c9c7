"""Storing of what named consumers acknowledge, in etcd and under the consumers' leases.

A thread of its own writes to etcd, at most once in two seconds, so neither answers nor training wait for etcd. If a
write fails, it is dropped, and the consumer's next acknowledgement is written instead.
"""

from __future__ import annotations

import logging
import threading

from flightedl.coordination.directory import Directory
from flightedl.coordination.keys import JobKeys
from flightedl.domain.feed.consumers import Consumers, may_replace
from flightedl.errors import FlightedlError
from flightedl.messages.base import decode, encode
from flightedl.messages.feed import Acknowledgement, ChangesTicket, Position
from flightedl.ports import Clock, Coordinator, CreatedAt, LeaseLostError, ModifiedAt, Put

_log = logging.getLogger(__name__)

#: Seconds between two writes. All processes of the job receive each write.
_PAUSE_S = 2.0


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
        """Start writing, as the pserver with this index."""
        self._index = index
        self._thread = threading.Thread(target=self._run, name="flightedl-consumers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._is_needed.set()

    def acknowledged(self, ticket: ChangesTicket, position: Position, newest: int) -> None:
        """Note the acknowledgement in a request; see ``Consumers.acknowledged``."""
        if ticket.consumer:
            with self._lock:
                self._consumers.acknowledged(ticket.consumer, ticket.consumer_generation, position, newest)
            self._is_needed.set()

    def answered(self, ticket: ChangesTicket, number: int, as_of: float) -> None:
        """Note the answer to a request, whose state is not older than the instant ``as_of``."""
        if ticket.consumer:
            at_s = self._clock.wall_time() - (self._clock.now() - as_of)
            with self._lock:
                self._consumers.answered(ticket.consumer, ticket.consumer_generation, number, at_s)
            self._is_needed.set()

    def _run(self) -> None:
        while self._is_needed.wait() and not self._stop.is_set():
            self._is_needed.clear()
            holders = {name: record.generation for name, record in self._directory.consumers().items()}
            self._written = {held: revision for held, revision in self._written.items() if held in holders.items()}
            with self._lock:
                found = self._consumers.take(holders)
            for name, acknowledgement in found.items():
                try:
                    self._store(name, holders[name], acknowledgement)
                except (FlightedlError, LeaseLostError) as error:
                    if not self._has_warned:
                        _log.warning("the position of consumer %s could not be stored: %s", name, error)
                    self._has_warned = True
            self._stop.wait(_PAUSE_S)

    def _store(self, name: str, generation: int, acknowledgement: Acknowledgement) -> None:
        holder, key = self._keys.consumer(name), self._keys.acknowledgement(name, self._index)
        entry = self._directory.entry(holder)
        if entry is None:
            return
        known = self._written.get((name, generation), 0)
        result = self._coordinator.transact(
            [CreatedAt(holder, generation), ModifiedAt(key, known)],
            [Put(key, encode(acknowledgement), entry.lease_id)],
        )
        if result.committed:
            self._written[name, generation] = result.revision
            return
        # A former process of this pserver may have written the key.
        found = result.entries.get(key)
        if found is not None and may_replace(decode(found.value, Acknowledgement), acknowledgement.position):
            self._written[name, generation] = found.mod_revision
