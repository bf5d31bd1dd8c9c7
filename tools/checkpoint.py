"""``flightedl checkpoint``: list, save, verify, restore and export checkpoints."""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import click

from flightedl.adapters.clock import SystemClock
from flightedl.adapters.storage import open_storage
from flightedl.config import require_job_name
from flightedl.coordination.checkpoint_places import export_model, export_table
from flightedl.domain.checkpoint.manifest import Manifest, Skipped, manifest_name
from flightedl.domain.checkpoint.restoring import saved_tables
from flightedl.errors import EXIT_FAILED, CorruptError, NotFoundError, UsageError
from flightedl.formats.checkpoint_files import found_checkpoints, verify
from flightedl.formats.model_files import WRITERS
from flightedl.launch.status import answered_within
from flightedl.messages.checkpoints import CheckpointReply, CheckpointRequest
from flightedl.ports import Storage

from .options import Number, running_job_options, together
from .running import running_job

_SLICE_S = 5.0
_WAIT_S = 2.0


@click.group()
def checkpoint() -> None:
    """List, save, verify, restore and export checkpoints."""


_place = together(
    click.option("--job", metavar="NAME", help="Name of the job [the only one at the URL]"), click.argument("url")
)


def _storage(url: str, job: str | None) -> tuple[Storage, str]:
    """Return the job's storage and the job's name."""
    if job is not None:
        require_job_name(job)
    else:
        names = {file.name.partition("/")[0] for file in open_storage(url).list("") if "/manifest.json" in file.name}
        if not names:
            raise NotFoundError(f"{url} has no checkpoint")
        if len(names) > 1:
            raise UsageError(f"{url} has checkpoints of {', '.join(sorted(names))}: choose a job with --job")
        job = names.pop()
    return open_storage(f"{url.rstrip('/')}/{job}"), job


def chosen_checkpoint(url: str, job: str | None, number: int | None) -> tuple[Storage, Manifest]:
    """Return a job's storage and one of its checkpoints, by default the newest one."""
    storage, name = _storage(url, job)
    found = found_checkpoints(storage, name)
    for each in found:
        if isinstance(each, Manifest) and number in {None, each.number}:
            return storage, each
        if isinstance(each, Skipped) and number == each.number:
            raise CorruptError(f"checkpoint {number} cannot be used: {each.reason}")
    which = "no complete checkpoint" if number is None else f"no checkpoint {number}"
    raise NotFoundError(f"{storage.url} has {which}; `flightedl checkpoint list` shows what it has")


def _is_there(storage: Storage, number: int) -> bool:
    """True unless the running job has meanwhile deleted the checkpoint."""
    return bool(storage.list(manifest_name(number)))


@checkpoint.command("list")
@_place
def list_command(url: str, job: str | None) -> None:
    """List all checkpoints of a job, newest first."""
    storage, name = _storage(url, job)
    found = found_checkpoints(storage, name)
    if not found:
        raise NotFoundError(f"{storage.url} has no checkpoint: check --job")
    users: defaultdict[int, list[int]] = defaultdict(list)
    for each in found:
        for shard in each.shards if isinstance(each, Manifest) else ():
            for link in shard.links:
                users[link.number].append(each.number)
    known = {each.number: each for each in found}
    for number in sorted(known.keys() | users.keys(), reverse=True):
        if number not in known:
            click.echo(f"c-{number:<6} base of c-{min(users[number])} to c-{max(users[number])}")
            continue
        each = known[number]
        if isinstance(each, Skipped):
            click.echo(f"c-{number:<6} cannot be used: {each.reason}")
            continue
        when = datetime.fromtimestamp(each.created_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        size = sum(shard.size_bytes for shard in each.shards) / 1e6
        versions = sorted({shard.lowest_version for shard in each.shards if shard.blocks})
        highest = max((shard.highest_version for shard in each.shards), default=0)
        first = min((shard.links[0].number for shard in each.shards if shard.links), default=None)
        on = "" if first is None else f"  on c-{first}"
        click.echo(
            f"c-{each.number:<6} {when}  {each.pserver_count} pservers  {size:,.1f} MB  "
            f"versions {versions[0] if versions else 0}-{highest}{on}"
        )


@checkpoint.command()
@running_job_options
@click.option("--timeout-s", type=Number(min=0), default=120.0, show_default=True, help="Longest wait.")
def save(timeout_s: float, **options: Any) -> int:
    """Save a checkpoint of a running job and wait until it is complete."""
    clock = SystemClock()
    ticket: int | None = None
    with running_job(options) as job:

        def ask(left_s: float) -> CheckpointReply:
            nonlocal ticket
            request = CheckpointRequest(ticket=ticket, reason="a command", wait_s=min(left_s / 2, _WAIT_S))
            reply = job.checkpoint(request, min(left_s, _SLICE_S))
            ticket = reply.ticket
            return reply

        reply = answered_within(timeout_s, clock, ask, lambda reply: reply.complete, is_reached=lambda: job.is_reached)
    if not reply.complete:
        click.echo(f"not complete after {timeout_s:.0f} s{': ' + reply.trouble if reply.trouble else ''}")
        return EXIT_FAILED
    click.echo(f"checkpoint c-{reply.latest} is complete")
    return 0


@checkpoint.command("verify")
@_place
@click.option("--number", type=click.IntRange(min=1), help="Verify only this checkpoint [all]")
def verify_command(url: str, job: str | None, number: int | None) -> int:
    """Read checkpoints completely and verify their checksums."""
    storage, name = _storage(url, job)
    is_good = True
    found = [each for each in found_checkpoints(storage, name) if number in {None, each.number}]
    if not found:
        raise NotFoundError(f"{storage.url} has no checkpoint {'' if number is None else number}")
    for each in found:
        try:
            if isinstance(each, Skipped):
                raise CorruptError(each.reason)  # noqa: TRY301 - reported like the errors of verify
            click.echo(f"c-{each.number:<6} good, {verify(storage, each) / 1e6:,.1f} MB")
        except (CorruptError, NotFoundError) as error:
            if not _is_there(storage, each.number):
                click.echo(f"c-{each.number:<6} has just been deleted in favor of newer ones")
                continue
            is_good = False
            click.echo(f"c-{each.number:<6} cannot be used: {error}")
    return 0 if is_good else EXIT_FAILED


@checkpoint.command()
@_place
@click.argument("number", type=int)
@click.option("--yes", is_flag=True, help="Skip the confirmation.")
def restore(url: str, job: str | None, number: int, yes: bool) -> None:
    """Make checkpoint NUMBER the newest by deleting later ones.

    The job must not be running. Start it with --resume afterwards.
    """
    storage, manifest = chosen_checkpoint(url, job, number)
    verify(storage, manifest)
    newer = [each.number for each in found_checkpoints(storage, manifest.job) if each.number > number]
    if newer and not yes:
        click.confirm(f"delete {', '.join(f'c-{each}' for each in newer)}?", abort=True)
    for each in newer:
        storage.delete(manifest_name(each))
    click.echo(f"c-{number} is now the newest checkpoint: start the job with --resume")


@checkpoint.command()
@_place
@click.argument("output")
@click.option("--format", "kind", type=click.Choice(sorted(WRITERS)), help="Format of the file [by its name]")
@click.option("--number", type=click.IntRange(min=1), help="Number of the checkpoint [the newest]")
@click.option("--tables", "has_tables", is_flag=True, help="Export the rows of all tables.")
@click.option("--table", "tables", multiple=True, metavar="NAME", help="Export rows of this table; may be repeated.")
@click.option("--slots", is_flag=True, help="Include the optimizer state of the rows.")
def export(
    url: str,
    job: str | None,
    output: str,
    *,
    kind: str | None,
    number: int | None,
    has_tables: bool,
    tables: tuple[str, ...],
    slots: bool,
) -> None:
    """Export a checkpoint's model to OUTPUT, the path or URL of a file.

    With --tables or --table, the command exports the rows of tables instead, as one Parquet file per table, to the
    folder OUTPUT.
    """
    if kind and (has_tables or tables):
        raise UsageError("tables are always written as Parquet: omit --format")
    if slots and not (has_tables or tables):
        raise UsageError("--slots applies to tables: add --tables or --table NAME")
    while True:
        storage, manifest = chosen_checkpoint(url, job, number)
        try:
            if has_tables or tables:
                found = tables or tuple(table.name for table in saved_tables(manifest))
                if not found:
                    raise UsageError(f"checkpoint c-{manifest.number} has no tables")
                places = [
                    export_table(storage, manifest, each, f"{output.rstrip('/')}/{file_of(each)}", has_slots=slots)
                    for each in found
                ]
                name = ", ".join(places)
            else:
                name = export_model(storage, manifest, output, kind or "")
        except NotFoundError:
            if number is None and not _is_there(storage, manifest.number):
                continue  # The running job has replaced this checkpoint with a newer one.
            raise
        click.echo(f"c-{manifest.number} written to {name}")
        return


def file_of(table: str) -> str:
    """Return a file name for a table, whose own name may contain any characters."""
    return f"{quote(table, safe=' ')}.parquet"
