"""The coordinator as a job sees it: revisions keep increasing even if the job resumes on an etcd that was rolled back.

Theory of operation. The key ``history`` names the job's *life* (``domain.recovery.store_history``). All processes of
the job add the life's first revision to revisions that they receive from etcd, and subtract it from revisions that they
send. In the first life, this revision is 0, so the difference matters only to programs that read the etcd of a resumed
job themselves. A condition on a revision of an earlier life is never met.

A process cannot continue if it detects that etcd was rolled back, or that its job has started another life. From then
on, all methods raise the same error, and ``on_over`` is called once.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import msgspec

from flightedl.coordination.keys import JobKeys
from flightedl.coordination.records import HistoryRecord
from flightedl.domain.recovery.store_history import LIFE_REVISIONS, Sighting
from flightedl.errors import BegunAnewError, CorruptError, FlightedlError, RolledBackError
from flightedl.messages.decoding import from_json
from flightedl.ports import (
    Absent,
    Condition,
    Coordinator,
    Entry,
    Lease,
    Listing,
    ModifiedAt,
    Operation,
    TransactionResult,
    Watch,
    WatchEvent,
    Written,
)

#: A revision that no existing key has, so that a condition on it is never met.
_NEVER = -1


class JobCoordinator:
    """See ``ports.Coordinator``.

    Args:
        inner: The coordinator, which is closed together with this one.
        keys: The job's keys.
        on_over: Called once, by the thread that detects that this process cannot continue. Must not raise an error.
    """

    def __init__(
        self, inner: Coordinator, keys: JobKeys, on_over: Callable[[FlightedlError], None] = lambda _: None
    ) -> None:
        self._inner = inner
        self._key = keys.history
        self._on_over = on_over
        self._lock = threading.Lock()
        #: Revision to add to etcd's revisions; None until the life has been read.
        self._base: int | None = None
        self._over: FlightedlError | None = None

    def look_again(self) -> None:
        """Read the life again, because this process has started another one and holds no keys of the previous one."""
        with self._lock:
            self._base = None

    # the port

    def sighting(self) -> Sighting | None:
        seen, base = self._inner.sighting(), self._base
        return None if seen is None or base is None else Sighting(seen.cluster, seen.revision + base)

    def get(self, key: str) -> Entry | None:
        with self.asking() as base:
            entry = self._inner.get(key)
            return None if entry is None else self.shifted(entry, base)

    def list(self, prefix: str) -> Listing:
        with self.asking() as base:
            found = self._inner.list(prefix)
            return Listing(tuple(self.shifted(entry, base) for entry in found.entries), found.revision + base)

    def transact(self, when: Sequence[Condition], then: Sequence[Operation]) -> TransactionResult:
        with self.asking() as base:
            result = self._inner.transact([_unshifted(condition, base) for condition in when], then)
            entries = {
                key: None if entry is None else self.shifted(entry, base) for key, entry in result.entries.items()
            }
            return TransactionResult(result.committed, result.revision + base, entries)

    def grant(self, ttl_s: float) -> Lease:
        with self.asking():
            return self._inner.grant(ttl_s)

    def lease_ttl_s(self, lease_id: int) -> float | None:
        with self.asking():
            return self._inner.lease_ttl_s(lease_id)

    def watch(self, prefix: str, after_revision: int) -> Watch:
        with self.asking() as base:
            return _JobWatch(self, self._inner.watch(prefix, max(after_revision - base, 0)), base)

    def close(self) -> None:
        self._inner.close()

    # for watches, too

    @contextlib.contextmanager
    def asking(self) -> Iterator[int]:
        """Allow calls to etcd inside the block. Yield the revision that is to be added to etcd's revisions.

        Raises:
            RolledBackError, BegunAnewError: this process cannot continue.
        """
        if self._over is not None:
            raise self._over
        try:
            yield self._known_base()
        except RolledBackError as error:
            advice = "Stop the remaining processes of this job, and continue from its newest checkpoint with --resume"
            raise self._end(RolledBackError(f"{error}. {advice}")) from None

    def shifted(self, entry: Entry, base: int) -> Entry:
        """Return an entry with the job's revisions. Raises BegunAnewError if it shows that another life has begun."""
        if entry.key == self._key and _base_in(entry) != base:
            raise self._end(BegunAnewError("the job was resumed after etcd had gone back: start this process again"))
        return replace(entry, create_revision=entry.create_revision + base, mod_revision=entry.mod_revision + base)

    def _known_base(self) -> int:
        if (base := self._base) is not None:
            return base
        entry = self._inner.get(self._key)
        base = 0 if entry is None else _base_in(entry)
        with self._lock:
            self._base = base if self._base is None else self._base
            return self._base

    def _end(self, error: FlightedlError) -> FlightedlError:
        with self._lock:
            is_news, self._over = self._over is None, self._over or error
        if is_news:
            self._on_over(error)
        return self._over


class _JobWatch:
    """See ``ports.Watch``."""

    def __init__(self, coordinator: JobCoordinator, inner: Watch, base: int) -> None:
        self._coordinator = coordinator
        self._inner = inner
        self._base = base

    def next(self, timeout_s: float) -> tuple[WatchEvent, ...]:
        with self._coordinator.asking():
            return tuple(self._shifted(event) for event in self._inner.next(timeout_s))

    def close(self) -> None:
        self._inner.close()

    def _shifted(self, event: WatchEvent) -> WatchEvent:
        if isinstance(event, Written):
            return Written(self._coordinator.shifted(event.entry, self._base))
        return replace(event, revision=event.revision + self._base)


def _unshifted(condition: Condition, base: int) -> Condition:
    if isinstance(condition, Absent):
        return condition
    if isinstance(condition, ModifiedAt):
        return replace(condition, mod_revision=_own(condition.mod_revision, base))
    return replace(condition, create_revision=_own(condition.create_revision, base))


def _own(revision: int, base: int) -> int:
    """Return a revision as etcd counts it. 0 stays 0, because it means that the key does not exist."""
    if not revision:
        return 0
    return revision - base if revision > base else _NEVER


def _base_in(entry: Entry) -> int:
    try:
        return from_json(entry.value, HistoryRecord).life * LIFE_REVISIONS
    except msgspec.DecodeError:
        raise CorruptError(f"{entry.key} has a foreign value: do not write there by hand") from None
