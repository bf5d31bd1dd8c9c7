"""Submitting, scaling and cancelling a job: with the in-memory cluster, and with recorded answers of Kubernetes."""

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
from flightedl.launch.kubernetes.views import labels_of, obstacles, outcome_of, view_of, waits_for
from flightedl.launch.kubernetes.watching import status_of, wait
from flightedl.messages.base import encode
from flightedl.messages.status import StatusReply, TaskCounts
from flightedl.ports import Clock, Cluster
from tests.support.clock import FakeClock
from tests.support.memory_cluster import MemoryCluster

from ...adapters.recorded_kubectl import IS_RECORDING, recorded
from ...deploy.controllers import Controllers, Kueue

JOB = ClusterJob(job="demo", image="demo:1", target="train.py", tls=False, insecure=True, keep_s=5)


@pytest.fixture
def fake_clock() -> FakeClock:
    return FakeClock(jumps=True)


@pytest.fixture
def cluster(fake_clock: FakeClock) -> MemoryCluster:
    return MemoryCluster(fake_clock, collection_s=4.0)


def ended(kind: str, **more: str) -> dict[str, Any]:
    return {"status": {"conditions": [{"type": kind, "status": "True", **more}]}}


def pod(name: str, component: str, **status: Any) -> dict[str, Any]:
    labels = labels_of("demo", component)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "status": status}


class Failing(MemoryCluster):
    """Cluster of which some calls fail; ``errors`` lists them in order by method."""

    def __init__(self, clock: FakeClock, **errors: list[BaseException | None]) -> None:
        super().__init__(clock, collection_s=4.0)
        self._errors = errors

    def _fail(self, method: str) -> None:
        if (errors := self._errors.get(method)) and (error := errors.pop(0)) is not None:
            raise error

    def apply(self, objects: Any) -> list[dict[str, Any]]:
        self._fail("apply")
        return super().apply(objects)

    def patch(self, kind: str, name: str, changes: Any) -> dict[str, Any]:
        self._fail("patch")
        return super().patch(kind, name, changes)

    def delete(self, kind: str, name: str) -> None:
        self._fail("delete")
        super().delete(kind, name)


READY = [{"type": "Ready", "status": "True"}]


def test_all_objects_are_created_with_the_running_trainers_job_as_owner(
    cluster: MemoryCluster, fake_clock: FakeClock
) -> None:
    submit(cluster, render(JOB), fake_clock)
    owner = cluster.objects.pop(("Job", "demo-trainer"))
    assert owner["spec"]["suspend"] is False
    assert len(cluster.objects) == len(render(JOB)) - 1
    for each in cluster.objects.values():
        assert [reference["uid"] for reference in each["metadata"]["ownerReferences"]] == [owner["metadata"]["uid"]]


def test_an_ended_job_is_replaced_and_a_running_one_is_not(cluster: MemoryCluster, fake_clock: FakeClock) -> None:
    submit(cluster, render(JOB), fake_clock)
    with pytest.raises(UsageError, match="exists already"):
        submit(cluster, render(JOB), fake_clock)
    before = cluster.patch("Job", "demo-trainer", ended("Complete"))
    submit(cluster, render(replace(JOB, trainers=5)), fake_clock)
    now = cluster.get("Job", "demo-trainer")
    assert now is not None
    assert now["metadata"]["uid"] != before["metadata"]["uid"]
    assert now["spec"]["parallelism"] == 5


REFUSED = UsageError("an object is wrong")


@pytest.mark.parametrize(
    ("errors", "kind"),
    [
        ({"apply": [None, REFUSED]}, UsageError),
        ({"apply": [None, KeyboardInterrupt()]}, KeyboardInterrupt),
        ({"patch": [UnavailableError("no answer")]}, UnavailableError),
    ],
    ids=["refused", "interrupted", "no answer"],
)
def test_a_submission_that_fails_leaves_nothing(
    fake_clock: FakeClock, errors: dict[str, list[BaseException | None]], kind: type[BaseException]
) -> None:
    failing = Failing(fake_clock, **errors)
    with pytest.raises(kind):
        submit(failing, render(JOB), fake_clock)
    fake_clock.sleep(5.0)
    assert failing.list("Job,Secret,ConfigMap,Deployment", {}) == []


def test_a_failed_cleanup_does_not_hide_why_a_submission_failed(fake_clock: FakeClock) -> None:
    failing = Failing(fake_clock, apply=[None, REFUSED], delete=[UnavailableError("no answer")])
    with pytest.raises(UsageError, match="an object is wrong"):
        submit(failing, render(JOB), fake_clock)
    left = failing.get("Job", "demo-trainer")
    assert left is not None
    assert left["spec"]["suspend"], "the job could not be deleted"
    submit(failing, render(replace(JOB, trainers=7)), fake_clock)
    assert find(failing, "demo").wanted == 7, "the next submission finds it incomplete and replaces it"


def test_an_overtaken_submission_does_not_touch_the_other_job(fake_clock: FakeClock) -> None:
    class Slow(MemoryCluster):
        """Cluster in which another submission replaces the job before the second call."""

        calls = 0

        def apply(self, objects: Any) -> list[dict[str, Any]]:
            self.calls += 1
            if self.calls == 2:
                submit(self, render(replace(JOB, trainers=7)), fake_clock)
            return super().apply(objects)

    slow = Slow(fake_clock, collection_s=4.0)
    with pytest.raises(UsageError, match="another UID"):
        submit(slow, render(JOB), fake_clock)
    assert (find(slow, "demo").wanted, find(slow, "demo").state) == (7, "starting")


def test_cancelling_a_job_deletes_nothing_of_its_successor(cluster: MemoryCluster, fake_clock: FakeClock) -> None:
    job = replace(JOB, tls=True, insecure=False, scaling=Scaling())
    objects = [*render(job), *make_secrets(job)]
    submit(cluster, objects, fake_clock)
    cluster.delete("Job", "demo-trainer")  # Deleted by hand, without waiting.
    submit(cluster, objects, fake_clock)
    fake_clock.sleep(60.0)
    assert len(cluster.list("Job,Secret,Deployment,ConfigMap,Role", labels_of("demo"))) == 1 + 4 + 3 + 1 + 1
    cancel(cluster, "demo", fake_clock, at_once=True)
    assert cluster.objects == {}, "cancelling waits until everything is gone"


def test_objects_created_by_hand_are_not_replaced_but_may_be_cancelled(
    cluster: MemoryCluster, fake_clock: FakeClock
) -> None:
    cluster.apply(render(JOB)[1:])
    with pytest.raises(UsageError, match=r"not submitted \(ConfigMap demo, .*flightedl cancel demo"):
        submit(cluster, render(JOB), fake_clock)
    cancel(cluster, "demo", fake_clock)
    assert cluster.objects == {}
    with pytest.raises(NotFoundError, match="no job demo"):
        cancel(cluster, "demo", fake_clock)


def test_trainers_scale_to_zero_and_back_until_the_job_has_ended(cluster: MemoryCluster, fake_clock: FakeClock) -> None:
    submit(cluster, render(JOB), fake_clock)
    assert scale(cluster, "demo", 0).state == "paused"
    assert scale(cluster, "demo", 8).wanted == 8
    cluster.patch("Job", "demo-trainer", ended("Complete"))
    with pytest.raises(UsageError, match="has ended"):
        scale(cluster, "demo", 3)
    with pytest.raises(NotFoundError, match="no job other"):
        scale(cluster, "other", 3)


class Queued(MemoryCluster):
    """Cluster with a twin of Kueue that acts after every change."""

    def __init__(self, clock: FakeClock, room: int) -> None:
        super().__init__(clock, collection_s=4.0)
        self.kueue = Kueue(self, room)
        self.controllers = Controllers(self, lambda _: None)
        self._is_acting = False
        #: Kinds of objects that existed when trainers were first allowed to run.
        self.there: set[str] = set()

    def apply(self, objects: Any) -> list[dict[str, Any]]:
        made = super().apply(objects)
        self.act()
        return made

    def patch(self, kind: str, name: str, changes: Any) -> dict[str, Any]:
        changed = super().patch(kind, name, changes)
        self.act()
        return changed

    def act(self) -> None:
        if not self._is_acting:
            self._is_acting = True
            self.kueue.step()
            self._is_acting = False
        job = self.objects.get(("Job", "demo-trainer"))
        if job is not None and not job["spec"]["suspend"] and not self.there:
            self.there = {kind for kind, _ in self.objects}

    def pods(self) -> int:
        """Number of running trainers after the controllers have acted and stopped pods have ended."""
        self.controllers.step()
        pods = self.list("Pod", labels_of("demo"))
        going = [each for each in pods if "deletionTimestamp" in each["metadata"]]
        for each in going:
            self.delete("Pod", each["metadata"]["name"])
        return len(pods) - len(going)


def test_a_queue_decides_when_trainers_run(fake_clock: FakeClock) -> None:
    queued = Queued(fake_clock, room=0)
    job = render(replace(JOB, queue="team", trainers=2))[:4]
    submit(queued, job, fake_clock)
    assert (find(queued, "demo").state, queued.pods()) == ("queued", 0)
    assert queued.kueue.stopped == [], "only the queue lets trainers run"
    for room, state, pods in ((2, "starting", 2), (0, "queued", 0), (9, "starting", 2)):
        queued.kueue.make_room(room)
        queued.act()
        assert (find(queued, "demo").state, queued.pods()) == (state, pods)
    cancel(queued, "demo", fake_clock, at_once=True)
    with pytest.raises(UsageError, match="a fixed number of trainers"):
        replace(JOB, queue="team", scaling=Scaling())


def test_a_queue_with_room_admits_trainers_once_everything_else_exists(fake_clock: FakeClock) -> None:
    queued = Queued(fake_clock, room=2)
    submit(queued, render(replace(JOB, queue="team", trainers=2)), fake_clock)
    assert queued.there >= {"ServiceAccount", "ConfigMap", "Deployment", "StatefulSet"}
    assert queued.kueue.stopped == []


def test_cancelling_waits_for_trainers_then_for_pservers(cluster: MemoryCluster, fake_clock: FakeClock) -> None:
    submit(cluster, render(JOB), fake_clock)
    cluster.apply([pod("demo-trainer-a", "trainer", phase="Running")])
    with pytest.raises(UnavailableError, match="for Pod demo-trainer-a to end"):
        cancel(cluster, "demo", fake_clock)
    assert ("Deployment", "demo-pserver") in cluster.objects, (
        "trainers need its values until they have returned their tasks"
    )
    cluster.apply([pod("demo-trainer-a", "trainer", phase="Succeeded"), pod("p", "pserver", phase="Running")])
    with pytest.raises(UnavailableError, match="for Pod p to end"):
        cancel(cluster, "demo", fake_clock)
    assert ("Deployment", "demo-master") in cluster.objects, "it completes the last checkpoint"
    cluster.delete("Pod", "p")
    cancel(cluster, "demo", fake_clock)
    assert cluster.objects == {}


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ({}, "starting"),
        ({"active": 2}, "training"),
        (ended("Complete")["status"], "done"),
        (ended("Failed", reason="BackoffLimitExceeded")["status"], "failed"),
        # Pods may still be terminating.
        (ended("SuccessCriteriaMet")["status"], "starting"),
    ],
)
def test_the_state_of_a_job_is_derived_from_its_objects(status: dict[str, Any], state: str) -> None:
    assert view_of(render(JOB)[0] | {"status": status}).state == state


def crashed(code: int) -> dict[str, Any]:
    state = {"name": "trainer", "state": {"terminated": {"exitCode": code}}}
    return pod("a", "trainer", phase="Failed", containerStatuses=[state])


@pytest.mark.parametrize(("codes", "exit_code"), [([1, 2, 143], 2), ([3], 3), ([1, 1], 1), ([], 1)])
def test_a_failed_job_ends_with_the_decisive_exit_code(codes: list[int], exit_code: int) -> None:
    view = view_of(render(JOB)[0] | ended("Failed", reason="PodFailurePolicy", message="exit code"))
    outcome = outcome_of(view, [crashed(code) for code in codes])
    assert outcome is not None
    assert (outcome.exit_code, outcome.reason) == (exit_code, "PodFailurePolicy: exit code")


def test_the_reason_why_a_pod_waits_is_shown() -> None:
    waiting = {"name": "trainer", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}
    assert waits_for(pod("a", "trainer", containerStatuses=[waiting])) == "ImagePullBackOff: no such image"
    creating = {"name": "trainer", "state": {"waiting": {"reason": "ContainerCreating"}}}
    assert waits_for(pod("a", "trainer", containerStatuses=[creating])) == ""
    unscheduled = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}
    assert waits_for(pod("a", "trainer", conditions=[unscheduled])) == "0/3 nodes are available"


def event(kind: str, name: str, reason: str, message: str) -> dict[str, Any]:
    details = {"type": "Warning", "reason": reason, "message": message}
    return {"kind": "Event", "involvedObject": {"kind": kind, "name": name}, **details}


def test_the_reason_why_any_pod_cannot_start_is_shown() -> None:
    crash = {
        "name": "master",
        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}},
        "lastState": {"terminated": {"exitCode": 2, "message": "starting\nflightedl: no such bucket\n"}},
    }
    pods = [
        pod("demo-etcd-0", "etcd", phase="Pending"),
        pod("demo-master-a", "master", phase="Running", containerStatuses=[crash]),
        pod("demo-trainer-a", "trainer", phase="Running"),
    ]
    events = [
        event("Pod", "demo-etcd-0", "FailedMount", 'secret "demo-etcd" not found'),
        event("Pod", "demo-trainer-a", "FailedScheduling", "is over: it runs"),
        event("ReplicaSet", "demo-pserver-5d", "FailedCreate", "exceeded quota"),
        event("Pod", "other-etcd-0", "FailedMount", "of another job"),
    ]
    view = view_of(render(JOB)[0])
    assert obstacles(view_of(render(replace(JOB, queue="q"))[0] | {"spec": {"suspend": True}}), [], []) == [
        "trainer cannot start: the queue has not admitted the trainers yet"
    ]
    assert obstacles(view, pods, events) == [
        'etcd cannot start: FailedMount: secret "demo-etcd" not found',
        "master cannot start: CrashLoopBackOff: flightedl: no such bucket",
        "pserver cannot start: FailedCreate: exceeded quota",
    ]


DONE = StatusReply(job="demo", state="done", epoch=1, epochs=1, tasks=TaskCounts(done=4, total=4))


@pytest.mark.parametrize(
    ("status", "exit_code"),
    [
        (DONE, 0),
        (StatusReply(job="demo", state="training", epochs=1, tasks=TaskCounts(todo=3, done=1, total=4)), 2),
        # The master cannot be reached, so the exit codes of trainers decide.
        (None, 0),
    ],
)
def test_the_master_decides_how_a_job_ended(
    cluster: MemoryCluster, fake_clock: FakeClock, status: StatusReply | None, exit_code: int
) -> None:
    submit(cluster, render(JOB), fake_clock)
    cluster.apply([pod("not-ready", "master"), pod("ready", "master", conditions=READY)])
    if status is not None:
        cluster.answers["ready"] = encode(status).decode()
    assert status_of(cluster, "demo") == status
    shown: list[str] = []

    def progress(view: Any, reported: StatusReply | None, _obstacles: Any) -> None:
        shown.append(view.state)
        assert reported == status
        cluster.patch("Job", "demo-trainer", ended("Complete"))

    outcome, newest = wait(cluster, "demo", fake_clock, progress, keeps_checkpoints=False)
    assert (outcome.exit_code, newest, shown) == (exit_code, status, ["starting"])


def test_events_are_read_occasionally_while_a_pod_cannot_start(cluster: MemoryCluster, fake_clock: FakeClock) -> None:
    submit(cluster, render(JOB), fake_clock)
    cluster.apply([pod("demo-etcd-0", "etcd", phase="Pending")])
    reasons: list[str] = []

    def progress(_view: Any, _said: StatusReply | None, obstacles: Any) -> None:
        reasons.extend(obstacles)
        if fake_clock.now() - started_at < 1:
            mount = event("Pod", "demo-etcd-0", "FailedMount", "no secret")
            cluster.apply([mount | {"metadata": {"name": "e"}}])
        if obstacles:
            cluster.patch("Job", "demo-trainer", ended("Complete"))

    started_at = fake_clock.now()
    wait(cluster, "demo", fake_clock, progress, keeps_checkpoints=False)
    assert reasons == ["etcd cannot start: FailedMount: no secret"]
    assert fake_clock.now() - started_at == pytest.approx(12.0), (
        "events may be many, so they are read only after ten seconds"
    )


def test_waiting_ends_when_the_job_is_deleted(cluster: MemoryCluster, fake_clock: FakeClock) -> None:
    outcome, _ = wait(cluster, "demo", fake_clock, lambda *_: None, keeps_checkpoints=False)
    assert outcome.exit_code == 1
    assert "no job demo" in outcome.reason


def test_secrets_exist_for_the_roles_that_run() -> None:
    job = replace(JOB, tls=True, insecure=False, scaling=Scaling())
    made = make_secrets(job)
    assert [each["metadata"]["name"] for each in made] == secret_names(job)
    assert secret_names(job) == ["demo-server", "demo-trainer", "demo-reader", "demo-etcd"]
    assert all(each["data"].keys() == {"ca.pem", "cert.pem", "key.pem"} for each in made)
    assert make_secrets(JOB) == []


def test_a_real_kubernetes_runs_and_scales_a_job_and_deletes_its_objects() -> None:
    """The recorded cluster ran all controllers of Kubernetes."""
    clock = SystemClock() if IS_RECORDING else FakeClock(jumps=True)
    with recorded("job") as real:
        submit(real, render(JOB), clock)
        assert find(real, "demo").wanted == JOB.trainers
        until(real, clock, "trainer", JOB.trainers)
        until(real, clock, "pserver", JOB.pservers + JOB.spares)
        with pytest.raises(UsageError, match="exists already"):
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
