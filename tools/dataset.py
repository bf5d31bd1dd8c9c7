"""``flightedl dataset``: inspects training data, indexes it in advance, or rewrites it.

Progress goes to stderr and results to stdout, so that the output of ``--json`` can be piped. ``convert`` and ``split``
publish only complete files. After an interruption, the same command continues where it stopped.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
import pyarrow as pa
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from flightedl.adapters.storage import FsspecFiles, open_storage
from flightedl.config import ServerSettings, settings
from flightedl.domain.data_urls import without_credentials
from flightedl.domain.groups.shuffling import Advice, Shuffling, advice_of, order_of
from flightedl.domain.queue import drawing
from flightedl.errors import UsageError
from flightedl.formats.chunk_index import ChunkIndex
from flightedl.formats.chunks import FileIndex
from flightedl.formats.dataset_spec import ON_CORRUPT, DatasetSpec, absolute_url
from flightedl.formats.index import IndexProgress
from flightedl.formats.json_records import JsonRecords
from flightedl.formats.mixed_layout import group_data
from flightedl.formats.stored_index import LoadedIndex, load_or_build
from flightedl.messages.declarations import DatasetDeclaration

from .consoles import plain_table, table_console
from .options import json_option, text_of, text_options, together

if TYPE_CHECKING:
    from flightedl.formats.convert import Converted

_SHOWN_FILES = 20
_LONGEST_VALUE = 60


@click.group()
def dataset() -> None:
    """Index, inspect, convert or split training data."""


#: Options that select the source of a command (see ``_spec`` and ``_indexed``).
_source_options = together(
    json_option(),
    click.option("--concurrency", type=click.IntRange(1, 256), default=16, show_default=True, help="Parallel reads."),
    click.option(
        "--on-corrupt", type=click.Choice(ON_CORRUPT), default="fail", help="Treatment of corrupt chunks [fail]"
    ),
    click.option("--format", "format_name", default="", metavar="NAME", help="Format of the files [by their names]"),
    text_options(),
    click.argument("urls", nargs=-1, required=True),
)
#: Options of commands that write a dataset.
_target_options = together(
    click.option("--overwrite", is_flag=True, help="Replace files of another conversion."),
    click.option(
        "--records-per-chunk", type=click.IntRange(min=1), default=65_536, help="Largest size of a chunk [65,536]"
    ),
    click.option("--columns", metavar="A,B", help="Write only these columns."),
    click.option("--to", "target", required=True, metavar="PREFIX", help="Prefix of the new files, with path or URL."),
)


@dataset.command()
@_source_options
@click.option("--checkpoint", metavar="URL", help="The job's checkpoint URL, where the index is stored.")
@click.option("--records-per-task", type=click.IntRange(min=0), default=0, help="Value of the job [one chunk]")
def index(*, as_json: bool, checkpoint: str | None, records_per_task: int, **source: Any) -> None:
    """Build a dataset's index of chunks and store it for future jobs.

    A job with the same URLs, format and records_per_task loads the index from its checkpoint URL and reads only files
    that have changed since.
    """
    spec = _spec(source, max_records_per_chunk=records_per_task)
    kept_at = settings(ServerSettings, checkpoint=checkpoint).checkpoint
    storage = open_storage(kept_at) if kept_at else None
    loaded = _indexed(spec, source, storage)
    if loaded.trouble:
        raise UsageError(f"cannot store the index: {loaded.trouble}")
    found = {
        **_facts(loaded.index),
        "files_read": loaded.files_read,
        "index": f"{storage.url}/{loaded.name}" if storage is not None else None,
    }
    if as_json:
        click.echo(json.dumps(found))
        return
    click.echo(_sentence(loaded.index))
    click.echo(f"{loaded.files_read} files read, {len(loaded.index.stats) - loaded.files_read} already indexed")
    click.echo(f"stored as {found['index']}" if storage is not None else "not stored: add --checkpoint URL to store it")
    _print_skipped(loaded.index)


@dataset.command()
@_source_options
@click.option("--records", type=click.IntRange(min=0), default=5, show_default=True, help="Number of records to show.")
@click.option("--global-batch", type=click.IntRange(min=1), default=256, help="Batch of all ranks of a group [256]")
@click.option("--ranks", type=click.IntRange(min=1), default=1, help="Number of ranks of a group [1]")
def inspect(*, as_json: bool, records: int, global_batch: int, ranks: int, **source: Any) -> None:
    """Show the files, columns and first records of a dataset, and what shuffle=True mixes."""
    from flightedl.formats.reader import first_records

    spec = _spec(source)
    chunk_index = _indexed(spec, source).index
    first = [chunk_index.chunk(number) for number in range(min(len(chunk_index), max(records, 1)))]
    shown = first_records(_files(spec), first, spec, records, schema=chunk_index.schema)
    advice = _advice(chunk_index, spec, global_batch, ranks)
    records_of, bytes_of = chunk_index.records, chunk_index.decoded_bytes
    of_tasks = drawing.advice_of(drawing.drawn(records_of, bytes_of, global_batch, 0), records_of, bytes_of)
    if as_json:
        columns = [{"name": field.name, "type": str(field.type)} for field in chunk_index.schema]
        files = list(map(_file_facts, chunk_index.files))
        found = {**_facts(chunk_index), "columns": columns, "files": files, "first_records": shown.to_pylist()}
        found["shuffle"] = {**dataclasses.asdict(advice), "tasks": dataclasses.asdict(of_tasks)}
        click.echo(json.dumps(found, default=_plain))
        return
    console = table_console()
    click.echo(_sentence(chunk_index))
    console.print(_file_table(chunk_index))
    console.print(_column_table(chunk_index.schema, shown))
    click.echo("\n".join((f"shuffle=True: {advice.text}", *advice.warnings)))
    click.echo("\n".join((f"shuffle=True without a group: {of_tasks.text}", *of_tasks.warnings)))
    _print_skipped(chunk_index)


@dataset.command()
@_source_options
@_target_options
@click.option(
    "--to-format",
    required=True,
    metavar="NAME",
    help="parquet, arrow, arrow-stream, recordio, csv, tsv, jsonl, lines, tar, tfrecord",
)
@click.option("--shards", type=click.IntRange(min=1), default=1, show_default=True, help="Number of new files.")
@click.option("--json-records", is_flag=True, help="Read RecordIO of JSON objects, one column per member.")
@click.option(
    "--filter", "filters", multiple=True, metavar="'COLUMN OP VALUE'", help="Condition on records; repeatable."
)
@click.option("--lossy", is_flag=True, help="Accept that the format changes values, and name the columns.")
def convert(*, to_format: str, filters: tuple[str, ...], **options: Any) -> None:
    """Write a dataset in another format, to PREFIX-00000-of-00009 and so on.

    If RecordIO files have several columns, each record is a JSON object; --json-records reads such files. After an
    interruption, run the same command to continue.
    """
    _write(to_format=to_format, filters=[_condition(text) for text in filters], **options)


@dataset.command()
@_source_options
@_target_options
@click.option("--shards", type=click.IntRange(min=1), required=True, help="Number of new files.")
def split(**options: Any) -> None:
    """Write a dataset to a different number of files in the same format.

    The records are distributed evenly, and each file contains consecutive records. After an interruption, run the same
    command to continue.
    """
    _write(to_format=None, filters=[], **options)


def _write(
    *,
    as_json: bool,
    target: str,
    to_format: str | None,
    shards: int,
    columns: str | None,
    filters: Sequence[tuple[str, str, Any]],
    records_per_chunk: int,
    overwrite: bool,
    json_records: bool = False,
    lossy: bool = False,
    **source: Any,
) -> None:
    from flightedl.formats.convert import Target
    from flightedl.formats.convert import convert as convert_index

    names = None if columns is None else tuple(name.strip() for name in columns.split(","))
    if json_records:
        source["format_name"] = JsonRecords.name
    spec = _spec(source, columns=names, filter=tuple(filters))
    root, _, prefix = absolute_url(target).rpartition("/")
    if target.startswith("memory://"):
        raise UsageError(f"{target} is lost when this command ends: choose a directory or a bucket")
    if to_format is not None:
        wanted = Target(prefix, to_format, shards, records_per_chunk)  # Rejects an unknown format before reading.
    chunk_index = _indexed(spec, source).index
    for sentence in chunk_index.left_out:
        click.echo(sentence, err=True)
    if to_format is None:
        wanted = Target(prefix, _only_format(chunk_index), shards, records_per_chunk)
    with _bar("records written") as advance:
        try:
            done = convert_index(
                _files(spec),
                chunk_index,
                spec,
                open_storage(root),
                wanted,
                overwrite=overwrite,
                is_split=to_format is None,
                is_lossy=lossy,
                progress=advance,
            )
        except KeyboardInterrupt:
            click.echo("interrupted: run the same command to write the remaining files", err=True)
            raise
    _print_written(done, without_credentials(root), as_json=as_json)


def _print_written(done: Converted, root: str, *, as_json: bool) -> None:
    if as_json:
        found = {
            "files": [f"{root}/{name}" for name in done.names],
            "kept": done.kept,
            "size_bytes": done.size_bytes,
            "corrupt_chunks": done.counts.corrupt_chunks,
            "corrupt_records": done.counts.corrupt_records,
            "changed_columns": done.changed,
        }
        click.echo(json.dumps(found))
        return
    more = f" to {done.names[-1]}" if len(done.names) > 1 else ""
    kept = f", {done.kept} of them existed already" if done.kept else ""
    click.echo(f"{root}/{done.names[0]}{more}: {done.size_bytes / 1e6:,.1f} MB{kept}")
    if done.changed:
        click.echo(f"changed by the format: {', '.join(done.changed)}", err=True)
    for sentence in done.counts.sentences:
        click.echo(f"skipped: {sentence}", err=True)


def _spec(source: Mapping[str, Any], **more: Any) -> DatasetSpec:
    urls = tuple(absolute_url(url) for url in source["urls"])
    text = text_of(source["names"], source["delimiter"], source["null_values"])
    more |= {"on_corrupt": source["on_corrupt"], "types": source["types"], "text": text}
    return DatasetSpec(urls, source["format_name"], **more)


def _advice(chunk_index: ChunkIndex, spec: DatasetSpec, batch_size: int, ranks: int) -> Advice:
    data = group_data(chunk_index, DatasetDeclaration(urls=list(spec.urls), batch_size=1), 0)
    return advice_of(data, order_of(data, batch_size, Shuffling()), batch_size, ranks, Shuffling())


def _files(spec: DatasetSpec) -> FsspecFiles:
    files = FsspecFiles()
    files.declare(spec.urls)
    return files


def _indexed(spec: DatasetSpec, source: Mapping[str, Any], storage: Any = None) -> LoadedIndex:
    with _bar("files indexed") as advance:

        def show(progress: IndexProgress) -> None:
            advance(progress.files_done, progress.file_count)

        return load_or_build(_files(spec), storage, spec, concurrency=source["concurrency"], progress=show)


@contextmanager
def _bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar if stderr is a terminal. Yields a function that takes the current count and the total."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _condition(text: str) -> tuple[str, str, Any]:
    """Parse a condition such as ``distance > 500``. The value is JSON, or a string if it cannot be parsed as JSON."""
    column, _, rest = text.strip().partition(" ")
    words = rest.strip()
    operator = "not in" if words.startswith("not in ") else words.partition(" ")[0]
    value = words.removeprefix(operator).strip()
    if not value:
        raise UsageError(f"--filter {text!r} is not COLUMN OPERATOR VALUE, such as 'distance > 500'")
    try:
        return column, operator, json.loads(value)
    except ValueError:
        return column, operator, value


def _only_format(chunk_index: ChunkIndex) -> str:
    formats = sorted({file.format for file in chunk_index.files})
    if len(formats) > 1:
        raise UsageError(f"the files have different formats ({', '.join(formats)}): use `flightedl dataset convert`")
    return formats[0]


def _facts(chunk_index: ChunkIndex) -> dict[str, Any]:
    return {
        "files_count": len(chunk_index.stats),
        "chunks": len(chunk_index),
        "records": chunk_index.record_count,
        "size_bytes": sum(stat.size_bytes for stat in chunk_index.stats),
        "content_hash": chunk_index.content_hash(),
        "skipped": list(chunk_index.skipped),
        "left_out": list(chunk_index.left_out),
    }


def _file_facts(file: FileIndex) -> dict[str, Any]:
    return {
        "url": without_credentials(file.stat.url),
        "format": file.format,
        "size_bytes": file.stat.size_bytes,
        "chunks": len(file.chunks),
        "records": int(file.chunks.records.sum()),
    }


def _sentence(chunk_index: ChunkIndex) -> str:
    size_bytes = sum(stat.size_bytes for stat in chunk_index.stats)
    counts = {"file": len(chunk_index.stats), "chunk": len(chunk_index), "record": chunk_index.record_count}
    counted = [f"{count:,} {name}{'' if count == 1 else 's'}" for name, count in counts.items()]
    return f"{', '.join(counted)}, {size_bytes / 1e6:,.1f} MB"


def _print_skipped(chunk_index: ChunkIndex) -> None:
    for sentence in chunk_index.left_out:
        click.echo(sentence, err=True)
    for url in chunk_index.without_records[:_SHOWN_FILES]:
        click.echo(f"{without_credentials(url)} has no records", err=True)
    for sentence in chunk_index.skipped:
        click.echo(f"skipped: {sentence}", err=True)


def _file_table(chunk_index: ChunkIndex) -> Table:
    numbers = ("chunks", "records", "MB")
    table = plain_table("file", "format", *numbers, right=numbers)
    for file in map(_file_facts, chunk_index.files[:_SHOWN_FILES]):
        counts = (f"{file['chunks']:,}", f"{file['records']:,}", f"{file['size_bytes'] / 1e6:,.1f}")
        table.add_row(file["url"], file["format"], *counts)
    if len(chunk_index.stats) > _SHOWN_FILES:
        table.add_row(f"and {len(chunk_index.stats) - _SHOWN_FILES:,} more", "", "", "", "")
    return table


def _column_table(schema: pa.Schema, first: pa.RecordBatch) -> Table:
    table = plain_table("column", "type", "first records")
    for field in schema:
        values = first.column(field.name).to_pylist() if field.name in first.schema.names else []
        table.add_row(field.name, str(field.type), ", ".join(_short(value) for value in values))
    return table


def _short(value: Any) -> str:
    text = repr(value) if isinstance(value, str | bytes) else str(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def _plain(value: Any) -> Any:
    """Convert a value that JSON cannot represent to a string."""
    return value.hex() if isinstance(value, bytes) else str(value)
