"""Chunks, the pieces of files that make up tasks: as objects, as columns, and as messages.

A *chunk* is a range of consecutive records of a file that can be read without the rest of the file. It contains its
location, its number of records, its format, and the version of the file when it was indexed. A trainer needs nothing
else to read it, apart from the dataset's schema for text formats (see ``formats.text``).

The chunks of a task are sent in order, as rows of ``CHUNK_SCHEMA``: either in a record batch that is attached to the
task, or as JSON on a request stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flightedl.errors import DataError
from flightedl.messages.tasks import ChunkRow
from flightedl.ports import FileStat

CHUNK_SCHEMA = pa.schema(
    [
        pa.field("url", pa.string(), nullable=False),
        pa.field("version", pa.string(), nullable=False),
        pa.field("format", pa.string(), nullable=False),
        pa.field("number", pa.int32(), nullable=False),
        pa.field("first_record", pa.int64(), nullable=False),
        pa.field("records", pa.int64(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("size_bytes", pa.int64(), nullable=False),
    ]
)

_CHUNK_STRUCT = pa.struct(list(CHUNK_SCHEMA))


class CorruptChunkError(DataError):
    """The content of a file is damaged. ``on_corrupt="skip"`` skips only content with this error."""

    def refused(self) -> CorruptChunkError:
        """Return this error with a remedy, for callers that do not skip corrupt content."""
        return CorruptChunkError(
            f"{str(self).rstrip('.')}; "
            "restore the file, remove it from the dataset, or choose on_corrupt skip to train without the corrupt parts"
        )


class ChangedFileError(DataError):
    """A file has changed since it was indexed, so the job's data is no longer the declared data."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A range of consecutive records of a file."""

    url: str
    #: Version of the file when it was indexed. If the version is different on reading, the file has changed.
    version: str
    #: Name of the format.
    format: str
    #: Number of the container in the file: a row group, a record batch, or the chunk itself.
    number: int
    #: Number of the chunk's first record in the file.
    first_record: int
    records: int
    #: Offset of the chunk's container in the file, in bytes.
    offset: int
    size_bytes: int

    def __str__(self) -> str:
        return f"chunk {self.number} of {self.url} (at byte {self.offset}, {self.records} records)"


_row = attrgetter(*(field.name for field in fields(Chunk)))


@dataclass(frozen=True, slots=True, eq=False)
class ChunkColumns:
    """Chunks of one or several files, as columns of equal length."""

    number: npt.NDArray[np.int32]
    first_record: npt.NDArray[np.int64]
    records: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]
    size_bytes: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.number)

    @staticmethod
    def of(records: Sequence[int], offset: Sequence[int], size_bytes: Sequence[int]) -> ChunkColumns:
        """Return adjacent chunks of a file, numbered from 0. Chunks without records are omitted."""
        counts = np.asarray(records, np.int64)
        firsts = np.cumsum(counts) - counts
        kept = np.flatnonzero(counts)
        return ChunkColumns(
            kept.astype(np.int32),
            firsts[kept],
            counts[kept],
            np.asarray(offset, np.int64)[kept],
            np.asarray(size_bytes, np.int64)[kept],
        )

    def split(self, max_records: int) -> ChunkColumns:
        """Split chunks into parts of at most ``max_records``. Each part keeps its container's number and offset."""
        parts = np.maximum(-(-self.records // max_records), 1)
        source = np.repeat(np.arange(len(self)), parts)
        part = np.arange(len(source)) - np.repeat(np.cumsum(parts) - parts, parts)
        skipped = part * max_records
        return ChunkColumns(
            self.number[source],
            self.first_record[source] + skipped,
            np.minimum(self.records[source] - skipped, max_records),
            self.offset[source],
            self.size_bytes[source],
        )

    @staticmethod
    def concatenated(parts: Sequence[ChunkColumns]) -> ChunkColumns:
        """Return all chunks of all arguments, in order. Requires at least one argument."""
        return ChunkColumns(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in _COLUMNS))


_COLUMNS = fields(ChunkColumns)


@dataclass(frozen=True, slots=True, eq=False)
class FileIndex:
    """Index of one file."""

    stat: FileStat
    format: str
    #: Schema of the file's records, without metadata.
    schema: pa.Schema
    chunks: ChunkColumns
    #: One sentence for each corrupt part that was skipped.
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class IndexOptions:
    """Options for dividing files into chunks."""

    #: Maximum records in a chunk of a Parquet file; 0 for no limit. Row groups are decoded up to the end of the chunk.
    max_records_per_chunk: int = 0
    #: Approximate maximum size of a chunk of a text file (see ``formats.text``).
    text_chunk_bytes: int = 16 << 20
    #: True to skip corrupt content and report it in ``FileIndex.skipped``.
    skip_corrupt: bool = False


def merged(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Merge adjacent parts of a container into one chunk, so that each container is decoded only once."""
    found: list[Chunk] = []
    for chunk in chunks:
        last = found[-1] if found else None
        if (
            last is not None
            and (last.url, last.version, last.number, last.offset)
            == (chunk.url, chunk.version, chunk.number, chunk.offset)
            and last.first_record + last.records == chunk.first_record
        ):
            found[-1] = replace(last, records=last.records + chunk.records)
        else:
            found.append(chunk)
    return found


def chunks_to_batch(chunks: Sequence[Chunk]) -> pa.RecordBatch:
    """Return the chunks as rows of ``CHUNK_SCHEMA``."""
    # Convert all columns in one call, because each call releases and reacquires the GIL, which other threads also use.
    return pa.RecordBatch.from_struct_array(pa.array([_row(chunk) for chunk in chunks], _CHUNK_STRUCT))


def chunks_to_rows(chunks: Sequence[Chunk]) -> list[ChunkRow]:
    """Return the chunks in the form used in messages."""
    return [_row(chunk) for chunk in chunks]


def chunks_from_rows(rows: Sequence[ChunkRow]) -> tuple[Chunk, ...]:
    """Return the chunks in a decoded message."""
    return tuple(Chunk(*row) for row in rows)
