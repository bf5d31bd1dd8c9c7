"""What was seen of a job, asked of everybody at about the same time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flightedl.messages.hosts import HostFacts
from flightedl.messages.status import JobEvent, PserverStatusReply, StatusReply


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
