"""``flightedl tasks``: list, retry or drop failed tasks."""

from __future__ import annotations

from typing import Any

import click
import msgspec
from rich.table import Table

from flightedl.errors import UsageError
from flightedl.launch.failed import joined, place_of
from flightedl.messages.status import FailedPiece, TaskCounts
from flightedl.messages.tasks import FailedTasksReply, FailedTasksRequest

from .consoles import plain_table, table_console
from .options import json_option, running_job_options, together
from .running import running_job

_TIMEOUT_S = 10.0


@click.group()
def tasks() -> None:
    """List, retry or drop failed tasks."""


_options = together(json_option(), running_job_options)
_selection = together(
    click.option("--all", "all_of_them", is_flag=True, help="All failed tasks."),
    click.option("--batch", type=click.IntRange(min=0), help="Only this batch of the task."),
    click.option("--task", type=click.IntRange(min=0), help="Only this task."),
    click.option("--epoch", type=click.IntRange(min=1), help="Only this epoch, counted from 1."),
)


@tasks.command("list")
@_options
def list_(as_json: bool, **options: Any) -> None:
    """List failed batches with file, chunk, records, trainer and last error."""
    with running_job(options) as job:
        reply = job.read(_TIMEOUT_S)
    if as_json:
        click.echo(msgspec.json.encode({"tasks": reply.tasks, "failed": reply.failed}))
        return
    if not reply.failed:
        click.echo("no task has failed")
    else:
        table_console().print(failed_table(reply.failed))
    for sentence in _remarks(reply.tasks, reply.failed):
        click.echo(sentence)


@tasks.command()
@_options
@_selection
def retry(**options: Any) -> None:
    """Return failed batches to the queue, and reset the number of their attempts."""
    _change("retry_failed", "{} failed batches are queued again", **options)


@tasks.command()
@_options
@_selection
def drop(**options: Any) -> None:
    """Drop failed batches permanently. They are neither trained on nor listed any more."""
    _change("drop_failed", "{} failed batches are dropped", **options)


def failed_table(failed: list[FailedPiece]) -> Table:
    """Return a table with one row per failed piece."""
    table = plain_table("epoch", "task", "batches", "where", "attempts", "last trainer", "last error")
    for piece in joined(failed):
        batches = f"{piece.first_batch}-{piece.end_batch - 1}"
        row = (str(piece.epoch + 1), str(piece.task), batches, place_of(piece), str(piece.attempts))
        table.add_row(*row, piece.trainer, piece.error)
    return table


def _remarks(counts: TaskCounts, failed: list[FailedPiece]) -> list[str]:
    """Return messages about failed batches that the list omits."""
    listed = sum(piece.end_batch - piece.first_batch for piece in failed)
    found = []
    if counts.failed_batches > listed:
        found.append(f"{counts.failed_batches - listed} more failed batches: see the master's log")
    if counts.dropped_batches:
        found.append(f"{counts.dropped_batches} batches were dropped")
    if counts.forgotten:
        found.append(f"{counts.forgotten} failed pieces of earlier epochs are no longer listed")
    return found


def _change(
    verb: str,
    sentence: str,
    *,
    as_json: bool,
    all_of_them: bool,
    epoch: int | None,
    task: int | None,
    batch: int | None,
    **options: Any,
) -> None:
    if (epoch, task, batch) == (None, None, None) and not all_of_them:
        raise UsageError("select failed tasks with --epoch, --task, --batch, or --all")
    if batch is not None and task is None:
        raise UsageError("--batch needs --task: batches are numbered within their task")
    request = FailedTasksRequest(epoch=None if epoch is None else epoch - 1, task=task, batch=batch)
    with running_job(options) as job:
        reply = job.change(verb, request, FailedTasksReply, _TIMEOUT_S)
    click.echo(msgspec.json.encode(reply) if as_json else sentence.format(reply.batches))
