"""Whole commands as people wait for them: import of a trainer, the first batch of a job, short tasks, digits.

Each figure stands beside another of the same run: the libraries' import, the digits example's loop in plain NumPy. The
first command compiles modules, as the installation of a package does.

    python -m benchmarks.start [TURNS]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import flightedl as fe
from flightedl.config import available_cores, child_environment, thread_environment
from flightedl.errors import JobFailedError
from flightedl.examples.digits import accuracy, first_parameters, images_and_digits, loss_and_gradients
from flightedl_tools.bench.sides import print_table, ratio

_DIGITS_EPOCHS = 20
#: What a trainer imports that reads Parquet.
TRAINER_IMPORT = "import flightedl as fe; fe.connect; import flightedl.formats.parquet"
#: What it stands on, which nobody can do without.
BARE_IMPORT = "import numpy, pyarrow.flight, pyarrow.parquet, grpc"
_TRAINERS = 2
_PSERVERS = 2
_BATCHES_OF_A_TASK = 3
_MODULE = "benchmarks.start"


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
    arguments = [_MODULE, "--trainers", str(_TRAINERS), "--pservers", str(_PSERVERS), "--", "train"]
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
    program = [sys.executable, "-m", _MODULE, "digits", str(_prepared(data)), str(epochs)]
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


def train(data_path: str, instants: Path, batch_size: int, epochs: int) -> None:
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


_BATCH_SIZE = 32
_LEARNING_RATE = 3e-3
_BETA1, _BETA2, _EPSILON = 0.9, 0.999, 1e-8


def train_alone(directory: Path, epochs: int) -> None:
    """Train, and print the accuracy."""
    batches: list[pa.RecordBatch] = []
    for path in sorted(directory.glob("train-*.arrow")):
        with pa.ipc.open_file(str(path)) as reader:
            for number in range(reader.num_record_batches):
                records = reader.get_batch(number)
                batches += [records.slice(at, _BATCH_SIZE) for at in range(0, records.num_rows, _BATCH_SIZE)]
    model = first_parameters(seed=0)
    first = {name: np.zeros_like(values) for name, values in model.items()}
    second = {name: np.zeros_like(values) for name, values in model.items()}
    random = np.random.default_rng(0)
    step = 0
    for _ in range(epochs):
        for number in random.permutation(len(batches)):
            _, gradients = loss_and_gradients(model, *images_and_digits(batches[number]))
            step += 1
            rate = _LEARNING_RATE * (1 - _BETA2**step) ** 0.5 / (1 - _BETA1**step)
            for name, gradient in gradients.items():
                first[name] += (1 - _BETA1) * (gradient - first[name])
                second[name] += (1 - _BETA2) * (gradient * gradient - second[name])
                model[name] -= rate * first[name] / (np.sqrt(second[name]) + _EPSILON)
    print(f"test accuracy: {accuracy(model, directory):.1%}")


def main(turns: str = "3") -> None:
    """Measure everything, and print each figure with its bar."""
    with tempfile.TemporaryDirectory(prefix="flightedl-bench-") as name:
        directory = Path(name)
        import_s(TRAINER_IMPORT, directory)
        imports = [[import_s(each, directory) for _ in range(int(turns))] for each in (TRAINER_IMPORT, BARE_IMPORT)]
        first_batch(directory)
        firsts = [first_batch(directory) for _ in range(int(turns))]
        digits = [*zip(*(digits_s(directory, _DIGITS_EPOCHS) for _ in range(int(turns))), strict=True)]
    ours, bare = map(statistics.median, imports)
    first_s, whole_s, waiting = (
        statistics.median(getattr(one, name) for one in firsts) for name in ("first_s", "whole_s", "waiting")
    )
    digits_ours, digits_alone = map(statistics.median, digits)
    rows = (
        ("import of a trainer: s of the processor", f"{ours:.2f}", f"its libraries {bare:.2f}", "≤ 0.54"),
        ("2 trainers, 2 pservers: s until the first batch", f"{first_s:.2f}", f"command {whole_s:.2f}", "≤ 2"),
        ("tasks of 3 batches: share of the loop between a step and the next batch", f"{waiting:.1%}", "", "≤ 5 %"),
        (
            f"digits, {_DIGITS_EPOCHS} epochs, whole command: s",
            f"{digits_ours:.2f}",
            f"NumPy loop {digits_alone:.2f}, {ratio(*digits):.2f} x",
            "≤ 2.5 x",
        ),
    )
    print_table("whole commands, medians", ("what", "flightedl", "beside it", "wanted"), rows, left=(0, 2))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["train", data, instants, size, epochs]:
            train(data, Path(instants), int(size), int(epochs))
        case ["digits", place, epochs]:
            train_alone(Path(place), int(epochs))
        case arguments:
            main(*arguments)
