"""What was seen of a job, asked of everybody at about the same time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flightedl.messages.hosts import HostFacts
from flightedl.messages.status import JobEvent, PserverStatusReply, StatusReply

#: In errors of storages that have no room.
_FULL = ("no space", "full", "quota", "enospc", "storage exceeded", "disk usage")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What came of asking one server."""

    address: str
    #: Until it answered, in seconds; None: it did not.
    seconds: float | None = None
    #: Whether a connection came about at all.
    is_connected: bool = True
    #: Why there is no answer; and its code, see ``errors``.
    error: str = ""
    code: str = ""
    #: By the clock of whoever asked, when the answer came; seconds since 1970.
    heard_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreTried:
    """What came of a small object in the checkpoints' storage."""

    #: Without credentials.
    url: str
    size_bytes: int
    #: "write", "read", "delete" -> how long that took.
    seconds: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    #: Of its disk; None: it has none of this machine's.
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownCertificate:
    """What a server showed when a connection came about."""

    #: Seconds since 1970; None: not known.
    ends_s: float | None = None
    #: Why it is not accepted; empty: it is, or nothing was shown.
    error: str = ""


def is_full(error: str) -> bool:
    """Whether a storage says that it has no room."""
    return any(word in error.lower() for word in _FULL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observations:
    """All of it."""

    job: str
    #: Of whoever asks.
    asker: HostFacts
    #: Each endpoint of etcd.
    etcd: tuple[Asked, ...] = ()
    #: Names of the jobs that are in etcd.
    jobs: tuple[str, ...] = ()
    #: Generations that etcd has of the master's lock, and of the address that a master has published; 0: none.
    lock_generation: int = 0
    address_generation: int = 0
    #: None: there is no address to ask.
    master: Asked | None = None
    status: StatusReply | None = None
    events: tuple[JobEvent, ...] = ()
    #: By index: pservers whose lease is alive, asked directly.
    pservers: Mapping[int, Asked] = field(default_factory=dict)
    replies: Mapping[int, PserverStatusReply] = field(default_factory=dict)
    #: Who was asked where its threads stand -> what it said.
    stacks: Mapping[str, str] = field(default_factory=dict)
    #: None: nobody said where checkpoints are.
    store: StoreTried | None = None
    #: Path -> (free, all) bytes of its disk, of the machine of whoever asks.
    disks: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    #: Of servers, where the job has TLS.
    certificates: Mapping[str, ShownCertificate] = field(default_factory=dict)
