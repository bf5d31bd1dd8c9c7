"""Interfaces to the outside world: clock, instruments, coordinator, files, storage and cluster.

Each interface (*port*) has an adapter in ``flightedl.adapters``, an in-memory twin in ``tests.support``, and a
contract suite in ``tests.support.contracts`` that both must pass. The suite checks the guarantees stated here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Protocol, Self

from flightedl.domain.recovery.store_history import Sighting


class Clock(Protocol):
    """A clock. Only ``now`` is used for expiry; ``wall_time`` is for people."""

    def now(self) -> float:
        """Return the time of a monotonic clock in seconds. The clock starts at an arbitrary time."""
        ...

    def wall_time(self) -> float:
        """Return the seconds since 1970, for logs and file metadata. No decision depends on this time."""
        ...

    def sleep(self, seconds: float) -> None:
        """Block the calling thread."""
        ...


# --- Instruments: metrics that a process collects while it works ---


@dataclass(frozen=True, slots=True)
class Measure:
    """A quantity that is measured repeatedly.

    Args:
        name: Ends in its unit: ``_seconds``, ``_bytes`` or none. The name of a counter gets ``_total``.
        help_text: Description for people.
        buckets: Upper bounds of its histogram, increasing.
        label: Name of its label; empty if it has none.
        labels: Allowed values of the label. Others count as "other", so that clients cannot create many series.
    """

    name: str
    help_text: str
    buckets: tuple[float, ...] = ()
    label: str = ""
    labels: tuple[str, ...] = ()


class Instruments(Protocol):
    """Collects metrics while a process works. Thread-safe and never raises. A call takes about a microsecond."""

    def count(self, measure: Measure, amount: float = 1.0, label: str = "") -> None:
        """Increase a counter by ``amount``, which must not be negative."""
        ...

    def observe(self, measure: Measure, value: float, label: str = "") -> None:
        """Add an observation to a histogram."""
        ...


class NoInstruments:
    """Instruments that discard everything."""

    def count(self, measure: Measure, amount: float = 1.0, label: str = "") -> None: ...

    def observe(self, measure: Measure, value: float, label: str = "") -> None: ...


# --- Coordinator: leases, locks and small state (etcd) ---


@dataclass(frozen=True, slots=True)
class Entry:
    """State of a key at one revision. The ``create_revision`` of a process's own key is its *generation*."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    #: Id of the key's lease; 0 if it has none.
    lease_id: int = 0


@dataclass(frozen=True, slots=True)
class Absent:
    """Condition that the key does not exist."""

    key: str


@dataclass(frozen=True, slots=True)
class CreatedAt:
    """Condition that the key exists and was created at this revision. This is the fence of a lock's holder."""

    key: str
    create_revision: int


@dataclass(frozen=True, slots=True)
class ModifiedAt:
    """Condition that the key was last written at this revision (compare-and-swap), or does not exist if it is 0."""

    key: str
    mod_revision: int


Condition = Absent | CreatedAt | ModifiedAt


@dataclass(frozen=True, slots=True)
class Put:
    """Write a key. If ``lease_id`` is 0, the key has no lease."""

    key: str
    value: bytes
    lease_id: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a key if it exists."""

    key: str


Operation = Put | Delete


@dataclass(frozen=True, slots=True)
class TransactionResult:
    """``committed`` is True if all conditions held and all operations were executed, at ``revision``.

    If it is False, ``entries`` contains the entry of each condition's key at that time, or None if there was none.
    """

    committed: bool
    revision: int
    entries: Mapping[str, Entry | None]


@dataclass(frozen=True, slots=True)
class Listing:
    """All entries under a prefix at one revision, sorted by key. A watch from ``revision`` on misses no event."""

    entries: tuple[Entry, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class Written:
    """Event of a watch: a key was created or overwritten."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Removed:
    """Event of a watch: a key was deleted, explicitly or because its lease ended."""

    key: str
    revision: int


WatchEvent = Written | Removed


class CompactedError(Exception):
    """The watch's revision has been compacted. List the entries again, then watch from the revision of the listing."""


class LeaseLostError(Exception):
    """The lease no longer exists, and all of its keys have been deleted."""


class Lease(Protocol):
    """A lease granted by the coordinator. Not thread-safe: only one thread may renew it."""

    @property
    def id(self) -> int:
        """Id of the lease, which is never 0."""
        ...

    @property
    def ttl_s(self) -> float:
        """The time to live that was *granted*, which may be longer than the requested one."""
        ...

    def renew(self) -> None:
        """Restart the time to live. Raises LeaseLostError if the lease has ended, UnavailableError if unknown."""
        ...

    def revoke(self) -> None:
        """End the lease and delete its keys. Does nothing if it has already ended."""
        ...


class Watch(Protocol):
    """Events under a prefix in the order of revisions. None is missed or repeated, even if the adapter reconnects."""

    def next(self, timeout_s: float) -> tuple[WatchEvent, ...]:
        """Return the next events, or () after ``timeout_s``. May raise CompactedError. Call from one thread only."""
        ...

    def close(self) -> None:
        """Stop watching. If another thread is waiting in ``next``, that call returns () within a second."""
        ...


class Coordinator(Protocol):
    """A linearizable store of small values, with leases and watches. Thread-safe. Every call has a time limit.

    All methods raise UnavailableError if the request was certainly not executed. ``transact`` raises
    OutcomeUnknownError if the request was sent but no answer arrived.

    The store may turn out to be another cluster, or to have a lower revision than this connection had seen before the
    request. From then on, all methods raise RolledBackError, including those of leases and watches; a watch may raise
    CompactedError once before that. The request that detected this may have been executed.
    """

    def sighting(self) -> Sighting | None:
        """Return the latest cluster and revision that this connection has seen, or None. Sends no request."""
        ...

    def get(self, key: str) -> Entry | None: ...

    def list(self, prefix: str) -> Listing: ...

    def transact(self, when: Sequence[Condition], then: Sequence[Operation]) -> TransactionResult:
        """Execute all operations atomically if all conditions hold, otherwise none. The limit is 128 of each."""
        ...

    def grant(self, ttl_s: float) -> Lease: ...

    def lease_ttl_s(self, lease_id: int) -> float | None:
        """Return the granted time to live of any process's lease, or None if the lease has ended."""
        ...

    def watch(self, prefix: str, after_revision: int) -> Watch:
        """Watch all events under ``prefix`` whose revision is above ``after_revision``."""
        ...

    def close(self) -> None: ...


# --- Files: source of training data. Storage: destination of checkpoints (fsspec) ---


@dataclass(frozen=True, slots=True)
class FileStat:
    """A file. ``version`` changes whenever the content may have changed (etag, or size with mtime)."""

    url: str
    size_bytes: int
    version: str
    #: Name below the fixed part of the pattern that it matches; empty if no pattern is known.
    name: str = field(default="", compare=False)
    #: True if the user says that the file is a copy of the one with this name (``data_moved``).
    is_copy: bool = field(default=False, compare=False)


class FileListing(tuple[FileStat, ...]):  # noqa: SLOT001 - tuples have no slots
    """The files that match patterns."""

    #: For each reason why matching names are not among the files, a sentence with their number.
    left_out: tuple[str, ...] = ()

    def __new__(cls, files: Iterable[FileStat], left_out: Iterable[str] = ()) -> Self:
        made = super().__new__(cls, files)
        made.left_out = tuple(left_out)
        return made


class Files(Protocol):
    """Read-only access to files by URL (``s3://``, ``memory://``, ``file://`` or a plain path).

    All methods raise UnavailableError if the store fails temporarily, and DataError for errors that a retry cannot
    solve. Reading an open file raises the exceptions of the store's library.
    """

    def declare(self, urls: Sequence[str], moved: Mapping[str, str] | None = None) -> None:
        """Remember the queries of URLs, with which files are opened, and folders (old -> new) of files that moved."""
        ...

    def expand(self, patterns: Sequence[str], *, may_be_empty: bool = False) -> FileListing:
        """Return the files that match these URLs and globs, sorted by URL, without duplicates.

        A wildcard never matches names that begin with ``_`` or ``.``, which by convention are not data. Raises
        DataError, which names the pattern, if a pattern cannot be listed or (unless ``may_be_empty``) matches nothing
        or a link without a target. With ``may_be_empty``, such a link is a file of version "".
        """
        ...

    def stat(self, url: str) -> FileStat | None:
        """Return the file with exactly this name, or None. Wildcard characters in the name have no special meaning."""
        ...

    def open(self, url: str) -> BinaryIO:
        """Open a seekable file for reading. Errors name the file, without credentials, and the reason."""
        ...


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file in a Storage. ``name`` is relative to the storage's root, with forward slashes."""

    name: str
    size_bytes: int


class Storage(Protocol):
    """A directory that is identified by a URL and has atomic writes. Thread-safe.

    Methods raise UnavailableError if the store is unreachable or full, and NotFoundError if the name does not exist.
    """

    @property
    def url(self) -> str:
        """URL of the root without credentials, for display."""
        ...

    def read(self, name: str) -> bytes: ...

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """Return exactly ``length`` bytes. Raises CorruptError if the file is shorter than that."""
        ...

    def publish(
        self, name: str, parts: Iterable[bytes | memoryview], require: Callable[[], None] = lambda: None
    ) -> int:
        """Write a file atomically and durably. If ``parts`` raises an error, nothing is written.

        Args:
            name: An existing file with this name is replaced atomically.
            parts: Contents of the file.
            require: Called after the last part, as late as the store allows before the file appears. If it raises,
                nothing has changed.

        Returns:
            Size of the file in bytes.
        """
        ...

    def list(self, prefix: str) -> tuple[StoredFile, ...]:
        """Return all files whose names start with ``prefix``, sorted. Never returns a cached listing."""
        ...

    def delete(self, name: str) -> None:
        """Delete a file if it exists."""
        ...


# --- Cluster: objects of Kubernetes ---


class Cluster(Protocol):
    """One namespace of a cluster, with objects in the JSON form of the API.

    Kinds are named as in the API ("Job", "Deployment", "Pod"). All methods raise UnavailableError if the cluster does
    not answer, AuthenticationError if it forbids the request, and UsageError if it rejects an object.
    """

    def apply(self, objects: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Create or update objects. Return their new states in the same order."""
        ...

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        """Return an object, or None if it does not exist."""
        ...

    def list(self, kind: str, labels: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return the objects of a kind (or a comma-separated list of kinds) with these labels, sorted by name."""
        ...

    def patch(self, kind: str, name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Change some fields. Return the new state. Raises NotFoundError if the object does not exist."""
        ...

    def delete(self, kind: str, name: str) -> None:
        """Delete an object if it exists, and then all objects that it owns. Does not wait for the deletion."""
        ...

    def logs(self, pod: str, *, follow: bool) -> AbstractContextManager[Iterable[str]]:
        """Return the lines of a pod's output so far, or until its end. They also end with the ``with`` block."""
        ...

    def execute(self, pod: str, command: Sequence[str], timeout_s: float) -> str:
        """Run a command in a pod and return its output. Raises UnavailableError if it fails or takes too long."""
        ...
