"""A complete job in one pod: ``flightedl run`` with its own etcd, and all processes on one machine.

For jobs that fit on one machine. Their processes communicate over loopback and shared memory, need neither certificates
nor network policies, and are restarted inside the pod. If the pod fails, the Job replaces it, and the new pod continues
from the newest checkpoint.
"""

from __future__ import annotations

from flightedl.errors import EXIT_INCOMPLETE, EXIT_JOB_FAILED, EXIT_USAGE
from flightedl.launch.kubernetes.pods import (
    Object,
    account,
    code_of,
    common_variables,
    config_map,
    failure_policy,
    make,
    pod,
    variables,
)
from flightedl.launch.kubernetes.values import WORK, ClusterJob

COMPONENT = "run"


def render(job: ClusterJob) -> list[Object]:
    """Return the Job with its single pod, and the objects it needs."""
    arguments = ["run", f"--job={job.job}", f"--trainers={job.trainers}", f"--pservers={job.pservers}"]
    arguments.append(f"--output={WORK}/output")
    if job.checkpoint:
        # An earlier pod may have ended before its first checkpoint.
        arguments += [f"--checkpoint={job.checkpoint}", "--resume=auto"]
    arguments += [job.target, *(["--", *job.arguments] if job.arguments else [])]
    mounts, volumes = code_of(job)
    template = pod(
        job,
        COMPONENT,
        ["flightedl"],
        arguments,
        [*common_variables(), *variables(job.variables)],
        job.trainer_resources,
        container={"envFrom": [{"secretRef": {"name": job.secret}}]} if job.secret else {},
        spec={"restartPolicy": "Never", "terminationGracePeriodSeconds": 30},
        # The default of 64 MiB is too small for processes that communicate over shared memory.
        mounts=[{"name": "shared-memory", "mountPath": "/dev/shm"}, *mounts],  # noqa: S108 - of the pod
        volumes=[{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}, *volumes],
    )
    spec = {
        "backoffLimit": 6,
        "ttlSecondsAfterFinished": job.keep_s,
        "podFailurePolicy": failure_policy(COMPONENT, ("FailJob", (EXIT_USAGE, EXIT_JOB_FAILED, EXIT_INCOMPLETE))),
        "template": template,
    }
    code = [config_map(job, job.name("code"), job.code)] if job.code else []
    return [make(job, "Job", job.job, COMPONENT, spec=spec), account(job, job.job), *code]
