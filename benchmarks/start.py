"""Waiting times of a user's command: until the first batch of a job, and between short tasks.

The first command compiles modules, as the installation of a package does.

    python -m benchmarks.start [TURNS]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import flightedl as fe
from flightedl.config import child_environment
from flightedl.errors import JobFailedError
from flightedl_tools.bench.sides import print_table

_TASKS, _BATCHES_OF_A_TASK, _BATCH_SIZE, _EPOCHS = 20, 3, 32, 20


def run_command(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run ``flightedl`` with these arguments. Raises JobFailedError with the end of its output if it fails."""
    command = [sys.executable, "-m", "flightedl", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise JobFailedError(
            f"flightedl run ended with code {done.returncode}: {done.stdout[-800:]}{done.stderr[-800:]}"
        )


def first_batch(directory: Path) -> tuple[float, float, float]:
    """Run a trivial script as a whole job of two trainers and two pservers.

    Returns the seconds from the command to the last trainer's first batch and to the end of the command, and the share
    of the loops' time between the end of a step and the next batch.
    """
    data, instants = directory / "small.parquet", Path(tempfile.mkdtemp(dir=directory))
    per_task = _BATCH_SIZE * _BATCHES_OF_A_TASK
    pq.write_table(pa.table({"k": np.arange(per_task * _TASKS)}), data, row_group_size=per_task)
    given = ["run", "--output", f"{instants}-run", "benchmarks.start", "--trainers", "2", "--pservers", "2", "--"]
    environment = child_environment(PYTHONPYCACHEPREFIX=str(directory / "compiled"), PYTHONDONTWRITEBYTECODE="")
    began = time.time()
    run_command([*given, "train", str(data), str(instants)], environment)
    ended = time.time()
    first_at, loop_s, waited_s = zip(*(json.loads(path.read_text()) for path in instants.iterdir()), strict=True)
    return max(first_at) - began, ended - began, sum(waited_s) / sum(loop_s)


def train(data: str, instants: str) -> None:
    """Train, and write the time of the first batch, the loop's seconds, and the seconds between steps and batches."""
    gradient = np.ones(650, np.float32)
    with fe.connect() as job:
        model = job.parameters({"w": np.zeros(650, np.float32)}, optimizer=fe.SGD(lr=1e-3), mode=fe.Sync())
        first_at = begun = ended = waited_s = 0.0
        for _ in job.dataset(data, batch_size=_BATCH_SIZE, epochs=_EPOCHS):
            now = time.perf_counter()
            if first_at:
                waited_s += now - ended
            else:
                first_at, begun = time.time(), now
            # About the work of a small network.
            while time.perf_counter() - now < 0.001:
                pass
            model.step({"w": gradient})
            ended = time.perf_counter()
        (Path(instants) / job.trainer).write_text(json.dumps([first_at, ended - begun, waited_s]))


def main(turns: str = "3") -> None:
    """Measure, and print each figure with its limit."""
    with tempfile.TemporaryDirectory(prefix="flightedl-bench-") as name:
        first_batch(Path(name))
        found = [first_batch(Path(name)) for _ in range(int(turns))]
    first_s, whole_s, waiting = map(statistics.median, zip(*found, strict=True))
    rows = (
        ("2 trainers, 2 pservers: s until the first batch", f"{first_s:.2f}", f"command {whole_s:.2f}", "≤ 2"),
        ("tasks of 3 batches: share of the loop between a step and the next batch", f"{waiting:.1%}", "", "≤ 5 %"),
    )
    print_table("whole commands, medians", ("what", "flightedl", "beside it", "wanted"), rows, left=(0, 2))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["train", data, instants]:
            train(data, instants)
        case arguments:
            main(*arguments)
