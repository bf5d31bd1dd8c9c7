"""The compiler's pages go, and compiling still works afterwards."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np
import pytest

from flightedl.pserver.compiler_memory import release_compiler_memory


def resident_bytes() -> int:
    """Of the compiler's code."""
    total, is_code = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            is_code = " r-xp " in line and "libllvmlite" in line
        elif is_code and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


def compiled(factor: int) -> Callable[[np.ndarray], float]:
    """A function that the compiler has not seen: what another test compiled, its pages may be dropped already."""

    def scaled_sum(values: np.ndarray) -> float:
        return values.sum() * factor

    return numba.njit(scaled_sum)


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
def test_the_compilers_pages_are_dropped_and_come_back() -> None:
    assert compiled(1)(np.ones(4)) == 4
    before = resident_bytes()
    assert release_compiler_memory() > 0
    assert resident_bytes() < before
    assert compiled(2)(np.ones(4)) == 8
