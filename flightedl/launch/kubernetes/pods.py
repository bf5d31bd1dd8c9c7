"""What all pods of a job have in common: who they are, what they may, where they may write.

No pod runs as root, may become more than it is, or writes to its image; none has a token for the cluster's API, except
the autoscaler, which cannot do its work without one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flightedl.config import tuned_environment
from flightedl.launch.kubernetes.values import CERTIFICATES, WORK, ClusterJob, Resources

Object = dict[str, Any]

#: The user of the image, by number, as the cluster wants it.
USER = 10001


def labels(job: ClusterJob, component: str = "") -> dict[str, str]:
    """By which objects of a job are found; ``component``: one of its parts."""
    found = {"app.kubernetes.io/name": "flightedl", "app.kubernetes.io/instance": job.job}
    return found | ({"app.kubernetes.io/component": component} if component else {})


def metadata(job: ClusterJob, name: str, component: str = "") -> Object:
    """Of an object."""
    return {
        "name": name,
        "labels": labels(job, component)
        | {"app.kubernetes.io/part-of": "flightedl", "app.kubernetes.io/managed-by": "flightedl"},
    }


def variable(name: str, value: str) -> Object:
    """One variable of a container."""
    return {"name": name, "value": value}


def variable_of_pod(name: str, path: str) -> Object:
    """A variable that each pod has another value of."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def settings_of(job: ClusterJob) -> list[Object]:
    """Where the settings of all processes come from."""
    secret = [{"secretRef": {"name": job.secret}}] if job.secret else []
    return [{"configMapRef": {"name": job.job}}, *secret]


def common_variables() -> list[Object]:
    """What allocator and gRPC need for speed before the process starts, and where it may write."""
    written = {"HOME": WORK, "NUMBA_CACHE_DIR": f"{WORK}/.numba", "PYTHONUNBUFFERED": "1"}
    return [variable(name, value) for name, value in (tuned_environment() | written).items()]


def probe(port: str, path: str, period_s: int, failures: int) -> Object:
    """An HTTP probe."""
    return {
        "httpGet": {"port": port, "path": path},
        "periodSeconds": period_s,
        "timeoutSeconds": 3,
        "failureThreshold": failures,
    }


def container(
    job: ClusterJob,
    name: str,
    command: Sequence[str],
    arguments: Sequence[str],
    environment: Sequence[Object],
    resources: Resources,
    more: Mapping[str, Any],
    certificates: str = "",
) -> Object:
    """A container that may write to ``/work`` and ``/tmp`` only. ``certificates``: whether it has some."""
    mounts: list[Object] = [{"name": "work", "mountPath": WORK}, {"name": "tmp", "mountPath": "/tmp"}]  # noqa: S108 - of the pod
    if certificates:
        mounts.append({"name": "certificates", "mountPath": CERTIFICATES, "readOnly": True})
    return {
        "name": name,
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
        # What it said last is then in its pod's status, for who watches the job.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
        **more,
    }


def pod(
    job: ClusterJob,
    component: str,
    containers: Sequence[Object],
    more: Mapping[str, Any],
    certificates: str = "",
    volumes: Sequence[Object] = (),
) -> Object:
    """The template of a pod. ``certificates``: the Secret that has its role's; empty: it has none."""
    found = [{"name": "work", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}]
    if certificates:
        # Readable for the pod's group, which nobody else is in.
        found.append({"name": "certificates", "secret": {"secretName": certificates, "defaultMode": 0o440}})
    return {
        "metadata": {"labels": labels(job, component) | {"app.kubernetes.io/part-of": "flightedl"}},
        "spec": {
            "serviceAccountName": job.job,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": list(containers),
            "volumes": [*found, *volumes],
            **more,
        },
    }


def spread(job: ClusterJob, component: str) -> list[Object]:
    """Not all on one machine, if it can be helped."""
    return [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": labels(job, component)},
        }
    ]


def disruption_budget(job: ClusterJob, component: str) -> Object:
    """Machines are emptied one pod of a kind after the other; the next one when its successor is ready."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(job, job.name(component), component),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": labels(job, component)}},
    }
