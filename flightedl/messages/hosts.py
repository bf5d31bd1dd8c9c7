"""What any process says of itself and of the machine that it is on."""

from __future__ import annotations

import msgspec

from flightedl.messages.base import Natural, Text


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A process and its machine, as the process sees them. Fields that it does not know are empty or 0."""

    #: Of flightedl.
    version: Text = ""
    #: Seconds since 1970, by the machine's clock, when this was said.
    wall_s: float = 0.0
    #: That the process may use.
    cores: Natural = 0
    #: That a library for linear algebra was told to begin; 0: as many as it likes.
    threads: Natural = 0
    #: Of the process in main memory, and the most that it may have.
    memory_bytes: Natural = 0
    memory_limit_bytes: Natural = 0
