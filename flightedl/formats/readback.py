"""Read back what a conversion has written, and compare it with the source.

A column is *changed* if a dataset of the new files would have other values in it, or values of another kind: bytes that
become text, or text that becomes numbers. Other physical types of the same values are no change, nor are bytes instead
of text in TFRecord, which has no text.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from flightedl.domain.retries import machine_error
from flightedl.errors import LossyError
from flightedl.formats.chunk_index import ChunkIndex
from flightedl.formats.chunks import IndexOptions
from flightedl.formats.dataset_spec import DatasetSpec
from flightedl.formats.inference import candidates, forms, is_guess, joined_schemas
from flightedl.formats.json_lines import json_columns, replaced
from flightedl.formats.reader import ChunkReader
from flightedl.formats.records import plain_column
from flightedl.formats.registry import named_format
from flightedl.formats.schemas import common_type, is_number, plain_schema
from flightedl.ports import FileStat

#: Columns of JSON objects in formats without other columns.
_OBJECTS = {"recordio": "record", "lines": "record", "tar": "json"}


@dataclass(frozen=True, slots=True)
class _LocalFile:
    """The part of ``ports.Files`` that readers need."""

    stat_: FileStat

    def open(self, url: str) -> BinaryIO:
        return Path(url).open("rb")

    def stat(self, url: str) -> FileStat:  # noqa: ARG002 - as Files does
        return self.stat_


class Readback:
    """Comparison of all shards of a conversion with their sources."""

    def __init__(self, format_name: str, *, is_lossy: bool) -> None:
        self._format = named_format(format_name)
        self._is_lossy = is_lossy
        self._changed: dict[str, None] = {}
        self._source: pa.Schema | None = None
        self._guess = pa.schema([])

    def checked(self, parts: Iterator[bytes], source: Iterator[pa.RecordBatch]) -> Iterator[bytes]:
        """Yield the parts of a new file. Before the end, compare its content with the source.

        Raises:
            LossyError: a column is changed, and the conversion must not be lossy.
        """
        with tempfile.TemporaryDirectory(prefix="flightedl-convert-") as folder:
            path = Path(folder, f"shard{self._format.suffixes[0]}")
            size_bytes = 0
            try:
                with path.open("wb") as file:
                    for part in parts:
                        size_bytes += file.write(part)
                        yield part
            except OSError as error:
                raise machine_error(error, "the new file cannot be compared with its source") or error from error
            self._compare(FileStat(str(path), size_bytes, "written"), source)
        self._require_unchanged()

    def changed(self) -> tuple[str, ...]:
        """Return the changed columns, after the last shard. Raises the same error as ``checked``."""
        source = pa.schema([]) if self._source is None else self._source
        for field in plain_schema(self._guess):
            kinds = field.type, replaced(field.type, pa.types.is_binary, pa.string())
            if field.name in source.names and not any(
                _is_same_kind(source.field(field.name).type, kind) for kind in kinds
            ):
                self._changed[field.name] = None
        self._require_unchanged()
        return tuple(self._changed)

    def _require_unchanged(self) -> None:
        if self._changed and not self._is_lossy:
            names = ", ".join(repr(name) for name in self._changed)
            raise LossyError(
                f"{self._format.name} changes the values of {names[:300]}, so nothing was written: "
                "choose another format or other columns, or accept this with --lossy"
            )

    def _compare(self, stat: FileStat, source: Iterator[pa.RecordBatch]) -> None:
        files: Any = _LocalFile(stat)
        found = self._format.index(files, stat, IndexOptions())
        self._guess = joined_schemas(self._guess, pa.schema([field for field in found.schema if is_guess(field)]))
        index = ChunkIndex([found], found.schema)
        chunks = [index.chunk(number) for number in range(len(index))]
        reader: ChunkReader | None = None
        start = 0
        for batch in source:
            if reader is None:
                self._source = batch.schema
                types = [(field.name, _read_as(field, batch.schema)) for field in found.schema]
                reader = ChunkReader(files, chunks, DatasetSpec((stat.url,)), pa.schema(types))
            written = reader.range(range(start, start + batch.num_rows))
            start += batch.num_rows
            self._note_changes(batch, pa.Table.from_batches([written]))

    def _note_changes(self, batch: pa.RecordBatch, written: pa.Table) -> None:
        objects = _OBJECTS.get(self._format.name)
        if objects == "record" and batch.num_columns == 1:
            # RecordIO holds bytes or text without a name.
            kind = common_type([batch.schema.field(0).type])
            written = pa.table([written.column(0).cast(kind)], batch.schema.names)
        elif objects in written.column_names and objects not in batch.schema.names:
            inner = json_columns(written.column(objects).to_pylist())
            written = pa.table([*written.columns, *inner.columns], [*written.column_names, *inner.column_names])
        for name in batch.schema.names:
            if name not in self._changed and (name not in written.column_names or _differs(batch[name], written[name])):
                self._changed[name] = None


def _read_as(field: pa.Field, source: pa.Schema) -> pa.DataType:
    """Return the type with which to read a written column: one that the source's type goes with, if there is one."""
    kinds: Sequence[pa.DataType] = ()
    if is_guess(field) and (forms(field) or not pa.types.is_nested(field.type)):
        kinds = candidates(field)
    wanted = source.field(field.name).type if field.name in source.names else None
    plain = common_type([field.type]) or field.type
    return next((kind for kind in kinds if wanted is not None and _is_same_kind(wanted, kind)), plain)


def _is_same_kind(one: pa.DataType, two: pa.DataType) -> bool:
    plain = [common_type([kind]) or kind for kind in (one, two)]
    return common_type([one, two]) is not None or all(map(is_number, plain))


def _differs(source: pa.Array, written: pa.ChunkedArray) -> bool:
    if not _is_same_kind(source.type, written.type):
        return True
    kind = common_type([source.type]) or source.type
    try:
        column, found = (plain_column(each).cast(kind) for each in (pa.chunked_array([source]), written))
    except pa.ArrowException:
        return True
    # NaN is not equal to itself, but its text is.
    return not column.equals(found) and repr(column.to_pylist()) != repr(found.to_pylist())
