"""Properties of this process and its machine, for the job's operators.

The properties are read from the kernel, without additional libraries, which takes about 50 microseconds.
"""

from __future__ import annotations

import functools
import resource
import sys
import time
from pathlib import Path

from flightedl import __version__
from flightedl.config import available_cores, linear_algebra_threads
from flightedl.messages.hosts import HostFacts

_STATM = Path("/proc/self/statm")
_MEMINFO = Path("/proc/meminfo")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_PAGE_BYTES = resource.getpagesize()
#: Seconds over which the use of processors is averaged.
_USE_S = 5.0


class _ProcessorUse:
    """Mean number of cores that this process has used in the last seconds."""

    def __init__(self) -> None:
        self._sample = time.monotonic(), time.process_time()
        self._busy_cores = 0.0

    def busy_cores(self) -> float:
        (began, used_before), now, used = self._sample, time.monotonic(), time.process_time()
        if now - began >= _USE_S:
            self._sample = now, used
            # A forked process begins with the parent's sample.
            self._busy_cores = max(used - used_before, 0.0) / (now - began)
        return self._busy_cores


_processor_use = _ProcessorUse()


def host_facts() -> HostFacts:
    """Return the present facts."""
    return HostFacts(
        version=__version__,
        wall_s=time.time(),
        cores=_cores(),
        threads=linear_algebra_threads(),
        memory_bytes=_resident_bytes(),
        memory_limit_bytes=_limit_bytes(),
        busy_cores=round(_processor_use.busy_cores(), 2),
    )


@functools.cache
def _cores() -> int:
    return available_cores()


def _resident_bytes() -> int:
    """Return the resident memory in bytes, or its peak if the system does not report the current size."""
    try:
        return int(_STATM.read_bytes().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


@functools.cache
def _limit_bytes() -> int:
    """Return the memory limit of the container, or the memory of the machine, in bytes; 0 if unknown."""
    try:
        return int(_CGROUP_LIMIT.read_text())
    except (OSError, ValueError):  # The process is not in a container, or the container has no limit ("max").
        pass
    try:
        return int(_MEMINFO.read_text().split(maxsplit=2)[1]) * 1024
    except (OSError, IndexError, ValueError):
        return 0
