"""The number of pservers changes again and again while processes are killed: every record still counts once."""

from __future__ import annotations

import contextlib
import random
import time
from pathlib import Path

import pytest

import flightedl as fe
from flightedl.errors import FlightedlError
from flightedl.launch.cluster import LocalCluster
from flightedl.launch.programs import TrainerProgram
from flightedl.launch.status import JobStatus
from flightedl.messages.scaling import ScaleReply, ScaleRequest
from tests.support.contracts.coordinator import eventually

pytestmark = [pytest.mark.etcd, pytest.mark.faults, pytest.mark.slow, pytest.mark.storm, pytest.mark.timeout(1200)]

_STORM_S = 45.0
_WAIT_S = 400.0
_ROLES = [("master", 0), *(("pserver", index) for index in range(4)), ("trainer", 0), ("trainer", 1)]


@pytest.mark.parametrize("mode", ["async", "sync", "bounded", "accumulated", "deterministic", "mean-backup"])
def test_every_record_counts_once_while_pservers_come_and_go(tmp_path: Path, mode: str) -> None:
    arguments = ("--data", str(tmp_path / "data"), "--tables", "--mode", mode, "--records", "30000", "--epochs", "3")
    with fe.local(
        pservers=2,
        output_dir=tmp_path / "out",
        checkpoint=str(tmp_path / "ck"),
        checkpoint_every_s=3.0,
        standby=True,
        lease_ttl_s=2.0,
        trainers=TrainerProgram("flightedl.examples.ledger", (*arguments, "--pause", "0.02"), 2),
    ) as cluster:
        with cluster.status() as status:
            eventually(lambda: status.read(5.0).tasks.done, timeout_s=_WAIT_S)
            changes = strike(cluster, status, random.Random(mode))
        assert cluster.outcome(_WAIT_S) is not None, "the job does not end"
    logs = [path.read_text() for path in (tmp_path / "out" / "logs").glob("*.log")]
    assert any("0 lost, 0 double" in text for text in logs)
    assert not any("Traceback" in text for text in logs)
    assert changes > 5


def strike(cluster: LocalCluster, status: JobStatus, chance: random.Random) -> int:
    """Change the number of pservers and kill processes until the time is up. Returns the number of accepted changes."""
    ends_at, changes = time.monotonic() + _STORM_S, 0
    while time.monotonic() < ends_at and cluster.outcome() is None:
        # A change is rejected while another one is in progress, and no master may be there at the moment.
        with contextlib.suppress(FlightedlError):
            status.change("scale", ScaleRequest(pservers=chance.randint(1, 4)), ScaleReply, 3.0)
            changes += 1
        time.sleep(chance.uniform(0.1, 2.5))
        if chance.random() < 0.6:
            with contextlib.suppress(FlightedlError):
                cluster.kill(*chance.choice(_ROLES))
        time.sleep(chance.uniform(0.5, 3.0))
    return changes
