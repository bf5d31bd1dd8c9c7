"""Kafka topics: chunks are ranges of a partition's offsets, and records are messages.

The number of a chunk is its partition, and its records are numbered by their offsets. A chunk may have fewer messages
than offsets, because transactions leave gaps. Nothing but the URL is needed to divide ranges into chunks, so a master
that takes over does so without the broker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

import numpy as np
import pyarrow as pa
from msgspec.structs import replace

from flightedl.domain.topics import topic_and_ranges, url_of
from flightedl.errors import NotFoundError, UsageError
from flightedl.formats.chunks import Chunk, ChunkColumns, CorruptChunkError, FileIndex, IndexOptions
from flightedl.formats.recordio import SCHEMA as RECORD_SCHEMA
from flightedl.formats.records import ReadRequest, Records, select
from flightedl.formats.sources import opened
from flightedl.ports import Files, FileStat

_NUMBERS = {"partition": pa.int32(), "offset": pa.int64(), "timestamp": pa.timestamp("ms", "UTC")}
SCHEMA = pa.schema({"value": pa.binary(), "key": pa.binary(), **_NUMBERS})
#: Default number of offsets of a task, rounded up to whole batches.
TASK_OFFSETS = 8192


class DeletedError(CorruptChunkError):
    """The broker has deleted messages before they were read."""

    def refused(self) -> CorruptChunkError:
        return self


class Topic:
    """See ``formats.Format``."""

    name: ClassVar[str] = "kafka"
    suffixes: ClassVar[tuple[str, ...]] = ()

    def index(self, files: Files, stat: FileStat, options: IndexOptions) -> FileIndex:  # noqa: ARG002 - see Format
        most = options.max_records_per_chunk or TASK_OFFSETS
        rows = [
            (partition, first, min(most, offsets.stop - first))
            for partition, offsets in topic_and_ranges(stat.url)[1].items()
            for first in range(offsets.start, offsets.stop, most)
        ]
        partitions, firsts, counts = np.array(rows, np.int64).reshape(-1, 3).T
        hashes = np.zeros(len(rows), np.uint64)
        chunks = ChunkColumns(partitions.astype(np.int32), firsts, counts, firsts, counts, hashes, counts)
        return FileIndex(stat, self.name, SCHEMA, chunks)

    def read(self, files: Files, chunk: Chunk, request: ReadRequest) -> Records:
        first = chunk.first_record
        offsets = {chunk.number: range(first, first + chunk.records)}
        try:
            with opened(files, url_of(topic_and_ranges(chunk.url)[0], offsets)) as source:
                table = pa.ipc.open_stream(source.read()).read_all().rename_columns(SCHEMA.names).cast(SCHEMA)
        except NotFoundError as error:
            raise DeletedError(str(error)) from None
        numbers = table["offset"].to_numpy() - first
        if request.schema == RECORD_SCHEMA:
            table = table.select(["value"]).rename_columns(RECORD_SCHEMA.names)
        found = select(table, request)
        return Records(found.table, numbers if found.numbers is None else numbers[found.numbers])

    @staticmethod
    def before(chunk: Chunk) -> Chunk:
        """Return up to 100 offsets before a chunk. Gaps follow the messages of their transaction."""
        first = max(chunk.first_record - 100, 0)
        return replace(chunk, first_record=first, records=chunk.first_record - first)

    def write(self, batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[bytes]:  # noqa: ARG002 - see Format
        raise UsageError("a topic can only be read: write another format, such as parquet")
