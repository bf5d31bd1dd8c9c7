"""Chunks: the pieces of files that tasks are made of, as values, as columns, and on the wire.

A *chunk* is a run of consecutive records of one file that can be read without reading the rest of the file. It says
where it is, how many records it has, and which version of the file it was found in. It names its format, so that a
trainer needs nothing else to read it (text formats also want the dataset's schema, see ``formats.text``).

``CHUNK_SCHEMA`` is how the chunks of a task cross the wire: one row for each chunk, in order; as a record batch for who
gets a task, as rows of JSON on a request stream.
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
    """The content of a file is broken: the one kind of bad data that ``on_corrupt="skip"`` passes over."""

    def refused(self) -> CorruptChunkError:
        """For who did not say what to do about it."""
        return CorruptChunkError(
            f"{str(self).rstrip('.')}; "
            "restore the file, leave it out, or choose on_corrupt skip to train without the corrupt parts"
        )


class ChangedFileError(DataError):
    """A file is not the one that was indexed: nothing of the job can be trusted to be what it was declared to be."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of records of one file."""

    url: str
    #: Of the file when it was indexed; another one at reading means that the file changed.
    version: str
    #: Name of the format.
    format: str
    #: Which container of the file: row group, record batch, or the chunk's own ordinal.
    number: int
    #: Number of its first record within the file.
    first_record: int
    records: int
    #: Where its container starts in the file.
    offset: int
    size_bytes: int

    def __str__(self) -> str:
        return f"chunk {self.number} of {self.url} (at byte {self.offset}, {self.records} records)"


_row = attrgetter(*(field.name for field in fields(Chunk)))


@dataclass(frozen=True, slots=True, eq=False)
class ChunkColumns:
    """The chunks of one file, or of many, as equally long columns."""

    number: npt.NDArray[np.int32]
    first_record: npt.NDArray[np.int64]
    records: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]
    size_bytes: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.number)

    @staticmethod
    def of(records: Sequence[int], offset: Sequence[int], size_bytes: Sequence[int]) -> ChunkColumns:
        """Chunks that follow each other in one file, numbered from 0; those without records are left out."""
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
        """The same records in chunks of at most ``max_records``: parts of a container share number and place."""
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
        """All chunks of the parts, in order; at least one part."""
        return ChunkColumns(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in _COLUMNS))


_COLUMNS = fields(ChunkColumns)


@dataclass(frozen=True, slots=True, eq=False)
class FileIndex:
    """Index of one file."""

    stat: FileStat
    format: str
    #: Of the file's records; without metadata.
    schema: pa.Schema
    chunks: ChunkColumns
    #: What was passed over because corrupt content may be skipped; one sentence each.
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class IndexOptions:
    """Options that decide how files are cut into chunks."""

    #: Parquet row groups with more records are cut; 0: never. A part is read by decoding its row group up to its end.
    max_records_per_chunk: int = 0
    #: Text files are cut into about this many bytes, or fewer: see ``formats.text``.
    text_chunk_bytes: int = 16 << 20
    #: Pass over corrupt content, and say so in ``FileIndex.skipped``.
    skip_corrupt: bool = False


def merged(chunks: Sequence[Chunk]) -> list[Chunk]:
    """The same records, with parts of one container that follow each other as one chunk: it is then decoded once."""
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
    """The chunks as rows of ``CHUNK_SCHEMA``."""
    # One conversion for all columns: each gives up the interpreter's lock, for which many calls compete.
    return pa.RecordBatch.from_struct_array(pa.array([_row(chunk) for chunk in chunks], _CHUNK_STRUCT))


def chunks_to_rows(chunks: Sequence[Chunk]) -> list[ChunkRow]:
    """The chunks for a message."""
    return [_row(chunk) for chunk in chunks]


def chunks_from_rows(rows: Sequence[ChunkRow]) -> tuple[Chunk, ...]:
    """The chunks of a message that was decoded."""
    return tuple(Chunk(*row) for row in rows)
