"""Processor time and memory of other processes, read from Linux's /proc."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from flightedl.errors import UsageError

_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = resource.getpagesize()
#: Fields of ``/proc/PID/stat``, counted from the one after the program's name.
_USER_TICKS, _SYSTEM_TICKS, _RESIDENT_PAGES = 11, 12, 21


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has used, in seconds."""
    fields = _stat(pid)
    return (int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])) / _TICKS_PER_S


def resident_bytes(pid: int) -> int:
    """Return the main memory that a process has now."""
    return int(_stat(pid)[_RESIDENT_PAGES]) * _PAGE_BYTES


def peak_bytes(pid: int) -> int:
    """Return the most main memory that a process ever had."""
    (line,) = [text for text in _read(_PROC / str(pid) / "status").splitlines() if text.startswith("VmHWM:")]
    return int(line.split()[1]) << 10


def _stat(pid: int) -> list[str]:
    # The program's name comes in parentheses, and may have spaces and parentheses in it.
    return _read(_PROC / str(pid) / "stat").rpartition(")")[2].split()


def _read(place: Path) -> str:
    if not _PROC.joinpath("self").exists():
        raise UsageError("benchmarks measure processes by /proc, which this system does not have: run them on Linux")
    return place.read_text()
