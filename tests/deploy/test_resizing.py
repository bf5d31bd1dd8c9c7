"""Changing the number of pservers of a job on a cluster, with processes that run as their manifests specify."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.examples.ledger import PARAMETERS, findings
from flightedl.launch.kubernetes.objects import render
from flightedl.launch.kubernetes.resizing import resize
from flightedl.launch.kubernetes.secrets import make_secrets
from flightedl.launch.kubernetes.submitting import find, scale, submit
from flightedl.launch.kubernetes.values import ClusterJob
from flightedl.launch.kubernetes.views import labels_of
from flightedl.launch.kubernetes.watching import status_of
from flightedl.messages.scaling import ScaleRequest
from flightedl.messages.status import StatusReply
from tests.support.etcd_server import EtcdServer
from tests.support.memory_cluster import MemoryCluster

from .controllers import Controllers
from .node import Node

pytestmark = [pytest.mark.etcd, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(240)]

RECORDS, PER_TASK, EPOCHS = 2000, 100, 3
_WAIT_S = 90.0


class Cluster(SystemClock):
    """A cluster with one node. Time passes on it while somebody waits."""

    def __init__(self, folder: Path) -> None:
        self.objects = MemoryCluster()
        self.node = Node(self.objects, folder, labels_of("ledger"))
        self.objects.execute = self.node.execute  # type: ignore[method-assign]
        self._controllers = Controllers(self.objects, self._ready_since)

    def _ready_since(self, name: str) -> float | None:
        running = self.node.running.get(name)
        return running.ready_since if running is not None and running.is_ready else None

    def step(self) -> None:
        self._controllers.step()
        self.node.step()

    def sleep(self, seconds: float) -> None:
        ends_at = time.monotonic() + seconds
        while time.monotonic() < ends_at:
            self.step()
            time.sleep(0.05)

    def until(self, is_so: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + _WAIT_S
        while not is_so():
            assert time.monotonic() < deadline, f"{what}; {self.node.problems}; {self.node.ended}"
            self.sleep(0.1)

    def status(self) -> StatusReply:
        """Return the job's status, once its master answers in time on a busy machine."""
        found: list[StatusReply] = []

        def has_answered() -> bool:
            found.extend(filter(None, [status_of(self.objects, "ledger")]))
            return bool(found)

        self.until(has_answered, "the master does not answer")
        return found[0]

    def pods(self) -> list[str]:
        return [name for name in self.node.running if "pserver" in name]

    def pod_of(self, index: int) -> str:
        (address,) = (each.address for each in self.status().pservers if each.index == index)
        return next(name for name, each in self.node.running.items() if each.address == address.partition(":")[0])


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    found = Cluster(tmp_path / "pods")
    yield found
    found.node.close()


def test_every_record_counts_once_while_pods_of_pservers_come_and_go(
    cluster: Cluster, own_etcd: EtcdServer, tmp_path: Path
) -> None:
    arguments = f"--records {RECORDS} --per-task {PER_TASK} --batch-size 20 --epochs {EPOCHS} --pause 0.5"
    job = ClusterJob(
        job="ledger",
        image="flightedl",
        target="flightedl.examples.ledger",
        arguments=(*arguments.split(), "--data", str(tmp_path / "data")),
        masters=1,
        etcd=own_etcd.address,
        checkpoint=str(tmp_path / "checkpoints"),
        leave_s=30,
        settled_s=1,
    )
    submit(cluster.objects, [*render(job), *make_secrets(job)], SystemClock())
    cluster.until(lambda: cluster.status().records, "the job does not train")

    reply = resize(cluster.objects, "ledger", ScaleRequest(pservers=3), _WAIT_S, cluster)
    assert (reply.pservers, reply.is_given_up) == (3, False)
    assert len(cluster.pods()) == 4
    assert all(each.blocks for each in cluster.status().pservers)

    evicted = cluster.pod_of(0)
    cluster.objects.patch("Pod", evicted, {"metadata": {"deletionTimestamp": "now"}})
    cluster.until(lambda: evicted in cluster.node.ended, "the pod does not end")
    assert cluster.node.ended[evicted] == 0
    assert "released blocks" in (tmp_path / "pods" / evicted / "work" / "output.log").read_text()
    cluster.until(lambda: len(cluster.status().pservers) == 3, "the spare does not take over")
    cluster.until(lambda: all(each.blocks for each in cluster.status().pservers), "the spare gets no blocks")
    assert not cluster.node.problems

    reply = resize(cluster.objects, "ledger", ScaleRequest(pservers=1), _WAIT_S, cluster)
    assert (reply.pservers, reply.is_given_up) == (1, False)
    serving = cluster.pod_of(0)
    cluster.until(lambda: len(cluster.pods()) == 2, "surplus pods are not removed")
    assert serving in cluster.pods()

    # The changes are slow on a busy machine, so the job is long, and more trainers end it.
    scale(cluster.objects, "ledger", 6)
    cluster.until(lambda: find(cluster.objects, "ledger").is_finished, "the job does not end")
    assert find(cluster.objects, "ledger").state == "done"
    assert all("ended by itself with 0 " in problem for problem in cluster.node.problems), cluster.node.problems
    (counts_path,) = (tmp_path / "pods").glob("*/work/ledger.npz")
    counts = np.load(counts_path)
    for name in PARAMETERS:
        assert np.array_equal(counts[name], np.ones((EPOCHS, RECORDS))), list(findings(counts, PER_TASK))
