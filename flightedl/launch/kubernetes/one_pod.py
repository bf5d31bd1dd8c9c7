"""A whole job in one pod: ``flightedl run``, with its own etcd and all processes beside each other.

For jobs that fit on one machine: processes reach each other by loopback and its memory, nothing needs certificates or
network policies, and what dies inside is started again inside. The pod itself is replaced by the Job: the next one goes
on from the newest checkpoint.
"""

from __future__ import annotations

from flightedl.errors import EXIT_JOB_FAILED, EXIT_USAGE
from flightedl.launch.kubernetes.objects import account, config_map
from flightedl.launch.kubernetes.pods import Object, common_variables, container, metadata, pod
from flightedl.launch.kubernetes.values import CODE, WORK, ClusterJob

COMPONENT = "run"


def render(job: ClusterJob) -> list[Object]:
    """The Job of one pod, and what it needs."""
    arguments = ["run", f"--job={job.job}", f"--trainers={job.trainers}", f"--pservers={job.pservers}"]
    arguments.append(f"--output={WORK}/output")
    if job.checkpoint:
        # The pod before may have ended before its first checkpoint.
        arguments += [f"--checkpoint={job.checkpoint}", "--resume=auto"]
    arguments += [job.target, *(["--", *job.arguments] if job.arguments else [])]
    more: Object = {"envFrom": [{"secretRef": {"name": job.secret}}]} if job.secret else {}
    variables = [*common_variables(), *({"name": name, "value": value} for name, value in job.variables.items())]
    whole = container(job, COMPONENT, ["flightedl"], arguments, variables, job.trainer_resources, more)
    # The default is 64 MiB, which is little for what processes on one machine share.
    whole["volumeMounts"].append({"name": "shared-memory", "mountPath": "/dev/shm"})  # noqa: S108 - of the pod
    volumes: list[Object] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    found = [account(job)]
    if job.code:
        whole["volumeMounts"].append({"name": "code", "mountPath": CODE, "readOnly": True})
        volumes.append({"name": "code", "configMap": {"name": job.name("code")}})
        found.append(config_map(job, job.name("code"), job.code))
    codes = {"containerName": COMPONENT, "operator": "In", "values": [EXIT_USAGE, EXIT_JOB_FAILED]}
    rules: list[Object] = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": codes},
    ]
    spec = {
        "backoffLimit": 6,
        "ttlSecondsAfterFinished": job.keep_s,
        "podFailurePolicy": {"rules": rules},
        "template": pod(
            job,
            COMPONENT,
            [whole],
            {"restartPolicy": "Never", "terminationGracePeriodSeconds": 30},
            volumes=volumes,
        ),
    }
    owner: Object = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(job, job.job, COMPONENT),
        "spec": spec,
    }
    return [owner, *found]
