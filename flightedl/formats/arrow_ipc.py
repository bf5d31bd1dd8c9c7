"""Arrow IPC files and streams. A chunk is one record batch. The first bytes of a file distinguish the two formats.

Indexing reads a file's footer and the metadata of each message, but no bodies. When a record batch is read, it is fully
validated (offsets, UTF-8), because using a damaged batch could crash the process. A file is read by its footer alone:
some writers, such as Polars, put no valid schema at its start.

In a *stream*, a record batch with dictionaries needs the dictionaries that precede it, so reading scans the metadata of
all earlier messages. The format does not require an end mark, so a stream that was truncated exactly between two
messages is not detected. Files have a footer, so truncation is always detected.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

import pyarrow as pa
import xxhash

from flightedl.formats import arrow_messages
from flightedl.formats.arrow_messages import MAGIC, message_at, messages, record_blocks
from flightedl.formats.chunks import Chunk, ChunkColumns, CorruptChunkError, FileIndex, IndexOptions
from flightedl.formats.records import ReadRequest, Records, conformed, require_columns, select
from flightedl.formats.schemas import require_unique_columns
from flightedl.formats.sinks import written
from flightedl.formats.sources import WatchedFile, opened, parsing, until_damage
from flightedl.ports import Files, FileStat


class ArrowFile:
    """Implementation of ``formats.Format`` that reads both files and streams, and writes files."""

    name: ClassVar[str] = "arrow"
    suffixes: ClassVar[tuple[str, ...]] = (".arrow", ".feather", ".ipc")
    _is_stream_written: ClassVar[bool] = False

    def index(self, files: Files, stat: FileStat, options: IndexOptions) -> FileIndex:
        digest = xxhash.xxh3_64()
        with opened(files, stat.url, digest) as source:
            if not stat.size_bytes:
                raise CorruptChunkError(f"{stat.url} is corrupt: it is empty, without even a schema")
            places: list[tuple[int, int, int]] = []
            schema = _schema(source).remove_metadata()
            require_unique_columns(schema.names, stat.url)
            with until_damage(options) as skipped, parsing(source, "after its last sound record batch"):
                for place in _places(source, stat):
                    places.append(place)  # noqa: PERF402 - what precedes the damage is kept
        offsets, sizes, records = zip(*places, strict=True) if places else ((), (), ())
        chunks = ChunkColumns.of(records, offsets, sizes)
        return FileIndex(stat, self.name, schema, chunks, tuple(skipped), digest.hexdigest())

    def written_schema(self, files: Files, stat: FileStat) -> pa.Schema:
        """Return the schema of the records with the metadata of their writer."""
        with opened(files, stat.url) as source:
            return _schema(source)

    def read(self, files: Files, chunk: Chunk, request: ReadRequest) -> Records:
        with opened(files, chunk.url) as source, parsing(source, f"record batch {chunk.number} at byte {chunk.offset}"):
            schema = _schema(source)
            require_columns(schema, request, chunk.url)
            included = sorted(schema.get_field_index(name) for name in request.needed() or ())
            options = pa.ipc.IpcReadOptions(included_fields=included, use_threads=False)
            if _is_file(source):
                source.seek(0)
                with pa.ipc.open_file(pa.PythonFile(source, mode="r"), options=options) as reader:
                    batch = reader.get_batch(chunk.number)
            else:
                batch = _read_from_stream(source, chunk, schema, options)
            batch.validate(full=True)
            if batch.num_rows != chunk.records:
                raise ValueError(f"it has {batch.num_rows} records, not {chunk.records}")
            table = pa.Table.from_batches([batch]).replace_schema_metadata(None)
            return select(conformed(table, request, chunk), request)

    def write(self, batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[bytes]:
        new = pa.ipc.new_stream if self._is_stream_written else pa.ipc.new_file
        options = pa.ipc.IpcWriteOptions(unify_dictionaries=not self._is_stream_written)
        return written(batches, lambda file: new(file, schema, options=options))


class ArrowStream(ArrowFile):
    """Implementation of ``formats.Format`` that reads both files and streams, and writes streams."""

    name: ClassVar[str] = "arrow-stream"
    suffixes: ClassVar[tuple[str, ...]] = (".arrows",)
    _is_stream_written: ClassVar[bool] = True


def _is_file(source: WatchedFile) -> bool:
    source.seek(0)
    return source.read(len(MAGIC)) == MAGIC


def _schema(source: WatchedFile) -> pa.Schema:
    with parsing(source, "at its start or in its footer: this is not a complete Arrow file or stream, nor Feather V2"):
        if _is_file(source):
            with pa.ipc.open_file(pa.PythonFile(source, mode="r")) as reader:
                return reader.schema
        first = message_at(source, 0)
        if first is None or first.kind != arrow_messages.SCHEMA:
            raise ValueError("no schema")
        source.seek(0)
        return pa.ipc.read_schema(pa.py_buffer(source.exactly(first.size_bytes)))


def _places(source: WatchedFile, stat: FileStat) -> Iterator[tuple[int, int, int]]:
    if not _is_file(source):
        for message in messages(source, 0, stat.size_bytes):
            if message.kind == arrow_messages.RECORDS:
                yield message.offset, message.size_bytes, message.records
        return
    for number, (offset, size_bytes) in enumerate(record_blocks(source, stat.size_bytes)):
        found = message_at(source, offset)
        if found is None or found.kind != arrow_messages.RECORDS:
            raise ValueError(f"record batch {number} is not at byte {offset}, where the footer says")
        yield offset, size_bytes, found.records


def _read_from_stream(
    source: WatchedFile, chunk: Chunk, schema: pa.Schema, options: pa.ipc.IpcReadOptions
) -> pa.RecordBatch:
    """Read the chunk from a stream that is assembled from the schema, preceding dictionaries, and the chunk itself."""
    parts = []
    has_dictionaries = any(_has_dictionary(field.type) for field in schema)
    for message in messages(source, 0, chunk.offset):
        if message.kind == arrow_messages.RECORDS:
            if not has_dictionaries:
                break
        else:
            source.seek(message.offset)
            parts.append(source.exactly(message.size_bytes))
    source.seek(chunk.offset)
    with pa.ipc.open_stream(source.buffer(chunk.size_bytes, b"".join(parts)), options=options) as reader:
        return reader.read_next_batch()


def _has_dictionary(kind: pa.DataType) -> bool:
    return pa.types.is_dictionary(kind) or any(_has_dictionary(kind.field(n).type) for n in range(kind.num_fields))
