"""etcd is restored from an older backup during a job: the job ends and is resumed, and every record counts once."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flightedl.errors import EXIT_JOB_FAILED, JobFailedError
from flightedl.examples.ledger import balance
from flightedl.launch.cluster import LocalCluster
from flightedl.launch.programs import TrainerProgram
from flightedl.launch.supervisor import OnEvent
from tests.support.etcd_server import EtcdServer

pytestmark = [pytest.mark.etcd, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(240)]

EPOCHS = 2
#: Longer than the time to stop a job, so that leases in the backup are still alive when the job is resumed.
LEASE_TTL_S = 8.0


def cluster(
    etcd: EtcdServer, directory: Path, name: str, *, resume: bool = False, on_event: OnEvent | None = None
) -> LocalCluster:
    arguments = (
        f"--records 3000 --per-task 100 --batch-size 20 --epochs {EPOCHS} --pause 0.02 --hold {directory / 'hold'}"
    )
    program = TrainerProgram("flightedl.examples.ledger", (*arguments.split(), "--data", str(directory / "data")), 2)
    return LocalCluster(
        2,
        job="ledger",
        etcd=etcd.address,
        output_dir=directory / name,
        trainers=program,
        lease_ttl_s=LEASE_TTL_S,
        checkpoint=str(directory / "checkpoints"),
        checkpoint_every_s=0.5,
        resume=resume,
        on_event=on_event,
    )


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def checkpoint_count(directory: Path) -> int:
    return max(
        (int(path.parent.name[2:]) for path in directory.glob("checkpoints/ledger/c-*/manifest.json")), default=0
    )


def test_a_running_job_ends_and_resumes_exactly(own_etcd: EtcdServer, tmp_path: Path) -> None:
    (tmp_path / "hold").touch()
    with cluster(own_etcd, tmp_path, "first") as first:
        until(lambda: checkpoint_count(tmp_path) >= 1)
        backup = own_etcd.backup()
        reached = checkpoint_count(tmp_path)
        # The master named by the backup no longer exists when the backup is restored.
        first.kill("master")
        until(lambda: checkpoint_count(tmp_path) >= reached + 2)
        own_etcd.restore(backup)
        outcome = first.outcome(60)
        assert outcome is not None
        assert outcome.exit_code == EXIT_JOB_FAILED, outcome
    logs = "".join(path.read_text() for path in (tmp_path / "first" / "logs").glob("*.log"))
    assert "restored from an older backup" in logs
    assert "with --resume" in logs
    events: list[str] = []
    with pytest.raises(JobFailedError, match=r"continue from checkpoint \d+ with --resume"):
        cluster(own_etcd, tmp_path, "second", on_event=events.append).start()
    assert "its master does not answer: waiting for them to expire, at most 11 s" in events[0]
    (tmp_path / "hold").unlink()
    with cluster(own_etcd, tmp_path, "third", resume=True) as third:
        done = third.outcome(120)
    assert done is not None
    assert done.exit_code == 0, done
    with np.load(tmp_path / "third" / "ledger.npz") as counts:
        assert balance(counts) == (0, 0)
