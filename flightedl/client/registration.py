"""The trainer's lease: who this process is to the job, also after it lost its lease.

A trainer that was frozen or cut off for longer than its lease is gone for the job: its tasks were handed to others.
When it wakes it registers anew under the same id with a new generation; whatever it still held is refused by its old
generation and dropped.
"""

from __future__ import annotations

import os
import socket
import threading
import uuid

import msgspec

from flightedl.coordination.keeper import HeldKey
from flightedl.coordination.keys import JobKeys
from flightedl.coordination.records import TrainerRecord
from flightedl.errors import UnavailableError
from flightedl.ports import Clock, Coordinator


class Registration:
    """Keeps ``trainers/<id>`` alive and takes it anew when it was lost. Thread-safe."""

    def __init__(self, coordinator: Coordinator, clock: Clock, keys: JobKeys, ttl_s: float) -> None:
        self.trainer = f"{socket.gethostname()[:40]}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self._coordinator = coordinator
        self._clock = clock
        self._keys = keys
        self._ttl_s = ttl_s
        self._lock = threading.Lock()
        self._held = self._claim()

    def _claim(self) -> HeldKey:
        record = TrainerRecord(id=self.trainer, generation=0, host=socket.gethostname(), pid=os.getpid())
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
        """The key as it is held now, also when it is lost."""
        with self._lock:
            return self._held

    @property
    def generation(self) -> int:
        """The generation under which this trainer acts now."""
        return self.held.generation

    def renewed(self) -> bool:
        """Register anew if the lease was lost. True when the generation changed.

        Raises:
            UnavailableError: etcd is not reachable, or the old key has not vanished yet; ask again.
        """
        with self._lock:
            if self._held.is_held:
                return False
            self._held.release()
            self._held = self._claim()
            return True

    def close(self) -> None:
        """End the lease: the others learn at once that this trainer left."""
        with self._lock:
            self._held.release()
