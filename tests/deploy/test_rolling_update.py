"""Rolling updates of servers, with processes that run as their manifests specify."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.config import CommonSettings
from flightedl.errors import FlightedlError
from flightedl.examples.ledger import CLOCKS, PARAMETERS, findings
from flightedl.launch.kubernetes.objects import render
from flightedl.launch.kubernetes.secrets import make_secrets
from flightedl.launch.kubernetes.submitting import find, submit
from flightedl.launch.kubernetes.values import ClusterJob
from flightedl.launch.kubernetes.views import labels_of
from flightedl.launch.kubernetes.watching import status_of
from flightedl.launch.status import JobStatus
from tests.support.etcd_server import EtcdServer
from tests.support.memory_cluster import MemoryCluster

from .controllers import Controllers
from .node import Node

pytestmark = [pytest.mark.etcd, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(240)]

RECORDS, PER_TASK, BATCH, EPOCHS = 2000, 100, 20, 2


@pytest.fixture
def cluster() -> MemoryCluster:
    return MemoryCluster()


@pytest.fixture
def node(cluster: MemoryCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    found = Node(cluster, tmp_path / "pods", labels_of("ledger"))
    monkeypatch.setattr(cluster, "execute", found.execute)
    yield found
    found.close()


@pytest.mark.parametrize(
    ("standbys", "pause_s"), [(0, 0.12), pytest.param(2, 0.4, marks=pytest.mark.storm)], ids=["checkpoints", "standbys"]
)
def test_every_record_counts_once_through_a_rolling_update_of_servers(
    cluster: MemoryCluster, node: Node, own_etcd: EtcdServer, tmp_path: Path, standbys: int, pause_s: float
) -> None:
    arguments = f"--records {RECORDS} --per-task {PER_TASK} --batch-size {BATCH} --epochs {EPOCHS} --pause {pause_s}"
    job = ClusterJob(
        job="ledger",
        image="flightedl",
        target="flightedl.examples.ledger",
        arguments=(*arguments.split(), "--data", str(tmp_path / "data")),
        spares=0,
        standby_pservers=standbys,
        etcd=own_etcd.address,
        # Standbys make checkpoints unnecessary.
        checkpoint="" if standbys else str(tmp_path / "checkpoints"),
        settled_s=1,
    )
    submit(cluster, [*render(job), *make_secrets(job)], SystemClock())
    controllers = Controllers(
        cluster,
        lambda name: node.running[name].ready_since if name in node.running and node.running[name].is_ready else None,
    )

    def until(is_so: Callable[[], bool], what: str, timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_so():
            controllers.step()
            node.step()
            assert not node.problems, f"{what}; {node.problems}"
            assert time.monotonic() < deadline, f"{what}; {node.problems}; {node.ended}; {list(node.running)}"
            time.sleep(0.05)

    certificates = tmp_path / "reader"
    chosen = CommonSettings(etcd=own_etcd.address, job="ledger", tls_dir=_certificates(cluster, certificates))
    asked = JobStatus(chosen, SystemClock())

    def done() -> int:
        try:
            return asked.read(2.0).records
        except FlightedlError:
            return -1

    servers = ("ledger-pserver", "ledger-master")
    until(lambda: all(map(controllers.is_rolled_out, servers)) and done() > 0, "the job does not train")
    before = {name for name in node.running if "trainer" not in name}
    for name in servers:
        controllers.fewest_ready[name] = 2
        changed = {"metadata": {"annotations": {"version": "2"}}}
        cluster.patch("Deployment", name, {"spec": {"template": changed}})
    until(lambda: all(map(controllers.is_rolled_out, servers)), "servers are not replaced")
    said = status_of(cluster, "ledger")
    assert said is not None, "a command in the master's pod, with its certificate, must return the status"
    assert {each.state for each in said.pservers} == {"serving"}
    until(lambda: find(cluster, "ledger").is_finished, "the job does not end", 90.0)
    asked.close()
    assert find(cluster, "ledger").state == "done"
    # A master that takes over is briefly not ready, so that the rollout waits for it.
    assert min(controllers.fewest_ready.values()) >= 1
    assert {name: node.ended.get(name) for name in before} == dict.fromkeys(before, 0), "all old pods must end cleanly"
    assert not node.problems
    (counts_path,) = (tmp_path / "pods").glob("*/work/ledger.npz")
    counts = np.load(counts_path)
    for name in PARAMETERS:
        assert np.array_equal(counts[name], np.ones((EPOCHS, RECORDS))), list(findings(counts, PER_TASK))
    assert {counts[name][0] for name in CLOCKS} == {EPOCHS * RECORDS // BATCH}


def _certificates(cluster: MemoryCluster, place: Path) -> str:
    """Certificates of a trainer, which may query the status."""
    place.mkdir()
    for name, data in cluster.objects["Secret", "ledger-trainer"]["data"].items():
        (place / name).write_bytes(base64.b64decode(data))
    return str(place)
