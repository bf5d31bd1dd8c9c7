"""``flightedl status``."""

from __future__ import annotations

from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from flightedl.domain.diagnosis.profile import in_words
from flightedl.launch.failed import alarms_of, joined, place_of, skipped_of
from flightedl.messages.status import (
    STARTING_S,
    USUAL_REFUSALS,
    ConsumerStatus,
    ServerStatus,
    StatusReply,
    TableCounts,
    TrainerStatus,
)

from .consoles import plain_table, table_console
from .mode import described
from .options import json_option, running_job_options
from .running import running_job

_TIMEOUT_S = 5.0


@click.command()
@running_job_options
@json_option("The master's reply as one JSON object.")
def status(as_json: bool, **options: Any) -> None:
    """Show the status of a running job.

    Shows its processes with their generations, the epoch, the tasks by state, and the versions of the parameters.
    """
    with running_job(options) as job:
        reply = job.read(_TIMEOUT_S)
    if as_json:
        click.echo(msgspec.json.encode(reply))
        return
    show(reply, table_console())


def show(reply: StatusReply, console: Console) -> None:
    """Print a status for people."""
    for name, value in facts(reply):
        console.print(f"{name:<12} {value}", markup=False, soft_wrap=True)
    console.print()
    console.print(processes(reply))
    for piece in joined(reply.failed):
        console.print(
            f"failed: epoch {piece.epoch + 1} task {piece.task}, {place_of(piece)}, {piece.attempts} attempts, "
            f"last by {piece.trainer}: {piece.error}",
            markup=False,
            soft_wrap=True,
        )


def facts(reply: StatusReply) -> list[tuple[str, str]]:
    """Return the lines about the entire job, as names and values."""
    tasks = reply.tasks
    last = "" if reply.epochs is None else f" of {reply.epochs}"
    found = [("job", reply.job), ("state", reply.state)]
    if reply.waiting_for:
        found.append(("waiting for", reply.waiting_for.removeprefix("waiting for ")))
    if reply.error:
        found.append(("error", reply.error))
    if reply.is_stopped:
        found.append(("stopped by", f"{reply.stopped_by}: {reply.stop_reason}"))
    found += group_of(reply)
    if tasks.total:
        counts = f"{tasks.todo} todo, {tasks.pending} pending, {tasks.done} done, {tasks.failed} failed"
        number = reply.epoch + 1 if reply.epochs is None else min(reply.epoch + 1, reply.epochs)
        found.append(("epoch", f"{number}{last}"))
        copies = f", {tasks.copies} copies assigned" if tasks.copies else ""
        growing = " so far" if reply.is_growing else ""
        found.append(("tasks", f"{counts}, {tasks.total} in all{growing}{copies}"))
    skipped = skipped_of(reply)
    more = f", {skipped} skipped" if skipped else ""
    found.append(("records", f"{reply.records:,}, {reply.records_per_s:,.0f} per second{more}"))
    found.extend((name, f"{value:.6g}") for name, value in sorted(reply.metrics.items()))
    for each in reply.evaluations:
        means = ", ".join(f"{name} {value:.6g}" for name, value in each.metrics.items())
        found.append((each.name, f"{each.tasks.done} of {each.tasks.total} tasks evaluated{means and ': '}{means}"))
    found.extend((f"table {each.name}", rows_of(each)) for each in reply.tables)
    if spent := in_words(reply.profile):
        found.append(("time", spent))
    if reply.mode:
        found.append(("mode", described(reply.mode_settings) or reply.mode))
    found.extend(("consumer", consumer_of(each)) for each in reply.consumers)
    found += changes_of(reply)
    if reply.checkpoint:
        age = "" if reply.checkpoint_age_s is None else f", {reply.checkpoint_age_s:.0f} s old"
        found.append(("checkpoint", reply.checkpoint + age))
    found.extend(("alarm", text) for text in alarms_of(reply))
    return found


def consumer_of(consumer: ConsumerStatus) -> str:
    """Describe a consumer and its lag."""
    text = f"{consumer.name} on {consumer.host}, pid {consumer.pid}, "
    if consumer.behind is None or consumer.age_s is None:
        return text + "has no complete copy yet"
    return text + f"{consumer.behind} changes and {consumer.age_s:.1f} s behind"


def changes_of(reply: StatusReply) -> list[tuple[str, str]]:
    """Return descriptions of the changes to the mode and the pservers that are in progress."""
    found = [("changing", f"waiting for {reply.mode_change}")] if reply.mode_change else []
    return found + ([] if reply.scaling is None else [("pservers", reply.scaling.text)])


def group_of(reply: StatusReply) -> list[tuple[str, str]]:
    """Return a description of the group that reads the data, or an empty string if there is no group."""
    group = reply.group
    return [] if group is None else [("group", f"{group.ranks} ranks, {group.phase}, start {group.starts}")]


def rows_of(counts: TableCounts) -> str:
    """Describe a table. The numbers of waiting, evicted and rejected rows are left out if they are 0."""
    found = f"{counts.rows:,} rows, {counts.size_bytes / (1 << 20):,.1f} MiB"
    if counts.reads:
        found += f", {counts.hits / counts.reads:.0%} of reads found one"
    more = {"wait for admission": counts.waiting, "evicted": counts.evicted, "refused: no memory": counts.refused}
    return found + "".join(f", {number:,} {what}" for what, number in more.items() if number)


def processes(reply: StatusReply) -> Table:
    """Return a table with one row per process of the job."""
    table = plain_table("process", "where", "generation", "state", "versions")
    if reply.master is not None:
        table.add_row("master", _where(reply.master), str(reply.master.generation), reply.master.state, "")
    there = {server.index: server for server in reply.pservers}
    for index in range(max(reply.pservers_desired, len(there))):
        server = there.get(index)
        if server is None:
            table.add_row(f"pserver-{index}", "-", "-", "missing", "")
        else:
            state = server.state
            if server.standby_lag_s is not None:
                state += f", standby {server.standby_lag_s:.1f} s behind"
            elif server.standby:
                state += ", standby without a copy"
            table.add_row(server.name, _where(server), str(server.generation), state, _versions(server))
    for trainer in sorted(reply.trainers, key=lambda each: (each.name or each.trainer, each.trainer)):
        state = f"waiting for {trainer.waiting_for}" if trainer.waiting_for else f"holds {trainer.holding} tasks"
        if trainer.starting_s >= STARTING_S and not trainer.waiting_for:
            state = f"the script has run for {trainer.starting_s:.0f} s and has not asked for a batch"
        where = f"{trainer.host} pid {trainer.pid}" if trainer.pid else trainer.host
        # Include the trainer's id, because the master's log and the list of failed tasks refer to it.
        table.add_row(
            trainer.name or trainer.trainer,
            f"{where}, {trainer.trainer}" if trainer.name else where,
            str(trainer.generation),
            state,
            f"{trainer.records:,} records{_path(trainer)}",
        )
    return table


def _where(server: ServerStatus) -> str:
    return f"{server.address} pid {server.pid}" if server.pid else server.address


def _path(trainer: TrainerStatus) -> str:
    """Return a description of how a trainer's values are transported: shared memory, TCP or both."""
    shared, sent = trainer.shared_pservers, trainer.pservers - trainer.shared_pservers
    if shared and sent:
        return f", values in shared memory to {shared} of {trainer.pservers} pservers"
    return ", values in shared memory" if shared else ", values over TCP" if sent else ""


def _versions(server: ServerStatus) -> str:
    if not server.blocks and not server.buckets:
        return ""
    counts = {"blocks": server.blocks, "buckets": server.buckets}
    size = "".join(f"{count} {what}, " for what, count in counts.items() if count)
    size += f"{server.size_bytes / 1e6:,.1f} MB"
    wrong = {code: count for code, count in sorted(server.refused_calls.items()) if code not in USUAL_REFUSALS}
    if wrong:
        codes = ", ".join(f"{count} {code}" for code, count in wrong.items())
        size += f", {sum(wrong.values())} calls refused: {codes}"
    if server.streams:
        size += f", {server.shared_streams} of {server.streams} streams in shared memory"
    if server.lowest_version == server.highest_version:
        return f"{server.lowest_version} ({size})"
    return f"{server.lowest_version}-{server.highest_version} ({size})"
