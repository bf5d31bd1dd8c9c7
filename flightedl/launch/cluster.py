"""A job's servers, and optionally its trainers, as processes on this machine (``fe.local()``).

::

    with fe.local(pservers=2) as cluster:
        job = cluster.connect()

etcd, the master and the pservers are real processes, watched by a supervisor. When the block ends, all processes, ports
and temporary directories are removed; the logs remain if ``output_dir`` is given.
"""

from __future__ import annotations

import atexit
import contextlib
import shutil
import signal
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from flightedl.adapters.clock import SystemClock
from flightedl.config import LOOPBACK, TrainerSettings, host_port
from flightedl.errors import FencedError, FlightedlError, JobFailedError, UnavailableError, UsageError
from flightedl.launch.etcd import EmbeddedEtcd
from flightedl.launch.forking import ForkServer, fork_server
from flightedl.launch.lease_cleaner import LeaseCleaner
from flightedl.launch.places import LOGS, directory_of, free_ports, make_directory
from flightedl.launch.policy import Account, Limits, Role, Slot
from flightedl.launch.processes import Child, Children
from flightedl.launch.programs import Programs, TrainerProgram
from flightedl.launch.scaling import DesiredPservers
from flightedl.launch.supervisor import OnEvent, Outcome, ProcessView, Starter, Supervisor, explain
from flightedl.ports import Storage
from flightedl.process.fork_guard import GUARD

if TYPE_CHECKING:
    from flightedl.client.session import Job
    from flightedl.launch.status import JobStatus

_STATUS_POLL_S = 0.1
_STATUS_TIMEOUT_S = 2.0
_NOT_STARTED = "the cluster was not started: use it in a `with` block"


class LocalCluster:
    """An etcd, a master and several pservers on this machine.

    Args:
        pservers: Number of parameter servers; 0 for trainers that only share data.
        job: The job's name; it distinguishes the jobs of one ``etcd``.
        checkpoint: URL for checkpoints and the dataset's index; None disables checkpoints.
        etcd: ``host:port`` of a running etcd to use; None starts one for the cluster.
        output_dir: Directory for logs (``logs/``) and for the script's output; None: a temporary directory.
        trainers: Program to run as trainers; None: no trainers.
        standby: Start an additional master and an additional pserver that take over immediately when one dies.
        standby_pservers: Number of pserver processes that keep a copy of one pserver's blocks each, and take over
            without loading a checkpoint when it dies.
        record: Directory in which every process records its events, for ``flightedl replay``; None disables recording.
        page: Let the master serve a web page of the job, at ``page_url``.
        limits: Restart limits of the supervisor.
        on_event: Receives a sentence about each process that ends or is replaced.
        forks: A fork server with its imports done, which the caller closes after the cluster; None starts one.
        more: Further settings of all processes, such as ``lease_ttl_s``.

    Raises:
        UsageError: a setting is wrong, or the etcd program is missing.
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
        standby_pservers: int = 0,
        record: str | Path | None = None,
        page: bool = False,
        limits: Limits | None = None,
        on_event: OnEvent | None = None,
        forks: ForkServer | None = None,
        **more: Any,
    ) -> None:
        if record is not None:
            more["record"] = str(directory_of(record, "record"))
        page_port = free_ports(1)[0] if page else 0
        #: URL of the job's page, which works once a master is running; empty if there is no page.
        self.page_url = f"http://{host_port(LOOPBACK, page_port)}/" if page else ""
        self._programs = Programs(job, pservers, checkpoint, etcd, trainers, standby, page_port, standby_pservers, more)
        self.job = job
        self.pservers = pservers
        self._output_dir = None if output_dir is None else directory_of(output_dir)
        self._limits = limits
        self._report: OnEvent = on_event or (lambda _: None)
        self._forks = forks
        self._clock = SystemClock()
        #: True to end a process's leases as soon as the supervisor notices the end of the process. False to let the
        #: leases expire, as on a cluster without a supervisor.
        self.revokes_leases = True
        self._resources: contextlib.ExitStack | None = None
        self._supervisor: Supervisor | None = None
        self._storage: Storage | None = None
        #: Imports what the trainers' script imports, for later trainers. Called when processors are free.
        self.preload: Callable[[], None] = lambda: None
        #: Name of a slot's process for users. Set by a launcher that knows the job's status.
        self.name_of: Callable[[Slot], str] | None = None
        #: Sessions created by ``connect``.
        self._sessions: list[Job] = []
        self._directory: Path | None = self._output_dir

    # State

    @property
    def etcd_address(self) -> str:
        """``host:port`` of the job's etcd. Valid once the cluster has started."""
        if self._programs.etcd_address is None:
            raise UsageError(_NOT_STARTED)
        return self._programs.etcd_address

    @property
    def directory(self) -> Path:
        """Directory of logs and results. Valid once the cluster has started."""
        if self._directory is None:
            raise UsageError(_NOT_STARTED)
        return self._directory

    @property
    def processes(self) -> tuple[ProcessView, ...]:
        """All processes, with their pids and the number of times that each was started."""
        return self._running().processes()

    def pid(self, role: str, index: int = 0) -> int | None:
        """Return the pid of a process, or None if it does not exist, has finished or is being replaced.

        Args:
            role: "etcd", "master", "pserver" or "trainer".
            index: Index of the process in its role.
        """
        child = self._child(role, index)
        return None if child is None else child.pid

    def kill(self, role: str, index: int = 0, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal to one process, and return its pid.

        Args:
            role: "etcd", "master", "pserver" or "trainer".
            index: Index of the process in its role.
            number: The signal.

        Raises:
            UnavailableError: the process is not running at the moment.
            UsageError: there is no such role.
        """
        child = self._child(role, index)
        if child is None:
            raise UnavailableError(f"{role} {index} is not running at the moment")
        child.send(number)
        return child.pid

    def outcome(self, timeout_s: float = 0.0) -> Outcome | None:
        """Return how the job ended, or None if it has not ended within ``timeout_s`` seconds."""
        return self._running().outcome(timeout_s)

    def scale(self, pservers: int, timeout_s: float = 600.0) -> None:
        """Change the number of pservers, and wait up to ``timeout_s`` until the blocks have moved. Trainers continue.

        Raises:
            UsageError: the number is impossible, or another change is in progress.
            NotReadyError: no trainer has declared a model yet.
            JobFailedError: the job has ended.
            UnavailableError: the blocks have not all moved in time, or the change was given up.
        """
        from flightedl.launch.status import follow_change
        from flightedl.messages.scaling import ScaleReply, ScaleRequest

        if pservers < 1:
            raise UsageError(f"pservers is {pservers!r:.80}, but a model needs at least 1 parameter server")
        with self.status() as job:
            job.change("scale", ScaleRequest(pservers=pservers), ScaleReply, 10.0)
            reply = follow_change(job.scaling, timeout_s, self._clock)
        if not reply.is_done or reply.is_given_up:
            raise UnavailableError(f"the pservers have not changed: {reply.text}")

    def status(self) -> JobStatus:
        """Return a connection to the master for status requests. The caller must close it."""
        # Imported lazily: the import takes as long as starting etcd, and is not needed until processes are running.
        from flightedl.launch.status import JobStatus

        return JobStatus(self._programs.common, self._clock)

    # Lifecycle

    def start(self, *, ready_s: float | None = 60.0, is_unwanted: Callable[[], bool] = lambda: False) -> Self:
        """Start all processes, and wait until the master and all pservers are ready.

        First waits until the leases of an earlier job with this name have ended (see ``liveness``).

        Args:
            ready_s: Time limit of the wait; None: return as soon as the processes are started.
            is_unwanted: Polled while waiting for an earlier job; True cancels the start.

        Raises:
            JobFailedError: a process ended and will not be restarted; contains its last lines.
            UnavailableError: the servers were not ready in time; names the missing ones.
        """
        if self._resources is not None:
            raise UsageError("the cluster is already running")
        self._require_places()
        programs = self._programs
        with contextlib.ExitStack() as stack:
            forks = self._forks or stack.enter_context(fork_server(programs.trainer_count))
            stack.callback(forks.preload, "")
            self.preload = partial(forks.preload, "" if programs.trainers is None else programs.trainers.target)
            if self._output_dir is None:
                self._directory = Path(tempfile.mkdtemp(prefix="flightedl-local-"))
                stack.callback(shutil.rmtree, self._directory, ignore_errors=True)
            children = stack.enter_context(Children(self.directory / LOGS))
            if self._output_dir is None:
                children.adopt_directory(self.directory)
            starters: dict[Slot, Starter] = {}
            if not programs.has_own_etcd:
                from flightedl.launch.naming import claim

                chosen = programs.master_settings()
                if not claim(stack, chosen, self._storage, self._clock, self._report, is_unwanted):
                    return self
            else:
                etcd = EmbeddedEtcd(children)
                stack.callback(etcd.close)
                if etcd.warning:
                    self._report(etcd.warning)
                first = etcd.start()
                programs.etcd_address = etcd.address
                starters[Slot(Role.ETCD, 0)] = lambda count: first if count == 1 else etcd.start_again()
            starters |= programs.starters(children, self.directory, forks)
            cleaner = LeaseCleaner(programs.common, self._clock)
            stack.callback(cleaner.close)
            self._supervisor = Supervisor(
                children,
                starters,
                self._clock,
                self._limits,
                self._report,
                lambda pid: cleaner.revoke_for(pid) if self.revokes_leases else None,
                self._account,
                lambda slot: str(slot) if self.name_of is None else self.name_of(slot),
                is_group=programs.has_group,
            )
            stack.callback(self._supervisor.stop)
            self._supervisor.start()
            spare_count = self._programs.spare_pservers
            supervisor = self._supervisor

            def resize(count: int) -> None:
                self.pservers = count
                supervisor.resize_pservers(
                    count + spare_count, lambda slot: programs.pserver_starter(children, forks, slot, count)
                )

            stack.callback(DesiredPservers(programs.common, self.pservers, self._clock, resize).close)
            if ready_s is not None:
                self._wait_until_ready(ready_s)
            self._resources = stack.pop_all()
        GUARD.register(self)
        atexit.register(self.stop)
        return self

    def stop(self, drain_s: float = 0.0, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Close all sessions opened by ``connect``, then stop all processes and delete temporary files.

        Args:
            drain_s: Additional seconds for the servers to write a last checkpoint.
            is_hurried: Polled while stopping; all processes are killed once it returns True.

        Raises:
            Exception: the error that has ended the loop of a session.
        """
        if GUARD.is_forked:
            return
        GUARD.forget(self)
        sessions, self._sessions = self._sessions, []
        with contextlib.ExitStack() as stack:
            resources, self._resources = self._resources, None
            if resources is not None:
                atexit.unregister(self.stop)
                stack.callback(resources.close)
                stack.callback(self._running().stop, drain_s, is_hurried)
            for session in sessions:
                stack.enter_context(contextlib.suppress(FencedError))
                why = f"the cluster of job {self.job} was stopped, as at the end of its `with` block"
                stack.callback(session.close, why)

    def connect(self, *, fresh: bool = False, **arguments: Any) -> Job:
        """Connect to this cluster's job with the arguments of ``fe.connect()``.

        The session ends when the cluster ends, or earlier if the session is closed.

        Args:
            fresh: If the job was started before, restart the servers and begin it from scratch.
            **arguments: Arguments of ``fe.connect``.

        Raises:
            UsageError: the cluster is not running, a setting is wrong, or (``fresh``) the job has checkpoints.
        """
        from flightedl.client.session import connect

        if self._resources is None:
            raise UsageError("the cluster is not running: connect inside its `with` block")
        if fresh:
            self._begin_from_nothing()
        more = self._programs.more_of(TrainerSettings)
        session = connect(
            **{"etcd": self.etcd_address, "job": self.job, **more, **arguments},
            job_over=self._why_over,
            begin_again="`cluster.connect(fresh=True)` restarts it from scratch",
        )
        self._sessions.append(session)
        return session

    def _why_over(self) -> str:
        outcome = self._running().outcome()
        return "" if outcome is None or not outcome.exit_code else explain(outcome)

    def _begin_from_nothing(self) -> None:
        from flightedl.launch.former import forget
        from flightedl.launch.naming import liveness_of

        looking = partial(liveness_of, self._programs.common, self._clock, self._report)
        with looking() as liveness:
            if liveness.coordinator.get(liveness.keys.job) is None:
                return
        if self._storage is not None:
            raise UsageError(
                f"job {self.job} cannot start from scratch, because {self._storage.url} has its checkpoints: "
                "pass another checkpoint= or job= to fe.local"
            )
        self.stop()
        if not self._programs.has_own_etcd:
            with looking() as liveness:
                liveness.require_ended()
                forget(liveness.coordinator, liveness.keys)
        self.start()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _require_places(self) -> None:
        """Check that the job can write its files, before anything is started.

        Raises:
            UsageError: a directory cannot be created, or the storage cannot be reached.
        """
        if self._output_dir is not None:
            make_directory(self._output_dir / LOGS)
        if not (url := self._programs.master_settings().checkpoint):
            return
        from flightedl.coordination.checkpoint_places import job_storage

        try:
            self._storage = job_storage(url, self.job)
        except UnavailableError as error:
            raise UsageError(f"checkpoints cannot be stored: {error}") from None

    def _account(self) -> Account | None:
        from flightedl.launch.status import account_of

        with self.status() as status:
            return account_of(status)

    def _running(self) -> Supervisor:
        GUARD.check()
        if self._supervisor is None:
            raise UsageError(_NOT_STARTED)
        return self._supervisor

    def _child(self, role: str, index: int) -> Child | None:
        if role not in list(Role):
            raise UsageError(f"the role {role!r:.80} must be one of {', '.join(Role)}")
        return self._running().child(Slot(Role(role), index))

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


def local(pservers: int = 1, **arguments: Any) -> LocalCluster:
    """Return a cluster on this machine, to be used in a ``with`` block.

    Args:
        pservers: Number of parameter servers; 0 for trainers that only share data.
        **arguments: Other arguments of :class:`LocalCluster`.
    """
    return LocalCluster(pservers, **arguments)
