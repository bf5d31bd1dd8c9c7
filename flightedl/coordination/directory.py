"""Directory of a job's processes: a copy of the job's small keys that follows changes in etcd.

Theory of operation. One thread lists the job's prefix, and then watches it from the revision of that listing. Each
batch of changes creates a new immutable snapshot, wakes the waiting threads, and calls the subscribers.

While etcd is unreachable, the copy stays unchanged (``trouble`` is the reason), and the watch resumes later. If etcd no
longer has the events in between, all keys are listed again, and subscribers see all changes together. After a rollback
of etcd, the copy never becomes current again (``require_followed``).

The copy may be outdated. A process that acts on the copy sends the generation that it found there. If that generation
has ended, the recipient rejects the request.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Self, TypeVar

import msgspec

from flightedl.coordination.keeper import HeldKey
from flightedl.coordination.keys import JobKeys
from flightedl.coordination.records import ServerRecord, TrainerRecord
from flightedl.errors import BegunAnewError, FlightedlError, RolledBackError
from flightedl.marks import sometimes
from flightedl.messages.decoding import from_json
from flightedl.ports import Clock, CompactedError, Coordinator, Entry, Watch, WatchEvent, Written

_log = logging.getLogger(__name__)

Result = TypeVar("Result")
Name = TypeVar("Name", int, str)
Record = TypeVar("Record", ServerRecord, TrainerRecord)

_WATCH_SLICE_S = 0.5
_UNREACHABLE_PAUSE_S = 0.2


class Directory:
    """Follows a job's keys from ``start`` until ``close``. Thread-safe.

    Args:
        coordinator: Access to the keys. The directory does not close it.
        keys: The job's keys.
        clock: Clock of ``wait_until``.
        failed: Called with the error of a subscriber, which must not keep changes from the others. Servers end then,
            because the subscriber may not have carried out all effects of a change.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        keys: JobKeys,
        clock: Clock,
        failed: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        self._coordinator = coordinator
        self._keys = keys
        self._clock = clock
        self._failed = failed
        self._condition = threading.Condition()
        #: The snapshot is replaced, never modified, so readers need no lock.
        self._snapshot: tuple[Mapping[str, Entry], int] = (MappingProxyType({}), 0)
        self._trouble = ""
        self._over: FlightedlError | None = None
        self._subscribers: list[Callable[[], None]] = []
        self._stop = threading.Event()
        #: Watch in which the thread waits. Closing it ends the wait.
        self._watching: Watch | None = None
        #: Cache of the decoded pservers of one snapshot.
        self._known_pservers: tuple[Mapping[str, Entry], Mapping[int, ServerRecord]] = ({}, {})
        self._thread = threading.Thread(target=self._follow, name="flightedl-directory", daemon=True)

    def start(self) -> Self:
        """Start following etcd. Returns immediately; call ``wait_until`` to wait for a state."""
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop following etcd. The last snapshot stays readable."""
        self._stop.set()
        with self._condition:
            self._condition.notify_all()
        if (watch := self._watching) is not None:
            watch.close()
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- state ---

    @property
    def revision(self) -> int:
        """Revision up to which all changes have been seen; 0 before the first listing."""
        return self._snapshot[1]

    @property
    def state(self) -> object:
        """An object that is replaced when the snapshot changes, or when this copy stops following etcd."""
        return self._snapshot

    @property
    def trouble(self) -> str:
        """Reason why the most recent request to etcd failed; empty if it succeeded."""
        return self._trouble

    def require_followed(self) -> None:
        """Raise RolledBackError or BegunAnewError if this copy can never become current again."""
        if self._over is not None:
            raise self._over

    def entry(self, key: str) -> Entry | None:
        """Return the latest known entry of a key. Keys under ``keys.state_prefix`` are not followed."""
        return self._snapshot[0].get(key)

    def entries(self, *keys: str) -> tuple[int, list[Entry | None]]:
        """Return a revision, and the entries of several keys at that revision."""
        entries, revision = self._snapshot
        return revision, [entries.get(key) for key in keys]

    def master(self) -> ServerRecord | None:
        """Return the record of the active master. Its ``generation`` is the generation of its lock."""
        found = self.entry(self._keys.master_address)
        return None if found is None else decoded(found, ServerRecord)

    def pservers(self) -> Mapping[int, ServerRecord]:
        """Return the pservers by index. The ``generation`` of each is the create_revision of ``ps/<index>``."""
        entries = self._snapshot[0]
        known, found = self._known_pservers
        if known is not entries:
            found = MappingProxyType(dict(sorted(records(entries, self._keys.pserver_index, ServerRecord))))
            # Called in every step, mostly with the same snapshot.
            self._known_pservers = entries, found
        return found

    def standbys(self) -> Mapping[int, ServerRecord]:
        """Return the standbys by the index of their pserver. The ``generation`` of each is that of its own key."""
        return dict(records(self._snapshot[0], self._keys.standby_index, ServerRecord))

    def ps_desired(self) -> int | None:
        """Return the job's number of pservers, or None if the master has not written it yet."""
        found = self.entry(self._keys.ps_desired)
        return int(found.value) if found is not None and found.value.isdigit() else None

    def trainers(self) -> dict[str, TrainerRecord]:
        """Return the live trainers by id. The ``generation`` of each is the create_revision of its key."""
        return dict(records(self._snapshot[0], self._keys.trainer_id, TrainerRecord))

    def consumers(self) -> dict[str, ServerRecord]:
        """Return the live consumers by name. The ``generation`` of each is the create_revision of its key."""
        return dict(records(self._snapshot[0], self._keys.consumer_name, ServerRecord))

    def wait_until(self, predicate: Callable[[Directory], Result | None], timeout_s: float) -> Result | None:
        """Evaluate ``predicate`` now and after each change. Return the first result that is not None.

        Return None after ``timeout_s``, or when the directory is closed.
        """
        deadline = self._clock.now() + timeout_s
        while True:
            seen = self._snapshot
            result = predicate(self)
            left_s = deadline - self._clock.now()
            if result is not None or left_s <= 0 or self._stop.is_set():
                return result
            with self._condition:
                if self._snapshot is seen and not self._stop.is_set():
                    self._condition.wait(left_s)

    def catch_up(self, key: str, timeout_s: float) -> bool:
        """Read a key from etcd, then wait until this copy is at least as new. Return False if ``timeout_s`` passes.

        Raises:
            UnavailableError: etcd is unreachable.
        """
        found = self._coordinator.get(key)

        def has_it(directory: Directory) -> bool | None:
            known = directory.entry(key)
            is_known = known is None if found is None else directory.revision >= found.mod_revision
            return is_known or None

        return self.wait_until(has_it, timeout_s) is not None

    def watch_over(self, held: Callable[[], HeldKey]) -> None:
        """Let this process notice at once that its key was deleted. ``held`` must not wait."""

        def look() -> None:
            own = held()
            revision, (entry,) = self.entries(own.key)
            own.seen(entry, revision)

        self.subscribe(look)

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` on the directory's thread after each batch of changes. It must return quickly."""
        with self._condition:
            self._subscribers.append(callback)

    # --- the thread ---

    def _follow(self) -> None:
        while not self._stop.is_set():
            try:
                listing = self._coordinator.list(self._keys.prefix)
                self._trouble = ""
                kept = {entry.key: entry for entry in listing.entries}
                self._replace(kept, listing.revision)
                self._watch(listing.revision)
            except CompactedError as error:
                sometimes("a directory listed all keys again")
                _log.info("the job's keys are listed again: %s", error)
            except (RolledBackError, BegunAnewError) as error:
                _log.error("the directory ends: %s", error)
                with self._condition:
                    self._over, self._trouble = error, str(error)
                    self._snapshot = self._snapshot[0], self._snapshot[1]
                    self._condition.notify_all()
                return
            except FlightedlError as error:
                sometimes("a directory could not follow etcd")
                if not self._trouble:
                    _log.warning("the directory cannot follow etcd: %s", error)
                self._trouble = str(error)
                self._stop.wait(_UNREACHABLE_PAUSE_S)

    def _watch(self, revision: int) -> None:
        with contextlib.closing(self._coordinator.watch(self._keys.prefix, revision)) as watch:
            self._watching = watch
            while not self._stop.is_set():
                events = watch.next(_WATCH_SLICE_S)
                if events:
                    self._apply(events)

    def _apply(self, events: tuple[WatchEvent, ...]) -> None:
        entries = dict(self._snapshot[0])
        revision = self._snapshot[1]
        for event in events:
            if isinstance(event, Written):
                revision = max(revision, event.entry.mod_revision)
                entries[event.entry.key] = event.entry
            else:
                revision = max(revision, event.revision)
                entries.pop(event.key, None)
        self._replace(entries, revision)

    def _replace(self, entries: Mapping[str, Entry], revision: int) -> None:
        with self._condition:
            self._snapshot = (MappingProxyType(dict(entries)), revision)
            subscribers = tuple(self._subscribers)
            self._condition.notify_all()
        for subscriber in subscribers:
            try:
                subscriber()
            except Exception as error:  # noqa: BLE001 - reported
                _log.exception("a subscriber of the directory failed")
                self._failed(error)


def records(
    entries: Mapping[str, Entry], name_in: Callable[[str], Name | None], kind: type[Record]
) -> Iterator[tuple[Name, Record]]:
    """Yield the records of all keys that identify a process, with the keys' generations."""
    for key, entry in entries.items():
        name = name_in(key)
        if name is not None and (record := decoded(entry, kind)) is not None:
            yield name, msgspec.structs.replace(record, generation=entry.create_revision)


def decoded(entry: Entry, kind: type[Record]) -> Record | None:
    """Return the record stored under a key, or None if the value is not a record (as if the key did not exist)."""
    try:
        return from_json(entry.value, kind)
    except msgspec.DecodeError:
        _log.debug("an entry could not be decoded key=%s", entry.key)
        return None
