"""Pages of code that only the start needs are dropped, and loaded again when they are needed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np
import pyarrow as pa
import pytest

from flightedl.process.startup_memory import _clean, release_startup_memory


def resident_bytes(library: str) -> int:
    """Return the resident bytes of a library's code and constants."""
    total, is_code = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            is_code = (" r-xp " in line or " r--p " in line) and library in line
        elif is_code and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


def compiled(factor: int) -> Callable[[np.ndarray], float]:
    """Return a function that is not compiled yet, since pages of compiled ones may have been dropped already."""

    def scaled_sum(values: np.ndarray) -> float:
        return values.sum() * factor

    return numba.njit(scaled_sum)


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
def test_dropped_pages_are_loaded_again_when_needed() -> None:
    assert compiled(1)(np.ones(4)) == 4
    assert pa.array([1, 2]).cast(pa.string()).to_pylist() == ["1", "2"]
    compiler, arrow = resident_bytes("libllvmlite"), resident_bytes("libarrow.so")
    assert release_startup_memory() > 0
    # What was relocated when the library was loaded stays.
    assert resident_bytes("libllvmlite") < compiler / 2
    assert resident_bytes("libarrow.so") < arrow / 2
    assert compiled(2)(np.ones(4)) == 8
    assert pa.array([3]).cast(pa.string()).to_pylist() == ["3"]


def pages(shared_dirty: int = 0, private_dirty: int = 0, anonymous: int = 0, swap: int = 0) -> list[str]:
    """Return the kernel's figures of a mapping's pages, in kB."""
    return [
        f"Shared_Dirty:          {shared_dirty} kB",
        f"Private_Dirty:         {private_dirty} kB",
        f"Anonymous:             {anonymous} kB",
        f"Swap:                  {swap} kB",
    ]


@pytest.mark.parametrize(
    "written",
    [{"shared_dirty": 4, "anonymous": 4}, {"anonymous": 4}, {"swap": 4}],
    ids=["forked", "cleaned", "swapped"],
)
def test_pages_written_before_a_fork_or_swapped_out_are_kept(written: dict[str, int]) -> None:
    lines = ["1000-2000 r--p 00000000 fe:00 7 /venv/libllvmlite.so", *pages(**written)]
    assert list(_clean("\n".join(lines))) == []


def test_written_pages_are_kept() -> None:
    lines = [
        "1000-2000 r-xp 00000000 fe:00 7 /venv/libllvmlite.so",
        *pages(),
        "2000-3000 r--p 00000000 fe:00 7 /venv/libllvmlite.so",
        *pages(private_dirty=4, anonymous=4),
        "3000-4000 rw-p 00000000 fe:00 7 /venv/libllvmlite.so",
        *pages(),
        "4000-5000 r--p 00000000 fe:00 8 /data/libarrow/model.bin",
        *pages(),
        "5000-6000 r--p 00000000 fe:00 9 /venv/pyarrow/libarrow.so.2600",
        *pages(),
    ]
    assert list(_clean("\n".join(lines))) == [(0x1000, 0x2000), (0x5000, 0x6000)]
