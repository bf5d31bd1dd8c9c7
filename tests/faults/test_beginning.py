"""Pservers die before the first checkpoint: the model is initialized again, and every record counts once."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import numpy as np
import pytest

import flightedl as fe
from flightedl.errors import FlightedlError, UnavailableError
from flightedl.examples.ledger import balance
from flightedl.launch.cluster import LocalCluster
from flightedl.launch.programs import TrainerProgram
from flightedl.launch.status import JobStatus

pytestmark = [pytest.mark.etcd, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(300)]

EPOCHS = 2


def until_serving(cluster: LocalCluster, status: JobStatus) -> None:
    deadline = time.monotonic() + 60
    while True:
        assert cluster.outcome() is None, cluster.outcome()
        assert time.monotonic() < deadline
        try:
            states = [pserver.state for pserver in status.read(1.0).pservers]
        except FlightedlError:
            states = []
        if states == ["serving", "serving"]:
            return
        time.sleep(0.02)


@pytest.mark.parametrize(("checkpoint", "mode"), [("none", "sync"), ("kept", "async"), ("failing", "sync")])
def test_every_record_counts_once_if_pservers_die_as_soon_as_they_serve(
    tmp_path: Path, mode: str, checkpoint: str
) -> None:
    arguments = ("--records", "3000", "--epochs", str(EPOCHS), "--pause", "0.01", "--mode", mode)
    cluster = fe.local(
        pservers=2,
        checkpoint=None if checkpoint == "none" else str(tmp_path / "ck"),
        output_dir=tmp_path / "out",
        lease_ttl_s=2.0,
        trainers=TrainerProgram("flightedl.examples.ledger", (*arguments, "--data", str(tmp_path / "data")), 2),
    )
    with cluster, cluster.status() as status:
        if checkpoint == "failing":
            # The storage works when it is probed before the job starts, and never again.
            (tmp_path / "ck").rename(tmp_path / "gone")
            (tmp_path / "ck").write_text("a file where a directory should be")
        killed = 0
        while killed < 4:
            until_serving(cluster, status)
            # Some pservers die before any training, some afterwards.
            time.sleep(0.4 * (killed % 2))
            # Wait for a pserver that has just ended in order to restart with the one that was killed before.
            with contextlib.suppress(UnavailableError):
                cluster.kill("pserver", killed % 2)
                killed += 1
        outcome = cluster.outcome(150)
    assert outcome is not None
    assert outcome.exit_code == 0, outcome
    with np.load(tmp_path / "out" / "ledger.npz") as counts:
        assert balance(counts) == (0, 0)
