"""Building blocks of a job's objects: labels, pods with one container, probes, budgets.

No pod runs as root, can gain privileges, or can write to its image. Only pods that use the cluster's API have a token
for it: the autoscaler, and processes that watch for notices there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flightedl.config import tuned_environment
from flightedl.launch.kubernetes.values import CERTIFICATES, CODE, WORK, ClusterJob, Resources
from flightedl.launch.kubernetes.views import labels_of

Object = dict[str, Any]

#: Kind -> API version. All other kinds are in v1.
_VERSIONS = {
    **dict.fromkeys(("Deployment", "StatefulSet"), "apps/v1"),
    **dict.fromkeys(("Role", "RoleBinding"), "rbac.authorization.k8s.io/v1"),
    "Job": "batch/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "PodDisruptionBudget": "policy/v1",
}
#: Id of the user in the image. Kubernetes requires a number.
USER = 10001


def labels(job: ClusterJob, component: str = "") -> dict[str, str]:
    """Return labels that select the objects of a job, or of one of its components."""
    return labels_of(job.job, component)


def make(job: ClusterJob, kind: str, name: str, component: str = "", /, **fields: Any) -> Object:
    """Return an object of a job. ``fields`` contains its spec or other top-level fields."""
    marks = {"app.kubernetes.io/part-of": "flightedl", "app.kubernetes.io/managed-by": "flightedl"}
    metadata = {"name": name, "labels": labels(job, component) | marks}
    return {"apiVersion": _VERSIONS.get(kind, "v1"), "kind": kind, "metadata": metadata, **fields}


def deployment(job: ClusterJob, component: str, template: Object, **spec: Any) -> Object:
    """Return a Deployment of pods made from this template."""
    spec |= {"selector": {"matchLabels": labels(job, component)}, "template": template}
    return make(job, "Deployment", job.name(component), component, spec=spec)


def disruption_budget(job: ClusterJob, component: str) -> Object:
    """Limit evictions of a component's pods to one at a time. The next one waits until the pod's successor is ready."""
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": labels(job, component)}}
    return make(job, "PodDisruptionBudget", job.name(component), component, spec=spec)


def account(job: ClusterJob, name: str, component: str = "") -> Object:
    """Return a ServiceAccount that has neither permissions nor a token."""
    return make(job, "ServiceAccount", name, component, automountServiceAccountToken=False)


def config_map(job: ClusterJob, name: str, data: Mapping[str, str]) -> Object:
    """Return a ConfigMap that contains these strings."""
    return make(job, "ConfigMap", name, data=dict(data))


def variables(values: Mapping[str, str]) -> list[Object]:
    """Return variables of a container."""
    return [{"name": name, "value": value} for name, value in values.items()]


def variable_of_pod(name: str, path: str) -> Object:
    """Return a variable whose value is taken from a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def common_variables() -> list[Object]:
    """Return variables that the allocator and gRPC read when they start, and variables for writable directories."""
    written = {"HOME": WORK, "NUMBA_CACHE_DIR": f"{WORK}/.numba", "PYTHONUNBUFFERED": "1"}
    return variables(tuned_environment() | written)


def settings_of(job: ClusterJob) -> list[Object]:
    """Return the sources of the settings that all processes share."""
    secret = [{"secretRef": {"name": job.secret}}] if job.secret else []
    return [{"configMapRef": {"name": job.job}}, *secret]


def ports(**numbers: int) -> list[Object]:
    """Return the named ports of a container."""
    return [{"name": name, "containerPort": number} for name, number in numbers.items()]


def probe(path: str, period_s: int, failures: int) -> Object:
    """Return an HTTP probe for the port ``health``."""
    return {
        "httpGet": {"port": "health", "path": path},
        "periodSeconds": period_s,
        "timeoutSeconds": 3,
        "failureThreshold": failures,
    }


def pod(
    job: ClusterJob,
    component: str,
    command: Sequence[str],
    arguments: Sequence[str],
    environment: Sequence[Object],
    resources: Resources,
    *,
    container: Mapping[str, Any],
    spec: Mapping[str, Any],
    certificates: str = "",
    mounts: Sequence[Object] = (),
    volumes: Sequence[Object] = (),
) -> Object:
    """Return the template of a pod with one container, which can write only to ``/work`` and ``/tmp``.

    Args:
        job: The job.
        component: Part of the job; also the container's name.
        command: The program.
        arguments: Its arguments.
        environment: Its variables.
        resources: What it requests, and its limits.
        container: Further fields of the container.
        spec: Further fields of the pod.
        certificates: Role whose Secret has the pod's certificates; empty if it needs none.
        mounts: Further mounts of the container.
        volumes: Volumes of these mounts.
    """
    secret: list[Object] = []
    first = [{"name": "work", "mountPath": WORK}, {"name": "tmp", "mountPath": "/tmp"}]  # noqa: S108 - of the pod
    if certificates and job.tls:
        mounts = [{"name": "certificates", "mountPath": CERTIFICATES, "readOnly": True}, *mounts]
        # The file is readable for the pod's group, which has no other members.
        source = {"secretName": job.name(certificates), "defaultMode": 0o440}
        secret.append({"name": "certificates", "secret": source})
    is_watching = bool(job.notice) and component in {"trainer", "master", "pserver"}
    if is_watching:
        environment = [*environment, *variables({"FLIGHTEDL_NOTICE": job.notice})]
        environment.append(variable_of_pod("FLIGHTEDL_NODE", "spec.nodeName"))
    process = {
        "name": component,
        "image": job.image,
        "command": list(command),
        "args": list(arguments),
        "workingDir": WORK,
        "env": list(environment),
        "resources": resources.of_container(),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        # The pod's status then contains the last lines of the process's output, for ``flightedl submit``.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [*first, *mounts],
        **container,
    }
    return {
        "metadata": {"labels": labels(job, component) | {"app.kubernetes.io/part-of": "flightedl"}},
        "spec": {
            "serviceAccountName": job.job,
            "automountServiceAccountToken": is_watching and job.notice == "kubernetes",
            "enableServiceLinks": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [process],
            "volumes": [{"name": "work", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}, *secret, *volumes],
            **spec,
        },
    }


def code_of(job: ClusterJob) -> tuple[list[Object], list[Object]]:
    """Return mounts and volumes for code that is submitted with the job."""
    if not job.code:
        return [], []
    mount = {"name": "code", "mountPath": CODE, "readOnly": True}
    return [mount], [{"name": "code", "configMap": {"name": job.name("code")}}]


def failure_policy(component: str, *more: tuple[str, Sequence[int]]) -> Object:
    """Return a Job's pod failure policy. ``more`` contains further actions, and the exit codes that cause them."""
    codes = {"containerName": component, "operator": "In"}
    # The rule for evicted pods comes first, because their exit codes are arbitrary.
    rules: list[Object] = [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
    return {"rules": rules + [{"action": action, "onExitCodes": codes | {"values": [*each]}} for action, each in more]}


def spread(job: ClusterJob, component: str) -> list[Object]:
    """Prefer to run the pods of a component on different machines."""
    return [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": labels(job, component)},
        }
    ]
