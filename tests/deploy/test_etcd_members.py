"""Members of a job's own etcd, with the arguments and certificates of their manifests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.adapters.etcd import EtcdCoordinator
from flightedl.adapters.etcd_access import EtcdAccess
from flightedl.config import CommonSettings
from flightedl.launch.kubernetes import secrets
from flightedl.launch.kubernetes.etcd_members import certificate_hosts, etcd
from flightedl.launch.kubernetes.secrets import make_secrets
from flightedl.launch.kubernetes.values import ETCD_PORT, ClusterJob
from flightedl.launch.kubernetes.views import labels_of
from flightedl.ports import Put
from tests.support.memory_cluster import MemoryCluster

from .node import Node

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(60)]

JOB = ClusterJob(job="demo", image="flightedl", target="train.py", etcd_members=3)


class NodeWithNames(Node):
    """A node that resolves names of members: it replaces them by addresses in their arguments."""

    def __init__(self, cluster: MemoryCluster, folder: Path) -> None:
        super().__init__(cluster, folder, labels_of("demo"))
        peers = [f"demo-etcd-{number}.demo-etcd-peer" for number in range(JOB.etcd_members)]
        self.names = {name: f"{self.network}.{number + 1}" for number, name in enumerate(peers)}

    def named(self, text: str) -> str:
        for name, address in self.names.items():
            text = text.replace(name, address).replace(name.replace(name.partition(".")[0], "$(POD_NAME)"), "$(POD_IP)")
        return text


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeWithNames]:
    cluster = MemoryCluster()
    found = NodeWithNames(cluster, tmp_path)
    hosts = [*certificate_hosts(JOB), *found.names.values()]
    monkeypatch.setattr(secrets, "certificate_hosts", lambda _: hosts)
    cluster.apply(make_secrets(JOB))
    (members,) = (each["spec"] for each in etcd(JOB) if each["kind"] == "StatefulSet")
    (container,) = members["template"]["spec"]["containers"]
    spec = members["template"]["spec"] | {
        "containers": [container | {"args": [found.named(word) for word in container["args"]]}]
    }
    for number in range(members["replicas"]):
        metadata = members["template"]["metadata"] | {"name": f"demo-etcd-{number}"}
        cluster.apply([{"kind": "Pod", "metadata": metadata, "spec": spec}])
    yield found
    found.close()


def test_three_members_form_a_cluster_and_serve_clients_with_certificates(node: NodeWithNames) -> None:
    def until_ready(count: int) -> None:
        deadline = time.monotonic() + 40
        while sum(each.is_ready for each in node.running.values()) < count:
            node.step()
            logs = [(each.mounts["/work"] / "output.log").read_text()[-600:] for each in node.running.values()]
            assert time.monotonic() < deadline, logs
            time.sleep(0.05)

    until_ready(3)
    certificates = node.running["demo-etcd-0"].mounts["/etc/flightedl/certificates"]
    addresses = ",".join(f"{address}:{ETCD_PORT}" for address in node.names.values())
    access = EtcdAccess.of(CommonSettings(etcd=addresses, etcd_tls_dir=str(certificates)))
    coordinator = EtcdCoordinator(access, clock=SystemClock())
    try:
        assert coordinator.transact([], [Put("/flightedl/demo/x", b"1")]).committed
        found = coordinator.get("/flightedl/demo/x")
        assert found is not None
        assert found.value == b"1"
    finally:
        coordinator.close()
