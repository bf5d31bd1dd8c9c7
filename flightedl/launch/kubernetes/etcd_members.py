"""An etcd for one job: a StatefulSet of 1, 3 or 5 members, each with a volume.

A single member runs the etcd in the job's image; several members run the image of the etcd project
(``ClusterJob.image_of_etcd``). With TLS, clients and members authenticate with certificates of the job's authority, and
each member's certificate lists the members' host names (``certificate_hosts``).
"""

from __future__ import annotations

from flightedl.adapters.etcd_program import member_arguments
from flightedl.launch.kubernetes.pods import (
    Object,
    disruption_budget,
    labels,
    make,
    pod,
    ports,
    probe,
    spread,
    variable_of_pod,
)
from flightedl.launch.kubernetes.values import (
    CERTIFICATES,
    ETCD_HEALTH_PORT,
    ETCD_PEER_PORT,
    ETCD_PORT,
    ClusterJob,
    Resources,
)

COMPONENT = "etcd"
_DATA = "/var/lib/etcd"
_RESOURCES = Resources("250m", "256Mi", "1Gi")


def certificate_hosts(job: ClusterJob) -> list[str]:
    """Return all host names of all members."""
    name, peers = job.name(COMPONENT), job.name("etcd-peer")
    return [name, *(f"{name}-{number}.{peers}" for number in range(job.etcd_members))]


def etcd(job: ClusterJob) -> list[Object]:
    """Return the members, and the services through which clients and other members reach them."""
    client = {"name": "client", "port": ETCD_PORT, "targetPort": "client"}
    peer = {"name": "peer", "port": ETCD_PEER_PORT, "targetPort": "peer"}
    selector, name, peers = labels(job, COMPONENT), job.name(COMPONENT), job.name("etcd-peer")
    # Members must find each other before any of them is ready.
    early = {"clusterIP": "None", "publishNotReadyAddresses": True}
    return [
        make(job, "Service", name, COMPONENT, spec={"selector": selector, "ports": [client]}),
        make(job, "Service", peers, COMPONENT, spec={**early, "selector": selector, "ports": [client, peer]}),
        _members(job),
        disruption_budget(job, COMPONENT),
    ]


def _members(job: ClusterJob) -> Object:
    template = pod(
        job,
        COMPONENT,
        ["etcd"],
        _arguments(job),
        # Variables used in the arguments.
        [variable_of_pod("POD_NAME", "metadata.name"), variable_of_pod("POD_IP", "status.podIP")],
        _RESOURCES,
        container={
            "ports": ports(client=ETCD_PORT, peer=ETCD_PEER_PORT, health=ETCD_HEALTH_PORT),
            "startupProbe": probe("/health?serializable=true", period_s=2, failures=60),
            # A member is alive if it can answer without the others, and ready if it can answer with a quorum.
            "livenessProbe": probe("/health?serializable=true", period_s=10, failures=6),
            "readinessProbe": probe("/health", period_s=2, failures=1),
            "image": job.image_of_etcd,
        },
        spec={"terminationGracePeriodSeconds": 30, "topologySpreadConstraints": spread(job, COMPONENT)},
        certificates=COMPONENT,
        mounts=[{"name": "data", "mountPath": _DATA}],
    )
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    spec = {
        "replicas": job.etcd_members,
        "serviceName": job.name("etcd-peer"),
        # Members wait for each other, so all of them must start at the same time.
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": labels(job, COMPONENT)},
        "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Delete", "whenScaled": "Retain"},
        "template": template,
        "volumeClaimTemplates": [{"metadata": {"name": "data"}, "spec": claim}],
    }
    return make(job, "StatefulSet", job.name(COMPONENT), COMPONENT, spec=spec)


def _arguments(job: ClusterJob) -> list[str]:
    scheme = "https" if job.tls else "http"
    name, peers = job.name(COMPONENT), job.name("etcd-peer")
    cluster = ",".join(
        f"{name}-{number}={scheme}://{name}-{number}.{peers}:{ETCD_PEER_PORT}" for number in range(job.etcd_members)
    )
    here = f"{scheme}://$(POD_IP)"
    found = [
        *member_arguments(
            "$(POD_NAME)",
            f"{_DATA}/data",
            f"{here}:{ETCD_PORT}",
            f"{here}:{ETCD_PEER_PORT}",
            cluster,
            advertised=f"{scheme}://$(POD_NAME).{peers}",
        ),
        f"--initial-cluster-token={job.job}",
        f"--listen-metrics-urls=http://$(POD_IP):{ETCD_HEALTH_PORT}",
        "--auto-compaction-mode=revision",
        "--auto-compaction-retention=10000",
        "--logger=zap",
        "--log-level=warn",
    ]
    if job.tls:
        for prefix in ("", "peer-"):
            found += [
                f"--{prefix}client-cert-auth",
                f"--{prefix}trusted-ca-file={CERTIFICATES}/ca.pem",
                f"--{prefix}cert-file={CERTIFICATES}/cert.pem",
                f"--{prefix}key-file={CERTIFICATES}/key.pem",
            ]
    return found
