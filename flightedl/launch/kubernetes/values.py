"""Settings of a job on a cluster, which are frozen, validated, and sufficient for creating the job's objects."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flightedl.config import etcd_addresses, is_job_name
from flightedl.errors import UsageError
from flightedl.launch.kubernetes.templates import PodTemplate

#: Ports of the pods. Each pod has its own address.
FLIGHT_PORT = 7070
HEALTH_PORT = 7071
METRICS_PORT = 9090
ETCD_PORT = 2379
ETCD_PEER_PORT = 2380
ETCD_HEALTH_PORT = 2381
#: The oldest etcd 3.5 that is safe with several members. Debian's version is safe with one member.
ETCD_IMAGE = "gcr.io/etcd-development/etcd:v3.5.28"

#: Maximum length of objects' names. In the names of pods, "-pserver-" and ten more characters follow.
_LONGEST_JOB_NAME = 40
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?")


@dataclass(frozen=True, slots=True)
class Resources:
    """Requests and limits of one container, as quantities in Kubernetes' notation."""

    cpu: str = "1"
    memory: str = "1Gi"
    memory_limit: str = "4Gi"
    #: Empty: no limit.
    cpu_limit: str = ""
    #: Number of NVIDIA GPUs.
    gpus: int = 0

    def __post_init__(self) -> None:
        for name in ("cpu", "memory", "memory_limit", "cpu_limit"):
            value = getattr(self, name)
            if not _QUANTITY.fullmatch(value) and (value or name != "cpu_limit"):
                raise UsageError(f"{name} is {value!r:.40}, but has to be a quantity, such as 500m or 2Gi")

    def of_container(self) -> dict[str, Any]:
        """Return requests and limits. GPUs are requested by a limit."""
        limits = {"memory": self.memory_limit, "cpu": self.cpu_limit, "nvidia.com/gpu": str(self.gpus or "")}
        return {
            "requests": {"cpu": self.cpu, "memory": self.memory},
            "limits": {name: value for name, value in limits.items() if value},
        }


@dataclass(frozen=True, slots=True)
class Scaling:
    """Settings of the autoscaler (see ``domain.scaling``)."""

    minimum: int = 1
    maximum: int = 10
    #: Minimum rate of an additional trainer, as a fraction of the current trainers' average rate.
    worth: float = 0.5
    #: Hourly cost of one trainer, and maximum hourly cost of all trainers; 0 for no maximum.
    hourly_cost: float = 0.0
    hourly_limit: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterJob:
    """One job on a cluster."""

    job: str
    image: str
    #: Path of a script, in the image or below /code, or dotted name of a module.
    target: str
    arguments: tuple[str, ...] = ()
    #: Name of a file -> its text, which is mounted at /code. Empty if the image contains the code.
    code: Mapping[str, str] = field(default_factory=dict)
    trainers: int = 2
    #: Number of ranks of a group, which torchrun starts in one pod; 0 if the trainers are not a group.
    ranks: int = 0
    pservers: int = 2
    #: Number of spare pservers, which take over immediately if a pserver dies.
    spares: int = 1
    #: Number of further pservers. If it is not 0, all pservers without an index follow one that has no standby yet.
    standby_pservers: int = 0
    #: Number of masters: one leads, the others are on standby.
    masters: int = 2
    #: URL for checkpoints. If it is empty, none are written, and training starts from scratch if a pserver dies.
    checkpoint: str = ""
    #: "true" to continue from the newest checkpoint, "auto" to do so if there is one, empty to start from scratch.
    resume: str = ""
    #: ``host:port`` of a running etcd; empty if the job gets its own etcd.
    etcd: str = ""
    #: Number of members of the job's own etcd; 0 if another tool creates this etcd with the same name.
    etcd_members: int = 1
    #: Image of the members. If empty, a single member uses the job's image, several use the etcd project's.
    etcd_image: str = ""
    #: True to use certificates from the Secrets JOB-server, JOB-trainer, JOB-reader and (own etcd) JOB-etcd.
    tls: bool = True
    #: True to work without certificates, in networks where only the job's pods can reach each other.
    insecure: bool = False
    #: Name of a Secret whose keys become variables of all processes, for example AWS_ACCESS_KEY_ID; may be empty.
    secret: str = ""
    #: Ports to which all pods may connect at any address, in addition to the ports of stores named by URLs.
    egress_ports: tuple[int, ...] = ()
    scaling: Scaling | None = None
    server_resources: Resources = Resources()
    trainer_resources: Resources = Resources()
    #: Templates to merge into the pods, in this order.
    templates: tuple[PodTemplate, ...] = ()
    #: Name of the Kueue queue that admits the trainers. If it is empty, the trainers start immediately.
    queue: str = ""
    #: Number of trainer crashes after which the job fails.
    backoff_limit: int = 6
    #: Seconds after which the job fails; 0 for no limit.
    deadline_s: int = 0
    #: More settings of all processes: name of an environment variable -> value.
    variables: Mapping[str, str] = field(default_factory=dict)
    #: Seconds after which the finished job and its servers are removed.
    keep_s: int = 600
    #: Maximum number of seconds that a server has, after SIGTERM, for its part of a last checkpoint.
    drain_s: int = 30
    #: Maximum seconds for which a pserver moves its blocks to other pservers before its pod ends; 0 moves none.
    leave_s: int = 0
    #: Source of notices that a pod's machine is about to end; empty for none.
    notice: str = ""
    #: Seconds for which a server must be ready before the next one is replaced. A spare then claims an index.
    settled_s: int = 5

    def __post_init__(self) -> None:
        if not is_job_name(self.job) or len(self.job) > _LONGEST_JOB_NAME:
            raise UsageError(
                f"job name {self.job!r} is not usable on a cluster: "
                f"use 1-{_LONGEST_JOB_NAME} lower-case letters, digits and dashes"
            )
        self._require_counts()
        if self.etcd:
            has_tls = bool(self.variables.get("FLIGHTEDL_ETCD_TLS_DIR"))
            object.__setattr__(self, "etcd", etcd_addresses(self.etcd, has_tls=has_tls))
        if not self.image:
            raise UsageError("a job on a cluster needs an image (--image)")
        if self.etcd_members not in {0, 1, 3, 5}:
            raise UsageError(f"an etcd has 1, 3 or 5 members, not {self.etcd_members}")
        if self.queue and self.scaling is not None:
            raise UsageError("a queue admits a fixed number of trainers: give --trainers N with --queue, not N..M")
        if self.resume and not self.checkpoint:
            raise UsageError("--resume needs the URL of the checkpoints (--checkpoint)")
        if self.standby_pservers and self.variables.get("FLIGHTEDL_RECOVERY") == "rollback":
            raise UsageError(
                "standby pservers cannot be used with FLIGHTEDL_RECOVERY=rollback, which resets all pservers to one "
                "checkpoint: leave out --standby-pservers, or this variable"
            )
        if self.tls and self.insecure:
            raise UsageError("--tls and --insecure exclude each other")

    def _require_counts(self) -> None:
        counts = ("trainers", "spares", "standby_pservers", "keep_s", "backoff_limit", "deadline_s", "leave_s")
        servers = self.pservers + self.spares + self.standby_pservers
        if self.ranks and (self.trainers != 1 or servers or self.scaling):
            raise UsageError(
                "the ranks of --nproc-per-node train a model of their own: leave out trainers and pservers"
            )
        for name, least in (("pservers", 0 if self.ranks else 1), ("masters", 1), *((name, 0) for name in counts)):
            value = getattr(self, name)
            if value < least:
                raise UsageError(f"{name} is {value}, but has to be {least} or more")

    def name(self, part: str) -> str:
        return f"{self.job}-{part}"

    @property
    def own_etcd(self) -> bool:
        return not self.etcd and self.etcd_members > 0

    @property
    def image_of_etcd(self) -> str:
        return self.etcd_image or (self.image if self.etcd_members <= 1 else ETCD_IMAGE)

    @property
    def etcd_address(self) -> str:
        """``host:port`` for clients, or a comma-separated list of such addresses."""
        return self.etcd or f"{self.name('etcd')}:{ETCD_PORT}"

    def settings(self) -> dict[str, str]:
        """Return the variables that all processes share."""
        found: dict[str, Any] = {
            "FLIGHTEDL_ETCD": self.etcd_address,
            "FLIGHTEDL_JOB": self.job,
            "FLIGHTEDL_PSERVERS": self.pservers,
            "FLIGHTEDL_CHECKPOINT": self.checkpoint,
            "FLIGHTEDL_LEASE_TTL_S": 5,
            "FLIGHTEDL_DRAIN_S": self.drain_s,
        }
        if self.leave_s:
            found["FLIGHTEDL_LEAVE_S"] = self.leave_s
        if self.resume:
            found["FLIGHTEDL_RESUME"] = self.resume
        if self.insecure:
            found["FLIGHTEDL_INSECURE"] = "true"
        if self.tls:
            found["FLIGHTEDL_TLS_DIR"] = CERTIFICATES
            if self.own_etcd:
                found["FLIGHTEDL_ETCD_TLS_DIR"] = CERTIFICATES
        return {name: str(value) for name, value in found.items()} | dict(self.variables)


#: Directory with the certificate for a pod's role.
CERTIFICATES = "/etc/flightedl/certificates"
#: Directory at which a ConfigMap with code is mounted.
CODE = "/code"
#: A directory to which a process may write. The rest of its file system is read-only.
WORK = "/work"
