"""RecordIO whose records are JSON objects, the format of ``decode=json.loads``.

Columns and types are those of JSON lines, but text remains text, even if all of it is dates. Types are inferred from
all records, so indexing reads the files completely.
"""

from __future__ import annotations

import io
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import ClassVar

import pyarrow as pa

from flightedl.formats.chunk_index import ChunkIndex
from flightedl.formats.chunks import Chunk, CorruptChunkError, FileIndex, IndexOptions
from flightedl.formats.inference import joined_schemas
from flightedl.formats.json_lines import JsonTexts, lines_of, require_objects
from flightedl.formats.recordio import SCHEMA, RecordIO
from flightedl.formats.records import ReadRequest, Records, require_columns, select
from flightedl.formats.sources import WatchedFile, parsing
from flightedl.formats.text import with_missing
from flightedl.ports import Files, FileStat

_LINES = JsonTexts()


class JsonRecords(RecordIO):
    """See ``formats.Format``."""

    name: ClassVar[str] = "recordio-json"
    suffixes: ClassVar[tuple[str, ...]] = ()
    may_lack_columns: ClassVar[bool] = True

    def index(self, files: Files, stat: FileStat, options: IndexOptions) -> FileIndex:
        found = super().index(files, stat, options)
        chunks = ChunkIndex([found], SCHEMA)
        schema = pa.schema([])
        for number in range(len(chunks)):
            try:
                schema = joined_schemas(schema, self._guess(files, chunks.chunk(number), options))
            except CorruptChunkError:
                if not options.skip_corrupt:
                    raise
        return replace(found, schema=schema)

    def _guess(self, files: Files, chunk: Chunk, options: IndexOptions) -> pa.Schema:
        lines = self._lines(files, chunk)
        with _parsing(chunk):
            count, found = _LINES.guess(lines, None, options)
            if count != chunk.records:
                raise ValueError(f"it has {count} JSON objects, not {chunk.records}")
            _LINES.require_declared(lines, None, count, options, (chunk.url, chunk.first_record))
        return found

    def read(self, files: Files, chunk: Chunk, request: ReadRequest) -> Records:
        lines = self._lines(files, chunk)
        with _parsing(chunk):
            require_objects(lines)
            table = with_missing(_LINES.parse(lines, None, request), request)
            if len(table) != chunk.records:
                raise ValueError(f"it has {len(table)} JSON objects, not {chunk.records}")
            require_columns(table.schema, request, chunk.url)
            return select(table, request)

    def _lines(self, files: Files, chunk: Chunk) -> bytes:
        return lines_of(super().read(files, chunk, ReadRequest(SCHEMA)).table.column(0).to_pylist())


def _parsing(chunk: Chunk) -> AbstractContextManager[None]:
    return parsing(WatchedFile(io.BytesIO(), chunk.url), f"chunk at byte {chunk.offset}")
