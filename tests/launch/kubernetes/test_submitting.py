"""A job is brought to a cluster, scaled and taken away: on the twin, and as a real Kubernetes answered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.errors import NotFoundError, UnavailableError, UsageError
from flightedl.launch.kubernetes.objects import render
from flightedl.launch.kubernetes.secrets import make_secrets, secret_names
from flightedl.launch.kubernetes.submitting import cancel, find, scale, submit
from flightedl.launch.kubernetes.values import ClusterJob, Scaling
from flightedl.launch.kubernetes.views import labels_of, outcome_of, view_of, waits_for
from flightedl.launch.kubernetes.watching import status_of, wait
from flightedl.messages.base import encode
from flightedl.messages.status import StatusReply, TaskCounts
from flightedl.ports import Clock, Cluster
from flightedl.testing.clock import FakeClock
from flightedl.testing.memory_cluster import MemoryCluster

from ...adapters.recorded_kubectl import IS_RECORDING, recorded

JOB = ClusterJob(job="demo", image="demo:1", target="train.py", tls=False, insecure=True, keep_s=5)


class PassingClock(FakeClock):
    """Time passes by sleeping."""

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)


@pytest.fixture
def fake_clock() -> FakeClock:
    return PassingClock()


@pytest.fixture
def cluster() -> MemoryCluster:
    return MemoryCluster()


def ended(kind: str, **more: str) -> dict[str, Any]:
    return {"status": {"conditions": [{"type": kind, "status": "True", **more}]}}


def pod(name: str, component: str, **status: Any) -> dict[str, Any]:
    labels = labels_of("demo", component)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "status": status}


READY = [{"type": "Ready", "status": "True"}]


def test_everything_is_there_and_owned_by_the_trainers_job_which_goes_on(
    cluster: MemoryCluster, fake_clock: FakeClock
) -> None:
    submit(cluster, render(JOB), fake_clock)
    owner = cluster.objects.pop(("Job", "demo-trainer"))
    assert owner["spec"]["suspend"] is False
    assert len(cluster.objects) == len(render(JOB)) - 1
    for each in cluster.objects.values():
        assert [reference["uid"] for reference in each["metadata"]["ownerReferences"]] == [owner["metadata"]["uid"]]


def test_a_job_that_runs_is_not_replaced_and_one_that_has_ended_is(
    cluster: MemoryCluster, fake_clock: FakeClock
) -> None:
    submit(cluster, render(JOB), fake_clock)
    with pytest.raises(UsageError, match="is there already"):
        submit(cluster, render(JOB), fake_clock)
    before = cluster.patch("Job", "demo-trainer", ended("Complete"))
    submit(cluster, render(replace(JOB, trainers=5)), fake_clock)
    now = cluster.get("Job", "demo-trainer")
    assert now is not None
    assert now["metadata"]["uid"] != before["metadata"]["uid"]
    assert now["spec"]["parallelism"] == 5


def test_a_submission_that_is_refused_leaves_nothing(cluster: MemoryCluster, fake_clock: FakeClock) -> None:
    class Refusing(MemoryCluster):
        def apply(self, objects: Any) -> list[dict[str, Any]]:
            if len(objects) > 1:
                raise UsageError("an object is wrong")
            return super().apply(objects)

    refusing = Refusing()
    with pytest.raises(UsageError):
        submit(refusing, render(JOB), fake_clock)
    assert refusing.objects == {}


def test_trainers_are_scaled_to_none_and_back_but_not_when_the_job_has_ended(
    cluster: MemoryCluster, fake_clock: FakeClock
) -> None:
    submit(cluster, render(JOB), fake_clock)
    assert scale(cluster, "demo", 0).state == "paused"
    assert scale(cluster, "demo", 8).wanted == 8
    cluster.patch("Job", "demo-trainer", ended("Complete"))
    with pytest.raises(UsageError, match="has ended"):
        scale(cluster, "demo", 3)
    with pytest.raises(NotFoundError, match="no job other"):
        scale(cluster, "other", 3)


def test_cancelling_waits_for_trainers_then_for_pservers(cluster: MemoryCluster, fake_clock: FakeClock) -> None:
    submit(cluster, render(JOB), fake_clock)
    cluster.apply([pod("demo-trainer-a", "trainer", phase="Running")])
    with pytest.raises(UnavailableError, match="for trainers to end"):
        cancel(cluster, "demo", fake_clock)
    assert ("Deployment", "demo-pserver") in cluster.objects, "its values are needed until trainers have handed back"
    cluster.apply([pod("demo-trainer-a", "trainer", phase="Succeeded"), pod("p", "pserver", phase="Running")])
    with pytest.raises(UnavailableError, match="for pservers to end"):
        cancel(cluster, "demo", fake_clock)
    assert ("Deployment", "demo-master") in cluster.objects, "it completes the last checkpoint"
    cluster.delete("Pod", "p")
    cancel(cluster, "demo", fake_clock)
    assert {kind for kind, _ in cluster.objects} == {"Pod"}


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ({}, "starting"),
        ({"active": 2}, "training"),
        (ended("Complete")["status"], "done"),
        (ended("Failed", reason="BackoffLimitExceeded")["status"], "failed"),
        # Pods may still be ending.
        (ended("SuccessCriteriaMet")["status"], "starting"),
    ],
)
def test_the_state_of_a_job(status: dict[str, Any], state: str) -> None:
    assert view_of(render(JOB)[0] | {"status": status}).state == state


def crashed(code: int) -> dict[str, Any]:
    state = {"name": "trainer", "state": {"terminated": {"exitCode": code}}}
    return pod("a", "trainer", phase="Failed", containerStatuses=[state])


@pytest.mark.parametrize(("codes", "exit_code"), [([1, 2, 143], 2), ([3], 3), ([1, 1], 1), ([], 1)])
def test_a_failed_job_ends_with_the_code_that_decided(codes: list[int], exit_code: int) -> None:
    view = view_of(render(JOB)[0] | ended("Failed", reason="PodFailurePolicy", message="exit code"))
    outcome = outcome_of(view, [crashed(code) for code in codes])
    assert outcome is not None
    assert (outcome.exit_code, outcome.reason) == (exit_code, "PodFailurePolicy: exit code")


def test_what_a_pod_waits_for_is_told() -> None:
    waiting = {"name": "trainer", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}
    assert waits_for(pod("a", "trainer", containerStatuses=[waiting])) == "ImagePullBackOff: no such image"
    creating = {"name": "trainer", "state": {"waiting": {"reason": "ContainerCreating"}}}
    assert waits_for(pod("a", "trainer", containerStatuses=[creating])) == ""
    unscheduled = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}
    assert waits_for(pod("a", "trainer", conditions=[unscheduled])) == "0/3 nodes are available"


DONE = StatusReply(job="demo", state="done", epoch=1, epochs=1, tasks=TaskCounts(done=4, total=4))


@pytest.mark.parametrize(
    ("status", "exit_code"),
    [
        (DONE, 0),
        (StatusReply(job="demo", state="training", epochs=1, tasks=TaskCounts(todo=3, done=1, total=4)), 2),
        # Nobody can be asked: the trainers' word counts.
        (None, 0),
    ],
)
def test_the_end_of_a_job_is_what_its_master_makes_of_it(
    cluster: MemoryCluster, fake_clock: FakeClock, status: StatusReply | None, exit_code: int
) -> None:
    submit(cluster, render(JOB), fake_clock)
    cluster.apply([pod("not-ready", "master"), pod("ready", "master", conditions=READY)])
    if status is not None:
        cluster.answers["ready"] = encode(status).decode()
    assert status_of(cluster, "demo") == status
    shown: list[str] = []

    def progress(view: Any, said: StatusReply | None, _waits: str) -> None:
        shown.append(view.state)
        assert said == status
        cluster.patch("Job", "demo-trainer", ended("Complete"))

    outcome, newest = wait(cluster, "demo", fake_clock, progress, keeps_checkpoints=False)
    assert (outcome.exit_code, newest, shown) == (exit_code, status, ["starting"])


def test_a_job_that_somebody_removes_ends_the_waiting(cluster: MemoryCluster, fake_clock: FakeClock) -> None:
    outcome, _ = wait(cluster, "demo", fake_clock, lambda *_: None, keeps_checkpoints=False)
    assert outcome.exit_code == 1
    assert "no job demo" in outcome.reason


def test_secrets_are_for_the_roles_that_run() -> None:
    job = replace(JOB, tls=True, insecure=False, scaling=Scaling())
    made = make_secrets(job)
    assert [each["metadata"]["name"] for each in made] == secret_names(job)
    assert secret_names(job) == ["demo-server", "demo-trainer", "demo-reader", "demo-etcd"]
    assert all(each["data"].keys() == {"ca.pem", "cert.pem", "key.pem"} for each in made)
    assert make_secrets(JOB) == []


def test_a_real_kubernetes_takes_it_scales_it_and_clears_away_what_it_owned() -> None:
    """As recorded, with the controllers of Kubernetes at work."""
    clock = SystemClock() if IS_RECORDING else PassingClock()
    with recorded("job") as real:
        submit(real, render(JOB), clock)
        assert find(real, "demo").wanted == JOB.trainers
        until(real, clock, "trainer", JOB.trainers)
        until(real, clock, "pserver", JOB.pservers + JOB.spares)
        with pytest.raises(UsageError, match="is there already"):
            submit(real, render(JOB), clock)
        scale(real, "demo", 0)
        until(real, clock, "trainer", 0)
        assert find(real, "demo").state == "paused"
        scale(real, "demo", 3)
        until(real, clock, "trainer", 3)
        cancel(real, "demo", clock, at_once=True)
        for role in ("trainer", "pserver", "master", "etcd"):
            until(real, clock, role, 0)
        left = {kind: real.list(kind, labels_of("demo")) for kind in ("ConfigMap", "Deployment", "Service")}
        assert left == {"ConfigMap": [], "Deployment": [], "Service": []}


def until(real: Cluster, clock: Clock, role: str, count: int) -> None:
    for _ in range(100):
        if len(real.list("Pod", labels_of("demo", role))) == count:
            return
        clock.sleep(0.3)
    pytest.fail(f"there are not {count} {role}s")
