"""A trainer is killed where no launcher sees its end: how long the others wait for it, and for a frozen one.

Two trainers average their values after twenty local steps, one second in all. One of them is killed at a random time,
20 times. A trainer waits for the other after each push, so the table has the longest waits of the survivor: without a
kill, and after one. Then one trainer is frozen, which only its lease shows.

    python -m benchmarks.deaths [KILLS]
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import flightedl as fe
from flightedl.config import child_environment
from flightedl_tools.bench.sides import print_table

_LOCAL_STEPS, _STEP_S, _FROZEN = 20, 0.05, 3


def train(data: str, waits: str) -> None:
    """Train, and append how long each exchange took, with the time of its end."""
    with fe.connect() as job, Path(waits).open("a") as file:
        model = job.parameters({"w": np.zeros(1_000)}, optimizer=fe.SGD(lr=1.0), local_steps=_LOCAL_STEPS)
        values = {"w": np.zeros(1_000)}
        for _ in job.dataset(data, batch_size=1, records_per_task=_LOCAL_STEPS):
            values = model.local_values(values)
            time.sleep(_STEP_S)
            began = time.monotonic()
            model.local_step(values)
            if (took := time.monotonic() - began) > 1e-3:
                file.write(f"{time.time()} {took}\n")
                file.flush()


class Trainer:
    """A process that trains, and that no launcher watches."""

    def __init__(self, address: str, folder: Path, number: int, lease_ttl_s: float = 5.0) -> None:
        self._waits = folder / f"{number}.txt"
        self._waits.touch()
        command = [sys.executable, "-m", "benchmarks.deaths", "train", str(folder / "data.parquet"), str(self._waits)]
        settings = {"ETCD": address, "JOB": "deaths", "LEASE_TTL_S": str(lease_ttl_s)}
        environment = child_environment() | {f"FLIGHTEDL_{name}": value for name, value in settings.items()}
        self._process = subprocess.Popen(command, env=environment)

    def signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self._process.pid, number)

    def waits_since(self, began: float) -> list[float]:
        """Return how long each exchange took that ended after this time, in seconds."""
        lines = [tuple(map(float, line.split())) for line in self._waits.read_text().splitlines()]
        return [took for ended, took in lines if ended >= began]

    def wait_for(self, count: int, began: float) -> float:
        """Wait for some exchanges after a time. Return the duration of the longest of them."""
        while len(found := self.waits_since(began)) < count:
            time.sleep(0.01)
        return max(found[:count])

    def end(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()


def main(kills: str = "20") -> None:
    """Measure the waits, and print them."""
    chance, found = np.random.default_rng(0), dict[str, list[float]]()
    with tempfile.TemporaryDirectory(prefix="flightedl-bench-") as name, fe.local(pservers=1, job="deaths") as cluster:
        folder = Path(name)
        pq.write_table(pa.table({"k": np.arange(1_000_000)}), folder / "data.parquet", row_group_size=1_000)
        trainers = [Trainer(cluster.etcd_address, folder, number) for number in range(2)]
        for number in range(int(kills) + _FROZEN):
            began = time.time()
            for each in trainers:
                each.wait_for(3, began)
            found.setdefault("undisturbed", []).append(trainers[0].wait_for(3, time.time()))
            time.sleep(chance.random() * _LOCAL_STEPS * _STEP_S)
            kind = "killed" if number < int(kills) else "frozen"
            trainers[1].signal(signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
            found.setdefault(kind, []).append(trainers[0].wait_for(2, time.time()))
            trainers[1].end()
            trainers[1] = Trainer(cluster.etcd_address, folder, 2 + number)
        for each in trainers:
            each.end()
    rows = [
        (kind, str(len(waits)), f"{statistics.median(waits):.2f} s", f"{max(waits):.2f} s")
        for kind, waits in found.items()
    ]
    print_table("longest wait of a trainer after its push", ("the other trainer", "times", "median", "longest"), rows)


if __name__ == "__main__":
    train(*sys.argv[2:]) if sys.argv[1:2] == ["train"] else main(*sys.argv[1:])
