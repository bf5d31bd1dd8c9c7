"""Which processes have died, judged by the streams that they keep open to the master.

A process that dies closes its connections. Each process keeps several streams open, each on a connection of its own.
Rules:

* A process is judged only after all its streams have been open at the same time. It is presumed dead once all of them
  have broken, and none has been opened again for ``GRACE_S``. One broken connection proves nothing.
* If a stream ends for another reason, such as its deadline, the process is not judged until all are open again.
* If most of the processes seem to have died together, the master's own connection is to blame, and no process is
  presumed dead.

To presume a process dead is safe, because its generation is over before anything else happens. A process that lives
notices that its key is gone, and starts again. Whatever is missed here is noticed when the lease ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

#: Seconds for which a process may be without a stream.
GRACE_S = 0.15


class Process(NamedTuple):
    """The holder of a key in etcd."""

    key: str
    generation: int


@dataclass(slots=True)
class _Streams:
    wanted: int
    open: set[int] = field(default_factory=set)
    is_judged: bool = False
    #: Time at which the process is presumed dead if no stream is open by then.
    dead_at: float = math.inf

    @property
    def has_broken(self) -> bool:
        return self.is_judged and not self.open


class Presences:
    """The streams of all processes. Not thread-safe. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._known: dict[Process, _Streams] = {}

    @property
    def stream_count(self) -> int:
        """Number of open streams."""
        return sum(len(each.open) for each in self._known.values())

    def opened(self, process: Process, stream: int, wanted: int) -> None:
        """Record that a process has opened a stream. ``wanted`` is the number of streams that it keeps open."""
        known = self._known.setdefault(process, _Streams(wanted))
        known.open.add(stream)
        known.is_judged |= len(known.open) >= known.wanted

    def ended(self, process: Process, stream: int, now: float, *, is_broken: bool) -> None:
        known = self._known.get(process)
        if known is None or stream not in known.open:
            return
        known.open.discard(stream)
        known.is_judged &= is_broken
        known.dead_at = now + GRACE_S
        if not known.open and not known.is_judged:
            self.forget(process)

    def forget(self, process: Process) -> None:
        """Forget a process that has ended."""
        self._known.pop(process, None)

    def presumed_dead(self, now: float, is_present: Callable[[Process], bool]) -> list[Process]:
        """Return the processes that hold their keys but are presumed dead, and forget those whose keys are gone."""
        for process in [process for process, known in self._known.items() if known.has_broken]:
            if not is_present(process):
                self.forget(process)
        broken = [process for process, known in self._known.items() if known.has_broken]
        if 2 * len(broken) > max(len(self._known), 2):
            return []
        return [process for process in broken if now >= self._known[process].dead_at]

    def next_at(self) -> float:
        """Return the earliest time at which another process may be presumed dead; infinite if there is none."""
        return min((each.dead_at for each in self._known.values() if each.has_broken), default=math.inf)
