"""``flightedl table``: import rows of other programs into tables, and export them.

Rows are imported into the newest checkpoint of a stopped job, not into running pservers. A checkpoint is complete or
does not exist, whichever process is killed, and any number of pservers restores it. So nothing in a running job has to
know about imports.
"""

from __future__ import annotations

import json
from typing import Any

import click
import numpy as np
from msgspec.structs import replace

from flightedl.adapters.clock import SystemClock
from flightedl.adapters.storage import FsspecFiles, open_storage
from flightedl.config import CommonSettings, ServerSettings, settings
from flightedl.coordination.checkpoint_places import export_table, table_in
from flightedl.domain.checkpoint.checkpoints import next_number_after
from flightedl.domain.checkpoint.manifest import WRITER, Manifest, manifest_name
from flightedl.domain.checkpoint.pointer import decode_pointer
from flightedl.domain.data_urls import without_credentials
from flightedl.domain.tables.optimizers import ROW_OPTIMIZERS
from flightedl.domain.tables.spec import TableSpec
from flightedl.errors import UnavailableError, UsageError
from flightedl.formats.checkpoint_files import found_checkpoints
from flightedl.formats.dataset_spec import DatasetSpec, absolute_url
from flightedl.formats.registry import FORMATS
from flightedl.formats.row_sources import row_table, rows_of
from flightedl.formats.stored_tables import stored_rows, with_rows
from flightedl.formats.table_files import table_file
from flightedl.launch.naming import liveness_of
from flightedl.messages.reading import ReadCommand
from flightedl.ports import Storage
from flightedl.process import machine

from .checkpoint import chosen_checkpoint, file_of
from .model import READ_S, write_flight
from .options import json_option, running_job_options, text_of, text_options, together
from .running import running_job

_RULES: dict[str, Any] = {kind.__name__: kind for kind in ROW_OPTIMIZERS}
_options = together(
    click.option("--checkpoint", metavar="URL", help="Location of the job's checkpoints"),
    click.option("--table", "name", required=True, metavar="NAME", help="Name of the table."),
    running_job_options,
)


@click.group()
def table() -> None:
    """Import rows of other programs into tables, and export them."""


@table.command("import")
@_options
@json_option()
@click.option("--optimizer", type=click.Choice([*_RULES]), default="SGD", help="Optimizer of a new job's table [SGD]")
@click.option("--no-slots", "has_slots", flag_value=False, default=True, help="Import only ids and values.")
@click.option("--keep-existing", "keeps_existing", is_flag=True, help="Skip ids that have rows [replace these rows]")
@text_options()
@click.option("--from", "kind", type=click.Choice(["numpy", "text", *FORMATS]), help="Format [by the files' names]")
@click.argument("url")
def import_(url: str, name: str, kind: str | None, optimizer: str, **given: Any) -> None:
    """Import the rows in the files at URL into a table of a job that is not running.

    The rows are written to a new checkpoint, from which the job continues with --resume. If the job has no checkpoint
    yet, the rows are checked and written to a file, from which its script can load the table.
    """
    text, types = text_of(*map(given.pop, ("names", "delimiter", "null_values"))), given.pop("types")
    files = DatasetSpec((absolute_url(url),), kind or "numpy" * url.endswith(".npz"), types=types, text=text)
    as_json, how = given.pop("as_json"), {key: given.pop(key) for key in ("has_slots", "keeps_existing")}
    chosen, clock = settings(ServerSettings, **given), SystemClock()
    if not chosen.checkpoint:
        raise UsageError("add --checkpoint URL, the location of the job's checkpoints")
    began, found = clock.now(), row_table(FsspecFiles(), files)
    click.echo(f"read {len(found):,} rows", err=True)
    storage, next_number = open_storage(f"{chosen.checkpoint.rstrip('/')}/{chosen.job}"), _require_stopped(chosen)
    manifest, number, existing = _newest(storage, chosen.job), 0, [np.empty(0, np.uint64)]
    if manifest is None:
        first = found.slice(0, 1).to_pylist()[0] if len(found) else {}
        spec = TableSpec(name, np.size(first.get("values", 0)), _RULES[optimizer](lr=1.0))
    else:
        number, spec = table_in(manifest, name)
        existing += [some.ids for some in stored_rows(storage, manifest, number, spec)]
    rows, counts = rows_of(without_credentials(url), found, spec, np.concatenate(existing), **how)
    click.echo(f"checked them; writing {counts['imported']:,}", err=True)

    def require_same() -> None:
        _require_stopped(chosen)
        if _newest(storage, chosen.job) != manifest:
            raise UsageError(f"job {chosen.job} has written another checkpoint: stop the job, and import again")

    if manifest is None:
        place = f"tables/{file_of(name)}"
        stored = (some.stored(spec) for some in rows)
        parts = table_file(spec, stored, has_slots=any(some.slots is not None for some in rows))
        storage.publish(place, parts, require_same)
        then = f"load them in the script, with job.table({name!r}, ...).load"
    else:
        new = max(next_number_after([file.name for file in storage.list("")]), next_number)
        place, then = f"c-{new}", "start the job with --resume"
        wanted = with_rows(storage, manifest, number, spec, rows, new, clock.wall_time())
        # A job that is running nevertheless, with an etcd of its own, will warn of this writer.
        storage.publish(WRITER, [f"import by flightedl table import on host {machine.host_name()}".encode()])
        storage.publish(manifest_name(new), [wanted.encode()], require_same)
    about = {"job": chosen.job, "table": name, "place": f"{storage.url}/{place}", "rows": len(found), **counts}
    if as_json:
        click.echo(json.dumps({**about, "seconds": round(clock.now() - began, 3)}))
    else:
        click.echo(", ".join(f"{key.replace('_', ' ')}: {value:,}" for key, value in counts.items()))
        click.echo(f"the rows are in {about['place']}: {then}")


def _newest(storage: Storage, job: str) -> Manifest | None:
    return next((found for found in found_checkpoints(storage, job) if isinstance(found, Manifest)), None)


def _require_stopped(chosen: ServerSettings) -> int:
    """Return the number of the job's next checkpoint, 0 if unknown. Raises UsageError if the job is running."""
    try:
        with liveness_of(chosen, SystemClock(), lambda text: click.echo(text, err=True)) as liveness:
            liveness.require_ended()
            pointer = liveness.coordinator.get(liveness.keys.checkpoint_latest)
    except UnavailableError:
        if chosen.etcd != CommonSettings().etcd:
            raise
        return 0
    except UsageError as error:
        raise UsageError(f"{error}, import the rows into its last checkpoint, and start it with --resume") from None
    return 0 if pointer is None else decode_pointer(pointer.value).next_number


@table.command()
@_options
@click.option("--slots", is_flag=True, help="Include the optimizer's slots and each row's number of updates.")
@click.option("--number", type=click.IntRange(min=1), help="Number of the checkpoint [the newest]")
@click.argument("output")
def export(output: str, name: str, checkpoint: str | None, number: int | None, *, slots: bool, **options: Any) -> None:
    """Export the rows of a table to OUTPUT, the path or URL of a Parquet file.

    The rows are read from a checkpoint if --checkpoint is given, otherwise from the running job, as of one moment.
    """
    if number is not None and checkpoint is None:
        raise UsageError("--number is the number of a checkpoint: add --checkpoint URL")
    if checkpoint is not None:
        place = export_table(*chosen_checkpoint(checkpoint, options["job"], number), name, output, has_slots=slots)
    else:
        with running_job(options) as job:
            command = ReadCommand(name=name, kind="table", cut="new", columns=["id", "values"])
            if slots:
                about = job.columns(command, READ_S)[0].metadata
                rule = _RULES[about[b"flightedl.optimizer"].decode()](lr=1.0)
                command = replace(command, columns=["id", "values", "updates", *(slot.name for slot in rule.slots)])
            place = write_flight(job, command, "parquet", output)
    click.echo(f"{name} written to {place}")
