"""A pserver is killed: how long training stops with a standby, and with a spare that loads the newest checkpoint.

The model has a table of the given size (1 GB by default) and 8 MB of dense parameters. The trainer pushes 4,096 random
rows and all dense parameters, 50 times per second. Also measures how much processor time the standby costs the pserver,
and the longest steps before the kill. The launcher ends the killed process's lease as soon as it notices the end.

    python -m benchmarks.standby [MB]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

import flightedl as fe
from flightedl.launch.cluster import LocalCluster
from flightedl.messages.status import ServerStatus

_DIM, _IDS, _DENSE = 32, 4_096, 2_000_000
_FILLED_AT_ONCE = 100_000
_EVERY_S = 0.02
_MEASURED_S = 20.0
_KILLS = 3
#: Maximum wait for a copy or a checkpoint, and maximum age of a copy when the pserver is killed.
_WAIT_S, _LAG_S = 300.0, 5.0


class Steps:
    """Steps of a trainer, with their durations."""

    def __init__(self, job: fe.Job, folder: Path, rows: int) -> None:
        self._data: Iterator[object] = iter(job.dataset(str(folder / "data.parquet"), batch_size=1))
        self._job, self._rows = job, rows
        self._table = job.table("t", _DIM, optimizer=fe.SGD(lr=1.0), unknown="zero")
        self._model = job.parameters({"w": np.zeros(_DENSE, np.float32)}, optimizer=fe.SGD(lr=1.0), mode=fe.Async())
        self._gradient = {"w": np.full(_DENSE, 1e-6, np.float32)}
        self._chance = np.random.default_rng(1)
        for start in range(0, rows, _FILLED_AT_ONCE):
            self.step(np.arange(start, min(rows, start + _FILLED_AT_ONCE)))

    @property
    def served(self) -> float:
        """Fraction of the rows that the pserver has."""
        return len(self._table) / self._rows

    def step(self, ids: np.ndarray | None = None) -> float:
        """Make a step, and return its duration in seconds."""
        next(self._data)
        ids = np.unique(self._chance.integers(0, self._rows, _IDS)) if ids is None else ids
        values = np.full((len(ids), _DIM), -1e-3, np.float32)
        began = time.monotonic()
        self._table.push(ids, values)
        self._model.step(self._gradient)
        return time.monotonic() - began

    def for_seconds(self, seconds: float, is_over: Callable[[], bool] = lambda: False) -> list[float]:
        """Make steps for some seconds, or until ``is_over``, and return their durations."""
        found, end = [], time.monotonic() + seconds
        while time.monotonic() < end and not is_over():
            found.append(self.step())
            time.sleep(max(0.0, _EVERY_S - found[-1]))
        return found


def _server(cluster: LocalCluster) -> ServerStatus:
    with cluster.status() as status:
        return status.read(10.0).pservers[0]


def _has_copy(cluster: LocalCluster, generation: int) -> bool:
    """True if a standby has a recent copy of a pserver that is newer than ``generation``."""
    logs = [path.read_text() for path in (cluster.directory / "logs").glob("pserver-*.log")]
    found = _server(cluster)
    is_copied = any(f"source={found.generation}," in text for text in logs)
    return found.generation > generation and is_copied and (found.standby_lag_s or 1e9) < _LAG_S


def _checkpoints_since(folder: Path, seconds: float) -> int:
    """Return how many checkpoints ended after this time. Only the first may have begun before it."""
    return sum(each.stat().st_mtime > seconds for each in folder.rglob("*manifest*"))


def _measure(kind: str, megabytes: int, folder: Path) -> None:
    rows = (megabytes << 20) // (4 * _DIM)
    more = {"standby_pservers": 1} if kind == "a standby" else {"standby": True}
    if kind == "a spare":
        more |= {"checkpoint": str(folder / "checkpoints"), "checkpoint_every_s": 20.0}
    with fe.local(pservers=1, **more) as cluster, cluster.connect() as job:
        steps = Steps(job, folder, rows)
        if kind == "a standby":
            steps.for_seconds(_WAIT_S, partial(_has_copy, cluster, 0))
        elif kind == "a spare":
            filled = time.time()
            steps.for_seconds(_WAIT_S, lambda: _checkpoints_since(folder, filled) > 1)
        steps.for_seconds(5.0)
        server = psutil.Process(_server(cluster).pid)
        before = server.cpu_times()
        durations = steps.for_seconds(_MEASURED_S)
        used = sum(server.cpu_times()[:2]) - sum(before[:2])
        print(
            f"with {kind}: processor {used / _MEASURED_S:.1%} of a core, {len(durations) / _MEASURED_S:.0f} steps/s, "
            f"median {statistics.median(durations) * 1e3:.1f} ms, 99 % {np.quantile(durations, 0.99) * 1e3:.1f} ms, "
            f"longest {max(durations) * 1e3:.1f} ms",
            flush=True,
        )
        for _ in range(_KILLS if kind != "nothing" else 0):
            found = _server(cluster)
            psutil.Process(found.pid).kill()
            took = steps.step()
            print(f"    a push was accepted {took:.2f} s after a kill, with {steps.served:.1%} of the rows", flush=True)
            steps.for_seconds(5.0)
            if kind == "a standby":
                steps.for_seconds(_WAIT_S, partial(_has_copy, cluster, found.generation))


def main(megabytes: int) -> None:
    """Measure each kind in turn."""
    folder = Path(tempfile.mkdtemp())
    pq.write_table(pa.table({"k": np.arange(1_000_000)}), folder / "data.parquet", row_group_size=1_000)
    for kind in ("nothing", "a standby", "a spare"):
        _measure(kind, megabytes, folder)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1024)
