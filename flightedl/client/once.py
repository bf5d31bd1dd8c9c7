"""Names that exactly one trainer of the job gets, for what must be done once, such as writing the final report.

A name lies in etcd on the lease of its winner, so that a winner which dies gives it back. A session that ends cleanly
takes the lease off first: what was done stays done.
"""

from __future__ import annotations

from collections.abc import Callable

from flightedl.client.registration import Registration
from flightedl.client.servers import persistently
from flightedl.client.waiting import Waiting
from flightedl.coordination.keys import JobKeys
from flightedl.errors import FlightedlError
from flightedl.ports import Absent, Coordinator, CreatedAt, Put


class OnceNames:
    """The names that this trainer won."""

    def __init__(
        self, coordinator: Coordinator, keys: JobKeys, registration: Registration, waiting: Callable[[], Waiting]
    ) -> None:
        self._coordinator = coordinator
        self._keys = keys
        self._registration = registration
        self._waiting = waiting
        self._won: set[str] = set()

    def take(self, name: str) -> bool:
        """Whether this trainer has the name, now or from before."""
        key = self._keys.once + name
        value = self._registration.trainer.encode()
        held = self._registration.held

        def attempt() -> bool:
            result = self._coordinator.transact([Absent(key)], [Put(key, value, held.lease_id)])
            entry = result.entries.get(key)
            return result.committed or (entry is not None and entry.value == value)

        if persistently(self._waiting(), attempt):
            self._won.add(key)
            return True
        return False

    def keep(self) -> None:
        """The session ends cleanly: nobody gets these names any more."""
        held = self._registration.held
        for key in sorted(self._won):
            try:
                entry = self._coordinator.get(key)
                if entry is not None and entry.lease_id == held.lease_id:
                    self._coordinator.transact(
                        [CreatedAt(key, entry.create_revision)], [Put(key, self._registration.trainer.encode())]
                    )
            except FlightedlError:
                return
