"""Choice of the number of pservers, based on their load.

More pservers help if trainers spend much of their time sending gradients and receiving values, the pservers' processors
are busy, and messages are large. Handling a small message costs the same however few blocks it contains, and a trainer
sends a message to each pserver. Therefore, more pservers do not help if messages are small.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Smallest share of the trainers' time, and smallest mean number of busy cores of a pserver, at which pservers limit a
#: job. Python uses one core at most.
_TIME, _CORES = 0.4, 0.8
#: Smallest mean size of a message for which more pservers help.
_MESSAGE_BYTES = 128 << 10
#: The load must last this long before the number changes.
_LASTS_S = 60.0
#: Seconds until the next attempt after one has failed, for example because the cluster is full.
_RETRY_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PserverLoad:
    """Load of a job's pservers."""

    pservers: int
    #: Mean number of cores that a pserver uses, and mean size of its messages in bytes.
    busy_cores: float
    message_bytes: float
    #: Share of the trainers' time that they spend sending gradients and receiving values.
    time: float

    @property
    def is_limiting(self) -> bool:
        """True if the pservers limit the job's throughput."""
        return self.time >= _TIME and self.busy_cores >= _CORES

    @property
    def wanted(self) -> int:
        """Recommended number of pservers: the present number, or twice as many."""
        return self.pservers * (1 + (self.is_limiting and self.message_bytes >= _MESSAGE_BYTES))


@dataclass(slots=True)
class PserverScaling:
    """Adds pservers while they limit the job, up to a maximum number.

    Args:
        maximum: Maximum number of pservers.
    """

    maximum: int
    _since: float | None = None
    _not_before: float = -math.inf

    def look(self, load: PserverLoad, now: float) -> int | None:
        """Return the number of pservers to which the job should be scaled now; None to leave the number unchanged."""
        wanted = min(load.wanted, self.maximum)
        if wanted <= load.pservers or now < self._not_before:
            self._since = None
        elif self._since is None:
            self._since = now
        elif now - self._since >= _LASTS_S:
            self._since = None
            return wanted
        return None

    def failed(self, now: float) -> None:
        """Record that pservers could not be added."""
        self._not_before = now + _RETRY_S
