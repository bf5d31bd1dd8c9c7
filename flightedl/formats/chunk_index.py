"""Index of a dataset, stored by columns. Each chunk takes a row of 40 bytes, so a million chunks take 40 MB.

The index is authoritative: a file whose version has changed since it was indexed is rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from flightedl.formats.chunks import Chunk, ChunkColumns, FileIndex
from flightedl.formats.schemas import schema_text
from flightedl.ports import FileStat

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


class ChunkIndex:
    """All chunks of a dataset. Immutable.

    Args:
        files: One result of indexing for each file, ordered by URL, or by arrival in a growing dataset.
        schema: Schema of all files' records.
    """

    def __init__(self, files: Sequence[FileIndex], schema: pa.Schema) -> None:
        self._files = tuple(
            FileIndex(file.stat, file.format, file.schema, ChunkColumns.of([], [], []), file.skipped) for file in files
        )
        counts = np.array([len(file.chunks) for file in files], np.int64)
        #: Number of each file's first chunk, followed by the number of all chunks.
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        self._file_numbers = np.repeat(np.arange(len(files), dtype=np.int32), counts)
        self._columns = ChunkColumns.concatenated([file.chunks for file in files])
        self._schema = schema
        self._record_count = int(self._columns.records.sum())

    @property
    def schema(self) -> pa.Schema:
        """Schema of the records, with all columns."""
        return self._schema

    @property
    def record_count(self) -> int:
        return self._record_count

    @property
    def records(self) -> npt.NDArray[np.int64]:
        """Number of records in each chunk, (chunk_count,)."""
        return self._columns.records

    @property
    def skipped(self) -> tuple[str, ...]:
        """One sentence for each corrupt part of a file that indexing skipped."""
        return tuple(sentence for file in self._files for sentence in file.skipped)

    @property
    def stats(self) -> tuple[FileStat, ...]:
        return tuple(file.stat for file in self._files)

    def __len__(self) -> int:
        return len(self._columns)

    def first_chunk(self, file: int) -> int:
        """Return the number of a file's first chunk; past the last file, return the number of all chunks."""
        return int(self._starts[file])

    def chunk(self, number: int) -> Chunk:
        """Return the chunk with this number. Raises IndexError if there is no such chunk."""
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
        file = self._files[number]
        part = slice(int(self._starts[number]), int(self._starts[number + 1]))
        columns = ChunkColumns(*(getattr(self._columns, field.name)[part] for field in fields(ChunkColumns)))
        return FileIndex(file.stat, file.format, file.schema, columns, file.skipped)

    def chunk_batch(self) -> pa.RecordBatch:
        """Return the chunks as rows of ``CHUNKS_SCHEMA``, without copying columns."""
        columns = (self._file_numbers, *(getattr(self._columns, field.name) for field in fields(ChunkColumns)))
        return pa.RecordBatch.from_arrays([pa.array(column) for column in columns], schema=CHUNKS_SCHEMA)

    def content_hash(self) -> str:
        """Return a hash (32 hexadecimal digits) of the files, their versions and how they are divided into chunks."""
        digest = xxhash.xxh3_128()
        for file in self._files:
            stat = file.stat
            digest.update(f"{stat.url}\0{stat.size_bytes}\0{stat.version}\0{file.format}\0".encode())
        digest.update(schema_text([self._schema]).encode())
        for array in (self._file_numbers, *(getattr(self._columns, field.name) for field in fields(ChunkColumns))):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()
