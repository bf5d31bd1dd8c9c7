"""State of a job as the objects on the cluster show it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flightedl.errors import EXIT_FAILED, EXIT_INCOMPLETE, EXIT_JOB_FAILED, EXIT_USAGE
from flightedl.launch.supervisor import Outcome

Object = Mapping[str, Any]

INSTANCE = "app.kubernetes.io/instance"
_COMPONENT = "app.kubernetes.io/component"
#: Label of Jobs that Kueue suspends, and admits when their queue has room.
QUEUE = "kueue.x-k8s.io/queue-name"


def labels_of(job: str, component: str = "") -> dict[str, str]:
    """Return labels that select the objects of a job or component. An empty name selects all jobs."""
    found = {"app.kubernetes.io/name": "flightedl"}
    if job:
        found[INSTANCE] = job
    return found | ({_COMPONENT: component} if component else {})


@dataclass(frozen=True, slots=True)
class JobView:
    """State of one job, as its trainers' Job shows it."""

    job: str
    #: Name of the Job.
    name: str
    #: Number of requested trainers, and number of running trainers.
    wanted: int
    active: int
    #: Number of trainers' pods that have crashed.
    failed: int
    #: "Complete", or why the job failed; empty while it runs.
    ended: str = ""
    is_failed: bool = False
    created_at: str = ""
    #: True if the job waits until a queue admits it.
    is_queued: bool = False

    @property
    def is_finished(self) -> bool:
        """True if no trainer will run again."""
        return bool(self.ended)

    @property
    def state(self) -> str:
        if self.is_finished:
            return "failed" if self.is_failed else "done"
        if not self.wanted:
            return "queued" if self.is_queued else "paused"
        return "training" if self.active else "starting"


def view_of(found: Object) -> JobView:
    """Return the state of the job to which a Job of trainers belongs."""
    spec, status, metadata = found["spec"], found.get("status", {}), found["metadata"]
    ended, is_failed = "", False
    for condition in status.get("conditions", []):
        # Only these conditions are final. While other conditions are set, pods may still be running.
        if condition["type"] in {"Complete", "Failed"} and condition["status"] == "True":
            is_failed = condition["type"] == "Failed"
            ended = f"{condition.get('reason', '')}: {condition.get('message', '')}" if is_failed else "Complete"
    return JobView(
        metadata["labels"][INSTANCE],
        metadata["name"],
        0 if spec.get("suspend") else spec.get("parallelism", 1),
        status.get("active", 0),
        status.get("failed", 0),
        ended,
        is_failed,
        metadata.get("creationTimestamp", ""),
        is_queued=bool(spec.get("suspend")) and QUEUE in metadata["labels"],
    )


def outcome_of(view: JobView, pods: Sequence[Object]) -> Outcome | None:
    """Return how a job ended, as shown by its Job and its trainers' pods. None if it has not ended."""
    if not view.is_finished:
        return None
    if not view.is_failed:
        return Outcome(0)
    codes = [code for pod in pods for code in exit_codes(pod)]
    final = {EXIT_USAGE, EXIT_JOB_FAILED, EXIT_INCOMPLETE}
    decisive = next((code for code in codes if code in final), EXIT_FAILED)
    return Outcome(decisive, view.ended)


def exit_codes(pod: Object) -> list[int]:
    """Return the exit codes of a trainer's pod that has ended."""
    return [
        status["state"]["terminated"]["exitCode"]
        for status in pod.get("status", {}).get("containerStatuses", [])
        if status["name"] == "trainer" and "terminated" in status.get("state", {})
    ]


def is_ready(pod: Object) -> bool:
    """True if a pod is ready and not being deleted."""
    conditions = pod.get("status", {}).get("conditions", [])
    is_good = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
    return is_good and "deletionTimestamp" not in pod["metadata"]


def has_output(pod: Object) -> bool:
    """True if the container of a pod has been started."""
    return pod.get("status", {}).get("phase") in {"Running", "Succeeded", "Failed"}


def component_of(pod: Object) -> str:
    """Return the component of a job to which a pod belongs."""
    return str(pod["metadata"].get("labels", {}).get(_COMPONENT, ""))


def obstacles(view: JobView, pods: Sequence[Object], events: Sequence[Object]) -> list[str]:
    """Return one message for each part of the job that cannot start, with the reason.

    Events may be outdated. An event is used only while its pod is pending, or while its controller has created no pod.
    """
    found = {component_of(pod): why for pod in pods if (why := waits_for(pod))}
    if view.is_queued:
        found["trainer"] = "the queue has not admitted the trainers yet"
    pending = {each["metadata"]["name"] for each in pods if each.get("status", {}).get("phase") == "Pending"}
    components = set(map(component_of, pods))
    for event in events:
        name = event["involvedObject"]["name"]
        component = name.removeprefix(f"{view.job}-").partition("-")[0]
        is_of_job = name.startswith(f"{view.job}-") and event.get("type") == "Warning"
        if is_of_job and (name in pending or component not in components):
            found.setdefault(component, f"{event.get('reason', '')}: {event.get('message', '')}")
    return [f"{component} cannot start: {why}" for component, why in sorted(found.items())]


def waits_for(pod: Object) -> str:
    """Return the reason why a pod is not running yet; empty if neither its machine nor the cluster reports any."""
    status = pod.get("status", {})
    for container in status.get("containerStatuses", []):
        waiting = container.get("state", {}).get("waiting")
        if waiting and waiting.get("reason") not in {None, "ContainerCreating", "PodInitializing"}:
            ended = container.get("lastState", {}).get("terminated", {})
            # The last line of the container's own output says more than the fact that it restarted.
            why = str(ended.get("message") or waiting.get("message", "")).strip().rpartition("\n")[2]
            return f"{waiting['reason']}: {why}".rstrip(": ")
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return str(condition.get("message") or condition.get("reason", ""))
    return ""


def is_being_evicted(pod: Object) -> bool:
    """True if the cluster is evicting the pod; False if the job itself is removing this trainer."""
    status = pod.get("status", {})
    marked = any(
        each["type"] == "DisruptionTarget" and each["status"] == "True" for each in status.get("conditions", [])
    )
    return marked and status.get("phase") not in {"Succeeded", "Failed"}
