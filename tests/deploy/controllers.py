"""Kueue, and the parts of Kubernetes' controllers of Deployments and Jobs that rollouts and ends of jobs need."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from typing import Any

from flightedl.launch.kubernetes.views import QUEUE
from tests.support.memory_cluster import MemoryCluster

Object = dict[str, Any]


class Controllers:
    """Controllers of an in-memory cluster. ``ready_since`` returns when a pod became ready, or None if it is not."""

    def __init__(self, cluster: MemoryCluster, ready_since: Callable[[str], float | None]) -> None:
        self._cluster = cluster
        self._ready_since = ready_since
        self._numbers = itertools.count()
        #: Deployment -> lowest number of ready pods during its rollout.
        self.fewest_ready: dict[str, int] = {}

    def step(self) -> None:
        for (kind, _), each in list(self._cluster.objects.items()):
            if kind == "Deployment":
                self._deployment(each)
            elif kind == "Job":
                self._job(each)

    def is_rolled_out(self, name: str) -> bool:
        """True if all pods of a Deployment have its present template and have been ready for long enough."""
        found = self._cluster.objects["Deployment", name]
        pods = self._pods(found["spec"]["selector"]["matchLabels"])
        return len(pods) == found["spec"]["replicas"] and all(
            self._is_of(each, found) and self._is_available(each, found) for each in pods
        )

    def _deployment(self, found: Object) -> None:
        spec = found["spec"]
        pods = [each for each in self._pods(spec["selector"]["matchLabels"]) if not _ends(each)]
        new = [each for each in pods if self._is_of(each, found)]
        available = [each for each in pods if self._is_available(each, found)]
        name = found["metadata"]["name"]
        if name in self.fewest_ready:
            self.fewest_ready[name] = min(self.fewest_ready[name], len(available))
        surge = spec["strategy"]["rollingUpdate"]["maxSurge"]
        if len(new) < spec["replicas"] and len(pods) < spec["replicas"] + surge:
            self._create(found)
            return
        if len(new) == len(pods) > spec["replicas"]:
            self._end(min(reversed(new), key=lambda pod: (self._is_available(pod, found), _deletion_cost(pod))))
            return
        old = [each for each in pods if each not in new]
        if old and len(available) > spec["replicas"] - spec["strategy"]["rollingUpdate"]["maxUnavailable"]:
            self._end(old[0])

    def _job(self, found: Object) -> None:
        spec = found["spec"]
        if found.get("status", {}).get("conditions"):
            return
        # The pods of a suspended Job end; resuming the Job creates new ones.
        parallelism = 0 if spec.get("suspend") else spec["parallelism"]
        pods = self._pods(spec["template"]["metadata"]["labels"])
        phases = [each.get("status", {}).get("phase") for each in pods]
        active = [each for each, phase in zip(pods, phases, strict=True) if phase not in {"Succeeded", "Failed"}]
        if "Succeeded" in phases:
            if not active:
                self._condition(found, "Complete")
            return
        for each in active[parallelism:]:
            self._end(each)
        for _ in range(parallelism - len(active)):
            self._create(found)

    def _condition(self, found: Object, kind: str) -> None:
        changes = {"status": {"conditions": [{"type": kind, "status": "True"}]}}
        self._cluster.patch(found["kind"], found["metadata"]["name"], changes)

    def _create(self, found: Object) -> None:
        template = found["spec"]["template"]
        name = f"{found['metadata']['name']}-{next(self._numbers)}"
        metadata = template["metadata"] | {"name": name, "annotations": {"template": json.dumps(template)}}
        self._cluster.apply([{"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}])

    def _end(self, pod: Object) -> None:
        if not _ends(pod):
            self._cluster.patch("Pod", pod["metadata"]["name"], {"metadata": {"deletionTimestamp": "now"}})

    def _pods(self, labels: dict[str, str]) -> list[Object]:
        return self._cluster.list("Pod", labels)

    def _is_of(self, pod: Object, found: Object) -> bool:
        return bool(pod["metadata"]["annotations"]["template"] == json.dumps(found["spec"]["template"]))

    def _is_available(self, pod: Object, found: Object) -> bool:
        since = self._ready_since(pod["metadata"]["name"])
        return since is not None and time.monotonic() - since >= found["spec"]["minReadySeconds"]


def _deletion_cost(pod: Object) -> int:
    return int(pod["metadata"]["annotations"].get("controller.kubernetes.io/pod-deletion-cost", "0"))


class Kueue:
    """Twin of Kueue: suspends every Job of a queue until the queue has room, even if another client resumes the Job."""

    def __init__(self, cluster: MemoryCluster, room: int) -> None:
        self._cluster = cluster
        self._room = room
        #: Name of an admitted Job -> number of its pods. A Job must be admitted again to change this number.
        self._admitted: dict[str, int] = {}
        #: Jobs that were resumed without being admitted, and were stopped.
        self.stopped: list[str] = []

    def step(self) -> None:
        for each in self._cluster.list("Job", {}):
            name, spec = each["metadata"]["name"], each["spec"]
            if QUEUE not in each["metadata"]["labels"]:
                continue
            if self._admitted.get(name) != spec["parallelism"]:
                self._admitted.pop(name, None)
                if not spec.get("suspend"):
                    self.stopped.append(name)
                if sum(self._admitted.values()) + spec["parallelism"] <= self._room:
                    self._admitted[name] = spec["parallelism"]
            self._cluster.patch("Job", name, {"spec": {"suspend": name not in self._admitted}})

    def make_room(self, room: int) -> None:
        """Change the queue's capacity, and stop Jobs that no longer fit."""
        self._room = room
        self._admitted = {name: pods for name, pods in self._admitted.items() if pods <= room}


def _ends(pod: Object) -> bool:
    return "deletionTimestamp" in pod["metadata"]
