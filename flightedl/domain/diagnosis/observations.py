"""Observations of a job: replies of all its processes, queried at about the same time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flightedl.messages.hosts import HostFacts
from flightedl.messages.status import JobEvent, PserverStatusReply, StatusReply

#: Words in the errors of full storages.
_FULL = ("no space", "full", "quota", "enospc", "storage exceeded", "disk usage")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Result of querying one server."""

    address: str
    #: Time to the reply, in seconds; None without a reply.
    seconds: float | None = None
    #: True if a connection was established.
    is_connected: bool = True
    #: Error and its code (see ``errors``); empty with a reply.
    error: str = ""
    code: str = ""
    #: Arrival of the reply by this machine's clock, in seconds since 1970.
    received_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreTried:
    """Result of writing, reading and deleting a small object in the checkpoint storage."""

    #: URL without credentials.
    url: str
    size_bytes: int
    #: "write", "read", "delete" -> duration in seconds.
    seconds: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    #: Free space on the storage's disk; None if the storage is not on this machine.
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownCertificate:
    """Certificate that a server presented in a TLS handshake."""

    #: Expiry in seconds since 1970; None if unknown.
    ends_s: float | None = None
    #: Reason for its rejection; empty if it was accepted, or none was presented.
    error: str = ""


def is_full(error: str) -> bool:
    """True if a storage's error says that it is full."""
    return any(word in error.lower() for word in _FULL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observations:
    """All observations of a job."""

    job: str
    #: Facts of the process that makes the diagnosis.
    asker: HostFacts
    #: One entry per endpoint of etcd.
    etcd: tuple[Asked, ...] = ()
    #: Names of the jobs in etcd.
    jobs: tuple[str, ...] = ()
    #: Generations of the master's lock and of the published address in etcd; 0 if absent.
    lock_generation: int = 0
    address_generation: int = 0
    #: None if no address is published.
    master: Asked | None = None
    status: StatusReply | None = None
    events: tuple[JobEvent, ...] = ()
    #: Index -> result of querying the pserver directly, for pservers with a live lease.
    pservers: Mapping[int, Asked] = field(default_factory=dict)
    replies: Mapping[int, PserverStatusReply] = field(default_factory=dict)
    #: Process -> stacks of its threads.
    stacks: Mapping[str, str] = field(default_factory=dict)
    #: None if the location of checkpoints is unknown.
    store: StoreTried | None = None
    #: Path on this machine -> (free, total) bytes of its disk.
    disks: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    #: Server -> its certificate, if the job uses TLS.
    certificates: Mapping[str, ShownCertificate] = field(default_factory=dict)
