"""``flightedl scale``: change the number of a running job's trainers or pservers."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import click
import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from flightedl.adapters.clock import SystemClock
from flightedl.errors import EXIT_FAILED, UsageError
from flightedl.launch.status import JobStatus, answered_within, follow_change
from flightedl.messages.scaling import ScaleReply, ScaleRequest

from .clusters import trainers
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
@json_option("The master's last reply as one JSON object.")
@running_job_options
def pservers(
    count: int | None, drain: tuple[int, ...], cancel: bool, timeout_s: float, as_json: bool, **options: Any
) -> int:
    """Change the number of pservers of a job while it trains.

    Blocks move to other pservers one after another, and trainers do not wait. `flightedl run` and `fe.local` start and
    end the processes; elsewhere, start further `flightedl pserver` processes yourself. Without COUNT and options, shows
    the progress of the newest change. Ctrl-C ends the change: blocks that have moved stay where they are.
    """
    if cancel and (count or drain):
        raise UsageError("--cancel ends the change in progress: give it without COUNT and --drain")
    first = ScaleRequest(pservers=count or 0, drain=list(drain), is_cancelled=cancel)
    is_change = bool(count or drain)
    with running_job(options) as job:
        reply = _asked(job, first, timeout_s)
        if is_change:
            try:
                reply = _followed(job, timeout_s, is_silent=as_json)
            except KeyboardInterrupt:
                reply = _asked(job, ScaleRequest(is_cancelled=True), _SLICE_S)
    click.echo(msgspec.json.encode(reply) if as_json else reply.text)
    return 0 if not is_change or (reply.is_done and not reply.is_given_up) else EXIT_FAILED


def _asked(job: JobStatus, request: ScaleRequest, timeout_s: float) -> ScaleReply:
    def ask(left_s: float) -> ScaleReply:
        return job.change("scale", request, ScaleReply, min(left_s, _SLICE_S))

    return answered_within(timeout_s, SystemClock(), ask, lambda _: True)


def _followed(job: JobStatus, timeout_s: float, *, is_silent: bool) -> ScaleReply:
    """Show the progress, on a terminal, until the change or the time limit ends. Return the last reply."""
    console = table_console()
    columns = TextColumn("blocks moved"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")
    progress = Progress(*columns, console=console, transient=True)
    shown: AbstractContextManager[object] = progress if console.is_terminal and not is_silent else nullcontext()
    with shown:
        bar = progress.add_task("", total=None)

        def show(reply: ScaleReply) -> None:
            progress.update(bar, completed=reply.moved, total=reply.total, description=reply.waiting_for)

        return follow_change(job, timeout_s, SystemClock(), show)
