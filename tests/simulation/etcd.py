"""In-memory etcd of the simulation: the product's ``adapters.memory``, with delays, faults and outages.

The store is a machine of its own, so nothing gives way inside it, and no killed process can leave it locked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from flightedl.adapters import memory
from flightedl.coordination.keys import JobKeys
from flightedl.domain.etcd_versions import Version
from flightedl.errors import UnavailableError
from flightedl.ports import Condition, Operation, Put, TransactionResult
from tests.simulation.flight import network
from tests.simulation.scheduler import AbandonedError, Process, Thread, require_running, this_process
from tests.support.faulty_coordinator import Backup, FaultKind, FaultyCoordinator

_Reply = TypeVar("_Reply")
HOST = "etcd"
_FAULTS: Sequence[FaultKind] = ("unavailable", "lost_request", "lost_reply")


class _Atomic:
    """Condition of the store. One thread runs at a time, so it needs no lock."""

    def __init__(self) -> None:
        self._waiting: list[Thread] = []

    def __enter__(self) -> None:
        if require_running().is_over:
            raise AbandonedError

    def __exit__(self, *_: object) -> None:
        pass

    def notify_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for thread in waiting:
            require_running().wake(thread)

    def wait(self, timeout_s: float) -> None:
        scheduler = require_running()
        thread = scheduler.current
        assert thread is not None, "the store itself would wait"
        self._waiting.append(thread)
        scheduler.block(scheduler.now + timeout_s, "watch of etcd")
        if thread in self._waiting:
            self._waiting.remove(thread)


class _VirtualClock:
    """Clock of the store: virtual time."""

    def now(self) -> float:
        return require_running().now

    def wall_time(self) -> float:
        return require_running().now

    def sleep(self, seconds: float) -> None:
        require_running().sleep(seconds)


class JudgedStore(memory.MemoryStore):
    """Store that notes what processes must not write.

    Only the master that holds the lock writes the job's state, and no process takes an index whose standby is alive.
    """

    def __init__(self) -> None:
        super().__init__(_VirtualClock())
        self.problems: list[str] = []

    def change(self, operations: Sequence[Operation]) -> None:
        """See ``MemoryStore``."""
        created = [each.key for each in operations if isinstance(each, Put) and each.key not in self.entries]
        super().change(operations)
        current = require_running().current
        if current is None:
            return
        process = current.process
        for key in [each.key for each in operations if isinstance(each, Put)]:
            keys = JobKeys(key.split("/")[2])
            is_state = key.startswith(keys.state_prefix) and process.name.startswith("master")
            if is_state and not self._has(keys.master_lock, process):
                self.problems.append(f"{process.name} wrote the job's state, but does not have the lock")
            index = keys.pserver_index(key) if key in created else None
            if index is not None and self._is_of_another(keys.standby(index), process):
                self.problems.append(f"{process.name} took index {index}, whose standby is alive")

    def _is_of_another(self, key: str, process: Process) -> bool:
        return key in self.entries and not self._has(key, process)

    def _has(self, key: str, process: Process) -> bool:
        """True if a key was written by this process."""
        entry = self.entries.get(key)
        return entry is not None and f'"pid":{process.pid}'.encode() in entry.value


class Etcd:
    """The etcd of one simulation."""

    def __init__(self) -> None:
        self.store = JudgedStore()
        self.store.condition = _Atomic()  # type: ignore[assignment] # it has the methods that the store uses
        self.store.cluster = "1" * 16
        #: Probability that a request fails.
        self.fault_chance = 0.0
        #: No request is answered before this time.
        self.down_until = 0.0
        self.chance = require_running().stream("etcd")
        #: Number of transactions of each process.
        self.transaction_counts: dict[Process, int] = {}
        #: Called before and after each transaction, for faults that are aimed at transactions.
        self.watchers: list[Callable[[Process, int, str], None]] = []
        self._backups: list[tuple[float, Backup]] = []
        self._clusters = 1
        #: Faults of the next request of a thread.
        self.planned: dict[Thread | None, FaultKind] = {}

    def back_up(self) -> None:
        """Keep a copy of the present state."""
        self._backups.append((require_running().now, self.admin().backup()))

    def go_back(self, seconds: float) -> bool:
        """Restore the newest copy that is at least so old, as another cluster. Return False if there is none."""
        before = [backup for at_s, backup in self._backups if at_s <= require_running().now - seconds + 0.001]
        if before:
            self._clusters += 1
            self.admin().restore(before[-1], str(self._clusters) * 16)
        return bool(before)

    def admin(self) -> Connection:
        """Return a connection of the simulation itself, without delays and faults."""
        return Connection(self, is_admin=True)


class _Current:
    """Holds the etcd of the current seed."""

    etcd: Etcd | None = None


def set_etcd(etcd: Etcd | None) -> None:
    """Begin or end a seed."""
    _Current.etcd = etcd


def current_etcd() -> Etcd:
    """Return the etcd of the current seed."""
    assert _Current.etcd is not None, "no seed is running"
    return _Current.etcd


class Connection(FaultyCoordinator):
    """A process's connection to the simulated etcd."""

    def __init__(self, etcd: Etcd, *, is_admin: bool = False) -> None:
        super().__init__(_VirtualClock(), etcd.store)
        self._etcd = etcd
        self._is_admin = is_admin

    def version(self) -> tuple[Version, int]:
        """Return the version of etcd, as a process needs it to warn of old versions."""
        raise UnavailableError("not in the simulation")

    def is_full(self) -> bool:
        """True if the database has reached its quota."""
        return False

    def transact(self, when: Sequence[Condition], then: Sequence[Operation]) -> TransactionResult:
        if self._is_admin:
            return super().transact(when, then)
        process, etcd = this_process(), self._etcd
        count = etcd.transaction_counts[process] = etcd.transaction_counts.get(process, 0) + 1
        for watcher in etcd.watchers:
            watcher(process, count, "before")
        try:
            return super().transact(when, then)
        finally:
            if not require_running().is_over:
                for watcher in etcd.watchers:
                    watcher(process, count, "after")

    def request(self, carry_out: Callable[[memory.MemoryStore], _Reply], lost: Exception | None = None) -> _Reply:
        if self._is_admin:
            return super().request(carry_out, lost)
        scheduler, etcd, host = require_running(), self._etcd, this_process().host
        scheduler.sleep(network().link(host, HOST).delay_s())
        if scheduler.now < etcd.down_until:
            scheduler.sleep(min(etcd.down_until - scheduler.now, 2.0))
            raise lost or UnavailableError("etcd did not answer")
        if etcd.fault_chance and etcd.chance.random() < etcd.fault_chance:
            self.fail_next(etcd.chance.choice(_FAULTS))
        if scheduler.current in etcd.planned:
            self.fail_next(etcd.planned.pop(scheduler.current))
        try:
            return super().request(carry_out, lost)
        finally:
            scheduler.sleep(network().link(HOST, host).delay_s())
