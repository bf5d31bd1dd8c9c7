"""The compiler's pages go, and compiling still works afterwards."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from flightedl.domain.kernels import kernel_for
from flightedl.domain.optimizers import SGD
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


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
def test_the_compilers_pages_are_dropped_and_come_back() -> None:
    kernel_for(SGD(lr=0.5), "float32").compile()
    before = resident_bytes()
    assert release_compiler_memory() > 0
    assert resident_bytes() < before
    values = np.ones(4, np.float64)
    kernel_for(SGD(lr=0.5), "float64")(values, np.ones(4), [], 0)
    assert values.tolist() == [0.5] * 4
