"""All objects of a job, in the order in which they are applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flightedl.launch.kubernetes.autoscaler import autoscaler
from flightedl.launch.kubernetes.etcd_members import etcd
from flightedl.launch.kubernetes.network import etcd_policy, policies
from flightedl.launch.kubernetes.pods import Object, metadata
from flightedl.launch.kubernetes.servers import masters, pservers
from flightedl.launch.kubernetes.templates import with_templates
from flightedl.launch.kubernetes.trainers import trainers
from flightedl.launch.kubernetes.values import ClusterJob


def render(job: ClusterJob) -> list[Object]:
    """Everything but Secrets; the trainers' Job, which owns the rest, first."""
    found = [trainers(job), account(job), _settings(job)]
    if job.code:
        found.append(config_map(job, job.name("code"), job.code))
    found += policies(job)
    if job.own_etcd:
        found += [*etcd(job), etcd_policy(job)]
    found += [*masters(job), *pservers(job)]
    if job.scaling is not None:
        found += autoscaler(job, job.scaling)
    return with_templates(found, job.templates)


def owned(objects: Sequence[Object], owner: Object, uid: str) -> list[Object]:
    """The same objects, which go when their owner goes."""
    reference = {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": uid,
        "controller": False,
        "blockOwnerDeletion": False,
    }
    return [each | {"metadata": each["metadata"] | {"ownerReferences": [reference]}} for each in objects]


def account(job: ClusterJob) -> Object:
    """Without any rights, and without a token."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(job, job.job),
        "automountServiceAccountToken": False,
    }


def _settings(job: ClusterJob) -> Object:
    return config_map(job, job.job, job.settings())


def config_map(job: ClusterJob, name: str, data: Mapping[str, str]) -> Object:
    """Texts by name."""
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(job, name), "data": dict(data)}
