"""Settings of every process: frozen, validated, built in one place.

Precedence: argument > environment > default; commands put their flags in as arguments. This is the only module that
reads the environment. Names are ``FLIGHTEDL_`` + the field's name in capitals, so that a launcher hands settings to a
child by setting variables.

Process tuning (``tuned_environment``) is here too, because it has to be in the environment before a process starts:
glibc otherwise returns every received buffer to the kernel and faults it in again, which halves throughput.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
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
#: Trainers say far more often than this which batches are done, so none is called stuck between two messages.
STUCK_FLOOR_S = 5.0
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Count = Annotated[int, msgspec.Meta(ge=0)]
#: At least one.
Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
AboveZero = Annotated[float, msgspec.Meta(gt=0)]
_JOB_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


class Resume(StrEnum):
    """Start of a job that etcd does not know: from the newest checkpoint, or from scratch."""

    #: From scratch. Existing checkpoints of the job are an error.
    NEVER = "false"
    #: From the newest checkpoint, which must exist.
    ALWAYS = "true"
    #: From the newest checkpoint, or from scratch if there is none.
    AUTO = "auto"

    @classmethod
    def of(cls, text: str) -> Resume:
        """Read a setting. Raises ValueError for anything else."""
        return cls({"0": "false", "1": "true"}.get(text, text.lower()))


def is_job_name(text: str) -> bool:
    """True if a job may have this name."""
    return _JOB_NAME.fullmatch(text) is not None


def require_addresses(text: str) -> None:
    """Raise UsageError unless this is one address of etcd, or several separated by commas."""
    for part in text.split(","):
        host, _, port = part.strip().rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise UsageError(f"etcd address {part!r:.80} is not host:port (--etcd or FLIGHTEDL_ETCD)")


def require_job_name(text: str) -> None:
    """Raise UsageError unless a job may have this name."""
    if not is_job_name(text):
        raise UsageError(
            f"job name {text!r:.80} is not usable: use 1-63 lower-case letters, digits and dashes (FLIGHTEDL_JOB)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonSettings:
    """Settings of every process of a job. Times are in seconds."""

    #: ``host:port`` of etcd, several separated by commas.
    etcd: str = "127.0.0.1:2379"
    job: str = "default"
    #: Time to live of the leases that name this process.
    lease_ttl_s: Annotated[float, msgspec.Meta(ge=1)] = 5.0
    log_level: str = "INFO"
    #: "text" for people, "json" for programs: one object a line.
    log_format: str = "text"
    #: Directory with ca.pem, cert.pem, key.pem, or with a directory of this process's role that has them
    #: (``flightedl certs``): mutual TLS for all Flight traffic. Empty: plain text.
    tls_dir: str = ""
    #: Directory with ca.pem, cert.pem, key.pem: TLS to etcd. Empty: plain text.
    etcd_tls_dir: str = ""
    #: Name of etcd's user, who authenticates by a password; empty: no user.
    etcd_user: str = ""
    #: File with the password of ``etcd_user``.
    etcd_password_file: str = ""
    #: "otlp": send traces and logs to an OpenTelemetry collector, which its own variables name; empty: nothing is sent.
    telemetry: str = ""
    #: Directory of the process's recording for ``flightedl replay``; empty: no recording.
    record: str = ""
    #: Checksums of values that travel between trainers and pservers: "always", "never", or "auto" (only if nothing else
    #: protects them), see ``rpc.integrity``.
    integrity: str = "auto"
    #: Shared memory for values between a trainer and a pserver of one host and user: "auto" or "never", see
    #: ``rpc.same_host``.
    same_host: str = "auto"

    def __post_init__(self) -> None:
        require_job_name(self.job)
        _require_in_range(self)
        _require_one_of("log_level", self.log_level, self.log_level.upper(), _LOG_LEVELS)
        _require_one_of("log_format", self.log_format, self.log_format, _LOG_FORMATS)
        _require_one_of("integrity", self.integrity, self.integrity, INTEGRITIES)
        _require_one_of("same_host", self.same_host, self.same_host, SAME_HOST)
        if self.telemetry not in _TELEMETRY:
            raise UsageError(f"telemetry is {self.telemetry!r:.40}, but must be otlp, or empty for none")
        require_addresses(self.etcd)
        if bool(self.etcd_user) != bool(self.etcd_password_file):
            raise UsageError("etcd_user and etcd_password_file belong together: set both, or neither")
        if self.etcd_user and not self.etcd_tls_dir:
            raise UsageError("a password is only sent to etcd over TLS: set etcd_tls_dir (FLIGHTEDL_ETCD_TLS_DIR), too")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings(CommonSettings):
    """Settings that masters and pservers have in addition."""

    #: Address to bind; numeric, because two servers can share a port under different names without an error.
    bind: str = "127.0.0.1"
    #: Address to publish; empty: the bound one.
    advertise: str = ""
    #: 0: any free port.
    port: Port = 0
    #: After SIGTERM, how long a last checkpoint and running requests may take before the process ends all the same.
    drain_s: Seconds = 5.0
    #: Port of the Prometheus metrics page; 0: none.
    metrics_port: Port = 0
    #: Port of the health page, for the probes of a cluster; 0: none.
    health_port: Port = 0
    #: URL under which checkpoints and the dataset index are stored; empty: none.
    checkpoint: str = ""
    #: Listen beyond loopback in plain text: everybody who reaches the port may ask everything.
    insecure: bool = False

    def __post_init__(self) -> None:
        CommonSettings.__post_init__(self)
        _require_secure(self.bind, self.tls_dir, insecure=self.insecure)


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterSettings(ServerSettings):
    """The master's settings."""

    #: Number of pservers; 0 for a job of data only. The first master writes it to etcd; -1 takes it from there.
    pservers: Annotated[int, msgspec.Meta(ge=-1)] = 1
    #: Number of trainers, for ``Sync(deterministic=True)``; 0: unknown.
    trainers: Count = 0
    attempts_limit: Positive = 5
    #: A task is taken back from a trainer after ``task_timeout_factor`` times the average of finished tasks, never
    #: earlier than after ``task_timeout_floor_s``.
    task_timeout_factor: AboveZero = 5.0
    task_timeout_floor_s: AboveZero = 30.0
    #: Before the first task is finished, and without a model: seconds without a finished batch after which a trainer
    #: that is alive loses its tasks.
    stuck_after_s: Annotated[float, msgspec.Meta(ge=STUCK_FLOOR_S)] = 900.0
    #: Seconds between checkpoints; 0: only at the end of an epoch.
    checkpoint_every_s: Seconds = 60.0
    #: Checkpoint every N finished tasks; 0 disables this trigger.
    checkpoint_every_tasks: Count = 0
    checkpoint_keep: Positive = 3
    #: Keep every checkpoint whose number is a multiple of N; 0: none.
    checkpoint_keep_every: Count = 0
    #: Maximum number of consecutive checkpoints that have only the changed rows of tables; 0: all have all rows.
    checkpoint_increments: Count = 8
    #: "replay": a pserver that comes back catches up. "rollback": all go back to the checkpoint that it has.
    recovery: str = "replay"
    #: Seconds between looks for new files of a followed dataset. A file joins when two looks find it unchanged.
    follow_every_s: AboveZero = 5.0
    #: Go on from the newest checkpoint if etcd knows nothing of the job; ``auto``: only if there is one.
    resume: Resume = Resume.NEVER

    def __post_init__(self) -> None:
        ServerSettings.__post_init__(self)
        if self.recovery not in {"replay", "rollback"}:
            raise UsageError(f"recovery is {self.recovery!r}, but there are only replay and rollback")
        if self.resume is not Resume.NEVER and not self.checkpoint:
            raise UsageError("resume needs the URL of the checkpoints (--checkpoint or FLIGHTEDL_CHECKPOINT)")


@dataclass(frozen=True, slots=True, kw_only=True)
class PserverSettings(ServerSettings):
    """A pserver's settings."""

    #: MiB that the rows of tables may have, with slots and index; 0: as much as is there.
    table_memory_mb: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorSettings(CommonSettings):
    """Settings of ``flightedl doctor``."""

    #: URL of the job's checkpoints, to try out; empty: that is left out.
    checkpoint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings(CommonSettings):
    """Settings of ``fe.connect()``."""

    #: Seconds after which an unreachable server ends the program with an error.
    give_up_s: Seconds = 300.0
    #: Seconds of waiting after which the program says what it waits for.
    say_after_s: Seconds = 10.0
    #: Directory where ``job.output_dir`` points; empty: the current one.
    output_dir: str = ""
    #: The launcher's name for this process, for ``flightedl status``; empty if it has none.
    process_name: str = ""
    #: The launcher's name for one start of a group of ranks, the same in all of them; empty if it has none.
    start: str = ""
    #: Write what ``job.log`` is given to files for TensorBoard, too, in ``output_dir``.
    tensorboard: bool = False
    #: Port of a Prometheus page of this trainer, at ``bind``; 0: none, and nothing listens.
    metrics_port: Port = 0
    bind: str = "127.0.0.1"
    #: Serve that page beyond loopback in plain text.
    insecure: bool = False

    def __post_init__(self) -> None:
        CommonSettings.__post_init__(self)
        if self.metrics_port:
            _require_secure(self.bind, self.tls_dir, insecure=self.insecure)


def _require_secure(bind: str, tls_dir: str, *, insecure: bool) -> None:
    if not tls_dir and not insecure and not _is_loopback(bind):
        raise UsageError(
            f"bind is {bind}, and without TLS everybody who reaches it may ask everything: make certificates "
            "with `flightedl certs create` and set tls_dir (FLIGHTEDL_TLS_DIR), or allow it by insecure "
            "(--insecure or FLIGHTEDL_INSECURE=true) where only the job's processes reach this address"
        )


def _ranges(cls: type) -> dict[str, msgspec.Meta]:
    """Setting -> the range that its type names."""
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


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return True  # A name is refused where it would be bound.


_Settings = TypeVar("_Settings", bound=CommonSettings)


def settings(cls: type[_Settings], environment: Mapping[str, str] | None = None, **arguments: Any) -> _Settings:
    """Build settings: arguments that are not None, else ``FLIGHTEDL_*`` of the environment, else the default.

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


#: Type of a setting -> how to read it from text, and what it is called.
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
    """The variables that make a child's ``settings()`` equal to ``value``."""
    return {ENVIRONMENT_PREFIX + f.name.upper(): str(getattr(value, f.name)) for f in fields(value)}


def replace_environment(variables: Mapping[str, str]) -> None:
    """Give this process the environment of another one, which it is to be from now on."""
    os.environ.clear()
    os.environ.update(variables)


def tuned_environment() -> dict[str, str]:
    """Variables that every process of a job is started with.

    They are for the allocator and gRPC, and measured to nearly double the throughput of Flight. By one of them glibc
    copies a block of values past the processor's cache: what is copied there is not read soon, and would push out what
    is. Measured with 64 MB: 8 % less time for a step. glibc's own limit is a part of the last cache, which a virtual
    machine may report as all that its host has.
    """
    gib = str(1 << 30)
    return {
        "MALLOC_MMAP_THRESHOLD_": gib,
        "MALLOC_TRIM_THRESHOLD_": gib,
        "MALLOC_TOP_PAD_": str(256 << 20),
        # Else each of a server's threads keeps the most that it ever held at once; the lock costs nothing measurable.
        "MALLOC_ARENA_MAX": "1",
        "GRPC_EXPERIMENTS": "tcp_frame_size_tuning,tcp_rcv_lowat",
        "GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=1000000",
    }


def child_environment(*values: CommonSettings, **variables: str) -> dict[str, str]:
    """The whole environment of a child process: this one's, tuned, with the settings given.

    What the user set by hand (an allocator's variable, say) is left as it is.
    """
    given = {name: text for value in values for name, text in to_environment(value).items()}
    return tuned_environment() | dict(os.environ) | given | variables


#: How many threads a library for linear algebra begins, each by another variable; without one, as many as there are
#: cores, in every process.
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


def thread_environment(process_count: int, cores: int, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables that give each of so many processes on one machine its share of the cores, at least one.

    Empty where the user has set any of them: one is enough to say what is wanted, as most libraries heed OpenMP's.
    """
    source = os.environ if environment is None else environment
    if any(name in source for name in _THREAD_VARIABLES):
        return {}
    return dict.fromkeys(_THREAD_VARIABLES, str(max(1, cores // max(1, process_count))))


def linear_algebra_threads(environment: Mapping[str, str] | None = None) -> int:
    """How many threads a library for linear algebra was told to begin; 0: nobody said."""
    source = os.environ if environment is None else environment
    told = (source.get(name, "") for name in _THREAD_VARIABLES)
    return next((int(text) for text in told if text.isdecimal()), 0)


def available_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """How many cores this process and its children may use: of the machine, its affinity, or its container's quota."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        limit_us, period_us = quota.read_text().split()
        return max(1, min(found, math.ceil(int(limit_us) / int(period_us))))
    except (OSError, ValueError):  # No container, or one without a quota ("max").
        return found
