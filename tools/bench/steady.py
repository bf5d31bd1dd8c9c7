"""The trainer of ``flightedl bench recovery``: it writes down when each of its pushes was accepted.

A push is accepted when every pserver has said so, which is when ``model.step`` returns in async mode. The instants are
of the clock that all processes of a machine share, in one file for each trainer process.
"""

from __future__ import annotations

import struct
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np

import flightedl as fe
from flightedl.examples.ledger import PARAMETERS, write_records
from flightedl.examples.prepared import prepared_directory

RECORDS = 20_000
PER_TASK = 20
BATCH_SIZE = 1
#: Of each batch, as if it were computed: a task of 20 batches takes about half a second.
_PAUSE_S = 0.02
_INSTANT = struct.Struct("d")


def main(data: Path, instants: Path) -> None:
    """Train without end."""
    kind = f"ledger-{RECORDS}-{PER_TASK}"
    directory = prepared_directory(data, kind, lambda folder: write_records(folder, RECORDS, PER_TASK), print)
    zeros = np.zeros(RECORDS, np.float32)
    with fe.connect() as job:
        batches = job.dataset(str(directory / "*.parquet"), batch_size=BATCH_SIZE, epochs=None, shuffle=True, seed=1)
        model = job.parameters(dict.fromkeys(PARAMETERS, zeros), optimizer=fe.SGD(lr=1.0), mode=fe.Async())
        with (instants / job.trainer).open("ab", buffering=0) as file:
            for batch in batches:
                gradient = zeros.copy()
                gradient[batch["k"].to_numpy()] = -1
                time.sleep(_PAUSE_S)
                model.step(dict.fromkeys(PARAMETERS, gradient))
                file.write(_INSTANT.pack(time.monotonic()))


def accepted_pushes(instants: Path) -> dict[str, list[float]]:
    """When the pushes of each trainer were accepted, so far; those without any are left out."""
    found: dict[str, list[float]] = {}
    for path in instants.iterdir():
        data = path.read_bytes()
        whole = len(data) - len(data) % _INSTANT.size
        if whole:
            found[path.name] = [instant for (instant,) in _INSTANT.iter_unpack(data[:whole])]
    return found


def longest_pause(pushes: list[float], began: float, ended: float) -> float:
    """The longest time between two accepted pushes, of which some lies between two instants; the last one may be open.

    Args:
        pushes: When they were accepted, rising, the first of them before ``began``.
        began: From when on it counts.
        ended: Until when.
    """
    edges = [*pushes, max(ended, pushes[-1])]
    return max(after - before for before, after in pairwise(edges) if after > began and before < ended)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
