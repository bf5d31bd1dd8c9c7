"""The loop around the scaling rule: its observations of cluster and master, and its actions."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

from msgspec.structs import replace as replace_struct

from flightedl.domain.scaling.marginal import MarginalScaling, ScalingLimits, Seen
from flightedl.domain.scaling.pservers import PserverScaling
from flightedl.errors import UnavailableError
from flightedl.launch.kubernetes.objects import render
from flightedl.launch.kubernetes.scaling import PserverLoop, look, run
from flightedl.launch.kubernetes.submitting import submit
from flightedl.launch.kubernetes.values import ClusterJob
from flightedl.launch.kubernetes.views import labels_of
from flightedl.messages.hosts import HostFacts
from flightedl.messages.scaling import ScaleReply
from flightedl.messages.status import ServerStatus, StatusReply, TaskCounts, TrainerStatus
from tests.support.clock import FakeClock
from tests.support.memory_cluster import MemoryCluster

JOB = ClusterJob(job="demo", image="demo:1", target="train.py", tls=False, insecure=True)
STATUS = StatusReply(job="demo", state="training", epochs=2, tasks=TaskCounts(todo=90, pending=5, total=100))


def started() -> MemoryCluster:
    cluster = MemoryCluster()
    submit(cluster, render(JOB), FakeClock())
    return cluster


def status(trainers: int, records: int) -> StatusReply:
    there = [TrainerStatus(trainer=str(index), generation=index) for index in range(trainers)]
    return StatusReply(job="demo", state="training", epochs=2, tasks=STATUS.tasks, trainers=there, records=records)


def pod(name: str, phase: str, condition: str) -> dict[str, Any]:
    conditions = [{"type": condition, "status": "True"}]
    metadata = {"name": name, "labels": labels_of("demo", "trainer")}
    return {"kind": "Pod", "metadata": metadata, "status": {"phase": phase, "conditions": conditions}}


def test_the_rule_sees_the_cluster_and_the_master() -> None:
    cluster = started()
    cluster.apply([pod("a", "Running", "DisruptionTarget"), pod("b", "Running", "Ready")])
    cluster.apply([pod("c", "Failed", "DisruptionTarget")])
    expected = Seen(records=7, running=2, wanted=2, leaving=1, tasks_left=None, is_training=True)
    assert look(cluster, "demo", lambda: status(2, 7)) == (expected, status(2, 7))
    cluster.patch("Job", "demo-trainer", {"status": {"conditions": [{"type": "Complete", "status": "True"}]}})
    assert look(cluster, "demo", lambda: status(2, 7)) is None


def test_the_rule_sees_the_remaining_tasks_of_the_last_epoch() -> None:
    last = StatusReply(job="demo", state="training", epoch=1, epochs=2, tasks=STATUS.tasks)
    found = look(started(), "demo", lambda: last)
    assert found is not None
    assert found[0].tasks_left == 95


class Looks(threading.Event):
    """Wait that advances the clock, and ends the loop after a number of rounds."""

    def __init__(self, clock: FakeClock, count: int) -> None:
        super().__init__()
        self._clock, self._left = clock, count

    def wait(self, timeout: float | None = None) -> bool:
        self._clock.advance(timeout or 0.0)
        self._left -= 1
        return self._left < 0


def test_the_loop_adds_worthwhile_trainers_and_says_why_once() -> None:
    cluster, clock = started(), FakeClock()
    begun = clock.now()
    decisions: list[str] = []

    def read() -> StatusReply:
        now = clock.now() - begun
        wanted = cluster.objects["Job", "demo-trainer"]["spec"]["parallelism"]
        if now == 50:
            raise UnavailableError("the master does not answer")
        return status(wanted, int(now * 100 * wanted))

    scaling = MarginalScaling(ScalingLimits(maximum=3))
    run(cluster, "demo", read, scaling, clock, Looks(clock, 40), decisions.append, 10.0)
    assert cluster.objects["Job", "demo-trainer"]["spec"]["parallelism"] == 3
    assert "the master does not answer" in decisions
    assert [line for line in decisions if "->" in line] == [
        "2 -> 3 trainers: 2 trainers process 200 records/s: trying more"
    ]
    assert len(decisions) == len(
        [line for index, line in enumerate(decisions) if index == 0 or line != decisions[index - 1]]
    )


def test_the_loop_ends_with_the_job() -> None:
    cluster, clock = started(), FakeClock()
    cluster.patch("Job", "demo-trainer", {"status": {"conditions": [{"type": "Complete", "status": "True"}]}})
    decisions: list[str] = []
    scaling = MarginalScaling(replace(ScalingLimits(), maximum=3))
    run(cluster, "demo", lambda: STATUS, scaling, clock, Looks(clock, 5), decisions.append, 10.0)
    assert decisions == ["job demo has ended"]


def test_the_loop_adds_pservers_that_limit_the_job() -> None:
    cluster, clock = started(), FakeClock()
    begun = clock.now()
    decisions: list[str] = []
    resized: list[int] = []

    def read() -> StatusReply:
        now = clock.now() - begun
        facts = HostFacts(cores=8, busy_cores=1.5)
        count = resized[-1] if resized else 2
        servers = [
            ServerStatus(
                index=index, address="h:1", generation=1, state="serving", facts=facts, pushes=10, received_bytes=10**7
            )
            for index in range(count)
        ]
        # For the first 100 s, trainers compute.
        profile = {"script": min(now, 100.0), "push": max(now - 100.0, 0.0), "pull": 0.0, "wait": 0.0, "data": 0.0}
        return replace_struct(status(2, 7), profile=profile, pservers=servers, pservers_desired=count)

    def grow(count: int) -> ScaleReply:
        resized.append(count)
        return ScaleReply(wanted=count, pservers=count)

    loop = PserverLoop(PserverScaling(5), grow)
    scaling = MarginalScaling(ScalingLimits(minimum=2, maximum=2))
    run(cluster, "demo", read, scaling, clock, Looks(clock, 16), decisions.append, 10.0)
    assert not resized, "the autoscaler was not told to change the pservers"
    begun = clock.now()
    run(cluster, "demo", read, scaling, clock, Looks(clock, 16), decisions.append, 10.0, loop)
    assert not resized
    run(cluster, "demo", read, scaling, clock, Looks(clock, 20), decisions.append, 10.0, loop)
    assert resized == [4, 5]
    text = "2 -> 4 pservers, because they limit the throughput: the job has 4 pservers"
    assert next(line for line in decisions if "pservers" in line) == text
