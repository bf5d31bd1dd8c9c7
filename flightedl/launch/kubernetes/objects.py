"""All objects of a job, in the order in which they are applied.

Masters and pservers are Deployments. A pod claims an index in etcd, independently of its name, and each pod binds its
own address. A pod that receives SIGTERM drains: a pserver moves its blocks to the others, for at most ``leave_s``, or
requests a checkpoint and waits for it, but no longer than ``drain_s``. So no preStop hook is needed. A pserver is ready
once it has loaded its predecessor's checkpoint. A rollout replaces the next pod only after the new pod has been ready
for a while.

The trainers are a Job without completions: ``parallelism`` pods run until one of them succeeds. A trainer succeeds when
training on all data is complete, so the others will soon succeed too, and the Job waits for them. ``parallelism`` may
change at any time, even to 0 and back. The exit codes of trainers (docs/operations.md) decide what happens:

* 2 and 3: a restart would not help, so the Job fails.
* 75 and 143, and evicted pods: no error has occurred, so another pod starts, and no failure is counted.
* all other codes: the trainer crashed, which counts against ``backoffLimit``.

The ranks of a group share one trainer's pod. If one rank dies, torchrun restarts all ranks in the pod.

The Job owns all other objects, so the cluster deletes them together with it: ``ttlSecondsAfterFinished`` after it has
ended, or when a user deletes it.

The autoscaler is a Deployment of one pod. It may only read and change the trainers' Job, and list pods.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

from flightedl.errors import EXIT_INCOMPLETE, EXIT_JOB_FAILED, EXIT_START_AGAIN, EXIT_USAGE, UsageError
from flightedl.launch.kubernetes.etcd_members import etcd
from flightedl.launch.kubernetes.network import etcd_policy, policies
from flightedl.launch.kubernetes.pods import (
    Object,
    account,
    code_of,
    common_variables,
    config_map,
    deployment,
    disruption_budget,
    failure_policy,
    make,
    pod,
    ports,
    probe,
    settings_of,
    spread,
    variable_of_pod,
    variables,
)
from flightedl.launch.kubernetes.templates import with_templates
from flightedl.launch.kubernetes.values import (
    FLIGHT_PORT,
    HEALTH_PORT,
    METRICS_PORT,
    ClusterJob,
    Resources,
    Scaling,
)
from flightedl.launch.kubernetes.views import QUEUE, component_of
from flightedl.launch.policy import EXIT_TERMINATED
from flightedl.launch.trainer import is_script

#: Additional seconds that a server on a busy machine has to shut down after the drain.
_CLOSING_S = 15
#: Seconds that a trainer has to finish its current step.
_TRAINER_GRACE_S = 60
#: Maximum number of starts of a group in one pod. The master counts the starts that end at the same records.
_RESTARTS = 1000
_AUTOSCALER_RESOURCES = Resources("100m", "256Mi", "512Mi")


def render(job: ClusterJob) -> list[Object]:
    """Return all objects except Secrets. The first one is the trainers' Job, which owns the others."""
    found = [_trainers(job), account(job, job.job), config_map(job, job.job, job.settings())]
    if job.code:
        found.append(config_map(job, job.name("code"), job.code))
    found += policies(job)
    if job.own_etcd:
        found += [*etcd(job), etcd_policy(job)]
    # One master leads while the others are on standby. Spare pservers wait for a free index. Standby pservers are in
    # the same Deployment, because the pod of a pserver that dies becomes the standby of its successor.
    found += _servers(job, "master", job.masters)
    if job.pservers:
        more = ["--standby"] if job.standby_pservers else []
        found += _servers(job, "pserver", job.pservers + job.spares + job.standby_pservers, *more)
    if job.scaling is not None:
        found += _autoscaler(job, job.scaling)
    return with_templates(found, job.templates)


def owned(objects: Sequence[Object], owner: Object, uid: str) -> list[Object]:
    """Return the objects with an owner, so that the cluster deletes them together with the owner."""
    reference = {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": uid,
        "controller": False,
        "blockOwnerDeletion": False,
    }
    return [each | {"metadata": each["metadata"] | {"ownerReferences": [reference]}} for each in objects]


def require_common_place(checkpoint: str, objects: Sequence[Object]) -> None:
    """Raise an error if checkpoints at this path would not outlive the pods that write them.

    Raises:
        UsageError: a master or pserver has no volume at that path, or one that is deleted with its pod.
    """
    scheme, _, path = checkpoint.rpartition("://")
    if scheme not in {"", "file", "local", "memory"} or not checkpoint:
        return
    for each in objects:
        if each["kind"] == "Deployment" and component_of(each) in {"master", "pserver"}:
            spec = each["spec"]["template"]["spec"]
            lost = {volume["name"] for volume in spec["volumes"] if "emptyDir" in volume}
            kept = [
                mount["mountPath"]
                for mount in spec["containers"][0]["volumeMounts"]
                if mount["name"] not in lost and not mount.get("readOnly")
            ]
            if scheme == "memory" or not any(PurePosixPath(path).is_relative_to(mount) for mount in kept):
                raise UsageError(
                    f"checkpoints at {checkpoint} would be lost with each pod: name a store, such as s3://bucket/name, "
                    "or a path on a volume of all masters and pservers (--volume CLAIM:PATH)"
                )


def _trainers(job: ClusterJob) -> Object:
    mounts, volumes = code_of(job)
    template = pod(
        job,
        "trainer",
        *_program(job),
        [variable_of_pod("FLIGHTEDL_PROCESS_NAME", "metadata.name"), *common_variables()],
        job.trainer_resources,
        container={"envFrom": settings_of(job)},
        spec={"restartPolicy": "Never", "terminationGracePeriodSeconds": _TRAINER_GRACE_S},
        certificates="trainer",
        mounts=mounts,
        volumes=volumes,
    )
    ignored, failing = (EXIT_START_AGAIN, EXIT_TERMINATED), (EXIT_USAGE, EXIT_JOB_FAILED, EXIT_INCOMPLETE)
    spec = {
        **({"activeDeadlineSeconds": job.deadline_s} if job.deadline_s else {}),
        "parallelism": job.trainers,
        "backoffLimit": job.backoff_limit,
        "ttlSecondsAfterFinished": job.keep_s,
        "podFailurePolicy": failure_policy("trainer", ("Ignore", ignored), ("FailJob", failing)),
        "template": template,
    }
    found = make(job, "Job", job.name("trainer"), "trainer", spec=spec)
    if job.queue:
        found["metadata"]["labels"][QUEUE] = job.queue
    return found


def _program(job: ClusterJob) -> tuple[list[str], list[str]]:
    if not job.ranks:
        return ["python", "-m", "flightedl.launch.trainer"], [job.target, *job.arguments]
    options = [f"--nproc-per-node={job.ranks}", f"--max-restarts={_RESTARTS}"]
    module = [] if is_script(job.target) else ["--module"]
    return ["python", "-m", "torch.distributed.run"], [*options, *module, job.target, *job.arguments]


def _servers(job: ClusterJob, role: str, replicas: int, *options: str) -> list[Object]:
    numbers = {"flight": FLIGHT_PORT, "health": HEALTH_PORT, "metrics": METRICS_PORT}
    own = {
        "FLIGHTEDL_PORT": str(FLIGHT_PORT),
        "FLIGHTEDL_HEALTH_PORT": str(HEALTH_PORT),
        "FLIGHTEDL_METRICS_PORT": str(METRICS_PORT),
    }
    template = pod(
        job,
        role,
        ["flightedl"],
        [role, *options],
        [variable_of_pod("FLIGHTEDL_BIND", "status.podIP"), *variables(own), *common_variables()],
        job.server_resources,
        container={
            "envFrom": settings_of(job),
            "ports": ports(**numbers),
            # Two minutes, because a new machine may have to read many files for the first time.
            "startupProbe": probe("/started", period_s=1, failures=120),
            "livenessProbe": probe("/live", period_s=10, failures=3),
            "readinessProbe": probe("/ready", period_s=1, failures=1),
        },
        spec={
            "terminationGracePeriodSeconds": job.leave_s * (role == "pserver") + job.drain_s + _CLOSING_S,
            "topologySpreadConstraints": spread(job, role),
        },
        certificates="server",
    )
    strategy = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}
    made = deployment(job, role, template, replicas=replicas, minReadySeconds=job.settled_s, strategy=strategy)
    return [made, disruption_budget(job, role)]


def _autoscaler(job: ClusterJob, scaling: Scaling) -> list[Object]:
    component = "autoscaler"
    name = job.name(component)
    of_jobs = {"apiGroups": ["batch"], "resources": ["jobs"], "resourceNames": [job.name("trainer")]}
    rules = [of_jobs | {"verbs": ["get", "patch"]}, {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    role = make(job, "Role", name, component, rules=rules)
    referred = {"apiGroup": role["apiVersion"].partition("/")[0], "kind": "Role", "name": name}
    subjects = [{"kind": "ServiceAccount", "name": name}]
    binding = make(job, "RoleBinding", name, component, roleRef=referred, subjects=subjects)
    arguments = [
        "autoscale",
        f"--min={scaling.minimum}",
        f"--max={scaling.maximum}",
        f"--worth={scaling.worth:g}",
    ]
    if scaling.hourly_limit:
        arguments += [f"--hourly-cost={scaling.hourly_cost:g}", f"--hourly-limit={scaling.hourly_limit:g}"]
    template = pod(
        job,
        component,
        ["flightedl"],
        arguments,
        common_variables(),
        _AUTOSCALER_RESOURCES,
        # The store's Secret is left out, because the autoscaler does not need it.
        container={"envFrom": [{"configMapRef": {"name": job.job}}]},
        spec={"terminationGracePeriodSeconds": 10},
        certificates="reader",
    )
    template["spec"] |= {"serviceAccountName": name, "automountServiceAccountToken": True}
    # Two autoscalers would conflict.
    made = deployment(job, component, template, replicas=1, strategy={"type": "Recreate"})
    return [account(job, name, component), role, binding, made]
