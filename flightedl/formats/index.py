"""The chunks of a dataset: which files, which chunks in each, which schema they share.

The index is a few columns and one row for each chunk (40 bytes), so a million chunks are 40 MB. Files are indexed in
parallel, a bounded number at a time; the first one that cannot be used ends it with a DataError. It is a pure function
of the files and of how they are cut, and so is its ``content_hash``.

An index is *the* account of the data: a file that is read later in another version is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, fields
from itertools import islice
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from flightedl.errors import DataError, UsageError
from flightedl.formats.chunks import Chunk, ChunkColumns, CorruptChunkError, FileIndex, IndexOptions
from flightedl.formats.recordio import RecordIO
from flightedl.formats.records import Condition, ReadRequest, require_columns
from flightedl.formats.registry import FORMATS, Format, format_for
from flightedl.formats.schemas import Mismatch, same_schema, schema_text, widened_schema
from flightedl.formats.sources import without_compression
from flightedl.formats.text import TextFormat
from flightedl.ports import Files, FileStat

Result = TypeVar("Result")

#: What may be done about corrupt content.
ON_CORRUPT = ("fail", "skip")

CHUNKS_SCHEMA = pa.schema(
    [
        pa.field("file", pa.int32(), nullable=False),
        pa.field("number", pa.int32(), nullable=False),
        pa.field("first_record", pa.int64(), nullable=False),
        pa.field("records", pa.int64(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("size_bytes", pa.int64(), nullable=False),
    ]
)


@dataclass(frozen=True, slots=True)
class DatasetSpec:
    """Which data, and how it is read.

    Args:
        urls: URLs and globs.
        format: Name of the format; empty: by the files' names.
        columns: Only these; None: all.
        filter: (column, operator, value) conditions, see ``formats.records``.
        batch_size: Records of a batch, before the filter.
        on_corrupt: "fail", or "skip" to pass over corrupt chunks and count them.
        max_records_per_chunk: See ``IndexOptions``.
        text_chunk_bytes: See ``IndexOptions``.
    """

    urls: tuple[str, ...]
    format: str = ""
    columns: tuple[str, ...] | None = None
    filter: tuple[Condition, ...] = ()
    batch_size: int = 1
    on_corrupt: str = "fail"
    max_records_per_chunk: int = 0
    text_chunk_bytes: int = IndexOptions().text_chunk_bytes

    def __post_init__(self) -> None:
        if not self.urls:
            raise UsageError("a dataset needs a list of at least one URL")
        if self.batch_size < 1:
            raise UsageError(f"batch_size has to be at least 1, not {self.batch_size}")
        if self.on_corrupt not in ON_CORRUPT:
            raise UsageError(f"on_corrupt is one of {', '.join(ON_CORRUPT)}, not {self.on_corrupt!r}")
        if self.max_records_per_chunk < 0 or self.text_chunk_bytes < 1:
            raise UsageError("chunks need a size above 0")
        if self.columns is not None and (not self.columns or len(set(self.columns)) != len(self.columns)):
            raise UsageError("columns= needs at least one name, and each only once")

    def index_options(self) -> IndexOptions:
        """What of this decides how files are cut."""
        return IndexOptions(self.max_records_per_chunk, self.text_chunk_bytes, self.on_corrupt == "skip")

    def request(self, schema: pa.Schema | None) -> ReadRequest:
        """What of this decides how chunks are read."""
        return ReadRequest(self.columns, self.filter, schema)

    def index_hash(self) -> str:
        """Of what decides the chunks of given files: the name under which an index is kept."""
        return xxhash.xxh3_64_hexdigest("\n".join((repr(self.index_options()), self.format, *self.urls)).encode())


@dataclass(frozen=True, slots=True)
class IndexProgress:
    """How far indexing is."""

    files_done: int
    file_count: int
    chunks: int
    records: int


Progress = Callable[[IndexProgress], None]


class ChunkIndex:
    """All chunks of a dataset. Immutable.

    Args:
        files: One for each file, in order of URL (of arrival, where the dataset grows): what indexing found, whose
            chunk columns are taken over.
        schema: Of the records of all files.
    """

    def __init__(self, files: Sequence[FileIndex], schema: pa.Schema) -> None:
        self._files = tuple(
            FileIndex(file.stat, file.format, file.schema, ChunkColumns.of([], [], []), file.skipped) for file in files
        )
        counts = np.array([len(file.chunks) for file in files], np.int64)
        #: Number of the first chunk of each file, and the number of all chunks.
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        self._file_numbers = np.repeat(np.arange(len(files), dtype=np.int32), counts)
        self._columns = ChunkColumns.concatenated([file.chunks for file in files])
        self._schema = schema
        self._record_count = int(self._columns.records.sum())

    @property
    def schema(self) -> pa.Schema:
        """Of all records."""
        return self._schema

    @property
    def record_count(self) -> int:
        """Records of all chunks."""
        return self._record_count

    @property
    def records(self) -> npt.NDArray[np.int64]:
        """Records of each chunk, (chunk count,)."""
        return self._columns.records

    @property
    def skipped(self) -> tuple[str, ...]:
        """What was passed over as corrupt while indexing; one sentence each."""
        return tuple(sentence for file in self._files for sentence in file.skipped)

    @property
    def stats(self) -> tuple[FileStat, ...]:
        """The files."""
        return tuple(file.stat for file in self._files)

    def __len__(self) -> int:
        return len(self._columns)

    def first_chunk(self, file: int) -> int:
        """Number of the first chunk of a file; the number of all chunks, for one past the last file."""
        return int(self._starts[file])

    def chunk(self, number: int) -> Chunk:
        """One chunk.

        Raises:
            IndexError: there is no such chunk.
        """
        if not 0 <= number < len(self):
            raise IndexError(f"there is no chunk {number} of {len(self)}")
        file = self._files[self._file_numbers[number]]
        columns = self._columns
        return Chunk(
            file.stat.url,
            file.stat.version,
            file.format,
            int(columns.number[number]),
            int(columns.first_record[number]),
            int(columns.records[number]),
            int(columns.offset[number]),
            int(columns.size_bytes[number]),
        )

    def file_index(self, number: int) -> FileIndex:
        """One file with its chunks, as indexing found it."""
        file = self._files[number]
        part = slice(int(self._starts[number]), int(self._starts[number + 1]))
        columns = ChunkColumns(*(getattr(self._columns, field.name)[part] for field in fields(ChunkColumns)))
        return FileIndex(file.stat, file.format, file.schema, columns, file.skipped)

    def chunk_batch(self) -> pa.RecordBatch:
        """All chunks as rows of ``CHUNKS_SCHEMA``; the columns are not copied."""
        columns = (self._file_numbers, *(getattr(self._columns, field.name) for field in fields(ChunkColumns)))
        return pa.RecordBatch.from_arrays([pa.array(column) for column in columns], schema=CHUNKS_SCHEMA)

    def content_hash(self) -> str:
        """The same for the same files in the same versions, cut the same way; 32 hexadecimal digits."""
        digest = xxhash.xxh3_128()
        for file in self._files:
            stat = file.stat
            digest.update(f"{stat.url}\0{stat.size_bytes}\0{stat.version}\0{file.format}\0".encode())
        digest.update(schema_text([self._schema]).encode())
        for array in (self._file_numbers, *(getattr(self._columns, field.name) for field in fields(ChunkColumns))):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


def build_index(
    files: Files,
    spec: DatasetSpec,
    *,
    concurrency: int = 16,
    progress: Progress | None = None,
    known: ChunkIndex | None = None,
    stats: Sequence[FileStat] | None = None,
) -> ChunkIndex:
    """Find the chunks of a dataset.

    Args:
        files: Where they are.
        spec: Which.
        concurrency: Files indexed at the same time, at most.
        progress: Called after each file, in this thread.
        known: An earlier index made with the same ``spec.index_options()``; its unchanged files are not read.
        stats: Just these files, in this order; None: those that the spec's URLs name, by name.

    Raises:
        DataError: a file is missing, unreadable, corrupt or of another schema than the others; there is no record; a
            column or condition of the spec fits no file.
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
) -> tuple[ChunkIndex, dict[FileStat, str]]:
    """The index with more files at its end, and those that cannot join, each with the reason.

    The schema stays what it is: a file that would widen it cannot join either.
    """

    def index_or_refuse(found: Format, files: Files, stat: FileStat, options: IndexOptions) -> FileIndex | str:
        try:
            file = _index_file(found, files, stat, options)
            _require_joinable(known, file)
        except DataError as error:
            return str(error)
        return file

    refused: dict[FileStat, str] = {}
    pending: list[tuple[int, FileStat]] = []
    for number, stat in enumerate(stats):
        try:
            format_for(stat.url, spec.format)
            pending.append((number, stat))
        except DataError as error:
            refused[stat] = str(error)
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
    """The index of just these files in this order, as it was before; those that ``known`` has are not even looked at.

    Raises:
        DataError: another file is gone, has changed, or cannot be read.
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
    """The files that ``known`` has just as they are, by place in ``stats``, and the others with their places."""
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
    mismatch: Mismatch | None
    first = known.file_index(0)
    if _is_guessed(file) and _is_guessed(first):
        joined = widened_schema(known.schema, file.schema, may_lack=file.format == "jsonl")
        mismatch = joined if isinstance(joined, Mismatch) else same_schema(known.schema, joined)
    else:
        mismatch = same_schema(known.schema, file.schema)
    if mismatch is not None:
        raise DataError(f"{file.stat.url} does not go with {first.stat.url}: {mismatch.text}")


def common_schema(files: Sequence[FileIndex]) -> pa.Schema:
    """The schema of all files but those that were skipped as a whole.

    Raises:
        DataError: they are mixed; names file and column.
    """
    sound = [file for file in files if len(file.chunks) or not file.skipped] or files
    first = sound[0]
    schema = first.schema
    for file in sound[1:]:
        if file.schema is first.schema or file.schema.equals(schema):
            continue
        if _is_guessed(file) and _is_guessed(first):
            joined = widened_schema(schema, file.schema, may_lack=file.format == "jsonl")
            if not isinstance(joined, Mismatch):
                schema = joined
                continue
            mismatch: Mismatch | None = joined
        else:
            mismatch = same_schema(schema, file.schema)
        if mismatch is not None:
            raise DataError(
                f"{file.stat.url} does not go with {first.stat.url}: {mismatch.text}. "
                "All files of a dataset need the same columns"
            )
    return schema


def _is_guessed(file: FileIndex) -> bool:
    return isinstance(FORMATS[file.format], TextFormat)


def _indexed(
    files: Files,
    spec: DatasetSpec,
    pending: Sequence[tuple[int, FileStat]],
    concurrency: int,
    index_file: Callable[[Format, Files, FileStat, IndexOptions], Result],
) -> Iterator[tuple[int, Result]]:
    """What ``index_file`` finds of each; never more than ``concurrency`` at work, none after the first error."""
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
