"""``flightedl scale``: change the number of a running job's trainers or pservers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import click
import msgspec
from msgspec.structs import replace
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from flightedl.adapters.clock import SystemClock
from flightedl.config import CommonSettings, settings
from flightedl.errors import (
    EXIT_FAILED,
    AuthenticationError,
    DeadlineError,
    NotFoundError,
    UnavailableError,
    UsageError,
)
from flightedl.launch.kubernetes.resizing import ask, resize
from flightedl.launch.kubernetes.submitting import find
from flightedl.launch.status import JobStatus, answered_within, follow_change
from flightedl.messages.scaling import ScaleReply, ScaleRequest
from flightedl.ports import Cluster

from .clusters import cluster_of, cluster_options, only_job, trainers
from .consoles import table_console
from .options import Number, json_option, running_job_options
from .running import running_job

_SLICE_S = 5.0


@click.group()
def scale() -> None:
    """Change the number of trainers or pservers of a running job."""


scale.add_command(trainers)


@scale.command()
@click.argument("count", type=click.IntRange(min=1), required=False)
@click.option("--drain", type=click.IntRange(min=0), multiple=True, help="Move this pserver's blocks to the others")
@click.option("--cancel", is_flag=True, help="End the change in progress; blocks that have moved stay where they are")
@click.option("--timeout-s", type=Number(min=0), default=3600.0, show_default=True, help="Longest wait.")
@click.option("--no-wait", is_flag=True, help="Only begin the change.")
@json_option("The master's last reply as one JSON object.")
@running_job_options
@cluster_options
def pservers(
    count: int | None,
    drain: tuple[int, ...],
    cancel: bool,
    timeout_s: float,
    no_wait: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Change the number of pservers of a job while it trains.

    Blocks move to other pservers one after another, and trainers do not wait. `flightedl run`, `fe.local` and
    Kubernetes start and end the processes; elsewhere, start further `flightedl pserver` processes yourself. Without
    COUNT and options, shows the progress of the newest change. Ctrl-C ends the change: blocks that have moved stay
    where they are. If neither --etcd nor FLIGHTEDL_ETCD names an etcd, the job is looked for on the cluster of
    `kubectl` first.
    """
    if cancel and (count or drain):
        raise UsageError("--cancel ends the change in progress: give it without COUNT and --drain")
    first = ScaleRequest(pservers=count or 0, drain=list(drain), is_cancelled=cancel)
    is_change = bool(count or drain) and not no_wait
    submitted = _submitted(options)
    if submitted is not None and no_wait and count:
        raise UsageError("surplus pods can only be removed after the change, so omit --no-wait on Kubernetes")
    with _progress(is_silent=as_json) as show:
        if submitted is not None:
            cluster, name = submitted
            clock = SystemClock()
            reply = resize(cluster, name, first, timeout_s, clock, show) if is_change else ask(cluster, name, first)
        else:
            del options["namespace"], options["context"]
            reply = _changed(options, first, timeout_s, show, is_change=is_change)
    click.echo(msgspec.json.encode(reply) if as_json else reply.text)
    return 0 if not is_change or (reply.is_done and not reply.is_given_up) else EXIT_FAILED


def _submitted(options: Mapping[str, Any]) -> tuple[Cluster, str] | None:
    """Return the cluster and the name of a job that was submitted; None if the job is reached through its etcd."""
    chosen = settings(CommonSettings, etcd=options["etcd"], job=options["job"])
    is_on_cluster = bool(options["namespace"] or options["context"])
    if chosen.etcd != CommonSettings().etcd or not (is_on_cluster or shutil.which("kubectl")):
        return None
    cluster = cluster_of(options)
    try:
        return cluster, find(cluster, options["job"] or only_job(cluster)).job
    except (NotFoundError, AuthenticationError, UnavailableError, DeadlineError):
        if is_on_cluster:
            raise
        return None


def _changed(
    options: Mapping[str, Any],
    first: ScaleRequest,
    timeout_s: float,
    show: Callable[[ScaleReply], None],
    *,
    is_change: bool,
) -> ScaleReply:
    """Send a request to the master. If it begins a change, wait for its end. Return the last reply."""
    with running_job(options) as job:
        clock = SystemClock()
        deadline = clock.now() + timeout_s
        if first.is_cancelled:
            # A request that is repeated at a master's successor must not end the next change.
            running = _asked(job, ScaleRequest(), timeout_s)
            if running.is_done:
                return running
            first = replace(first, change=running.change)
        reply = _asked(job, first, max(deadline - clock.now(), 0.0))
        if is_change:
            try:
                reply = follow_change(job.scaling, max(deadline - clock.now(), 0.0), clock, show)
            except KeyboardInterrupt:
                reply = _asked(job, ScaleRequest(is_cancelled=True, change=reply.change), _SLICE_S)
        return reply


def _asked(job: JobStatus, request: ScaleRequest, timeout_s: float) -> ScaleReply:
    def once(left_s: float) -> ScaleReply:
        return job.change("scale", request, ScaleReply, min(left_s, _SLICE_S))

    return answered_within(timeout_s, SystemClock(), once, lambda _: True, is_reached=lambda: job.is_reached)


@contextmanager
def _progress(*, is_silent: bool) -> Iterator[Callable[[ScaleReply], None]]:
    """Yield a function that shows the progress in a reply, if the output is a terminal."""
    console = table_console()
    if is_silent or not console.is_terminal:
        yield lambda _: None
        return
    columns = TextColumn("blocks moved"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=None)

        def show(reply: ScaleReply) -> None:
            progress.update(bar, completed=reply.moved, total=reply.total, description=reply.waiting_for)

        yield show
