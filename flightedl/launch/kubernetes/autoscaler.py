"""The loop that adds and removes trainers, as a Deployment of one, with the rights to do that and no others.

It may read and change the one Job of the trainers, and read which pods there are.
"""

from __future__ import annotations

from flightedl.launch.kubernetes.pods import Object, common_variables, container, labels, metadata, pod
from flightedl.launch.kubernetes.values import ClusterJob, Resources, Scaling

COMPONENT = "autoscaler"
_RESOURCES = Resources("100m", "256Mi", "512Mi")


def autoscaler(job: ClusterJob, scaling: Scaling) -> list[Object]:
    """The loop and its rights."""
    name = job.name(COMPONENT)
    role: Object = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": metadata(job, name, COMPONENT),
        "rules": [
            {
                "apiGroups": ["batch"],
                "resources": ["jobs"],
                "resourceNames": [job.name("trainer")],
                "verbs": ["get", "patch"],
            },
            {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
        ],
    }
    binding: Object = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": metadata(job, name, COMPONENT),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name}],
    }
    account: Object = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(job, name, COMPONENT),
        "automountServiceAccountToken": False,
    }
    return [account, role, binding, _deployment(job, scaling)]


def _deployment(job: ClusterJob, scaling: Scaling) -> Object:
    certificates = job.name("reader") if job.tls else ""
    arguments = [
        "autoscale",
        f"--min={scaling.minimum}",
        f"--max={scaling.maximum}",
        f"--worth={scaling.worth:g}",
    ]
    if scaling.hourly_limit:
        arguments += [f"--hourly-cost={scaling.hourly_cost:g}", f"--hourly-limit={scaling.hourly_limit:g}"]
    loop = container(
        job,
        COMPONENT,
        ["flightedl"],
        arguments,
        common_variables(),
        _RESOURCES,
        # The store is no business of its.
        {"envFrom": [{"configMapRef": {"name": job.job}}]},
        certificates,
    )
    template = pod(job, COMPONENT, [loop], {"terminationGracePeriodSeconds": 10}, certificates)
    template["spec"] |= {"serviceAccountName": job.name(COMPONENT), "automountServiceAccountToken": True}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(job, job.name(COMPONENT), COMPONENT),
        "spec": {
            "replicas": 1,
            # Two of them would not agree.
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": labels(job, COMPONENT)},
            "template": template,
        },
    }
