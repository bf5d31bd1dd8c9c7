"""Properties of a process and its machine."""

from __future__ import annotations

import msgspec

from flightedl.messages.base import Natural, Text


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A process and its machine, as reported by the process. Unknown fields are empty or 0."""

    #: Version of flightedl.
    version: Text = ""
    #: Time of the report by the machine's clock, in seconds since 1970.
    wall_s: float = 0.0
    #: Number of cores that the process may use.
    cores: Natural = 0
    #: Number of threads that libraries for linear algebra may start; 0 if unlimited.
    threads: Natural = 0
    #: Resident memory of the process, and its limit, in bytes.
    memory_bytes: Natural = 0
    memory_limit_bytes: Natural = 0
    #: Mean number of cores that the process has used in the last seconds.
    busy_cores: float = 0.0
