"""Chunks, the pieces of files that make up tasks: as objects, as columns, and as messages.

A *chunk* is a range of consecutive records of a file that can be read without the rest of the file. It contains its
location, its number of records, its format, and the version of the file when it was indexed. A trainer needs nothing
else to read it, apart from the dataset's schema for text formats (see ``formats.text``).

The chunks of a task are sent in order, as rows of ``CHUNK_SCHEMA``: either in a record batch that is attached to the
task, or as JSON on a request stream.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from msgspec.structs import replace

from flightedl.errors import DataError, Fault, UsageError
from flightedl.messages.tasks import ChunkRow
from flightedl.ports import FileStat

#: Columns that describe chunks within their file.
PLACE_FIELDS = (
    pa.field("number", pa.int32(), nullable=False),
    *(pa.field(name, pa.int64(), nullable=False) for name in ("first_record", "records", "offset", "size_bytes")),
)
CHUNK_SCHEMA = pa.schema(
    [*(pa.field(name, pa.string(), nullable=False) for name in ("url", "version", "format")), *PLACE_FIELDS]
)
_CHUNK_STRUCT = pa.struct(list(CHUNK_SCHEMA))


class CorruptChunkError(DataError):
    """The content of a file is damaged. ``on_corrupt="skip"`` skips only content with this error."""

    fault: ClassVar[Fault] = "decoder"

    def refused(self) -> CorruptChunkError:
        """Return this error with a remedy, for callers that do not skip corrupt content."""
        return CorruptChunkError(
            f"{str(self).rstrip('.')}; "
            "restore the file, remove it from the dataset, or choose on_corrupt skip to train without the corrupt parts"
        )


class ChangedFileError(DataError):
    """A file has changed since it was indexed, so the job's data is no longer the declared data."""


class Chunk(msgspec.Struct, frozen=True):
    """A range of consecutive records of a file."""

    url: str
    #: Version of the file when it was indexed, followed by a space and the chunk's mark (see ``FileIndex.mark``).
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
    #: For a part of a container: the number of the container's records before it, and of all its records. Otherwise 0.
    skipped: int = 0
    container_records: int = 0

    def part(self, skipped: int, records: int) -> Chunk:
        """Return some of the chunk's records as a chunk."""
        if records == self.records:
            return self
        known, first = self.container_records or self.records, self.first_record + skipped
        return replace(
            self, first_record=first, records=records, skipped=self.skipped + skipped, container_records=known
        )

    @property
    def container(self) -> Chunk:
        """The chunk that has to be decoded to read this one."""
        if not self.container_records:
            return self
        first, records = self.first_record - self.skipped, self.container_records
        return replace(self, first_record=first, records=records, skipped=0, container_records=0)

    @property
    def file_version(self) -> str:
        return self.version.rpartition(" ")[0] or self.version

    @property
    def mark(self) -> str:
        """Mark of the content; empty if unknown."""
        version, _, mark = self.version.rpartition(" ")
        return mark if version else ""

    def require_hash(self, found: int) -> None:
        """Raise ValueError unless the chunk had the same ``ChunkColumns.hash`` when it was indexed."""
        if self.mark and self.mark.partition("-")[2] != f"{found:016x}":
            raise ValueError("its bytes are not those that were indexed")

    def __str__(self) -> str:
        return f"chunk {self.number} of {self.url} (at byte {self.offset}, {self.records} records)"


_row = attrgetter(*CHUNK_SCHEMA.names)


@dataclass(frozen=True, slots=True, eq=False)
class ChunkColumns:
    """Chunks of one or several files, as columns of equal length."""

    number: npt.NDArray[np.int32]
    first_record: npt.NDArray[np.int64]
    records: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]
    size_bytes: npt.NDArray[np.int64]
    #: Hash of each chunk's content, if indexing reads it (text) or its checksum (RecordIO); otherwise 0.
    hash: npt.NDArray[np.uint64]
    #: Number of bytes of each chunk without compression, as far as indexing knows.
    plain_bytes: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.number)

    @property
    def arrays(self) -> list[npt.NDArray[Any]]:
        return [getattr(self, field.name) for field in fields(self)]

    @staticmethod
    def of(
        records: Sequence[int],
        offset: Sequence[int],
        size_bytes: Sequence[int],
        hashes: Sequence[int] = (),
        plain_bytes: Sequence[int] = (),
    ) -> ChunkColumns:
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
            np.asarray(hashes or [0] * len(counts), np.uint64)[kept],
            np.asarray(plain_bytes or size_bytes, np.int64)[kept],
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
            self.hash[source],
            (self.plain_bytes // parts)[source],
        )

    @staticmethod
    def concatenated(parts: Sequence[ChunkColumns]) -> ChunkColumns:
        """Return all chunks of all arguments, in order. Requires at least one argument."""
        return ChunkColumns(*map(np.concatenate, zip(*(part.arrays for part in parts), strict=True)))


@dataclass(frozen=True, slots=True, eq=False)
class FileIndex:
    """Index of one file."""

    stat: FileStat
    format: str
    #: Schema of the file's records, without metadata.
    schema: pa.Schema
    chunks: ChunkColumns
    #: One sentence for each corrupt part that was skipped, and one about members of an archive that are no data.
    skipped: tuple[str, ...] = ()
    #: Hash of what indexing read if it does not show the entire content (footers, headers). It depends on neither times
    #: nor names. Empty if the chunks have hashes.
    mark: str = ""


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Options of CSV and TSV files.

    Args:
        names: Names of the columns of files without a header line; empty to read them from the first line.
        delimiter: The ASCII character between fields; empty for that of the format.
        null_values: Texts that are nulls in columns of any type. Columns of other types than text have more of them.

    Raises:
        UsageError: an option is out of range.
    """

    names: tuple[str, ...] = ()
    delimiter: str = ""
    null_values: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(set(self.names)) != len(self.names):
            twice, _ = Counter(self.names).most_common(1)[0]
            raise UsageError(f"names has {twice!r:.80} twice: give each column a name of its own")
        if self.delimiter and (len(self.delimiter) > 1 or self.delimiter in '"\r\n' or not self.delimiter.isascii()):
            raise UsageError(f"delimiter is {self.delimiter!r:.80}, but must be one ASCII character, such as ';'")


#: Options of files with a header line and the format's own delimiter.
AS_NAMED = TextOptions()


def column_names(text: str) -> tuple[str, ...]:
    """Return the names in a text such as ``label,I1-I13,C1-C26``, in which ranges stand for all of their names.

    Raises:
        UsageError: a name is empty, or a range is not ascending or has more than 1,000,000 names.
    """
    found: list[str] = []
    for part in text.split(",") if text else ():
        ends = re.fullmatch(r"(.*?)(\d+)-(.*?)(\d+)", part.strip())
        if ends is None or ends[1] != ends[3]:
            found.append(part.strip())
            continue
        numbers = range(int(ends[2]), int(ends[4]) + 1)
        if not 0 < len(numbers) <= 1_000_000:
            raise UsageError(f"names has the range {part!r:.80}, but a range must ascend, such as I1-I13")
        width = len(ends[2]) if len(ends[2]) == len(ends[4]) else 1
        found += [f"{ends[1]}{number:0{width}d}" for number in numbers]
    if "" in found:
        raise UsageError(f"names is {text!r:.80}, but must be names of columns, such as label,I1-I13,C1-C26")
    return tuple(found)


@dataclass(frozen=True, slots=True)
class IndexOptions:
    """Options for dividing files into chunks."""

    #: Maximum records in a chunk of a Parquet file; 0 for no limit. Row groups are decoded up to the end of the chunk.
    max_records_per_chunk: int = 0
    #: Approximate maximum size of a chunk of a text file (see ``formats.text``).
    text_chunk_bytes: int = 16 << 20
    #: True to skip corrupt content and report it in ``FileIndex.skipped``.
    skip_corrupt: bool = False
    #: (column, name of its type) for columns whose types are not inferred or combined.
    types: tuple[tuple[str, str], ...] = ()
    text: TextOptions = AS_NAMED

    @property
    def declared(self) -> dict[str, pa.DataType]:
        """Types by column. Raises UsageError if pyarrow has no type with such a name."""
        return {column: named_type(name) for column, name in self.types}


def named_type(name: str) -> pa.DataType:
    """Return the type that pyarrow calls so, such as "string", "float32", "timestamp[us]" or "list<int64>"."""
    if (inner := re.fullmatch(r"list<(?:item: )?(.+)>", name)) is not None:
        return pa.list_(named_type(inner[1]))
    parts = re.fullmatch(r"(timestamp)\[(\w+), tz=([^]]+)\]|(decimal128|decimal256)\((\d+), ?(\d+)\)", name)
    try:
        if parts is None:
            return pa.type_for_alias(name)
        return pa.timestamp(parts[2], parts[3]) if parts[1] else getattr(pa, parts[4])(int(parts[5]), int(parts[6]))
    except (ValueError, pa.ArrowException):
        raise UsageError(f"types: there is no type {name!r:.80}; use one such as string, int64 or bool") from None


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
    """Return the chunks in the form used in messages, without their places in containers."""
    return [_row(chunk) for chunk in chunks]


def parts_to_rows(chunks: Sequence[Chunk]) -> list[tuple[int, int]]:
    """Return the places of chunks in containers, as in ``Assignment.parts``."""
    if not any(chunk.container_records for chunk in chunks):
        return []
    return [(chunk.skipped, chunk.container_records) for chunk in chunks]


def chunks_from_rows(rows: Sequence[ChunkRow], parts: Sequence[tuple[int, int]] = ()) -> tuple[Chunk, ...]:
    """Return the chunks in a decoded message."""
    if not parts:
        return tuple(Chunk(*row) for row in rows)
    return tuple(Chunk(*row, *part) for row, part in zip(rows, parts, strict=True))
