"""``flightedl run``: a complete job on this machine, from the first process to the summary.

Exit codes:

* 0: every trainer did all its work and every task was done, or a trainer stopped the job (``job.stop``)
* 1: the script crashed, or a process ended too often
* 2: the command, the script or the data must be changed, or the script succeeded but left work undone
* 3: the job cannot continue
* 4: the job ended, but some tasks failed permanently, or the last checkpoint was not written
* 129, 130, 143: stopped by a signal (hang-up, Ctrl-C, SIGTERM)
* 141: stopped because the reader of the output closed its end, as in ``flightedl run ... | head``

If the reader of the output closes its end, the job stops as on Ctrl-C and prints its summary to standard error. To
train without watching, redirect the output to a file.

After a signal, or a notice that the machine is about to end, the job stops in less than five seconds, plus at most
``FLIGHTEDL_DRAIN_S`` if the servers write a last checkpoint. A second signal kills all processes immediately. Only the
output directory and the checkpoints remain.
"""

from __future__ import annotations

import contextlib
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console

from flightedl.adapters.clock import SystemClock
from flightedl.adapters.notices import watched
from flightedl.config import CommonSettings, ServerSettings, settings
from flightedl.domain.diagnosis.profile import advice
from flightedl.errors import EXIT_INCOMPLETE, EXIT_JOB_FAILED, FlightedlError, NotFoundError, UsageError, has_finished
from flightedl.launch.cluster import LocalCluster
from flightedl.launch.failed import failed_tasks, joined, place_of, skipped_of
from flightedl.launch.forking import ForkServer
from flightedl.launch.places import make_directory
from flightedl.launch.policy import Role, Slot
from flightedl.launch.programs import TrainerProgram
from flightedl.launch.progress import Display, Figures, JobConsole, make_display
from flightedl.launch.results import keep_curves, last_checkpoint
from flightedl.launch.supervisor import Outcome
from flightedl.launch.trainer import check_target
from flightedl.launch.verdict import is_finished, is_last_word, verdict
from flightedl.messages.status import StatusReply
from flightedl.ports import Clock

if TYPE_CHECKING:
    from flightedl.launch.status import JobStatus

_REFRESH_S = 0.25
_STATUS_EVERY_S = 0.5
_STATUS_TIMEOUT_S = 2.0
#: Seconds for which an unreachable master is not reported, because it must start first.
_PATIENCE_S = 5.0
#: Maximum number of seconds to wait for the master's final status after every trainer has ended.
_LAST_WORD_S = 10.0
#: Additional seconds if a trainer has stopped the job. The master uses half of them to wait for remaining work.
_STOPPED_WORD_S = 60.0
_LAST_CHECKPOINT = "after a last checkpoint, which may take {:g} s; a second signal ends the job at once"
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of ``flightedl run``."""

    #: Path of a script, or dotted name of a module.
    target: str
    arguments: tuple[str, ...] = ()
    trainers: int = 1
    #: True if the trainers are the ranks of a group.
    is_group: bool = False
    pservers: int = 1
    #: The default is derived from the name of the target.
    job: str | None = None
    checkpoint: str | None = None
    #: True to start a standby master and a spare pserver, which take over immediately. None: only with checkpoints.
    standby: bool | None = None
    #: Number of pserver processes that keep a copy of one pserver's blocks each.
    standby_pservers: int = 0
    #: The default is a new directory under ``runs/``.
    output: Path | None = None
    etcd: str | None = None
    #: True to serve a web page about the job. Ignored if the job uses certificates, because browsers have none.
    page: bool = True
    #: The command that continues from this run's checkpoints; empty if unknown.
    resume_command: str = ""
    #: A fork server that has done its imports, to be closed after the job. If None, one is started.
    forks: ForkServer | None = None
    #: Further settings of all processes.
    more: Mapping[str, Any] = field(default_factory=dict)


def job_name(target: str) -> str:
    """Derive a job's name from a script or module: ``flightedl.examples.flights`` gives ``flights``."""
    last = Path(target).stem if target.endswith(".py") else target.rpartition("/")[2].rpartition(".")[2]
    name = re.sub(r"[^a-z0-9]+", "-", last.lower()).strip("-")[:63].strip("-")
    return name or "job"


def new_output_directory(job: str, parent: Path) -> Path:
    """Create and return the first of the directories ``parent/job``, ``parent/job-2``, ... that does not exist."""
    make_directory(parent)
    number = 1
    while True:
        directory = parent / (job if number == 1 else f"{job}-{number}")
        try:
            directory.mkdir()
        except FileExistsError:
            number += 1
        except OSError as error:
            raise UsageError(
                f"{directory} cannot be created ({error.strerror}): choose another place (--output)"
            ) from None
        else:
            return directory.absolute()


def run_job(options: RunOptions, console: Console) -> int:
    """Run a complete job, show its progress, and return the exit code.

    Raises:
        UsageError: something must be changed first; nothing was started.
    """
    check_target(options.target)
    clock = SystemClock()
    job = job_name(options.target) if options.job is None else options.job
    chosen = settings(CommonSettings, job=job, etcd=options.etcd, notice=options.more.get("notice"))
    display = make_display(console, clock)
    program = TrainerProgram(options.target, options.arguments, options.trainers, display.lines, options.is_group)
    cluster = LocalCluster(
        options.pservers,
        job=job,
        checkpoint=options.checkpoint,
        standby=options.checkpoint is not None if options.standby is None else options.standby,
        standby_pservers=options.standby_pservers,
        etcd=options.etcd,
        output_dir=options.output or new_output_directory(job, Path("runs")),
        trainers=program,
        page=options.page and not settings(CommonSettings, tls_dir=options.more.get("tls_dir")).tls_dir,
        on_event=display.event,
        forks=options.forks,
        **options.more,
    )
    drain_s = settings(ServerSettings).drain_s if options.checkpoint else 0.0
    started_at = clock.now()
    with _stop_requests(console) as requests:
        with display, contextlib.ExitStack() as stack:
            stack.enter_context(watched(chosen, display.event, acknowledges=True))
            stack.callback(cluster.stop)
            cluster.start(ready_s=None, is_unwanted=lambda: bool(requests))
            if not requests:
                if cluster.page_url:
                    display.event(f"the job's page is at {cluster.page_url}")
                display.event(f"`flightedl status --etcd {cluster.etcd_address} --job {job}` shows its state")
            poller = StatusPoller(cluster, clock)
            stack.callback(poller.close)
            cluster.name_of = lambda slot: name_of(slot, poller.status)
            # Call this first, so that a poller that is waiting for a reply does not delay the stop.
            stack.callback(cluster.stop)
            outcome = _watch(cluster, poller, display, clock, options.trainers, requests)
            if has_finished(outcome.exit_code):
                poller.wait_for_last_status()
                found = verdict(poller.status, keeps_checkpoints=bool(options.checkpoint))
                outcome = max(found, outcome, key=lambda each: each.exit_code)
            elif outcome.exit_code < 128:
                poller.refresh()
            if outcome.exit_code >= 128:
                display.event("stopping" + (f" {_LAST_CHECKPOINT.format(drain_s)}" if drain_s else ""))
                cluster.stop(drain_s, is_hurried=lambda: len(requests) > 1)
        wall_s = clock.now() - started_at
        resume = _resume_hint(options, job) if may_be_resumed(outcome, poller.status) else ""
        if signal.SIGPIPE in requests:
            console = JobConsole(stderr=True, highlight=False)
        return _report(console, outcome, poller.status, wall_s, cluster.directory, resume)


def _resume_hint(options: RunOptions, job: str) -> str:
    if not options.checkpoint or not options.resume_command:
        return ""
    saved = last_checkpoint(options.checkpoint, job)
    return f"{saved}; continue from it with: {options.resume_command}" if saved else ""


@contextlib.contextmanager
def _stop_requests(console: Console) -> Iterator[list[int]]:
    """Collect the signals that ask this process to stop. If its output is closed, that counts as SIGPIPE."""
    received: list[int] = []
    if isinstance(console, JobConsole):
        console.on_closed = lambda: received.append(signal.SIGPIPE)

    def receive(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, receive) for number in _STOP_SIGNALS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StatusPoller:
    """Requests the job's status from the master on a separate thread, so that the display never waits.

    The modules are imported when the first reply is due, because the job's processes need the CPU until then.
    """

    def __init__(self, cluster: LocalCluster, clock: Clock) -> None:
        self._cluster = cluster
        self._clock = clock
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._job_status: JobStatus | None = None
        self._read_at = clock.now()
        self.status: StatusReply | None = None
        self._trouble = ""
        self._thread = threading.Thread(target=self._run, name="status-poller", daemon=True)
        self._thread.start()

    def refresh(self) -> StatusReply | None:
        with self._lock:
            try:
                self._job_status = self._job_status or self._cluster.status()
                self.status = self._job_status.read(_STATUS_TIMEOUT_S)
                self._trouble, self._read_at = "", self._clock.now()
            except NotFoundError:
                # Every job starts without a master. If the job has had a master, a successor is about to start.
                self._trouble = "" if self.status is None else "a new one takes over"
            except FlightedlError as error:
                self._trouble = str(error)
            return self.status

    def wait_for_last_status(self) -> None:
        """Poll until the master reports that no work is left. It does so immediately unless it is being replaced."""
        deadline = self._clock.now() + _LAST_WORD_S
        self.status = None
        while True:
            status = self.refresh()
            more_s = _STOPPED_WORD_S if status is not None and status.is_stopped else 0.0
            if (status is not None and is_last_word(status)) or self._clock.now() >= deadline + more_s:
                return
            self._closing.wait(_STATUS_EVERY_S)

    @property
    def trouble(self) -> str:
        """Why the status is outdated; empty if it is current."""
        return self._trouble if self._clock.now() - self._read_at >= _PATIENCE_S else ""

    def _run(self) -> None:
        while not self._closing.wait(_STATUS_EVERY_S):
            self.refresh()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        if self._job_status is not None:
            self._job_status.close()


def _watch(
    cluster: LocalCluster, poller: StatusPoller, display: Display, clock: Clock, trainers: int, requests: list[int]
) -> Outcome:
    started_at, hint = clock.now(), ""
    left_out: list[str] | None = None
    while not requests:
        outcome = cluster.outcome(_REFRESH_S)
        if outcome is not None:
            return outcome
        status = poller.status
        if status is not None and status.state == "failed":
            return Outcome(EXIT_JOB_FAILED, status.error or "the job failed")
        if status is not None and status.batches:
            cluster.preload()
        if status is not None and not hint and (hint := too_few_tasks(status, trainers)):
            display.event(hint)
        if status is not None and status.tasks.total and left_out is None:
            left_out = status.names_left_out
            for sentence in left_out:
                display.event(sentence)
        running = [view for view in cluster.processes if view.slot.role is Role.TRAINER and view.pid is not None]
        scripts = {str(view.slot): view.runs_s for view in running}
        elapsed_s = clock.now() - started_at
        display.update(Figures(elapsed_s, status, len(running), trainers, cluster.pservers, poller.trouble, scripts))
    return Outcome(128 + requests[0], stop_reason(requests[0]))


def name_of(slot: Slot, status: StatusReply | None) -> str:
    """Return the name of a slot's process, such as ``pserver-0 (process pserver-3)``."""
    servers = [] if status is None or slot.role is not Role.PSERVER else status.pservers
    return next((each.name for each in servers if each.process == str(slot)), str(slot))


def stop_reason(number: int) -> str:
    """Return why a job was stopped from outside, given the number of the signal."""
    if number == signal.SIGPIPE:
        return "stopped: its output is no longer read (redirect it to a file to train without watching)"
    return f"stopped by {signal.Signals(number).name}"


def _report(
    console: Console,
    outcome: Outcome,
    status: StatusReply | None,
    wall_s: float,
    directory: Path,
    resume: str,
) -> int:
    failed = 0 if status is None else failed_tasks(status)
    lines = list(summary(outcome, status, failed, wall_s, directory))
    if status is not None and (hint := advice(status.profile)):
        lines.append(f"trainers' time: {hint}")
    lines += [*keep_curves(directory), *filter(None, [resume])]

    def say(line: str, style: str | None = None) -> None:
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    for line in lines:
        say(f"flightedl: {line}")
    if outcome.reason:
        say(f"flightedl: {outcome.reason}", "red" if outcome.exit_code else "yellow")
    # At the end, print the output that shows why the job ended.
    for line in outcome.last_lines:
        say(f"{outcome.slot} | {line}")
    return outcome.exit_code


def may_be_resumed(outcome: Outcome, status: StatusReply | None) -> bool:
    """True if the job is not done, so that it can be continued from its checkpoint."""
    is_done = outcome.exit_code in {0, EXIT_INCOMPLETE}
    return status is not None and (status.is_stopped or not is_done)


def too_few_tasks(status: StatusReply, trainers: int) -> str:
    """Return a suggested remedy if there are fewer tasks than trainers; empty otherwise."""
    total = status.tasks.total
    if not 0 < total < trainers or status.is_growing:
        return ""
    return (
        f"an epoch has {total} task{'' if total == 1 else 's'}, fewer than the {trainers} trainers, so some are "
        "idle: cut the data into more files with `flightedl dataset split`; "
        "for Parquet, job.dataset(..., records_per_task=) also helps"
    )


def summary(
    outcome: Outcome, status: StatusReply | None, failed: int, wall_s: float, directory: Path
) -> tuple[str, ...]:
    """Return the last lines of a run: its duration, the work done, and the output directory."""
    ended = "done" if outcome.exit_code in {0, EXIT_INCOMPLETE} else "ended"
    if outcome.exit_code == 0 and status is not None and status.is_stopped:
        ended = f"stopped by {status.stopped_by} ({status.stop_reason})"
    parts = [f"{ended} in {wall_s:.1f} s"]
    lines: list[str] = []
    if status is not None:
        if status.epochs is not None and status.state == "done" and not status.is_stopped:
            parts.append(f"{status.epochs} epoch{'' if status.epochs == 1 else 's'}")
        parts.append(f"{status.records:,} records")
        if status.tasks.total:
            which = "the last epoch" if is_finished(status) and not status.is_stopped else f"epoch {status.epoch + 1}"
            parts.append(f"{status.tasks.done} of {status.tasks.total} tasks of {which} done")
        parts.append(f"{failed} tasks failed")
        if skipped := skipped_of(status):
            parts.append(f"{skipped} skipped")
        failures = joined(status.failed)[:10]
        lines = [f"failed: epoch {p.epoch + 1} task {p.task}, {place_of(p)}: {p.error}" for p in failures]
    return (*lines, ", ".join(parts), f"output and logs are in {directory}")
