"""Groups of ranks under faults: each record counts once in the surviving model, no matter which process dies when."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from flightedl.config import child_environment
from flightedl.errors import FlightedlError
from flightedl.launch.cluster import LocalCluster
from flightedl.launch.places import free_ports
from flightedl.launch.programs import TrainerProgram
from flightedl.launch.verdict import verdict

from .group_trainer import RECORDS

pytestmark = [pytest.mark.etcd, pytest.mark.faults, pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).with_name("group_trainer.py")
FLIGHTEDL = str(Path(sys.executable).with_name("flightedl"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.parquet"
    pq.write_table(pa.table({"id": range(RECORDS)}), path, row_group_size=37)
    return path


def counts_of(directory: Path) -> list[list[float]]:
    counts: list[list[float]] = torch.load(directory / "model.pt")["net"]["weight"].reshape(-1, RECORDS).tolist()
    return counts


def assert_each_record_counts_once(directory: Path, epochs: int = 2) -> None:
    assert counts_of(directory) == [[1.0] * RECORDS] * epochs


def wait_until(happens: Callable[[], object], within_s: float = 150.0) -> None:
    deadline = time.monotonic() + within_s
    while not happens():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.05)


def records_of(cluster: LocalCluster) -> int:
    with cluster.status() as status:
        try:
            return status.read(2.0).records
        except FlightedlError:
            return 0


def test_records_that_kill_their_rank_are_skipped_and_named(data: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [FLIGHTEDL, "run", "--nproc-per-node", "2", "--output", tmp_path / "run", SCRIPT, data, tmp_path, "poison=123"],
        env=child_environment(FLIGHTEDL_ATTEMPTS_LIMIT="2"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 4, done.stdout + done.stderr
    output = done.stdout + done.stderr
    # If a rank dies in its first moments, only the next start knows its batch.
    assert 2 <= output.count("all ranks are started again") <= 3
    assert "killed by SIGSEGV; all ranks are started again" in output
    assert "failed: epoch 1" in output
    assert "it ended without a word" in output
    first, second = counts_of(tmp_path)
    assert first[123] == 0
    assert first.count(0.0) <= 10, "at most one batch may be skipped"
    assert set(first) == {0.0, 1.0}
    assert second == [1.0] * RECORDS


@contextlib.contextmanager
def served(data: Path, *more: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """Run ``flightedl data serve``, and yield the variables that it prints."""
    process = subprocess.Popen([FLIGHTEDL, "data", "serve", str(data), *more], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = next(line for line in process.stdout if "export " in line)
        yield process, dict(each.split("=") for each in line.split() if "=" in each)
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
        assert process.returncode in {0, 130}


def test_a_torchrun_group_survives_kills_of_its_served_master(data: Path, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "3"]
    torchrun += ["--master-port", str(free_ports(1)[0])]
    with served(data) as (server, variables):
        launched = subprocess.Popen(
            [*torchrun, str(SCRIPT), str(data), str(tmp_path), "pause=0.05", "dies_saving=1"],
            env=child_environment(**variables),
        )
        try:
            wait_until((tmp_path / "model.pt").exists)
            kill_child(server.pid, "flightedl.master")
            assert launched.wait(120) == 0
        finally:
            launched.terminate()
            launched.wait(30)
    assert (tmp_path / "died").exists()
    assert_each_record_counts_once(tmp_path)


def kill_child(parent: int, module: str) -> None:
    import psutil

    named = [each for each in psutil.Process(parent).children(recursive=True) if module in " ".join(each.cmdline())]
    assert named, "no process with this name exists"
    named[0].kill()


def strikes(cluster: LocalCluster, chosen: random.Random, kinds: range, size: int) -> int:
    """Kill and freeze ranks and masters, alone and together, at random moments. Return the number of strikes."""

    def kill(role: str, index: int, number: signal.Signals = signal.SIGKILL) -> None:
        with contextlib.suppress(FlightedlError, ProcessLookupError):
            cluster.kill(role, index, number)

    for kind in kinds:
        before = records_of(cluster)
        # Strike from the first steps of a start to its last ones.
        wait_s = chosen.choice([0.0, 0.3, 1.0, 3.0, 6.0])
        wait_until(lambda before=before: cluster.outcome(0.05) or records_of(cluster) not in {0, before})
        if cluster.outcome(wait_s):
            return kind - kinds.start
        match kind % 4:
            case 0:
                kill("trainer", chosen.randrange(size))
            case 1:
                kill("master", 0)
                kill("trainer", chosen.randrange(size))
            case 2:
                for rank in range(size):
                    kill("trainer", rank)
            case _:
                frozen = cluster.pid("trainer", 1)
                kill("trainer", 1, signal.SIGSTOP)
                threading.Event().wait(4.0)
                if frozen is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(frozen, signal.SIGCONT)
    return len(kinds)


_STORM = [pytest.mark.storm, pytest.mark.timeout(3000)]


@pytest.mark.parametrize(
    ("kind", "sizes", "count", "pause", "records", "epochs"),
    [
        pytest.param("ddp", (4, 2), 2, 0.05, 60, 2, id="ddp"),
        pytest.param("fsdp", (2, 3), 2, 0.05, 60, 2, id="fsdp"),
        pytest.param("ddp", (4, 2, 3), 100, 1.0, 12, 10, marks=_STORM, id="ddp-storm"),
        pytest.param("fsdp", (4, 2, 3), 50, 1.0, 12, 5, marks=_STORM, id="fsdp-storm"),
    ],
)
def test_each_record_counts_once_in_the_surviving_model(
    data: Path, tmp_path: Path, kind: str, sizes: tuple[int, ...], count: int, pause: float, records: int, epochs: int
) -> None:
    """Groups of different sizes, each with its own etcd and master, resume from the same checkpoint.

    ``records`` is the number of records of a round, so half as many ranks have batches of twice the size.
    """
    chosen, struck = random.Random(count), 0
    for number, size in enumerate(sizes):
        more = f"kind={kind}", f"pause={pause}", f"batch={records // size}", f"epochs={epochs}"
        program = TrainerProgram(str(SCRIPT), (str(data), str(tmp_path), *more), size, is_group=True)
        out = tmp_path / f"out-{number}"
        # Many strikes may hit the same records repeatedly.
        with LocalCluster(0, output_dir=out, trainers=program, lease_ttl_s=2.0, attempts_limit=1000) as cluster:
            struck += strikes(cluster, chosen, range(number, number + count // len(sizes)), size)
            if number == len(sizes) - 1:
                outcome = cluster.outcome(200 * epochs)
                assert outcome is not None
                assert outcome.exit_code == 0, outcome
                with cluster.status() as status:
                    last = status.read(10.0)
    assert struck > count // 2
    assert verdict(last, keeps_checkpoints=False).exit_code == 0, last
    assert_each_record_counts_once(tmp_path, epochs)
