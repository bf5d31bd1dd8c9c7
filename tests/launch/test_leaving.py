"""A pserver that has to end moves its blocks to the others. Nothing is lost, although the job has no checkpoints."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import flightedl as fe
from flightedl.launch import programs
from flightedl.launch.cluster import LocalCluster
from flightedl.launch.forking import ForkServer
from flightedl.launch.policy import Role, Slot
from flightedl.launch.processes import Children
from flightedl.launch.programs import TrainerProgram
from flightedl.launch.supervisor import Starter
from tests.support.contracts.coordinator import eventually

from .metadata_server import MetadataServer, metadata_server

pytestmark = [pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(300)]

_WAIT_S = 120.0


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetadataServer]:
    """Metadata service of the machine on which pserver 1 runs."""
    start = programs._starter
    with metadata_server("aws") as server:

        def starter(
            children: Children, forks: ForkServer, slot: Slot, program: Sequence[str], given: dict[str, str], *more: Any
        ) -> Starter:
            environment = given | server.environment() if slot == Slot(Role.PSERVER, 1) else given
            return start(children, forks, slot, program, environment, *more)

        monkeypatch.setattr(programs, "_starter", starter)
        yield server


def test_a_pserver_that_sees_a_notice_moves_its_blocks_away(tmp_path: Path, cloud: MetadataServer) -> None:
    arguments = ("--data", str(tmp_path / "data"), "--tables", "--records", "8000", "--epochs", "2", "--pause", "0.02")
    logs = tmp_path / "out" / "logs"

    def text(name: str) -> str:
        return (logs / f"{name}.log").read_text() if (logs / f"{name}.log").exists() else ""

    with fe.local(
        pservers=2,
        output_dir=tmp_path / "out",
        leave_s=60.0,
        trainers=TrainerProgram("flightedl.examples.ledger", arguments, 2),
    ) as cluster:
        with cluster.status() as status:
            eventually(lambda: status.read(5.0).tasks.done > 2, timeout_s=_WAIT_S)
            before = cluster.pid("pserver", 1)
            cloud.announce()
            eventually(lambda: cluster.pid("pserver", 1) not in {None, before}, timeout_s=_WAIT_S)
            cloud.documents.clear()
            eventually(lambda: status.read(5.0).tasks.done > 12 or None, timeout_s=_WAIT_S)
        outcome = cluster.outcome(_WAIT_S)
    assert outcome is not None
    assert "0 lost, 0 double" in text("trainer-0") + text("trainer-1")
    assert "released blocks" in text("pserver-1")
    assert "values are lost" not in text("pserver-1") + text("master")


def test_blocks_stay_when_the_trainers_have_left_a_job_with_checkpoints(tmp_path: Path) -> None:
    """Otherwise pservers that are all stopped would move their blocks to each other."""
    pq.write_table(pa.table({"x": range(64)}), tmp_path / "data.parquet")
    names = [f"w{number}" for number in range(4)]

    def step_once(cluster: LocalCluster) -> list[float]:
        with cluster.connect() as job:
            data = job.dataset(tmp_path / "data.parquet", batch_size=8, epochs=2)
            model = job.parameters({name: np.zeros(8, np.float32) for name in names}, optimizer=fe.SGD(lr=1.0))
            next(iter(data))
            before = [float(model[name][0]) for name in names]
            model.step({name: np.ones(8, np.float32) for name in names})
        return before

    kept = {"checkpoint": str(tmp_path / "checkpoints"), "leave_s": 60.0}
    with fe.local(pservers=2, output_dir=tmp_path / "out", **kept) as cluster:
        assert step_once(cluster) == [0.0] * 4
        before = cluster.kill("pserver", 1, signal.SIGTERM)
        eventually(lambda: cluster.pid("pserver", 1) not in {None, before}, timeout_s=_WAIT_S)
        assert step_once(cluster) == [-1.0] * 4
    assert "released blocks" not in (tmp_path / "out" / "logs" / "pserver-1.log").read_text()
