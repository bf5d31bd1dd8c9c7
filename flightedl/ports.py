"""Interfaces of flightedl to the world: clock, instruments, coordinator, files, storage, cluster.

Each port has an adapter in ``flightedl.adapters``, an in-memory twin in ``flightedl.testing``, and one contract suite
in ``flightedl.testing.contracts`` that both pass. The guarantees written here are what that suite checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

from flightedl.domain.recovery.store_history import Sighting


class Clock(Protocol):
    """Time. Expiry uses ``now`` only; ``wall_time`` is for people."""

    def now(self) -> float:
        """Monotonic seconds; never goes back; the zero is arbitrary."""
        ...

    def wall_time(self) -> float:
        """Seconds since 1970, for logs and file metadata. Never used to decide anything."""
        ...

    def sleep(self, seconds: float) -> None:
        """Block the calling thread."""
        ...


# --- Instruments: figures that a process gathers while it works ---


@dataclass(frozen=True, slots=True)
class Measure:
    """Something that is measured again and again.

    Args:
        name: Ends in its unit: ``_seconds``, ``_bytes`` or none. A count's gets ``_total``.
        told: What it is, for people.
        buckets: Upper bounds of its histogram, rising.
        label: Name of its label; empty: it has none.
        labels: All values that the label may have. Others count as "other", so that nobody can make many of them.
    """

    name: str
    told: str
    buckets: tuple[float, ...] = ()
    label: str = ""
    labels: tuple[str, ...] = ()


class Instruments(Protocol):
    """Takes figures while a process works. Thread-safe; never raises; a call takes about a microsecond."""

    def count(self, measure: Measure, amount: float = 1.0, label: str = "") -> None:
        """So much more; ``amount`` is at least 0."""
        ...

    def observe(self, measure: Measure, value: float, label: str = "") -> None:
        """It was measured once more."""
        ...


class NoInstruments:
    """Nobody looks at the figures."""

    def count(self, measure: Measure, amount: float = 1.0, label: str = "") -> None: ...

    def observe(self, measure: Measure, value: float, label: str = "") -> None: ...


# --- Coordinator: leases, locks and small state (etcd) ---


@dataclass(frozen=True, slots=True)
class Entry:
    """A key as it stood at one revision. ``create_revision`` of a process's own key is its *generation*."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    #: 0 when the key is not leased.
    lease_id: int = 0


@dataclass(frozen=True, slots=True)
class Absent:
    """Condition: the key does not exist."""

    key: str


@dataclass(frozen=True, slots=True)
class CreatedAt:
    """Condition: the key exists and was created at this revision (the fence of a lock holder)."""

    key: str
    create_revision: int


@dataclass(frozen=True, slots=True)
class ModifiedAt:
    """Condition: the key was last written at this revision (compare-and-swap). 0 means: does not exist."""

    key: str
    mod_revision: int


Condition = Absent | CreatedAt | ModifiedAt


@dataclass(frozen=True, slots=True)
class Put:
    """Write a key; ``lease_id`` 0 leaves it unleased."""

    key: str
    value: bytes
    lease_id: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a key; deleting an absent key is fine."""

    key: str


Operation = Put | Delete


@dataclass(frozen=True, slots=True)
class TransactionResult:
    """``committed`` tells whether all conditions held and all operations were done at ``revision``.

    When refused, ``entries`` holds what stood under each condition's key at that moment (None: absent).
    """

    committed: bool
    revision: int
    entries: Mapping[str, Entry | None]


@dataclass(frozen=True, slots=True)
class Listing:
    """All entries under a prefix at one revision, sorted by key. Watch from ``revision`` to miss nothing."""

    entries: tuple[Entry, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class Written:
    """Watch event: a key was created or overwritten."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Removed:
    """Watch event: a key was deleted, by hand or because its lease ended."""

    key: str
    revision: int


WatchEvent = Written | Removed


class CompactedError(Exception):
    """The watch's revision was compacted away: list again, then watch from the listing's revision."""


class LeaseLostError(Exception):
    """The lease does not exist any more; all its keys are gone."""


class Lease(Protocol):
    """A lease granted by the coordinator. Not thread-safe; one thread renews."""

    @property
    def id(self) -> int:
        """Never 0."""
        ...

    @property
    def ttl_s(self) -> float:
        """The *granted* time to live, which may be longer than the one asked for."""
        ...

    def renew(self) -> None:
        """Start the time to live anew. LeaseLostError: gone. UnavailableError: not known, try again."""
        ...

    def revoke(self) -> None:
        """End the lease and delete its keys; ending an ended lease is fine."""
        ...


class Watch(Protocol):
    """Events of a prefix in revision order, none missed, none repeated, across reconnects of the adapter."""

    def next(self, timeout_s: float) -> tuple[WatchEvent, ...]:
        """The next events, or () after ``timeout_s``. CompactedError: see there. One thread calls it."""
        ...

    def close(self) -> None:
        """Stop; a ``next`` that is waiting in another thread returns () within a second."""
        ...


class Coordinator(Protocol):
    """A linearizable store of small values with leases and watches. Thread-safe; every call has a time limit.

    All methods raise UnavailableError when nothing can have happened, and ``transact`` raises OutcomeUnknownError
    when the request was sent and no answer came.

    When the store turns out to be another cluster's, or to have a lower revision than this connection had seen before
    it asked, everything raises RolledBackError from then on, for ever, also leases and watches (a watch may raise
    CompactedError once before). A request that found this out may have been carried out.
    """

    def sighting(self) -> Sighting | None:
        """The newest that this connection has seen of the store; None: nothing yet. Asks nobody."""
        ...

    def get(self, key: str) -> Entry | None: ...

    def list(self, prefix: str) -> Listing: ...

    def transact(self, when: Sequence[Condition], then: Sequence[Operation]) -> TransactionResult:
        """All operations if all conditions hold, atomically; else nothing. At most 128 of either."""
        ...

    def grant(self, ttl_s: float) -> Lease: ...

    def lease_ttl_s(self, lease_id: int) -> float | None:
        """The granted time to live of a lease, whoever holds it; None: it has ended."""
        ...

    def watch(self, prefix: str, after_revision: int) -> Watch:
        """Every event under ``prefix`` with a revision greater than ``after_revision``."""
        ...

    def close(self) -> None: ...


# --- Files: what training data is read from; Storage: what checkpoints are written to (fsspec) ---


@dataclass(frozen=True, slots=True)
class FileStat:
    """One file. ``version`` changes when the content may have changed (etag, or size with mtime)."""

    url: str
    size_bytes: int
    version: str


class Files(Protocol):
    """Read-only access to files anywhere, by URL (``s3://``, ``memory://``, ``file://`` or a plain path).

    All methods raise UnavailableError if the store fails at the moment, and DataError for what another attempt cannot
    cure. Reading an open file raises what the store's library raises.
    """

    def expand(self, patterns: Sequence[str], *, may_be_empty: bool = False) -> tuple[FileStat, ...]:
        """Files of the given URLs and globs, sorted by URL, without repeats.

        A wildcard leaves out names that begin with ``_`` or ``.``: by custom these are no data.
        The DataError names the pattern that matches nothing, unless it may, or that cannot be listed.
        """
        ...

    def stat(self, url: str) -> FileStat | None:
        """The one file of exactly this name, whatever characters are in it; None: there is none."""
        ...

    def open(self, url: str) -> BinaryIO:
        """Open for reading; seekable. Errors name the file (without credentials) and the reason."""
        ...


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of a Storage; ``name`` is relative to its root, with forward slashes."""

    name: str
    size_bytes: int


class Storage(Protocol):
    """A directory anywhere (its root is a URL) with all-or-nothing writes. Thread-safe.

    UnavailableError: the store cannot be reached or is full; NotFoundError: no such name.
    """

    @property
    def url(self) -> str:
        """The root, without credentials: for people."""
        ...

    def read(self, name: str) -> bytes: ...

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes, or CorruptError when the file is shorter."""
        ...

    def publish(
        self, name: str, parts: Iterable[bytes | memoryview], require: Callable[[], None] = lambda: None
    ) -> int:
        """Write a whole file; it is there complete and durable, or not at all, also when ``parts`` raises.

        Args:
            name: An existing file of this name is replaced atomically.
            parts: Its bytes.
            require: Called when all parts have come, as shortly before the file is there as the store allows; when it
                raises, nothing has changed.

        Returns:
            Its size in bytes.
        """
        ...

    def list(self, prefix: str) -> tuple[StoredFile, ...]:
        """All files whose name starts with ``prefix``, sorted, never from a stale cache."""
        ...

    def delete(self, name: str) -> None:
        """Deleting an absent file is fine."""
        ...


# --- Cluster: objects of Kubernetes ---


class Cluster(Protocol):
    """One namespace of a cluster, as plain objects: what the API takes and gives as JSON.

    Kinds are named as the API names them ("Job", "Deployment", "Pod"). All methods raise UnavailableError when the
    cluster does not answer, AuthenticationError when it does not allow what is asked, and UsageError when it refuses an
    object.
    """

    def apply(self, objects: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Create objects, or change them to what is given; as they are then, in the same order."""
        ...

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        """An object; None: there is none."""
        ...

    def list(self, kind: str, labels: Mapping[str, str]) -> list[dict[str, Any]]:
        """All objects of a kind, or of several with commas between them, that have these labels, sorted by name."""
        ...

    def patch(self, kind: str, name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Change some fields; as it is then. NotFoundError: there is no such object."""
        ...

    def delete(self, kind: str, name: str) -> None:
        """Remove an object and, after it, all that it owns; does not wait. One that is not there is fine."""
        ...

    def logs(self, pod: str, *, follow: bool) -> AbstractContextManager[Iterable[str]]:
        """Lines of a pod's output until now, or until its end. Leaving the block ends it."""
        ...

    def execute(self, pod: str, command: Sequence[str], timeout_s: float) -> str:
        """Run a command in a pod; its output. UnavailableError: it failed, or took too long."""
        ...
