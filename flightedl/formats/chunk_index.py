"""Index of a dataset, stored by columns. Each chunk takes a row of 56 bytes, so a million chunks take 56 MB.

The index is authoritative: a file whose content has changed since it was indexed is rejected (see ``formats.reader``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from flightedl.formats.chunks import PLACE_FIELDS, Chunk, ChunkColumns, FileIndex
from flightedl.formats.schemas import schema_text

CHUNKS_SCHEMA = pa.schema(
    [
        pa.field("file", pa.int32(), nullable=False),
        *PLACE_FIELDS,
        pa.field("hash", pa.uint64(), nullable=False),
        pa.field("plain_bytes", pa.int64(), nullable=False),
    ]
)


#: Assumed memory of a value whose size varies.
_VALUE_BYTES = 16


class ChunkIndex:
    """All chunks of a dataset. Immutable.

    Args:
        files: One result of indexing for each file, ordered by URL, or by arrival in a growing dataset.
        schema: Schema of all files' records.
        left_out: For each reason why names that match the patterns are no files of the dataset, a sentence.
    """

    def __init__(self, files: Sequence[FileIndex], schema: pa.Schema, left_out: Sequence[str] = ()) -> None:
        self.left_out = tuple(left_out)
        counts = np.array([len(file.chunks) for file in files], np.int64)
        #: Number of each file's first chunk, followed by the number of all chunks.
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        self._file_numbers = np.repeat(np.arange(len(files), dtype=np.int32), counts)
        self._columns = ChunkColumns.concatenated([file.chunks for file in files])
        #: Index of each file.
        self.files = tuple(
            replace(file, chunks=ChunkColumns(*(column[start:end] for column in self._columns.arrays)))
            for file, (start, end) in zip(files, pairwise(self._starts.tolist()), strict=True)
        )
        self.stats = tuple(file.stat for file in self.files)
        #: Schema of the records, with all columns.
        self.schema = schema
        #: Number of records in each chunk, (chunk_count,).
        self.records = self._columns.records
        places = np.stack([self._file_numbers, self._columns.number, self._columns.offset])
        #: Numbers of the chunks that begin a container. Chunks of the same container follow one another.
        self._containers = np.flatnonzero((np.diff(places, prepend=-1) != 0).any(axis=0))
        self.record_count = int(self.records.sum())

    @property
    def decoded_bytes(self) -> npt.NDArray[np.int64]:
        """Estimated memory of each chunk's records with all columns, (chunk_count,)."""
        return np.maximum(self._columns.plain_bytes, self._columns.records * sum(map(_value_bytes, self.schema.types)))

    @property
    def skipped(self) -> tuple[str, ...]:
        """One sentence for each corrupt part of a file that indexing skipped."""
        return tuple(sentence for file in self.files for sentence in file.skipped)

    @property
    def without_records(self) -> tuple[str, ...]:
        """URLs of the files that are sound but have no records."""
        return tuple(file.stat.url for file in self.files if not len(file.chunks) and not file.skipped)

    def __len__(self) -> int:
        return len(self._columns)

    def first_chunk(self, file: int) -> int:
        """Return the number of a file's first chunk; past the last file, return the number of all chunks."""
        return int(self._starts[file])

    def chunk(self, number: int) -> Chunk:
        """Return the chunk with this number. Raises IndexError if there is no such chunk."""
        if not 0 <= number < len(self):
            raise IndexError(f"there is no chunk {number} of {len(self)}")
        file = self.files[self._file_numbers[number]]
        columns = self._columns
        mark = file.mark or f"{columns.hash[number]:016x}"
        skipped, container_records = 0, 0
        if len(self._containers) < len(self):
            at = int(np.searchsorted(self._containers, number, side="right"))
            first = int(self._containers[at - 1])
            end = int(self._containers[at]) if at < len(self._containers) else len(self)
            if end - first > 1:
                skipped = int(columns.first_record[number] - columns.first_record[first])
                last = int(columns.first_record[end - 1] + columns.records[end - 1])
                container_records = last - int(columns.first_record[first])
        return Chunk(
            file.stat.url,
            f"{file.stat.version} {file.stat.size_bytes}-{mark}",
            file.format,
            int(columns.number[number]),
            int(columns.first_record[number]),
            int(columns.records[number]),
            int(columns.offset[number]),
            int(columns.size_bytes[number]),
            skipped,
            container_records,
        )

    def chunk_batch(self) -> pa.RecordBatch:
        """Return the chunks as rows of ``CHUNKS_SCHEMA``, without copying columns."""
        columns = map(pa.array, (self._file_numbers, *self._columns.arrays))
        return pa.RecordBatch.from_arrays(list(columns), schema=CHUNKS_SCHEMA)

    def version_hash(self) -> str:
        """Return a hash of the times or ETags of files whose marks do not show their entire content."""
        return xxhash.xxh3_64_hexdigest("\n".join(file.stat.version for file in self.files if file.mark).encode())

    def content_hash(self) -> str:
        """Return a hash (32 hexadecimal digits) of the files' content and how it is divided into chunks.

        It depends on the names below the fixed parts of the patterns, but not on folders, times and ETags.
        """
        digest = xxhash.xxh3_128()
        for file in self.files:
            stat = file.stat
            name = stat.name or stat.url.rpartition("/")[2]
            digest.update(f"{name}\0{stat.size_bytes}\0{file.mark}\0{file.format}\0".encode())
        digest.update(schema_text(self.schema).encode())
        *of_content, _ = self._columns.arrays
        for array in (self._file_numbers, *of_content):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


def _value_bytes(kind: pa.DataType) -> int:
    """Return the memory of a value; if it varies, an assumption."""
    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size) * _value_bytes(kind.value_type)
    return -(-kind.bit_width // 8) if pa.types.is_primitive(kind) else _VALUE_BYTES
