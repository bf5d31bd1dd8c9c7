"""A job's servers, and its trainers if wanted, as processes of this machine: what ``fe.local()`` gives.

::

    with fe.local(pservers=2) as cluster:
        job = cluster.connect()

etcd, the master and the pservers are real processes, started together and watched over by a supervisor. Everything
is gone when the block ends: processes, ports, temporary directories. The logs stay when ``output_dir`` was given.
"""

from __future__ import annotations

import atexit
import contextlib
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from flightedl.adapters.clock import SystemClock
from flightedl.adapters.etcd import EtcdCoordinator
from flightedl.adapters.etcd_access import EtcdAccess
from flightedl.config import (
    CommonSettings,
    MasterSettings,
    PserverSettings,
    TrainerSettings,
    available_cores,
    child_environment,
    settings,
    thread_environment,
)
from flightedl.coordination.checkpoint_places import job_storage
from flightedl.coordination.keys import JobKeys
from flightedl.errors import FlightedlError, JobFailedError, UnavailableError, UsageError
from flightedl.launch.etcd import EmbeddedEtcd
from flightedl.launch.failed import failed_tasks
from flightedl.launch.former import forget, former_job, require_startable
from flightedl.launch.lease_cleaner import LeaseCleaner
from flightedl.launch.liveness import Liveness
from flightedl.launch.policy import Account, Limits, Role, Slot
from flightedl.launch.processes import Child, Children, OnLine
from flightedl.launch.status import JobStatus, is_master_answering, tool_connector
from flightedl.launch.supervisor import OnEvent, Outcome, ProcessView, Starter, Supervisor
from flightedl.ports import Coordinator, Storage

if TYPE_CHECKING:
    from flightedl.client.session import Job

_Settings = TypeVar("_Settings", bound=CommonSettings)

#: Directory of the logs, in that of the results.
LOGS = "logs"
_STATUS_POLL_S = 0.1
_STATUS_TIMEOUT_S = 2.0
#: What the policy decides rests on the account: a busy master is waited for, one that is gone refuses at once.
_ACCOUNT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class TrainerProgram:
    """What the trainers of a whole job run."""

    #: Path of a script or dotted name of a module.
    target: str
    arguments: tuple[str, ...] = ()
    count: int = 1
    #: Receives their output.
    on_line: OnLine | None = None


class LocalCluster:
    """etcd, one master and some pservers on this machine.

    Args:
        pservers: how many parameter servers.
        job: the job's name; with ``etcd`` it tells several jobs apart.
        checkpoint: URL for checkpoints and the dataset's index; None: none are kept.
        etcd: ``host:port`` of a running etcd to use; None: one of the cluster's own.
        output_dir: where logs (``logs/``) and what the script saves go; None: a temporary directory.
        trainers: the program to run as trainers beside the servers; None: no trainers.
        standby: start one more master and one more pserver, which take over from one that dies at once, without the
            time that starting takes.
        record: directory in which every process records what happens to it, for ``flightedl replay``; None: nothing is.
        limits: when the supervisor gives up.
        on_event: is told in one sentence about each process that ends or is replaced.
        more: further settings of all processes, such as ``lease_ttl_s``.

    Raises:
        UsageError: a setting is wrong, or there is no etcd program.
    """

    def __init__(
        self,
        pservers: int = 1,
        *,
        job: str = "local",
        checkpoint: str | None = None,
        etcd: str | None = None,
        output_dir: str | Path | None = None,
        trainers: TrainerProgram | None = None,
        standby: bool = False,
        record: str | Path | None = None,
        limits: Limits | None = None,
        on_event: OnEvent | None = None,
        **more: Any,
    ) -> None:
        if not isinstance(pservers, int) or pservers < 1:
            raise UsageError(f"pservers is {pservers!r:.80}, but a job needs at least one parameter server")
        if trainers is not None and trainers.count < 1:
            raise UsageError(f"trainers is {trainers.count}, but a job needs at least one trainer")
        self.job = job
        self.pservers = pservers
        self._checkpoint = checkpoint
        self._given_etcd = etcd
        self._output_dir = None if output_dir is None else _directory_of(output_dir)
        self._trainers = trainers
        self._standby = standby
        self._limits = limits
        self._on_event = on_event
        if record is not None:
            more["record"] = str(_directory_of(record, "record"))
        self._more = more
        known = {field.name for kind in (MasterSettings, PserverSettings, TrainerSettings) for field in fields(kind)}
        if unknown := sorted(more.keys() - known):
            raise UsageError(f"there is no setting named {', '.join(unknown)}")
        for kind in (MasterSettings, PserverSettings, TrainerSettings):
            names = {field.name for field in fields(kind)}
            given = {name: value for name, value in (more | {"checkpoint": checkpoint}).items() if name in names}
            settings(kind, **{"job": job, "etcd": etcd, **given})
        self._clock = SystemClock()
        #: Whether the leases of processes that are seen to end are ended at once; else they run their time, as on a
        #: cluster where nobody sees it.
        self.revokes_leases = True
        self._resources: contextlib.ExitStack | None = None
        self._supervisor: Supervisor | None = None
        self._storage: Storage | None = None
        #: What ``connect`` gave.
        self._sessions: list[Job] = []
        self._etcd_address: str | None = etcd
        self._directory: Path | None = self._output_dir

    # What it is made of

    @property
    def etcd_address(self) -> str:
        """``host:port`` of the job's etcd; known once it was started."""
        if self._etcd_address is None:
            raise UsageError("the cluster was not started: use it in a `with` block")
        return self._etcd_address

    @property
    def directory(self) -> Path:
        """Where logs and results go; known once it was started."""
        if self._directory is None:
            raise UsageError("the cluster was not started: use it in a `with` block")
        return self._directory

    @property
    def processes(self) -> tuple[ProcessView, ...]:
        """All processes, with their pids and how often each was started."""
        return self._running().processes()

    def pid(self, role: str, index: int = 0) -> int | None:
        """The pid of one process now; None: it is being replaced or has finished."""
        child = self._running().child(Slot(Role(role), index))
        return None if child is None else child.pid

    def kill(self, role: str, index: int = 0, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal to one process; its pid.

        Raises:
            UnavailableError: no process is there at the moment.
        """
        child = self._running().child(Slot(Role(role), index))
        if child is None:
            raise UnavailableError(f"no {role} {index} runs at the moment")
        child.send(number)
        return child.pid

    def outcome(self, timeout_s: float = 0.0) -> Outcome | None:
        """How the job ended, or None while it runs after ``timeout_s``."""
        return self._running().outcome(timeout_s)

    def status(self) -> JobStatus:
        """Asks the master how the job stands; close it after use."""
        return JobStatus(self._etcd(), self.job, self._clock, self._settings(CommonSettings).tls_dir)

    # Life

    def start(self, *, ready_s: float | None = 60.0, is_unwanted: Callable[[], bool] = lambda: False) -> Self:
        """Start everything and wait until the master and all pservers are there.

        What a former job of this name has left in etcd is waited for first (``liveness``).

        Args:
            ready_s: how long to wait for that; None: return as soon as the processes are started.
            is_unwanted: asked during the wait for a former job; nothing is started when it says so.

        Raises:
            JobFailedError: a process ended for good; has its last lines.
            UnavailableError: they were not there in time; says what is missing.
        """
        if self._resources is not None:
            raise UsageError("the cluster runs already")
        self._require_places()
        with contextlib.ExitStack() as stack:
            if self._output_dir is None:
                self._directory = Path(tempfile.mkdtemp(prefix="flightedl-local-"))
                stack.callback(shutil.rmtree, self._directory, ignore_errors=True)
            children = stack.enter_context(Children(self.directory / LOGS))
            if self._output_dir is None:
                children.adopt_directory(self.directory)
            starters: dict[Slot, Starter] = {}
            if self._given_etcd is not None:
                if not self._claim_name(self._given_etcd, stack, is_unwanted):
                    return self
            else:
                etcd = EmbeddedEtcd(children)
                stack.callback(etcd.close)
                first = etcd.start()
                self._etcd_address = etcd.address
                starters[Slot(Role.ETCD, 0)] = lambda count: first if count == 1 else etcd.start_again()
            starters |= self._starters(children)
            cleaner = LeaseCleaner(self._etcd(), self.job, self._clock)
            stack.callback(cleaner.close)
            account = stack.enter_context(self.status())
            self._supervisor = Supervisor(
                children,
                starters,
                self._clock,
                self._limits,
                self._on_event,
                lambda pid: cleaner.revoke_for(pid) if self.revokes_leases else None,
                lambda: _account_of(account),
            )
            stack.callback(self._supervisor.stop)
            self._supervisor.start()
            if ready_s is not None:
                self._wait_until_ready(ready_s)
            self._resources = stack.pop_all()
        atexit.register(self.stop)
        return self

    def stop(self) -> None:
        """Close all sessions of ``connect``, then stop and remove everything. Fine to call twice."""
        sessions, self._sessions = self._sessions, []
        for session in sessions:
            session.close(f"the cluster of job {self.job} was stopped, as at the end of its `with` block")
        resources, self._resources = self._resources, None
        if resources is not None:
            atexit.unregister(self.stop)
            resources.close()

    def connect(self, *, fresh: bool = False, **arguments: Any) -> Job:
        """``fe.connect()`` to this cluster's job; takes the same arguments.

        The session ends with the cluster, if not before.

        Args:
            fresh: Begin the job from nothing, with servers that are started again, where it was begun before.
            **arguments: As of ``fe.connect``.

        Raises:
            UsageError: the cluster does not run, a setting is wrong, or (``fresh``) the job has checkpoints.
        """
        from flightedl.client.session import connect

        if self._resources is None:
            raise UsageError("the cluster does not run: connect inside its `with` block")
        if fresh:
            self._begin_from_nothing()
        names = {field.name for field in fields(TrainerSettings)}
        more = {name: value for name, value in self._more.items() if name in names}
        session = connect(
            **{"etcd": self.etcd_address, "job": self.job, **more, **arguments},
            job_over=self._why_over,
            begin_again="`cluster.connect(fresh=True)` begins it again from nothing",
        )
        self._sessions.append(session)
        return session

    def _why_over(self) -> str:
        """Why the servers will not come back; empty: they may."""
        outcome = self._running().outcome()
        return "" if outcome is None or not outcome.exit_code else explain(outcome)

    def _begin_from_nothing(self) -> None:
        keys = JobKeys(self.job)
        with contextlib.closing(EtcdCoordinator(self._etcd(), clock=self._clock)) as coordinator:
            if coordinator.get(keys.job) is None:
                return
            if self._storage is not None:
                raise UsageError(
                    f"job {self.job} cannot begin from nothing, because {self._storage.url} has its checkpoints: "
                    "give fe.local another checkpoint= or job="
                )
            self.stop()
            if self._given_etcd is not None:
                self._liveness(coordinator).require_gone()
                forget(coordinator, keys)
        self.start()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _require_places(self) -> None:
        """Find out before anything is started whether there is a place for what the job writes.

        Raises:
            UsageError: there is none.
        """
        if self._output_dir is not None:
            make_directory(self._output_dir / LOGS)
        try:
            chosen = self._settings(MasterSettings, checkpoint=self._checkpoint)
            self._storage = job_storage(chosen.checkpoint, self.job)
        except UnavailableError as error:
            raise UsageError(f"no checkpoints can be kept: {error}") from None

    def _claim_name(self, etcd: str, stack: contextlib.ExitStack, is_unwanted: Callable[[], bool]) -> bool:
        """Become the one who starts this job, until ``stack`` is closed; False: that is not wanted any more."""
        keys = JobKeys(self.job)
        chosen = self._settings(MasterSettings, checkpoint=self._checkpoint, etcd=etcd)
        coordinator = stack.enter_context(contextlib.closing(EtcdCoordinator(EtcdAccess.of(chosen), clock=self._clock)))
        liveness = self._liveness(coordinator, is_unwanted)
        held = liveness.claim_name(chosen.lease_ttl_s)
        if held is None:
            return False
        stack.callback(held.release)
        former = former_job(coordinator, keys)
        require_startable(former, etcd, self._storage, resume=chosen.resume)
        if former is not None and former.is_over:
            # All of it is in its last checkpoint.
            liveness.require_gone(held)
            if is_unwanted():
                return False
            forget(coordinator, keys)
        return True

    def _liveness(self, coordinator: Coordinator, is_unwanted: Callable[[], bool] = lambda: False) -> Liveness:
        connector = tool_connector(self._settings(CommonSettings).tls_dir)
        return Liveness(
            coordinator,
            JobKeys(self.job),
            self._clock,
            lambda record: is_master_answering(record, self.job, connector),
            self._on_event or (lambda _: None),
            is_unwanted,
        )

    def _running(self) -> Supervisor:
        if self._supervisor is None:
            raise UsageError("the cluster was not started: use it in a `with` block")
        return self._supervisor

    # Processes

    def _starters(self, children: Children) -> dict[Slot, Starter]:
        # Ports are always free ones: a fixed one from the environment could serve only one of the processes.
        servers = {"port": 0, "metrics_port": 0, "checkpoint": self._checkpoint}
        trainers = 0 if self._trainers is None else self._trainers.count
        master = self._settings(MasterSettings, pservers=self.pservers, trainers=trainers, **servers)
        pserver = self._settings(PserverSettings, **servers)
        more = 1 if self._standby else 0
        slots = [Slot(Role.MASTER, 0), *(Slot(Role.PSERVER, index) for index in range(self.pservers))]
        slots += [Slot(Role.MASTER, 1), Slot(Role.PSERVER, self.pservers)] * more
        cores = available_cores()
        environments = {
            Role.MASTER: child_environment(master, **thread_environment(cores, cores)),
            Role.PSERVER: child_environment(pserver, **thread_environment(self.pservers, cores)),
        }
        found: dict[Slot, Starter] = {
            slot: _starter(children, str(slot), [f"flightedl.{slot.role}"], environments[slot.role]) for slot in slots
        }
        if self._trainers is not None:
            threads = thread_environment(trainers, cores)
            program = ["flightedl.launch.trainer", self._trainers.target, *self._trainers.arguments]
            for index in range(self._trainers.count):
                slot = Slot(Role.TRAINER, index)
                trainer = self._settings(TrainerSettings, output_dir=str(self.directory), process_name=str(slot))
                environment = child_environment(trainer, **threads)
                found[slot] = _starter(children, str(slot), program, environment, self._trainers.on_line)
        return found

    def _etcd(self) -> EtcdAccess:
        return EtcdAccess.of(self._settings(CommonSettings))

    def _settings(self, kind: type[_Settings], **own: Any) -> _Settings:
        names = {field.name for field in fields(kind)}
        more = {name: value for name, value in self._more.items() if name in names}
        if self._given_etcd is None:
            # One of its own is on loopback, and wants no proof.
            more |= dict.fromkeys(("etcd_tls_dir", "etcd_user", "etcd_password_file"), "")
        return settings(kind, **{"etcd": self._etcd_address, "job": self.job, **own, **more})

    def _wait_until_ready(self, timeout_s: float) -> None:
        deadline = self._clock.now() + timeout_s
        missing = "the master"
        with self.status() as status:
            while (outcome := self._running().outcome(_STATUS_POLL_S)) is None:
                try:
                    reply = status.read(_STATUS_TIMEOUT_S)
                    if len(reply.pservers) >= self.pservers:
                        return
                    missing = f"{self.pservers - len(reply.pservers)} of {self.pservers} pservers"
                except FlightedlError as error:
                    missing = f"the master ({error})"
                if self._clock.now() >= deadline:
                    raise UnavailableError(f"the cluster is not ready after {timeout_s:.0f} s: waiting for {missing}")
        raise JobFailedError(explain(outcome))


def make_directory(directory: Path) -> None:
    """Make a directory for results where it is missing.

    Raises:
        UsageError: it cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"the output directory {directory} cannot be made ({error.strerror}): choose another one (--output)"
        ) from None


def _directory_of(value: Any, name: str = "output_dir") -> Path:
    try:
        return Path(value).absolute()
    except TypeError:
        raise UsageError(f"{name} is {value!r:.80}, but must be a path") from None


def _account_of(status: JobStatus) -> Account | None:
    try:
        reply = status.read(_ACCOUNT_TIMEOUT_S)
    except FlightedlError:
        return None
    has_trained = reply.batches > 0 or reply.tasks.done > 0 or reply.epoch > 0
    worst = max(reply.raised, key=lambda each: each.batches - each.repeated, default=None)
    return Account(
        has_trained,
        reply.state == "done",
        reply.tasks.attempts,
        failed_tasks(reply),
        0 if worst is None else worst.batches - worst.repeated,
        "" if worst is None else f"{worst.error} ({worst.place})",
    )


def explain(outcome: Outcome) -> str:
    """An outcome as text: the reason, then the last lines of the process that shows it."""
    return "\n".join([outcome.reason, *(f"  {outcome.slot} | {line}" for line in outcome.last_lines)])


def _starter(
    children: Children,
    name: str,
    module_and_arguments: Sequence[str],
    environment: Mapping[str, str],
    on_line: OnLine | None = None,
) -> Starter:
    command = [sys.executable, "-m", *module_and_arguments]

    def start(_count: int) -> Child:
        return children.start(name, command, environment, on_line=on_line)

    return start


def local(pservers: int = 1, **arguments: Any) -> LocalCluster:
    """A cluster on this machine, to be used in a ``with`` block: see :class:`LocalCluster`."""
    return LocalCluster(pservers, **arguments)
