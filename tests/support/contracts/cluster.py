"""Contract suite for ``ports.Cluster``."""

from __future__ import annotations

from typing import Any

import pytest

from flightedl.errors import NotFoundError, UnavailableError, UsageError
from flightedl.ports import Cluster

_LABELS = {"app.kubernetes.io/instance": "contract"}


def config_map(name: str, **data: str) -> dict[str, Any]:
    """Return a small object that tests can apply."""
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "labels": dict(_LABELS)}, "data": data}


class ClusterContract:
    """Behavior of every cluster. The fixture ``cluster`` is a namespace in which no object has the suite's label."""

    @pytest.fixture
    def cluster(self) -> Cluster:
        raise NotImplementedError

    def test_applying_an_object_again_replaces_its_data(self, cluster: Cluster) -> None:
        assert cluster.get("ConfigMap", "a") is None
        (made,) = cluster.apply([config_map("a", x="1")])
        (changed,) = cluster.apply([config_map("a", x="2")])
        assert (made["data"], changed["data"]) == ({"x": "1"}, {"x": "2"})
        assert made["metadata"]["uid"] == changed["metadata"]["uid"]
        found = cluster.get("ConfigMap", "a")
        assert found is not None
        assert found["data"] == {"x": "2"}

    def test_objects_are_listed_by_label(self, cluster: Cluster) -> None:
        other = config_map("c")
        other["metadata"]["labels"] = {"app.kubernetes.io/instance": "another"}
        applied = cluster.apply([config_map("b"), config_map("a"), other])
        assert [each["metadata"]["name"] for each in applied] == ["b", "a", "c"]
        assert [each["metadata"]["name"] for each in cluster.list("ConfigMap", _LABELS)] == ["a", "b"]
        assert cluster.list("Secret", _LABELS) == []

    def test_a_patch_changes_only_the_fields_that_it_names(self, cluster: Cluster) -> None:
        cluster.apply([config_map("a", x="1", y="2")])
        assert cluster.patch("ConfigMap", "a", {"data": {"y": "3"}})["data"] == {"x": "1", "y": "3"}
        with pytest.raises(NotFoundError):
            cluster.patch("ConfigMap", "absent", {"data": {}})

    def test_a_deleted_object_no_longer_exists(self, cluster: Cluster) -> None:
        cluster.apply([config_map("a")])
        cluster.delete("ConfigMap", "a")
        cluster.delete("ConfigMap", "a")
        assert cluster.get("ConfigMap", "a") is None

    def test_an_absent_pod_runs_no_commands_and_has_no_logs(self, cluster: Cluster) -> None:
        with pytest.raises((UnavailableError, UsageError)):
            cluster.execute("absent", ["true"], 10.0)
        with cluster.logs("absent", follow=False) as lines:
            assert list(lines) == []
