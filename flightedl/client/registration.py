"""A trainer's registration: its id, its lease, and the recovery from a lost lease.

If a trainer is frozen or disconnected for longer than its lease, the job considers it dead and assigns its tasks to
other trainers. When it continues, it registers again: its id is the same, its generation is new, and work under the old
generation is void.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from typing import TypeVar

import msgspec

from flightedl.client.data.ranks import lasting_name
from flightedl.coordination.keeper import HeldKey
from flightedl.coordination.keys import JobKeys
from flightedl.coordination.records import TrainerRecord
from flightedl.errors import FencedError, NotReadyError, UnavailableError
from flightedl.messages.decoding import from_json
from flightedl.ports import Clock, Coordinator, LeaseLostError
from flightedl.process import machine

Result = TypeVar("Result")


class Registration:
    """Keeps the key ``trainers/<id>`` alive, and creates it again if it is lost. Thread-safe.

    ``name`` is the launcher's name for the trainer, used in messages.
    """

    def __init__(self, coordinator: Coordinator, clock: Clock, keys: JobKeys, ttl_s: float, name: str = "") -> None:
        self.trainer = f"{machine.host_name()[:40]}-{machine.process_id()}-{uuid.uuid4().hex[:6]}"
        self._coordinator = coordinator
        self._clock = clock
        self._keys = keys
        self._ttl_s = ttl_s
        self._name = name
        #: Name of this trainer that outlives its process.
        self.witness = lasting_name(name)
        self._lock = threading.Lock()
        #: True if ``renewed`` has not reported the current generation yet.
        self._is_news = False
        self._is_closed = False
        self._held = self._claim()

    def _claim(self) -> HeldKey:
        record = TrainerRecord(
            id=self.trainer, generation=0, name=self._name, host=machine.host_name(), pid=machine.process_id()
        )
        held = HeldKey.claim(
            self._coordinator,
            self._clock,
            self._keys.trainer(self.trainer),
            msgspec.json.encode(record),
            self._ttl_s,
        )
        if held is None:
            raise UnavailableError(f"the previous lease of trainer {self.trainer} has not ended yet")
        return held

    @property
    def held(self) -> HeldKey:
        """The key as this trainer last held it, even if the trainer has lost it since."""
        with self._lock:
            return self._held

    @property
    def latest(self) -> HeldKey:
        """The latest key. Unlike ``held``, this does not wait while the trainer registers again."""
        return self._held

    @property
    def generation(self) -> int:
        return self._held.generation

    def renewed(self) -> bool:
        """Register again if the lease was lost. Only the first call after that returns True.

        Raises:
            UnavailableError: etcd is unreachable, or the old key still exists. Call this again.
            FencedError: this trainer has left the job.
        """
        with self._lock:
            self._renew()
            is_news, self._is_news = self._is_news, False
            return is_news

    def has_replaced(self, trainer: str) -> bool:
        """True if this process replaces a dead trainer whose lease has not ended yet."""
        entry = self._coordinator.get(self._keys.trainer(trainer)) if self._name else None
        if entry is None:
            return False
        other = from_json(entry.value, TrainerRecord)
        # Two sessions of one process have the same name, too.
        is_another = other.pid != machine.process_id()
        return is_another and (other.name, other.host) == (self._name, machine.host_name())

    def under_lease(self, act: Callable[[HeldKey], Result]) -> Result:
        """Register again if the lease was lost. Then call a function that needs this trainer's lease.

        Raises:
            UnavailableError: as for ``renewed``, or the lease ended before ``act`` could use it. Call this again.
            FencedError: as for ``renewed``.
        """
        with self._lock:
            self._renew()
            held = self._held
        try:
            return act(held)
        except LeaseLostError:
            held.has_lost()
            raise NotReadyError(f"the lease of trainer {self.trainer} has ended; it is registering again") from None

    def _renew(self) -> None:
        if not self._held.is_held:
            if self._is_closed:
                raise FencedError(f"trainer {self.trainer} has left the job")
            self._held.release()
            self._held = self._claim()
            self._is_news = True

    def close(self) -> None:
        """End the lease, so that other processes notice immediately that this trainer has left."""
        with self._lock:
            self._is_closed = True
            self._held.release()
