"""Observations of a job: the replies of all its processes, queried at about the same time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flightedl.domain.etcd_versions import Version
from flightedl.messages.hosts import HostFacts
from flightedl.messages.status import JobEvent, PserverStatusReply, StatusReply

#: Words that occur in error messages if a storage is full.
_FULL = ("no space", "full", "quota", "enospc", "storage exceeded", "disk usage")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Result of querying one server."""

    address: str
    #: Seconds until the reply arrived; None if no reply arrived.
    seconds: float | None = None
    #: True if a connection was established.
    is_connected: bool = True
    #: Error message and its code (see ``errors``); both are empty if a reply arrived.
    error: str = ""
    code: str = ""
    #: Time at which the reply arrived, in seconds since 1970 by this machine's clock.
    received_s: float = 0.0
    #: Version and number of members of etcd, if the server is an etcd member; empty if unknown.
    version: Version = ()
    member_count: int = 0
    #: True if etcd rejects all writes, because a member's database has reached its quota.
    is_full: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreTried:
    """Result of writing, reading and deleting a small object in the checkpoint storage."""

    #: URL without credentials.
    url: str
    size_bytes: int
    #: Operation ("write", "read" or "delete") -> duration in seconds.
    seconds: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    #: Free space on the storage's disk; None if the storage is not on this machine.
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownCertificate:
    """Certificate that a server presented in the TLS handshake."""

    #: Expiration time in seconds since 1970; None if unknown.
    ends_s: float | None = None
    #: Why the certificate was rejected; empty if it was accepted or if the server presented none.
    error: str = ""


def is_full(error: str) -> bool:
    """True if a storage's error message indicates that the storage is full."""
    return any(word in error.lower() for word in _FULL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observations:
    """All observations of a job."""

    job: str
    #: Facts about the process that performs the diagnosis.
    asker: HostFacts
    #: One result per etcd endpoint.
    etcd: tuple[Asked, ...] = ()
    #: Names of the jobs that have keys in etcd.
    jobs: tuple[str, ...] = ()
    #: Generations of the master's lock and of its published address in etcd; 0 if the key does not exist.
    lock_generation: int = 0
    address_generation: int = 0
    #: None if no address is published.
    master: Asked | None = None
    status: StatusReply | None = None
    events: tuple[JobEvent, ...] = ()
    #: Index -> reply to a direct query of the pserver, for each pserver with a live lease.
    pservers: Mapping[int, Asked] = field(default_factory=dict)
    replies: Mapping[int, PserverStatusReply] = field(default_factory=dict)
    #: Process -> stack traces of its threads.
    stacks: Mapping[str, str] = field(default_factory=dict)
    #: None if the location of the job's checkpoints is unknown.
    store: StoreTried | None = None
    #: Path on this machine -> (free bytes, total bytes) of its disk.
    disks: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    #: Server -> its certificate, if the job uses TLS.
    certificates: Mapping[str, ShownCertificate] = field(default_factory=dict)

    def pserver(self, index: int) -> str:
        """Return the name of a pserver, with the name of its process if it is known."""
        return f"pserver-{index}" if self.status is None else self.status.pserver(index)
