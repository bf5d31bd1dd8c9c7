"""Build the index of a dataset: its files, the chunks of each file, and the common schema.

A limited number of files are indexed in parallel. The first unusable file ends the indexing with a DataError. The index
and its ``content_hash`` depend only on the files and on the settings for dividing them into chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import pyarrow as pa

from flightedl.errors import DataError
from flightedl.formats.chunk_index import ChunkIndex
from flightedl.formats.chunks import ChunkColumns, CorruptChunkError, FileIndex, IndexOptions
from flightedl.formats.dataset_spec import DatasetSpec
from flightedl.formats.recordio import RecordIO
from flightedl.formats.records import require_columns
from flightedl.formats.registry import Format, format_for, named_format
from flightedl.formats.schemas import Mismatch, same_schema, widened_schema
from flightedl.formats.sources import without_compression
from flightedl.formats.text import TextFormat
from flightedl.ports import Files, FileStat

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class IndexProgress:
    """Progress of indexing."""

    files_done: int
    file_count: int
    chunks: int
    records: int


Progress = Callable[[IndexProgress], None]


def build_index(
    files: Files,
    spec: DatasetSpec,
    *,
    concurrency: int = 16,
    progress: Progress | None = None,
    known: ChunkIndex | None = None,
    stats: Sequence[FileStat] | None = None,
) -> ChunkIndex:
    """Index the files of a dataset.

    Args:
        files: Access to the files.
        spec: Description of the dataset.
        concurrency: Maximum number of files to index at the same time.
        progress: Called after each file, in the caller's thread.
        known: An earlier index with the same ``spec.index_options()``. Its unchanged files are not read.
        stats: The files to index, in this order; None for the files that match the spec's URLs, sorted by name.

    Raises:
        DataError: a file is missing, unreadable or corrupt, or its schema differs from the others; there are no
            records; or a column or condition of the spec does not match the files.
    """
    stats = files.expand(list(spec.urls)) if stats is None else stats
    found, pending = _known_and_new(stats, known)
    chunks = sum(len(file.chunks) for file in found.values())
    records = sum(int(file.chunks.records.sum()) for file in found.values())
    for number, file in _indexed(files, spec, pending, concurrency, _index_file):
        found[number] = file
        chunks += len(file.chunks)
        records += int(file.chunks.records.sum())
        if progress is not None:
            progress(IndexProgress(len(found), len(stats), chunks, records))
    ordered = [found[number] for number in range(len(stats))]
    schema = common_schema(ordered)
    if not records:
        raise DataError(_no_records(ordered))
    index = ChunkIndex(ordered, schema)
    if not any(file.format == RecordIO.name for file in ordered):
        require_columns(schema, spec.request(schema), without_compression(stats[0].url))
    return index


def extended_index(
    files: Files, spec: DatasetSpec, known: ChunkIndex, stats: Sequence[FileStat], *, concurrency: int = 16
) -> tuple[ChunkIndex, dict[FileStat, Exception]]:
    """Return the index extended by more files, and the files that cannot be added, with their errors.

    The schema does not change, so a file that would widen it cannot be added.
    """

    def index_or_refuse(found: Format, files: Files, stat: FileStat, options: IndexOptions) -> FileIndex | Exception:
        try:
            file = _index_file(found, files, stat, options)
            _require_joinable(known, file)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one file, the others can join
            return error
        return file

    refused: dict[FileStat, Exception] = {}
    pending: list[tuple[int, FileStat]] = []
    for number, stat in enumerate(stats):
        try:
            format_for(stat.url, spec.format)
            pending.append((number, stat))
        except DataError as error:
            refused[stat] = error
    joined: dict[int, FileIndex] = {}
    for number, result in _indexed(files, spec, pending, concurrency, index_or_refuse):
        if isinstance(result, FileIndex):
            joined[number] = result
        else:
            refused[stats[number]] = result
    ordered = [known.file_index(number) for number in range(len(known.stats))]
    return ChunkIndex([*ordered, *(joined[number] for number in sorted(joined))], known.schema), refused


def restored_index(
    files: Files,
    spec: DatasetSpec,
    stats: Sequence[FileStat],
    schema: pa.Schema,
    *,
    known: ChunkIndex | None = None,
    concurrency: int = 16,
) -> ChunkIndex:
    """Rebuild an earlier index of exactly these files, in this order. Files that ``known`` contains are not accessed.

    Raises:
        DataError: a file that is not in ``known`` was removed, has changed, or cannot be read.
    """

    def index_unchanged(found: Format, files: Files, stat: FileStat, options: IndexOptions) -> FileIndex:
        now = files.stat(stat.url)
        if now != stat:
            raise DataError(
                f"{stat.url} {'is gone' if now is None else 'has changed'} since it joined the job's dataset: "
                "put it back, or start a new job"
            )
        return _index_file(found, files, stat, options)

    found, pending = _known_and_new(stats, known)
    found.update(_indexed(files, spec, pending, concurrency, index_unchanged))
    return ChunkIndex([found[number] for number in range(len(stats))], schema)


def _known_and_new(
    stats: Sequence[FileStat], known: ChunkIndex | None
) -> tuple[dict[int, FileIndex], list[tuple[int, FileStat]]]:
    """Divide the files, given as positions in ``stats``, into those unchanged in ``known`` and all others."""
    reusable = {} if known is None else {stat: number for number, stat in enumerate(known.stats)}
    found: dict[int, FileIndex] = {}
    pending: list[tuple[int, FileStat]] = []
    for number, stat in enumerate(stats):
        if known is not None and stat in reusable:
            found[number] = known.file_index(reusable[stat])
        else:
            pending.append((number, stat))
    return found, pending


def _require_joinable(known: ChunkIndex, file: FileIndex) -> None:
    if not len(file.chunks) and file.skipped:
        return
    first = known.file_index(0)
    joined = _joined(known.schema, first, file)
    mismatch = joined if isinstance(joined, Mismatch) else same_schema(known.schema, joined)
    if mismatch is not None:
        raise DataError(f"{file.stat.url} does not go with {first.stat.url}: {mismatch.text}")


def common_schema(files: Sequence[FileIndex]) -> pa.Schema:
    """Return the common schema of all files that were not entirely skipped.

    Raises:
        DataError: the schemas differ. The message names the file and the column.
    """
    sound = [file for file in files if len(file.chunks) or not file.skipped] or files
    first = sound[0]
    schema = first.schema
    for file in sound[1:]:
        if file.schema is first.schema or file.schema.equals(schema):
            continue
        joined = _joined(schema, first, file)
        if isinstance(joined, Mismatch):
            raise DataError(
                f"{file.stat.url} does not go with {first.stat.url}: {joined.text}. "
                "All files of a dataset need the same columns"
            )
        schema = joined
    return schema


def _joined(schema: pa.Schema, first: FileIndex, file: FileIndex) -> pa.Schema | Mismatch:
    """Return a schema that fits both the first file and another one. The schemas of text files are only inferred."""
    if _is_guessed(file) and _is_guessed(first):
        return widened_schema(schema, file.schema, may_lack=file.format == "jsonl")
    return same_schema(schema, file.schema) or schema


def _is_guessed(file: FileIndex) -> bool:
    return isinstance(named_format(file.format), TextFormat)


def _indexed(
    files: Files,
    spec: DatasetSpec,
    pending: Sequence[tuple[int, FileStat]],
    concurrency: int,
    index_file: Callable[[Format, Files, FileStat, IndexOptions], Result],
) -> Iterator[tuple[int, Result]]:
    """Yield the index of each file. Index at most ``concurrency`` files at a time, and stop after an error."""
    options = spec.index_options()
    waiting = iter([(number, stat, format_for(stat.url, spec.format)) for number, stat in pending])
    with ThreadPoolExecutor(max_workers=max(concurrency, 1), thread_name_prefix="flightedl-index") as pool:
        running: dict[Future[Result], int] = {}
        try:
            while True:
                for number, stat, found in islice(waiting, 2 * concurrency - len(running)):
                    running[pool.submit(index_file, found, files, stat, options)] = number
                if not running:
                    return
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in sorted(done, key=running.__getitem__):
                    number = running.pop(future)
                    yield number, future.result()
        finally:
            for future in running:
                future.cancel()


def _index_file(found: Format, files: Files, stat: FileStat, options: IndexOptions) -> FileIndex:
    try:
        return found.index(files, stat, options)
    except CorruptChunkError as error:
        if not options.skip_corrupt:
            raise error.refused() from error
        return FileIndex(stat, found.name, pa.schema([]), ChunkColumns.of([], [], []), (str(error),))


def _no_records(files: Sequence[FileIndex]) -> str:
    more = f" and {len(files) - 1} more files" if len(files) > 1 else ""
    skipped = [sentence for file in files for sentence in file.skipped]
    because = f" ({len(skipped)} corrupt parts were skipped: {skipped[0]})" if skipped else ""
    return f"there is no record in {files[0].stat.url}{more}{because}: name files with data"
