"""Build the index of a dataset: its files, the chunks of each file, and the common schema.

A limited number of files are indexed in parallel. The first unusable file ends the indexing with a DataError. The index
and its ``content_hash`` depend only on the files and on the settings for dividing them into chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TypeVar

import pyarrow as pa

from flightedl.errors import DataError
from flightedl.formats.chunk_index import ChunkIndex
from flightedl.formats.chunks import AS_NAMED, ChunkColumns, CorruptChunkError, FileIndex
from flightedl.formats.csv_text import CommaSeparated
from flightedl.formats.dataset_spec import DatasetSpec
from flightedl.formats.inference import is_guess
from flightedl.formats.recordio import UNDECODED
from flightedl.formats.records import plain_column, require_columns
from flightedl.formats.registry import Format, format_for, named_format
from flightedl.formats.schemas import column_mismatch, common_field, type_mismatch
from flightedl.formats.sources import without_compression
from flightedl.ports import FileListing, Files, FileStat

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
    found = _unchanged(stats, known)
    new = [stat for stat in stats if stat not in found]
    for stat in new:
        _format_of(spec, stat)
    chunks = sum(len(file.chunks) for file in found.values())
    records = sum(int(file.chunks.records.sum()) for file in found.values())
    for stat, file in _indexed(new, concurrency, partial(_index_file, files, spec)):
        found[stat] = file
        chunks += len(file.chunks)
        records += int(file.chunks.records.sum())
        if progress is not None:
            progress(IndexProgress(len(found), len(stats), chunks, records))
    ordered = [found[stat] for stat in stats]
    schema = common_schema(ordered, spec.index_options().declared)
    if not records:
        raise DataError(_no_records(ordered))
    if not schema.names:
        raise DataError(f"the records of {stats[0].url} have no columns: name files with data")
    index = ChunkIndex(ordered, schema, stats.left_out if isinstance(stats, FileListing) else ())
    if not any(file.format in UNDECODED for file in ordered):
        require_columns(schema, spec.request(schema), without_compression(stats[0].url))
    return index


def extended_index(
    files: Files, spec: DatasetSpec, known: ChunkIndex, stats: Sequence[FileStat], *, concurrency: int = 16
) -> tuple[ChunkIndex, dict[FileStat, Exception]]:
    """Return the index extended by more files, and the files that cannot be added, with their errors.

    The schema does not change, so a file that would widen it cannot be added.
    """

    def index_or_refuse(stat: FileStat) -> FileIndex | Exception:
        try:
            file = _index_file(files, spec, stat)
            _require_joinable(known, file)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one file, the others can join
            return error
        return file

    results = dict(_indexed(stats, concurrency, index_or_refuse))
    joined = [result for stat in stats if isinstance(result := results[stat], FileIndex)]
    refused = {stat: result for stat, result in results.items() if isinstance(result, Exception)}
    return ChunkIndex([*known.files, *joined], known.schema), refused


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

    def index_unchanged(stat: FileStat) -> FileIndex:
        now = files.stat(stat.url)
        if now != stat:
            raise DataError(
                f"{stat.url} {'is gone' if now is None else 'has changed'} since it joined the job's dataset: "
                "put it back, or start a new job"
            )
        return _index_file(files, spec, stat)

    found = _unchanged(stats, known)
    found.update(_indexed([stat for stat in stats if stat not in found], concurrency, index_unchanged))
    return ChunkIndex([found[stat] for stat in stats], schema)


def _unchanged(stats: Sequence[FileStat], known: ChunkIndex | None) -> dict[FileStat, FileIndex]:
    """Return the indices of the files that ``known`` contains in the same version."""
    wanted = set(stats)
    return {file.stat: file for file in (() if known is None else known.files) if file.stat in wanted}


def _require_joinable(known: ChunkIndex, file: FileIndex) -> None:
    if not len(file.chunks) and file.skipped:
        return
    mismatch = column_mismatch(known.schema, file.schema, may_lack=_may_lack_columns(file))
    if mismatch := mismatch or type_mismatch(known.schema, file.schema):
        raise DataError(f"{file.stat.url} does not go with {known.stats[0].url}: {mismatch}")


def common_schema(files: Sequence[FileIndex], declared: Mapping[str, pa.DataType] | None = None) -> pa.Schema:
    """Return the common schema of all files that were not entirely skipped. ``declared`` types are not combined.

    Raises:
        DataError: the schemas differ. The message names the file and the column.
    """
    declared = declared or {}
    sound = [file for file in files if len(file.chunks) or not file.skipped] or files
    # Most files have the same schema as others.
    distinct = list({(file.schema.serialize().to_pybytes(), file.format): file for file in reversed(sound)}.values())
    distinct.sort(key=sound.index)
    first = distinct[0]
    columns: dict[str, list[tuple[FileIndex, pa.Field]]] = {}
    for file in distinct:
        may_lack = _may_lack_columns(file)
        mismatch = column_mismatch(first.schema, file.schema, may_lack=may_lack)
        if mismatch and not (may_lack and _may_lack_columns(first)):
            raise _differs(file, first, mismatch)
        for field in file.schema:
            columns.setdefault(field.name, []).append((file, field))
    missing = sorted(declared.keys() - columns.keys())
    if missing and not any(file.format in UNDECODED for file in sound):
        raise DataError(f"types= names {missing[0]!r:.80}, but the columns are {', '.join(columns)[:300]}")
    for name, kind in declared.items():
        for file, field in columns.get(name, ()):
            if not is_guess(field):
                _require_castable(file, field, kind)
    types = {name: declared.get(name) or _common(found) for name, found in columns.items()}
    return pa.schema(list(types.items()))


def _require_castable(file: FileIndex, field: pa.Field, kind: pa.DataType) -> None:
    """Raise DataError if no value of a stored column can be read as the type in types=."""
    try:
        plain_column(pa.chunked_array([pa.array([], field.type)])).cast(kind)
    except pa.ArrowNotImplementedError:
        raise DataError(
            f"{file.stat.url}: column {field.name!r} is {field.type}, which cannot be read as {kind}: correct types="
        ) from None


def _common(found: Sequence[tuple[FileIndex, pa.Field]]) -> pa.DataType:
    kind = common_field([field for _, field in found])
    if kind is not None:
        return kind
    # Name the first file that does not go with all files before it.
    count = next(n for n in range(2, len(found) + 1) if common_field([field for _, field in found[:n]]) is None)
    (first, known), (file, field) = found[0], found[count - 1]
    for earlier, other in found[: count - 1]:
        if common_field([other, field]) is None:
            first, known = earlier, other
            break
    text = f"column {field.name!r} is {field.type} and not {known.type}; types= sets its type"
    raise _differs(file, first, text)


def _differs(file: FileIndex, first: FileIndex, text: str) -> DataError:
    return DataError(
        f"{file.stat.url} does not go with {first.stat.url}: {text}. All files of a dataset need the same columns"
    )


def _may_lack_columns(file: FileIndex) -> bool:
    return bool(getattr(named_format(file.format), "may_lack_columns", False))


def _indexed(
    stats: Sequence[FileStat], concurrency: int, index_file: Callable[[FileStat], Result]
) -> Iterator[tuple[FileStat, Result]]:
    """Yield the index of each file. Index at most ``concurrency`` files at a time, and stop after an error."""
    waiting = iter(stats)
    with ThreadPoolExecutor(max_workers=max(concurrency, 1), thread_name_prefix="flightedl-index") as pool:
        running: dict[Future[Result], FileStat] = {}
        try:
            while True:
                for stat in islice(waiting, 2 * concurrency - len(running)):
                    running[pool.submit(index_file, stat)] = stat
                if not running:
                    return
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in [future for future in running if future in done]:
                    yield running.pop(future), future.result()
        finally:
            for future in running:
                future.cancel()


def _format_of(spec: DatasetSpec, stat: FileStat) -> Format:
    found = format_for(stat.url, spec.format)
    if spec.text != AS_NAMED and not isinstance(found, CommaSeparated):
        raise DataError(f"names=, delimiter= and null_values= apply to csv and tsv, but {stat.url} is {found.name}")
    return found


def _index_file(files: Files, spec: DatasetSpec, stat: FileStat) -> FileIndex:
    found, options = _format_of(spec, stat), spec.index_options()
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
