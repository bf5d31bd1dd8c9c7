"""Certificates of a submitted job, as Secrets: one per role, created for this job alone.

The authority's key is discarded, so no more certificates can be issued. When the certificates expire, resubmit the job.
"""

from __future__ import annotations

import base64
import tempfile
from pathlib import Path

from flightedl.adapters.pem_files import FILES
from flightedl.launch.certificates import ETCD, members
from flightedl.launch.kubernetes.etcd_members import certificate_hosts
from flightedl.launch.kubernetes.pods import Object, make
from flightedl.launch.kubernetes.values import ClusterJob
from flightedl.rpc.authentication import Role

_DAYS = 365


def secret_names(job: ClusterJob) -> list[str]:
    """Return the names of the Secrets that the job's pods need before they can start."""
    roles = [Role.SERVER, Role.TRAINER, *([Role.READER] if job.scaling else []), *([ETCD] if job.own_etcd else [])]
    return [job.name(role) for role in roles] if job.tls else []


def make_secrets(job: ClusterJob) -> list[Object]:
    """Create new certificates as Secrets. Raises UsageError if the package that this requires is not installed."""
    if not job.tls:
        return []
    from flightedl.adapters import certificates

    with tempfile.TemporaryDirectory(prefix="flightedl-certificates-") as folder:
        place = Path(folder)
        certificates.create(place, members(job.job, certificate_hosts(job)), days=_DAYS, authority_days=2 * _DAYS)
        return [_secret(job, name, place / name.removeprefix(f"{job.job}-")) for name in secret_names(job)]


def _secret(job: ClusterJob, name: str, place: Path) -> Object:
    data = {file: base64.b64encode((place / file).read_bytes()).decode() for file in FILES}
    return make(job, "Secret", name, type="Opaque", data=data)
