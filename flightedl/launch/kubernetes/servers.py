"""Masters and pservers, as Deployments: which pod has which index is decided in etcd, not by its name.

Each pod binds its own address. A pod that is told to end (SIGTERM) drains: a pserver asks for a checkpoint and waits
for it, at most ``drain_s``. So there is no hook before the signal: it would only do the same, from elsewhere. A rollout
goes on to the next pod when the one before has been ready for a moment, which a pserver is when it has loaded what its
predecessor left.
"""

from __future__ import annotations

from flightedl.launch.kubernetes.pods import (
    Object,
    common_variables,
    container,
    disruption_budget,
    labels,
    metadata,
    pod,
    probe,
    settings_of,
    spread,
    variable,
    variable_of_pod,
)
from flightedl.launch.kubernetes.values import FLIGHT_PORT, HEALTH_PORT, METRICS_PORT, ClusterJob

#: After SIGTERM, beyond the drain: what closing takes on a busy machine.
_CLOSING_S = 15


def masters(job: ClusterJob) -> list[Object]:
    """One leads, the others stand by: they take the lock within the time of its lease."""
    return [_deployment(job, "master", job.masters), disruption_budget(job, "master")]


def pservers(job: ClusterJob) -> list[Object]:
    """As many as hold the model, and spares that wait for an index to become free."""
    return [_deployment(job, "pserver", job.pservers + job.spares), disruption_budget(job, "pserver")]


def _deployment(job: ClusterJob, role: str, replicas: int) -> Object:
    certificates = job.name("server") if job.tls else ""
    environment = [
        variable_of_pod("FLIGHTEDL_BIND", "status.podIP"),
        variable("FLIGHTEDL_PORT", str(FLIGHT_PORT)),
        variable("FLIGHTEDL_HEALTH_PORT", str(HEALTH_PORT)),
        variable("FLIGHTEDL_METRICS_PORT", str(METRICS_PORT)),
        *common_variables(),
    ]
    more = {
        "envFrom": settings_of(job),
        "ports": [
            {"name": "flight", "containerPort": FLIGHT_PORT},
            {"name": "health", "containerPort": HEALTH_PORT},
            {"name": "metrics", "containerPort": METRICS_PORT},
        ],
        # Two minutes: a machine that has just come may have to load much.
        "startupProbe": probe("health", "/started", period_s=1, failures=120),
        "livenessProbe": probe("health", "/live", period_s=10, failures=3),
        "readinessProbe": probe("health", "/ready", period_s=1, failures=1),
    }
    server = container(job, role, ["flightedl"], [role], environment, job.server_resources, more, certificates)
    template = pod(
        job,
        role,
        [server],
        {
            "terminationGracePeriodSeconds": job.drain_s + _CLOSING_S,
            "topologySpreadConstraints": spread(job, role),
        },
        certificates,
    )
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(job, job.name(role), role),
        "spec": {
            "replicas": replicas,
            "minReadySeconds": job.settled_s,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "selector": {"matchLabels": labels(job, role)},
            "template": template,
        },
    }
