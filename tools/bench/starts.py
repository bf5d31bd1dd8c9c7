"""How long people wait for whole commands: until a trainer is imported, the first batch comes, a small job ends."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from flightedl.config import available_cores, child_environment, thread_environment
from flightedl.errors import JobFailedError

#: What a trainer imports that reads Parquet.
TRAINER_IMPORT = "import flightedl as fe; fe.connect; import flightedl.formats.parquet"
#: What it stands on, which nobody can do without.
BARE_IMPORT = "import numpy, pyarrow.flight, pyarrow.parquet, grpc"
_TRAINERS = 2
_PSERVERS = 2
_BATCHES_OF_A_TASK = 3
_SCRIPT = "flightedl_tools.bench.first_batch"


@dataclass(frozen=True, slots=True)
class FirstBatch:
    """Of one run of the trivial script."""

    #: From the command until the last trainer had its first batch, and until the command had ended.
    first_s: float
    whole_s: float
    #: Share of the loops' time between the end of a step and the next batch.
    waiting: float


def import_s(statement: str, directory: Path) -> float:
    """Processor time of an interpreter that imports this, less that of one that imports nothing."""
    return _python_s(statement, directory) - _python_s("pass", directory)


def _python_s(statement: str, directory: Path) -> float:
    code = f"{statement}\nimport time; print(time.process_time())"
    environment = _environment(directory, **thread_environment(1, 1))
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    return float(done.stdout)


def _environment(directory: Path, **variables: str) -> dict[str, str]:
    """Of a process whose modules are compiled, as those of an installed package are."""
    return child_environment(PYTHONPYCACHEPREFIX=str(directory / "compiled"), PYTHONDONTWRITEBYTECODE="", **variables)


def write_small_tasks(path: Path, task_count: int, batch_size: int) -> None:
    """Records of which a task is three batches."""
    per_task = batch_size * _BATCHES_OF_A_TASK
    pq.write_table(pa.table({"k": np.arange(per_task * task_count)}), path, row_group_size=per_task)


def first_batch(directory: Path, *, task_count: int = 20, epochs: int = 20) -> FirstBatch:
    """Run the trivial script as a whole job."""
    batch_size = 32
    data, instants = directory / "small.parquet", directory / "instants"
    if not data.exists():
        write_small_tasks(data, task_count, batch_size)
    instants.mkdir(exist_ok=True)
    for old in instants.iterdir():
        old.unlink()
    began = time.time()
    arguments = [_SCRIPT, "--trainers", str(_TRAINERS), "--pservers", str(_PSERVERS), "--"]
    flightedl_run([*arguments, str(data), str(instants), str(batch_size), str(epochs)], directory)
    ended = time.time()
    found = [json.loads(path.read_text()) for path in instants.iterdir()]
    if len(found) != _TRAINERS:
        raise JobFailedError(f"{len(found)} of {_TRAINERS} trainers have written down when they had their first batch")
    return FirstBatch(
        max(one["first_at"] for one in found) - began,
        ended - began,
        sum(one["waited_s"] for one in found) / sum(one["loop_s"] for one in found),
    )


def digits_s(directory: Path, epochs: int) -> tuple[float, float]:
    """Seconds of the digits example as a whole command, and of its loop in plain NumPy, each with its imports."""
    data = directory / "digits"
    environment = _environment(directory, **thread_environment(1, available_cores()))
    more = ["--data", str(data), "--epochs", str(epochs)]
    if not data.exists():
        # The first run makes the data.
        flightedl_run(["flightedl.examples.digits", "--", "--data", str(data), "--epochs", "1"], directory)
    began = time.perf_counter()
    flightedl_run(["flightedl.examples.digits", "--trainers", str(_TRAINERS), "--", *more], directory)
    ours_s = time.perf_counter() - began
    began = time.perf_counter()
    program = [sys.executable, "-m", "flightedl_tools.bench.local_digits", str(_prepared(data)), str(epochs)]
    subprocess.run(program, check=True, capture_output=True, env=environment)
    return ours_s, time.perf_counter() - began


def _prepared(data: Path) -> Path:
    return next(data.rglob("test.arrow")).parent


def flightedl_run(arguments: Sequence[str], directory: Path) -> None:
    """``flightedl run``, whose output goes to a directory.

    Raises:
        JobFailedError: it failed; has what it said.
    """
    command = [sys.executable, "-m", "flightedl", "run", "--output", str(directory / f"run-{time.time_ns()}")]
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, check=False, env=_environment(directory)
    )
    if done.returncode:
        raise JobFailedError(
            f"flightedl run ended with code {done.returncode}: {done.stdout[-800:]}{done.stderr[-800:]}"
        )
