"""Ends the leases of dead processes, so that their successors need not wait until the leases expire.

A process that starts other processes sees when they end. The keys that a dead process held in etcd (its pserver's
index, its trainer's key, the master's lock and address) contain its host and pid. Each key is deleted in a transaction
that compares the key's generation, so a successor's key is never deleted. A frozen or disconnected process is not dead,
and its lease must expire.

A separate thread deletes the keys, because etcd itself may be the process that died.
"""

from __future__ import annotations

import queue
import threading

from flightedl.config import CommonSettings
from flightedl.coordination.keys import JobKeys
from flightedl.errors import FlightedlError
from flightedl.launch.liveness import holder_of
from flightedl.ports import Clock, Coordinator, CreatedAt, Delete, Entry
from flightedl.process import machine

_RETRY_S = 0.1
_GIVE_UP_S = 10.0


class LeaseCleaner:
    """Deletes the keys of dead processes. Thread-safe.

    Args:
        chosen: Settings that name the job and its etcd.
        clock: Paces the retries.
    """

    def __init__(self, chosen: CommonSettings, clock: Clock) -> None:
        self._chosen = chosen
        self._clock = clock
        self._dead: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="flightedl-leases", daemon=True)
        self._thread.start()

    def revoke_for(self, pid: int) -> None:
        """Delete the keys of a process on this machine that has ended."""
        self._dead.put(pid)

    def close(self) -> None:
        """Stop. The remaining leases expire later."""
        self._is_closing = True
        self._dead.put(None)
        self._thread.join(3.0)

    def _run(self) -> None:
        coordinator: Coordinator | None = None
        try:
            while (pid := self._dead.get()) is not None and not self._is_closing:
                if coordinator is None:
                    # Imported lazily, because the import is slow and not needed until a process has ended.
                    from flightedl.coordination.coordinators import open_coordinator

                    coordinator = open_coordinator(self._chosen, clock=self._clock)
                self._revoke(coordinator, pid)
        finally:
            if coordinator is not None:
                coordinator.close()

    def _revoke(self, coordinator: Coordinator, pid: int) -> None:
        prefix, deadline = JobKeys(self._chosen.job).prefix, self._clock.now() + _GIVE_UP_S
        while not self._is_closing and self._clock.now() < deadline:
            try:
                delete_keys_of(coordinator, prefix, pid)
            except FlightedlError:
                self._clock.sleep(_RETRY_S)
            else:
                return


def delete_keys_of(coordinator: Coordinator, prefix: str, pid: int) -> None:
    """Delete the keys of a process on this machine, except those that another process has already replaced.

    Raises:
        UnavailableError, OutcomeUnknownError: etcd is unreachable; call again.
    """
    for entry in coordinator.list(prefix).entries:
        if _is_held_by(entry, pid):
            coordinator.transact([CreatedAt(entry.key, entry.create_revision)], [Delete(entry.key)])


def _is_held_by(entry: Entry, pid: int) -> bool:
    holder = holder_of(entry) if entry.lease_id else None
    return holder is not None and holder.pid == pid and machine.host_name() in {holder.name, holder.host}
