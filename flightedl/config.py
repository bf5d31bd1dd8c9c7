"""Settings of every process, which are immutable, validated, and built in one place.

An argument takes precedence over the environment, and the environment over the default; commands pass their flags as
arguments. This is the only module that reads the environment. A variable's name is ``FLIGHTEDL_`` followed by the name
of the field in capitals. A launcher passes settings to child processes by setting these variables.

The variables for process tuning (``tuned_environment``) are also here, because they must be set before a process
starts. Without it, glibc returns every received buffer to the kernel and faults it in again, which halves throughput.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import re
import socket
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, SupportsIndex, TypeVar

import msgspec

from flightedl.errors import UsageError

ENVIRONMENT_PREFIX = "FLIGHTEDL_"
_TELEMETRY = ("", "otlp")
_LOG_FORMATS = ("text", "json")
INTEGRITIES = ("auto", "always", "never")
SAME_HOST = ("auto", "never")
#: Sources of notices that a machine is about to end (see ``domain.notices``).
NOTICES = ("aws", "aws-rebalance", "gcp", "azure", "kubernetes")
#: Trainers report finished batches far more often than this, so no trainer seems stuck between two reports.
STUCK_FLOOR_S = 5.0
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Count = Annotated[int, msgspec.Meta(ge=0)]
#: At least one.
Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
AboveZero = Annotated[float, msgspec.Meta(gt=0)]
_JOB_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def host_port(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def family_of(address: str) -> socket.AddressFamily:
    """Return the family of sockets that can bind a numeric address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def require_numeric(host: str) -> None:
    """Raise UsageError unless this is a numeric address, as servers need to bind to."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise UsageError(f"bind address {host!r} is a name; give a numeric address such as 127.0.0.1") from None


def is_loopback(host: str, *, name: bool = False) -> bool:
    """True if this is a numeric address of the loopback interface, in brackets or not. Return ``name`` for a name."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return name


def _loopback() -> str:
    for address in ("127.0.0.1", "::1"):
        with contextlib.suppress(OSError), socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
            return address
    return "127.0.0.1"


#: Address of the loopback interface: that of IPv4, unless this machine only has that of IPv6.
LOOPBACK = _loopback()


class Resume(StrEnum):
    """How to start a job that has no state in etcd: from the newest checkpoint, or from scratch."""

    #: Start from scratch. It is an error if the job has checkpoints.
    NEVER = "false"
    #: Continue from the newest checkpoint, which must exist.
    ALWAYS = "true"
    #: Continue from the newest checkpoint, or start from scratch if there is none.
    AUTO = "auto"

    @classmethod
    def of(cls, text: str) -> Resume:
        """Parse a setting. Raises ValueError for any other string."""
        return cls({"0": "false", "1": "true"}.get(text, text.lower()))


def is_job_name(text: str) -> bool:
    """True if this is a valid name for a job."""
    return _JOB_NAME.fullmatch(text) is not None


def etcd_addresses(text: str, *, has_tls: bool) -> str:
    """Return an address of etcd, or a comma-separated list of such addresses, as ``host:port`` without schemes.

    Raises:
        UsageError: an address is not ``host:port``, or its scheme contradicts ``has_tls``.
    """
    found = []
    for part in text.split(","):
        scheme, is_url, address = part.strip().rpartition("://")
        host, _, port = (address.removesuffix("/") if is_url else address).rpartition(":")
        is_host = ":" not in host.removeprefix("[").removesuffix("]") or (host[0], host[-1]) == ("[", "]")
        if not (host and is_host and port.isdecimal() and 0 < int(port) < 65536) or scheme not in {"", "http", "https"}:
            hint = ", with an IPv6 address in brackets" if part.count(":") > 2 else ""
            if "@" in part:
                part, hint = f"…@{part.rpartition('@')[2]}", ", without user and password (FLIGHTEDL_ETCD_USER)"  # noqa: PLW2901
            raise UsageError(f"etcd address {part!r:.80} is not host:port{hint} (--etcd or FLIGHTEDL_ETCD)")
        if is_url and has_tls != (scheme == "https"):
            remedy = "omit it, or write https://" if has_tls else "set the directory of its certificates"
            raise UsageError(f"etcd address {part!r:.80} contradicts FLIGHTEDL_ETCD_TLS_DIR: {remedy}")
        found.append(f"{host}:{port}")
    return ",".join(found)


def require_job_name(text: str) -> None:
    """Raise UsageError unless this is a valid name for a job."""
    if not is_job_name(text):
        raise UsageError(
            f"job name {text!r:.80} is not usable: use 1-63 lower-case letters, digits and dashes (FLIGHTEDL_JOB)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonSettings:
    """Settings of every process of a job. All times are in seconds."""

    #: ``host:port`` of etcd, or a comma-separated list of such addresses. ``http://`` or ``https://`` may precede each
    #: address.
    etcd: str = host_port(LOOPBACK, 2379)
    #: Name of the job: 1 to 63 lower-case letters, digits and dashes.
    job: str = "default"
    #: Time to live of this process's leases. The process counts as alive for this long after it last renewed its lease.
    lease_ttl_s: Annotated[float, msgspec.Meta(ge=1)] = 5.0
    #: DEBUG, INFO, WARNING, ERROR or CRITICAL.
    log_level: str = "INFO"
    #: "text" for people, or "json" for programs, with one object per line.
    log_format: str = "text"
    #: Directory with ca.pem, cert.pem and key.pem, or with a subdirectory for this process's role that contains them
    #: (``flightedl certs``). Enables mutual TLS for all Flight traffic. Empty for plain text.
    tls_dir: str = ""
    #: Directory with ca.pem, cert.pem and key.pem for TLS to etcd; empty for plain text.
    etcd_tls_dir: str = ""
    #: Name of an etcd user who authenticates with a password; empty for none.
    etcd_user: str = ""
    #: File that contains the password of ``etcd_user``.
    etcd_password_file: str = ""
    #: "otlp" sends traces and logs to the OpenTelemetry collector that ``OTEL_*`` variables name; empty sends nothing.
    telemetry: str = ""
    #: Directory for the process's recording, for ``flightedl replay``; empty disables recording.
    record: str = ""
    #: OLD=NEW, or several of these with commas between them: folders whose files were copied to another place. OLD and
    #: NEW are the same if the copies have the same names as the files that were indexed.
    data_moved: str = ""
    #: Checksums of values sent between trainers and pservers: "always", "never", or "auto" (only if nothing else
    #: protects the values).
    integrity: str = "auto"
    #: Shared memory for values between a trainer and a pserver of the same user on the same host: "auto" or "never".
    same_host: str = "auto"
    #: Source of notices that this machine is about to end: aws, aws-rebalance, gcp, azure or kubernetes; empty for
    #: none. A notice has the effect of SIGTERM. Used by servers, ``flightedl run`` and ``python -m
    #: flightedl.launch.trainer``.
    notice: str = ""
    #: URL of the cloud's metadata service, for tests.
    notice_url: str = "http://169.254.169.254"
    #: Name of the pod's node, for ``notice=kubernetes``.
    node: str = ""

    def __post_init__(self) -> None:
        require_job_name(self.job)
        _require_in_range(self)
        _require_one_of("log_level", self.log_level, self.log_level.upper(), _LOG_LEVELS)
        _require_one_of("log_format", self.log_format, self.log_format, _LOG_FORMATS)
        _require_one_of("integrity", self.integrity, self.integrity, INTEGRITIES)
        _require_one_of("same_host", self.same_host, self.same_host, SAME_HOST)
        if self.notice and self.notice not in NOTICES:
            raise UsageError(f"notice is {self.notice!r:.40}, but must be {', '.join(NOTICES)}, or empty for none")
        if not self.notice_url.startswith("http://"):
            raise UsageError(f"notice_url is {self.notice_url!r:.80}, but must be an http:// URL")
        if self.notice == "kubernetes" and not self.node:
            raise UsageError("notice=kubernetes needs the name of the pod's node: set FLIGHTEDL_NODE to spec.nodeName")
        if self.telemetry not in _TELEMETRY:
            raise UsageError(f"telemetry is {self.telemetry!r:.40}, but must be otlp, or empty for none")
        if self.etcd or not isinstance(self, TrainerSettings):
            object.__setattr__(self, "etcd", etcd_addresses(self.etcd, has_tls=bool(self.etcd_tls_dir)))
        if bool(self.etcd_user) != bool(self.etcd_password_file):
            raise UsageError("etcd_user and etcd_password_file belong together: set both, or neither")
        if self.etcd_user and not self.etcd_tls_dir:
            raise UsageError("a password is only sent to etcd over TLS: set etcd_tls_dir (FLIGHTEDL_ETCD_TLS_DIR), too")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings(CommonSettings):
    """Settings that masters and pservers have in addition."""

    #: Address to bind; "0.0.0.0" accepts connections from other machines. It must be numeric, because two servers can
    #: bind the same port under different names without an error.
    bind: str = LOOPBACK
    #: Address to publish; empty for the address that is bound. Required with "0.0.0.0".
    advertise: str = ""
    #: Port; 0: any free port.
    port: Port = 0
    #: Maximum number of seconds, after SIGTERM, for a last checkpoint and for requests in progress.
    drain_s: Seconds = 5.0
    #: Port of the page with Prometheus metrics; 0 disables the page.
    metrics_port: Port = 0
    #: Port of the health page, for the probes of a cluster; 0 disables the page.
    health_port: Port = 0
    #: URL for checkpoints and the dataset index, which is the same for all processes; empty disables both.
    checkpoint: str = ""
    #: Accept connections from other machines in plain text. Anyone who can reach the port then has full access.
    insecure: bool = False
    #: Name that the launcher has given this process, for ``flightedl status``; empty if it has none.
    process_name: str = ""

    def __post_init__(self) -> None:
        CommonSettings.__post_init__(self)
        _require_secure(self.bind, self.tls_dir, insecure=self.insecure)


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterSettings(ServerSettings):
    """Settings of the master."""

    #: Number of pservers; 0 for a job without a model. The first master writes it to etcd; -1 reads it from there.
    pservers: Annotated[int, msgspec.Meta(ge=-1)] = 1
    #: Number of trainers, which ``Sync(deterministic=True)`` needs; 0 if unknown.
    trainers: Count = 0
    #: Number of failed attempts after which a task is bisected or quarantined.
    attempts_limit: Positive = 5
    #: A task is revoked from a trainer after ``task_timeout_factor`` times the average duration of finished tasks, but
    #: not before ``task_timeout_floor_s``.
    task_timeout_factor: AboveZero = 5.0
    #: Minimum time before a task is revoked, once any task has been finished.
    task_timeout_floor_s: AboveZero = 30.0
    #: Seconds without a finished batch after which a live trainer loses its tasks. Used until the first task has been
    #: finished, and in jobs without a model.
    stuck_after_s: Annotated[float, msgspec.Meta(ge=STUCK_FLOOR_S)] = 900.0
    #: Seconds for which a trainer may fail at one batch after another, with nothing done in between, before it has to
    #: end. If all trainers do, for example because the storage refuses access, the job waits for the data that long.
    stand_still_s: AboveZero = 600.0
    #: Seconds between checkpoints; 0 for checkpoints only at the end of epochs.
    checkpoint_every_s: Seconds = 60.0
    #: Checkpoint after every N finished tasks; 0 disables this trigger.
    checkpoint_every_tasks: Count = 0
    #: Number of the newest checkpoints that are kept.
    checkpoint_keep: Positive = 3
    #: Keep every checkpoint whose number is a multiple of N; 0 keeps none for this reason.
    checkpoint_keep_every: Count = 0
    #: Maximum number of consecutive incremental checkpoints, which contain only changed rows; 0 disables them.
    checkpoint_increments: Count = 8
    #: "replay": a restarted pserver catches up by repeating batches. "rollback": all pservers return to its checkpoint.
    recovery: str = "replay"
    #: Seconds that a pserver must be busier than the others before some of its blocks move to them; 0 disables such
    #: moves.
    rebalance_s: Seconds = 60.0
    #: Seconds between scans for new files in a growing dataset. A file is added when two scans have found it unchanged.
    follow_every_s: AboveZero = 5.0
    #: What to do if etcd has no state for the job. "true" continues from the newest checkpoint, "auto" does so if there
    #: is one, and "false" starts from scratch, but refuses to run if the job has checkpoints.
    resume: Resume = Resume.NEVER

    def __post_init__(self) -> None:
        ServerSettings.__post_init__(self)
        if self.recovery not in {"replay", "rollback"}:
            raise UsageError(f"recovery is {self.recovery!r}, but must be replay or rollback")
        # A job without a model can continue from its state in an etcd that somebody has chosen.
        if self.resume is not Resume.NEVER and not self.checkpoint and self.etcd == host_port(LOOPBACK, 2379):
            raise UsageError("resume needs the URL of the checkpoints (--checkpoint or FLIGHTEDL_CHECKPOINT)")


@dataclass(frozen=True, slots=True, kw_only=True)
class PserverSettings(ServerSettings):
    """Settings of a pserver."""

    #: Limit, in MiB, on the memory of tables' rows, including their slots and index; 0 disables the limit.
    table_memory_mb: Count = 0
    #: Maximum number of seconds for which a pserver moves its blocks to other pservers after SIGTERM. 0 leaves the
    #: blocks to its successor.
    leave_s: Seconds = 0.0
    #: Follow a pserver that has no standby if no index is free, and take over its blocks if it dies.
    standby: bool = False
    #: Seconds between the copies that a standby requests.
    standby_lag_s: AboveZero = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorSettings(CommonSettings):
    """Settings of ``flightedl doctor``."""

    #: URL of the job's checkpoints, for testing the storage; empty disables the test.
    checkpoint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings(CommonSettings):
    """Settings of ``fe.connect()``."""

    #: Addresses of etcd, as for servers. If empty, rank 0 starts a master without etcd, which ends with the ranks.
    etcd: str = ""
    #: Seconds after which an unreachable server ends the program with an error.
    give_up_s: Seconds = 300.0
    #: Seconds of waiting after which the program reports what it is waiting for.
    say_after_s: Seconds = 10.0
    #: Seconds after which a rank ends if others of its group have not asked for their first batches.
    start_timeout_s: Seconds = 1800.0
    #: Directory for ``job.output_dir``; empty for the current directory.
    output_dir: str = ""
    #: Name that the launcher has given this process, for ``flightedl status``; empty if it has none.
    process_name: str = ""
    #: The launcher's name for one start of a group of ranks, which is the same for all ranks; empty if there is none.
    start: str = ""
    #: Also write the values passed to ``job.log`` to TensorBoard files in ``output_dir``.
    tensorboard: bool = False
    #: Port of this trainer's Prometheus page, at the address ``bind``; 0 disables the page.
    metrics_port: Port = 0
    #: Address to bind for that page.
    bind: str = LOOPBACK
    #: Serve that page to other machines in plain text.
    insecure: bool = False

    def __post_init__(self) -> None:
        CommonSettings.__post_init__(self)
        if self.metrics_port:
            _require_secure(self.bind, self.tls_dir, insecure=self.insecure)


def _require_secure(bind: str, tls_dir: str, *, insecure: bool) -> None:
    # A name is rejected when the server binds it.
    if not tls_dir and not insecure and not is_loopback(bind, name=True):
        raise UsageError(
            f"bind is {bind}, and without TLS anyone who can reach it has full access: create certificates "
            "with `flightedl certs create` and set tls_dir (FLIGHTEDL_TLS_DIR), or set insecure "
            "(--insecure or FLIGHTEDL_INSECURE=true) if only the job's processes can reach this address"
        )


def _ranges(cls: type) -> dict[str, msgspec.Meta]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")}


def _require_in_range(values: CommonSettings) -> None:
    for name, bounds in _ranges(type(values)).items():
        value, least, above, most = getattr(values, name), bounds.ge, bounds.gt, bounds.le
        # Comparisons with NaN are false.
        is_high = value >= least if least is not None else above is None or value > above
        if is_high and (most is None or value <= most):
            continue
        wanted = f"above {above:g}" if above is not None else f"at least {least:g}"
        more = "" if most is None else f" and at most {most:g}"
        names = f"--{name.replace('_', '-')} or {ENVIRONMENT_PREFIX}{name.upper()}"
        raise UsageError(f"{name} is {value:g}, but must be {wanted}{more} ({names})")


def _require_one_of(name: str, given: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{name} is {given!r:.40}, but must be one of {', '.join(allowed)}")


_Settings = TypeVar("_Settings", bound=CommonSettings)


def settings(cls: type[_Settings], environment: Mapping[str, str] | None = None, **arguments: Any) -> _Settings:
    """Build settings from the arguments that are not None, then from ``FLIGHTEDL_*`` variables, then from defaults.

    Raises:
        UsageError: a value does not have its field's type or range; names the field or variable.
    """
    source = os.environ if environment is None else environment
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for field in fields(cls):
        hint: type = hints[field.name]
        if arguments.get(field.name) is not None:
            values[field.name] = _argument(arguments.pop(field.name), hint, field.name)
        elif (text := source.get(ENVIRONMENT_PREFIX + field.name.upper())) is not None:
            values[field.name] = _parse(text, hint, ENVIRONMENT_PREFIX + field.name.upper())
        arguments.pop(field.name, None)
    if arguments:
        raise UsageError(f"{cls.__name__} has no setting named {', '.join(sorted(arguments))}")
    return cls(**values)


#: Type of a setting -> parser of its text, and name of the type for messages.
_KINDS: Mapping[type, tuple[Callable[[str], Any], str]] = {
    Resume: (Resume.of, "true, false or auto"),
    bool: (lambda text: {"0": False, "1": True, "false": False, "true": True}[text.lower()], "true or false"),
    int: (int, "a whole number"),
    float: (float, "a number"),
    str: (str, "text"),
}


def _parse(text: str, hint: type, name: str) -> Any:
    read, wanted = _KINDS[hint]
    try:
        return _finite(read(text))
    except (KeyError, ValueError):
        raise UsageError(f"{name} is {text!r:.80}, but must be {wanted}") from None


def _argument(value: Any, hint: type, name: str) -> Any:
    try:
        if hint is Resume and isinstance(value, bool | str):
            return Resume.of(str(value))
        if hint is str:
            return os.fspath(value)
        if hint is bool or isinstance(value, bool):
            if hint is bool and isinstance(value, bool):
                return value
        elif isinstance(value, SupportsIndex):
            return hint(value)
        elif hint is float and isinstance(value, float):
            return _finite(value)
    except (TypeError, ValueError):
        pass
    raise UsageError(f"{name} is {value!r:.80}, but must be {_KINDS[hint][1]}")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError
    return value


def to_environment(value: CommonSettings) -> dict[str, str]:
    """Return the variables that make a child's ``settings()`` equal to ``value``."""
    return {ENVIRONMENT_PREFIX + f.name.upper(): str(getattr(value, f.name)) for f in fields(value)}


def replace_environment(variables: Mapping[str, str]) -> None:
    """Replace this process's environment, so that it can run as another process."""
    os.environ.clear()
    os.environ.update(variables)


def kafka_config() -> str:
    """Return librdkafka's properties as text, or the path of a file that contains them; empty if there are none."""
    return os.environ.get("FLIGHTEDL_KAFKA_CONFIG", "")


def tuned_environment() -> dict[str, str]:
    """Return the variables that every process of a job is started with.

    The variables tune the allocator and gRPC, and nearly double the measured throughput of Flight. One of them makes
    glibc copy large blocks without going through the processor's cache, because such data is not read soon and would
    evict other data. With a threshold of 64 MB, a step became 8 % faster. glibc's own threshold depends on the
    last-level cache, for which a virtual machine may report its host's entire cache.
    """
    gib = str(1 << 30)
    return {
        "MALLOC_MMAP_THRESHOLD_": gib,
        "MALLOC_TRIM_THRESHOLD_": gib,
        "MALLOC_TOP_PAD_": str(256 << 20),
        # With more arenas, each server thread would keep all memory that it ever used. One lock has no measurable cost.
        "MALLOC_ARENA_MAX": "1",
        "GRPC_EXPERIMENTS": "tcp_frame_size_tuning,tcp_rcv_lowat",
        "GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=1000000",
    }


def child_environment(*values: CommonSettings, **variables: str) -> dict[str, str]:
    """Return the complete environment of a child process: that of this process, tuned, with these settings.

    Variables that the user has set, for example for the allocator, are kept. Only the encoding of output is changed,
    because launchers read it as UTF-8, whatever the encoding of their own terminal.
    """
    given = {name: text for value in values for name, text in to_environment(value).items()}
    return tuned_environment() | dict(os.environ) | {"PYTHONIOENCODING": "utf-8"} | given | variables


#: Variables that set the number of threads of linear algebra libraries. By default, each starts one per core.
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


def thread_environment(process_count: int, cores: int, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return variables that give each of ``process_count`` processes its share of the cores, at least one core.

    Empty if the user has set any of them: most libraries obey OpenMP's variable, so one shows the user's intent.
    """
    source = os.environ if environment is None else environment
    if any(name in source for name in _THREAD_VARIABLES):
        return {}
    return dict.fromkeys(_THREAD_VARIABLES, str(max(1, cores // max(1, process_count))))


def linear_algebra_threads(environment: Mapping[str, str] | None = None) -> int:
    """Return the number of threads set for linear algebra libraries, or 0 if no number is set."""
    source = os.environ if environment is None else environment
    counts = (source.get(name, "") for name in _THREAD_VARIABLES)
    return next((int(text) for text in counts if text.isdecimal()), 0)


def available_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the number of cores that this process may use, given the machine, its affinity and any container quota."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        limit_us, period_us = quota.read_text().split()
        return max(1, min(found, math.ceil(int(limit_us) / int(period_us))))
    except (OSError, ValueError):  # There is no container, or it has no quota ("max").
        return found
