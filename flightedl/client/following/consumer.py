"""The name of a follower, which only one live process of the job holds at a time."""

from __future__ import annotations

import contextlib
import re
import threading

import msgspec

from flightedl.coordination.keeper import HeldKey
from flightedl.coordination.keys import JobKeys
from flightedl.coordination.records import ServerRecord
from flightedl.errors import FlightedlError, UsageError
from flightedl.messages.decoding import from_json
from flightedl.messages.feed import CONSUMER_NAME
from flightedl.ports import Clock, Coordinator
from flightedl.process import machine

#: Seconds between two attempts to claim the name, and seconds to wait after a dead process's lease has ended.
_RETRY_S = 0.2
_GRACE_S = 1.0


def checked_name(name: str) -> str:
    """Return the name of a consumer. Raises UsageError if it is invalid."""
    if not name or not re.fullmatch(CONSUMER_NAME, name):
        raise UsageError(f"the name {name!r:.80} needs 1 to 64 letters, digits and characters of '._-'")
    return name


class ConsumerName:
    """Holds the name of a consumer from construction until ``close``. Thread-safe.

    If the lease is lost, the name is claimed again as soon as it is free. Until then, the follower has no name.

    Args:
        coordinator: Access to etcd.
        clock: Clock of the lease.
        keys: The job's keys.
        name: The name.
        ttl_s: Time to live of the lease. If a process with this name has just died, its lease ends within this time.

    Raises:
        UsageError: the name is invalid, or another live process holds it.
        UnavailableError: etcd cannot be reached.
    """

    def __init__(self, coordinator: Coordinator, clock: Clock, keys: JobKeys, name: str, ttl_s: float) -> None:
        self.name = checked_name(name)
        self._coordinator = coordinator
        self._clock = clock
        self._key = keys.consumer(name)
        self._ttl_s = ttl_s
        self._value = msgspec.json.encode(ServerRecord(address="", name=machine.host_name(), pid=machine.process_id()))
        self._stop = threading.Event()
        deadline = clock.now() + ttl_s + _GRACE_S
        while (held := HeldKey.claim(coordinator, clock, self._key, self._value, ttl_s, self._claim_again)) is None:
            if clock.now() > deadline:
                entry = coordinator.get(self._key)
                record = ServerRecord(address="") if entry is None else from_json(entry.value, ServerRecord)
                raise UsageError(
                    f"{name!r} already follows job {keys.job_name!r} as process {record.pid} on {record.name}: "
                    "end it or choose another name"
                )
            clock.sleep(_RETRY_S)
        self._held = held

    @property
    def generation(self) -> int | None:
        """Generation of the key; None while this process does not hold the name."""
        held = self._held
        return held.generation if held.is_held else None

    def close(self) -> None:
        """Release the name."""
        self._stop.set()
        self._held.release()

    def _claim_again(self, _: str) -> None:
        with contextlib.suppress(FlightedlError):
            held = HeldKey.claim_when_free(
                self._coordinator,
                self._clock,
                self._key,
                self._value,
                self._ttl_s,
                self._claim_again,
                stop=self._stop,
            )
            if held is not None:
                self._held = held
                if self._stop.is_set():
                    held.release()
