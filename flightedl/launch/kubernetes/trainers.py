"""The trainers, as a Job without completions: as many pods as ``parallelism`` says, until one of them ends well.

A trainer ends well when all is trained, which then is true for all of them: the Job waits for the others and is
complete. ``parallelism`` may change at any time, down to 0 and up again. What the exit code of a trainer says about
going on (docs/operations.md) is the Job's pod failure policy:

* 2 and 3: starting again does not help; the Job fails.
* 75 and 143, and pods that the cluster took away: nothing is wrong; another pod, and it does not count.
* anything else is a crash, and counts against ``backoffLimit``.

The Job owns all other objects of the job, so that they go when it goes: ``ttlSecondsAfterFinished`` after its end, or
when somebody deletes it.
"""

from __future__ import annotations

from flightedl.errors import EXIT_JOB_FAILED, EXIT_START_AGAIN, EXIT_USAGE
from flightedl.launch.kubernetes.pods import (
    Object,
    common_variables,
    container,
    metadata,
    pod,
    settings_of,
    variable_of_pod,
)
from flightedl.launch.kubernetes.values import CODE, ClusterJob
from flightedl.launch.policy import EXIT_TERMINATED

#: A step that is under way may take some time.
_GRACE_S = 60

COMPONENT = "trainer"
#: Label of a Job that Kueue suspends, and admits when its queue has room.
QUEUE = "kueue.x-k8s.io/queue-name"


def trainers(job: ClusterJob) -> Object:
    """The Job."""
    certificates = job.name("trainer") if job.tls else ""
    environment = [variable_of_pod("FLIGHTEDL_PROCESS_NAME", "metadata.name"), *common_variables()]
    more: Object = {"envFrom": settings_of(job)}
    command = ["python", "-m", "flightedl.launch.trainer"]
    trainer = container(
        job,
        COMPONENT,
        command,
        [job.target, *job.arguments],
        environment,
        job.trainer_resources,
        more,
        certificates,
    )
    volumes = []
    if job.code:
        trainer["volumeMounts"].append({"name": "code", "mountPath": CODE, "readOnly": True})
        volumes.append({"name": "code", "configMap": {"name": job.name("code")}})
    template = pod(
        job,
        COMPONENT,
        [trainer],
        {"restartPolicy": "Never", "terminationGracePeriodSeconds": _GRACE_S},
        certificates,
        volumes,
    )
    described = metadata(job, job.name(COMPONENT), COMPONENT)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": described | {"labels": described["labels"] | ({QUEUE: job.queue} if job.queue else {})},
        "spec": {
            **({"activeDeadlineSeconds": job.deadline_s} if job.deadline_s else {}),
            "parallelism": job.trainers,
            "backoffLimit": job.backoff_limit,
            "ttlSecondsAfterFinished": job.keep_s,
            "podFailurePolicy": {"rules": _rules()},
            "template": template,
        },
    }


def _rules() -> list[Object]:
    def by_exit_code(action: str, *codes: int) -> Object:
        return {"action": action, "onExitCodes": {"containerName": COMPONENT, "operator": "In", "values": list(codes)}}

    return [
        # First: a pod that was taken away says so whatever its exit code is.
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        by_exit_code("Ignore", EXIT_START_AGAIN, EXIT_TERMINATED),
        by_exit_code("FailJob", EXIT_USAGE, EXIT_JOB_FAILED),
    ]
