"""Peak resident memory of a pserver with Adam, async and sync, while many trainers push.

The limit is the size of the arrays that the mode needs (values, slots, and a sum for synchronous rounds) plus 256 MiB.
The trainers' shared memory, which the pserver only reads, is shown separately. 1,024 MiB and 8 trainers need 14 GB.

    python -m benchmarks.memory [MB] [TRAINERS] [shared|tcp]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from flightedl.rpc.same_host import TRAINERS_MEMORY
from flightedl_tools.bench.dense import flightedl_side
from flightedl_tools.bench.sides import print_table
from flightedl_tools.bench.trainer import Workload
from flightedl_tools.bench.workers import peak_bytes

SPARE_BYTES = 256 << 20
#: Arrays of the model's size by mode.
ARRAYS = {"async": 3, "sync": 4}
STEPS = 6


def mapped_bytes(pid: int, name: str) -> int:
    """Return the resident memory that a process maps under a name."""
    found_kib, is_it = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            is_it = name in line
        elif is_it and first == "Rss:":
            found_kib += int(rest[0])
    return found_kib << 10


def main(mb: str = "1024", trainers: str = "8", path: str = "shared") -> None:
    """Measure both modes."""
    rows = []
    for mode, arrays in ARRAYS.items():
        workload = Workload(mb=float(mb), trainers=int(trainers), optimizer="adam", mode=mode, path=path)
        with (
            tempfile.TemporaryDirectory(prefix="flightedl-bench-") as directory,
            flightedl_side(workload, Path(directory)) as side,
        ):
            side.run(STEPS)
            (pid,) = side.server_pids
            theirs = mapped_bytes(pid, TRAINERS_MEMORY)
            peak = peak_bytes(pid) - theirs
        size = workload.size_bytes
        told = [f"{each / 1e6:.0f}" for each in (size, peak, arrays * size + SPARE_BYTES, theirs)]
        rows.append((mode, *told, f"{peak / size:.2f}"))
    columns = ("mode", "model MB", "peak MB", "bar MB", "trainers' MB", "peak / model")
    print_table(f"peak memory of one pserver, Adam, {trainers} trainers, {path}", columns, rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
