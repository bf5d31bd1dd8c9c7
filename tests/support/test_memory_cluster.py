"""The Cluster's twin passes the adapter's contract."""

from __future__ import annotations

import pytest

from tests.support.contracts.cluster import ClusterContract, config_map
from tests.support.memory_cluster import MemoryCluster


class TestContract(ClusterContract):
    @pytest.fixture
    def cluster(self) -> MemoryCluster:
        return MemoryCluster()


def test_objects_are_deleted_with_their_owner() -> None:
    cluster = MemoryCluster()
    (owner,) = cluster.apply([config_map("owner")])
    owned = config_map("owned")
    owned["metadata"]["ownerReferences"] = [{"uid": owner["metadata"]["uid"]}]
    cluster.apply([owned, config_map("other")])
    cluster.delete("ConfigMap", "owner")
    assert list(cluster.objects) == [("ConfigMap", "other")]
