"""The trivial script whose first batch ``flightedl bench latency`` waits for, and whose short tasks it times.

``flightedl run first_batch.py -- DATA INSTANTS``: each trainer writes a line of JSON into a file of the directory
INSTANTS: when it had its first batch, how long its loop took, and how long it waited between the end of a step and the
next batch.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

import flightedl as fe


def main(data_path: str, instants: Path, batch_size: int, epochs: int) -> None:
    """Train, and write it down."""
    gradient = np.ones(650, np.float32)
    with fe.connect() as job:
        data = job.dataset(data_path, batch_size=batch_size, epochs=epochs)
        model = job.parameters({"w": np.zeros(650, np.float32)}, optimizer=fe.SGD(lr=1e-3), mode=fe.Sync())
        first_at = 0.0
        begun = ended = waited_s = 0.0
        for _ in data:
            now = time.perf_counter()
            if not first_at:
                first_at, begun = time.time(), now
            else:
                waited_s += now - ended
            # About what a small network computes.
            while time.perf_counter() - now < 0.001:
                pass
            model.step({"w": gradient})
            ended = time.perf_counter()
        found = {"first_at": first_at, "loop_s": ended - begun, "waited_s": waited_s}
        (instants / f"{job.trainer}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
