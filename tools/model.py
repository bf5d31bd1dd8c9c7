"""``flightedl model``: read the parameters and tables of a running job."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from typing import Any, get_args
from urllib.parse import quote

import click
import numpy as np
import pyarrow as pa
import pyarrow.csv

from flightedl.coordination.checkpoint_places import write_file
from flightedl.errors import UsageError
from flightedl.launch.status import JobStatus
from flightedl.messages.reading import Cut, ReadCommand

from .consoles import plain_table, table_console
from .options import running_job_options
from .running import running_job

_TIMEOUT_S = 10.0
READ_S = 600.0
_SHOWN = 10


@click.group()
def model() -> None:
    """Read the parameters and tables of a running job."""


@model.command("list")
@running_job_options
@click.argument("prefix", default="")
def list_command(prefix: str, **options: Any) -> None:
    """List the parameters and tables, or those whose names begin with PREFIX."""
    with running_job(options) as job:
        found = job.flights(prefix, _TIMEOUT_S)
    table = plain_table("name", "kind", "dtype", "shape", "size")
    for each in found:
        about = _about(each.schema)
        shape = about.get("shape") or f"rows of {about['dim']}"
        size = "-" if each.size_bytes < 0 else f"{each.size_bytes / 1e6:,.1f} MB"
        table.add_row(about["name"], about["kind"], about["dtype"], shape, size)
    table_console().print(table)


@model.command()
@running_job_options
@click.argument("name")
@click.option("--cut", type=click.Choice(get_args(Cut)), default="latest", help="State to read [latest]")
def show(name: str, cut: Cut, **options: Any) -> None:
    """Show the columns, the state and the first rows of a parameter or table."""
    with running_job(options) as job:
        schema, batches = job.columns(ReadCommand(name=name, cut=cut), READ_S)
        first = next(batches, None)
    for key, value in _about(schema if first is None else first.schema).items():
        click.echo(f"{key:<12} {value}")
    for field in schema:
        click.echo(f"{'column':<12} {field.name}: {field.type}")
    for row in [] if first is None else first.slice(0, _SHOWN).to_pylist():
        click.echo(f"{'row':<12} {json.dumps(row)}")


@model.command()
@running_job_options
@click.argument("name")
@click.argument("output", default="")
@click.option("--to", "kind", type=click.Choice(["parquet", "npy", "csv"]), help="Format [by the name of OUTPUT]")
@click.option("--cut", type=click.Choice(get_args(Cut)), default="latest", help="State to read [latest]")
@click.option("--rows", metavar="START:STOP", help="Rows of a parameter, or buckets of a table [all]")
@click.option("--columns", metavar="NAMES", help="Columns of a table, separated by commas [id,values]")
def get(
    name: str,
    output: str,
    kind: str | None,
    cut: Cut,
    rows: str | None,
    columns: str | None,
    **options: Any,
) -> None:
    """Write a parameter or table to OUTPUT, the path or URL of a file [NAME and the format].

    A matrix and the values of a table become several columns of a CSV file.
    """
    chosen = kind or output.rpartition(".")[2]
    if chosen not in {"parquet", "npy", "csv"}:
        raise UsageError("choose a format: --to parquet, --to npy or --to csv")
    start, stop = _rows(rows)
    names = None if columns is None else columns.split(",")
    if names is not None and not all(names):
        raise UsageError(f"--columns is {columns!r:.80}, but it must name columns, for example id,values")
    command = ReadCommand(name=name, cut=cut, start=start, stop=stop, columns=names)
    target = output or f"{quote(name, safe=' ')}.{chosen}"
    with running_job(options) as job:
        click.echo(f"{name} written to {write_flight(job, command, chosen, target)}")


def _rows(text: str | None) -> tuple[int, int | None]:
    start, colon, stop = (text or ":").partition(":")
    if not colon or not all(end.isdecimal() or not end for end in (start, stop)):
        raise UsageError(f"--rows is {text!r:.40}, but it must be START:STOP, for example 0:100")
    return int(start or 0), int(stop) if stop else None


def write_flight(job: JobStatus, command: ReadCommand, kind: str, target: str) -> str:
    """Write what a command reads to a file of a running job. Return its URL."""
    from flightedl.formats.table_files import file_of

    schema, batches = job.columns(command, READ_S)
    if kind == "parquet":
        return write_file(
            target, file_of(schema, (batch.replace_schema_metadata(schema.metadata) for batch in batches))
        )
    return write_file(target, _npy(schema, batches, command) if kind == "npy" else _csv(schema, batches))


def _npy(schema: pa.Schema, batches: Iterable[pa.RecordBatch], command: ReadCommand) -> Iterator[bytes]:
    about = _about(schema)
    if about["kind"] == "table":
        raise UsageError("an npy file has one array: write the table with --to parquet or --to csv")
    parts = [_flat(batch.column(0)).to_numpy(zero_copy_only=False) for batch in batches]
    array = np.concatenate(parts)
    shape = json.loads(about["shape"])
    is_whole = command.start == 0 and command.stop is None
    sink = io.BytesIO()
    np.save(sink, array.reshape(shape if is_whole else (-1, *shape[1:])))
    yield sink.getvalue()


def _flat(column: pa.Array) -> pa.Array:
    return column.flatten() if pa.types.is_fixed_size_list(column.type) else column


def _csv(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Iterator[bytes]:
    names: list[str] = []
    for field in schema:
        is_list = pa.types.is_fixed_size_list(field.type)
        names += [f"{field.name}_{place}" for place in range(field.type.list_size)] if is_list else [field.name]
    yield (",".join(f'"{name}"' for name in names) + "\n").encode()
    for batch in batches:
        columns: list[pa.Array] = []
        for column in batch.columns:
            flat = _flat(column)
            flat = flat.cast(pa.float32()) if pa.types.is_float16(flat.type) else flat
            width = len(flat) // max(len(column), 1)
            columns += [flat.take(pa.array(range(place, len(flat), width))) for place in range(width)]
        sink = io.BytesIO()
        pyarrow.csv.write_csv(
            pa.RecordBatch.from_arrays(columns, names), sink, pyarrow.csv.WriteOptions(include_header=False)
        )
        yield sink.getvalue()


def _about(schema: pa.Schema) -> dict[str, str]:
    """Return the metadata about the model in a schema."""
    prefix = b"flightedl."
    return {
        key.removeprefix(prefix).decode(): value.decode()
        for key, value in (schema.metadata or {}).items()
        if key.startswith(prefix)
    }
