"""Network policies of a job. They deny all connections that are not listed here.

TLS alone does not protect a server, because the request of an unauthorized client is in the server's memory before the
server can reject it. Networks without support for policies ignore these objects.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from flightedl.launch.kubernetes.pods import Object, labels, make
from flightedl.launch.kubernetes.values import (
    ETCD_HEALTH_PORT,
    ETCD_PEER_PORT,
    ETCD_PORT,
    FLIGHT_PORT,
    METRICS_PORT,
    ClusterJob,
)

_DEFAULT_PORTS = {"http": 80, "https": 443}
_URL = re.compile(r"(?P<scheme>[a-z0-9+]+)://[^/?#]*?(:(?P<port>[0-9]{1,5}))?([/?#]|$)")
#: Namespace of the pods that may read the metrics.
_MONITORING = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}


def policies(job: ClusterJob) -> list[Object]:
    """Return the policies for all pods of a job."""
    members = {"podSelector": {"matchLabels": labels(job)}}
    found = [
        _policy(job, "deny", labels(job), ingress=[], egress=[]),
        _policy(job, "leave", labels(job), egress=_ways_out(job)),
    ]
    # Policies are additive, so each set of ports has its own policy.
    for name, ports in (
        ("external-etcd", {int(address.rpartition(":")[2]) for address in job.etcd.split(",") if address}),
        ("stores", ports_of([job.checkpoint, *job.variables.values(), *job.arguments]).union(job.egress_ports) - {443}),
    ):
        if ports:
            found.append(_policy(job, name, labels(job), egress=[{"ports": [_tcp(port) for port in sorted(ports)]}]))
    for role in ("master", "pserver"):
        ingress = [
            {"from": [members], "ports": [_tcp(FLIGHT_PORT)]},
            {"from": [_MONITORING], "ports": [_tcp(METRICS_PORT)]},
        ]
        found.append(_policy(job, role, labels(job, role), ingress=ingress))
    return found


def etcd_policy(job: ClusterJob) -> Object:
    """Return the policy for the members of the job's own etcd."""
    members = {"podSelector": {"matchLabels": labels(job)}}
    peers = {"podSelector": {"matchLabels": labels(job, "etcd")}}
    ingress = [
        {"from": [members], "ports": [_tcp(ETCD_PORT)]},
        {"from": [peers], "ports": [_tcp(ETCD_PEER_PORT)]},
        {"from": [_MONITORING], "ports": [_tcp(ETCD_HEALTH_PORT)]},
    ]
    return _policy(job, "etcd", labels(job, "etcd"), ingress=ingress)


def _ways_out(job: ClusterJob) -> list[Object]:
    """Return the rules for outgoing connections: to DNS, the job's pods, and (HTTPS) stores and the cluster's API.

    The last rule allows the machine's metadata service, which supplies the machine's credentials in a cloud.
    """
    return [
        {"ports": [{"protocol": "UDP", "port": 53}, _tcp(53)]},
        {"to": [{"podSelector": {"matchLabels": labels(job)}}]},
        {"ports": [_tcp(443), _tcp(6443)]},
        {"to": [{"ipBlock": {"cidr": "169.254.0.0/16"}}], "ports": [_tcp(80), _tcp(988)]},
    ]


def ports_of(texts: Iterable[str]) -> set[int]:
    """Return the ports of all strings that are HTTP(S) URLs or that are URLs with an explicit port."""
    urls = filter(None, map(_URL.match, texts))
    return {int(url["port"] or _DEFAULT_PORTS.get(url["scheme"], 0)) for url in urls} - {0}


def _tcp(port: int) -> Object:
    return {"protocol": "TCP", "port": port}


def _policy(job: ClusterJob, name: str, selected: dict[str, str], **ways: list[Any]) -> Object:
    spec = {
        "podSelector": {"matchLabels": selected},
        "policyTypes": [way.capitalize() for way in ways],
        **{way: rules for way, rules in ways.items() if rules},
    }
    return make(job, "NetworkPolicy", job.name(name), spec=spec)
