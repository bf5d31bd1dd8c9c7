"""Facts about a process and its machine."""

from __future__ import annotations

import msgspec

from flightedl.messages.base import Natural, Text


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A process and its machine, as the process sees them. Unknown fields are empty or 0."""

    #: Version of flightedl.
    version: Text = ""
    #: Seconds since 1970, by the machine's clock, at the time of the report.
    wall_s: float = 0.0
    #: Cores that the process may use.
    cores: Natural = 0
    #: Threads that a library for linear algebra may start; 0: no limit.
    threads: Natural = 0
    #: Bytes of the process in main memory, and their limit.
    memory_bytes: Natural = 0
    memory_limit_bytes: Natural = 0
