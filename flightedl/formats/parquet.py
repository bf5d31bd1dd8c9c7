"""Parquet: a chunk is a row group, or a part of a large one.

Indexing reads footers only. Reading takes only the wanted columns, and with conditions: nothing where the row group's
statistics exclude every record, else first the columns of the conditions, and the others only where a record is left.

A part of a row group (``max_records_per_chunk``) is read by decoding the row group up to its end: it makes smaller
tasks, not cheaper ones. Pages with a checksum are verified; the format does not require one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from flightedl.formats.chunks import Chunk, ChunkColumns, FileIndex, IndexOptions
from flightedl.formats.records import ReadRequest, Records, empty, expression, require_columns, select
from flightedl.formats.schemas import require_unique_columns
from flightedl.formats.sinks import PartsSink
from flightedl.formats.sources import WatchedFile, opened, parsing
from flightedl.ports import Files, FileStat

#: Records decoded at a time where only a part of a row group is wanted.
_DECODED_RECORDS = 65_536


class Parquet:
    """See ``formats.Format``."""

    name: ClassVar[str] = "parquet"
    suffixes: ClassVar[tuple[str, ...]] = (".parquet", ".pq", ".parq")

    def index(self, files: Files, stat: FileStat, options: IndexOptions) -> FileIndex:
        with opened(files, stat.url) as source, _open(source) as file:
            metadata = file.metadata
            offsets = [_offset(metadata.row_group(number)) for number in range(metadata.num_row_groups)]
            records = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
            schema = file.schema_arrow.remove_metadata()
            require_unique_columns(schema, stat.url)
        sizes = [end - start for start, end in pairwise([*offsets, stat.size_bytes])]
        chunks = ChunkColumns.of(records, offsets, [max(size, 0) for size in sizes])
        if options.max_records_per_chunk:
            chunks = chunks.split(options.max_records_per_chunk)
        return FileIndex(stat, self.name, schema, chunks)

    def schema(self, files: Files, stat: FileStat) -> pa.Schema:
        with opened(files, stat.url) as source, _open(source) as file:
            return file.schema_arrow.remove_metadata()

    def read(self, files: Files, chunk: Chunk, request: ReadRequest) -> Records:
        place = f"row group {chunk.number} at byte {chunk.offset}"
        with opened(files, chunk.url) as source, parsing(source, place), _open(source) as file:
            schema = file.schema_arrow.remove_metadata()
            require_columns(schema, request, chunk.url)
            group_start = sum(file.metadata.row_group(number).num_rows for number in range(chunk.number))
            start = chunk.first_record - group_start
            if start + chunk.records > file.metadata.row_group(chunk.number).num_rows:
                raise ValueError(f"it does not have the {chunk.records} records that the index says")
            where = expression(schema, request.conditions)
            if where is None:
                table = _part(file, chunk.number, _listed(request.needed()), start, chunk.records)
                return select(table, request)
            if _is_excluded(source, chunk.number, where, schema):
                return empty(schema, request)
            return _filtered(file, chunk, start, where, request, schema)

    def write(self, batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[bytes]:
        sink = PartsSink()
        with pq.ParquetWriter(
            pa.PythonFile(sink, mode="w"), schema, compression="zstd", write_page_checksum=True
        ) as writer:
            for batch in batches:
                writer.write_batch(batch, row_group_size=max(batch.num_rows, 1))
                yield sink.take()
        yield sink.take()


def _open(source: WatchedFile) -> pq.ParquetFile:
    return pq.ParquetFile(pa.PythonFile(source, mode="r"), pre_buffer=True, page_checksum_verification=True)


def _offset(group: Any) -> int:
    """Where a row group's first page starts."""
    if not group.num_columns:
        return 0
    column = group.column(0)
    dictionary = column.dictionary_page_offset
    return int(column.data_page_offset if dictionary is None else min(dictionary, column.data_page_offset))


def _is_excluded(source: WatchedFile, number: int, where: pc.Expression, schema: pa.Schema) -> bool:
    """Whether the statistics show that no record of the row group meets the conditions."""
    fragment = ds.ParquetFileFormat().make_fragment(pa.PythonFile(source, mode="r"), row_groups=[number])
    return not fragment.subset(filter=where, schema=schema).row_groups


def _filtered(
    file: pq.ParquetFile, chunk: Chunk, start: int, where: pc.Expression, request: ReadRequest, schema: pa.Schema
) -> Records:
    tested = list(dict.fromkeys(column for column, _, _ in request.conditions))
    shown = list(request.shown(schema))
    table = _part(file, chunk.number, tested, start, chunk.records)
    number = pa.array(np.arange(len(table), dtype=np.int64))
    kept = table.append_column("", number).filter(where).column("")
    if not len(kept):
        return empty(schema, request)
    others = [name for name in shown if name not in tested]
    if others:
        rest = _part(file, chunk.number, others, start, chunk.records)
        for name in others:
            table = table.append_column(rest.schema.field(name), rest.column(name))
    return Records(table.select(shown).take(kept), kept.to_numpy())


def _part(file: pq.ParquetFile, number: int, columns: list[str] | None, start: int, count: int) -> pa.Table:
    """``count`` records of a row group from ``start`` on; what follows them is not decoded."""
    end = start + count
    if end == file.metadata.row_group(number).num_rows:
        return file.read_row_group(number, columns=columns).slice(start)
    batches: list[pa.RecordBatch] = []
    decoded = 0
    for batch in file.iter_batches(batch_size=min(end, _DECODED_RECORDS), row_groups=[number], columns=columns):
        batches.append(batch)
        decoded += batch.num_rows
        if decoded >= end:
            break
    return pa.Table.from_batches(batches).replace_schema_metadata(None).slice(start, count)


def _listed(columns: tuple[str, ...] | None) -> list[str] | None:
    return None if columns is None else list(columns)
