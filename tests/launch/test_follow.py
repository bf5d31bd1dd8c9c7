"""A growing directory with real processes, some of which are killed: each record counts once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import flightedl as fe
from flightedl.config import child_environment
from flightedl.launch.cluster import LocalCluster
from flightedl.launch.forking import ForkServer
from flightedl.launch.programs import TrainerProgram
from flightedl.launch.status import JobStatus
from flightedl.messages.status import StatusReply

from .forked_launcher import ForkedCommand

pytestmark = [pytest.mark.etcd, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(180)]

Until = Callable[..., None]

PER_FILE = 100

SCRIPT = """
import sys
import numpy as np
import flightedl as fe

COUNT = int(sys.argv[2])
with fe.connect() as job:
    data = job.dataset(sys.argv[1] + "/*.parquet", batch_size=10, shuffle=True, seed=1, follow=True)
    model = job.parameters({"w": np.zeros(COUNT, np.float32)}, optimizer=fe.SGD(lr=1.0), mode=fe.Sync(reduce="sum"))
    for batch in data:
        gradient = np.zeros(COUNT, np.float32)
        gradient[batch["k"].to_numpy()] = -1
        model.step({"w": gradient})
    if job.once("save"):
        model.pull()
        np.save(job.output_dir / "unfinished.npy", model["w"])
        (job.output_dir / "unfinished.npy").rename(job.output_dir / "w.npy")
"""


class Growing:
    """A directory to which files with further records are added."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()
        self.count = 0

    def add(self) -> None:
        """Add a file whose name sorts before those of all others."""
        first = self.count * PER_FILE
        name = f"part-{900 - self.count:03d}.parquet"
        hidden = self.directory / f".{name}"
        pq.write_table(pa.table({"k": np.arange(first, first + PER_FILE)}), hidden, row_group_size=25)
        hidden.rename(self.directory / name)
        self.count += 1

    def end(self) -> None:
        (self.directory / "_END").touch()


@pytest.fixture
def growing(tmp_path: Path) -> Growing:
    return Growing(tmp_path / "data")


@pytest.fixture
def cluster(tmp_path: Path, growing: Growing) -> Iterator[LocalCluster]:
    (tmp_path / "train.py").write_text(SCRIPT)
    program = TrainerProgram(str(tmp_path / "train.py"), (str(growing.directory), "900"), 2)
    kept = str(tmp_path / "kept")
    with LocalCluster(
        2, checkpoint=kept, output_dir=tmp_path / "out", trainers=program, follow_every_s=0.2, lease_ttl_s=3.0
    ) as made:
        yield made


def status_of(status: JobStatus) -> StatusReply:
    try:
        return status.read(1.0)
    except fe.errors.FlightedlError:
        return StatusReply(job="", state="away")


def test_every_record_of_a_growing_directory_counts_once_despite_kills(
    cluster: LocalCluster, growing: Growing, tmp_path: Path, until: Until
) -> None:
    growing.add()
    with cluster.status() as status:

        def done(tasks: int) -> Callable[[], bool]:
            return lambda: status_of(status).tasks.done == tasks

        until(done(4), 60.0)
        assert "new files, or a file _END" in status_of(status).waiting_for
        for role in ("master", "trainer", "pserver", "master"):
            growing.add()
            before = cluster.pid(role)
            cluster.kill(role)
            growing.add()
            until(lambda role=role, before=before: cluster.pid(role) not in {None, before}, 30.0)
            until(done(4 * growing.count), 60.0)
        (growing.directory / "part-500.parquet").write_bytes(b"not Parquet")
        until(lambda: "part-500.parquet is corrupt" in status_of(status).dataset_alarm, 30.0)
        (growing.directory / "part-500.parquet").unlink()
        growing.end()
        until(lambda: status_of(status).state == "done", 60.0)
        assert status_of(status).records == PER_FILE * growing.count
    until((tmp_path / "out" / "w.npy").exists, 30.0)
    assert np.array_equal(np.load(tmp_path / "out" / "w.npy"), np.ones(900))


def test_a_resumed_job_keeps_its_files_and_follows_new_ones(
    growing: Growing, forks: ForkServer, tmp_path: Path, until: Until
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)

    def run(*more: str) -> ForkedCommand:
        command = ["run", "--checkpoint", str(tmp_path / "kept"), "--output", "out", "--job", "grows"]
        with (tmp_path / "log").open("ab") as log:
            return ForkedCommand(
                forks,
                [*command, "--trainers", "2", "--pservers", "2", *more, "train.py", str(growing.directory), "300"],
                cwd=tmp_path,
                stdout=log,
                env=child_environment(FLIGHTEDL_FOLLOW_EVERY_S="0.2"),
            )

    def checkpoints() -> list[Path]:
        return list((tmp_path / "kept" / "grows").glob("**/manifest*"))

    growing.add()
    growing.add()
    with run() as first:
        until(checkpoints, 60.0)
        first.send_signal(signal.SIGTERM)
        first.wait(60)
    growing.add()
    growing.end()
    with run("--resume") as second:
        assert second.wait(90) == 0
    assert np.array_equal(np.load(tmp_path / "out" / "w.npy"), np.ones(300))
