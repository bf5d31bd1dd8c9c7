"""CSV and TSV with a header line. Fields are quoted as in RFC 4180, so quoted fields may contain newlines.

pyarrow infers the types of columns: null, int64, date, time, timestamp, bool, double or string. If the types inferred
from different parts of a file differ, the column becomes a column of strings. If the types in different files differ,
this is an error. Empty lines are skipped. A UTF-8 BOM is permitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pc

from flightedl.errors import DataError
from flightedl.formats.chunks import CorruptChunkError
from flightedl.formats.cutting import Readable, csv_records_end, ends_quoted, first_csv_record_end
from flightedl.formats.records import ReadRequest
from flightedl.formats.schemas import Mismatch, is_binary, widened_schema, widened_type
from flightedl.formats.sinks import written
from flightedl.formats.text import TextFormat

_HEAD_BYTES = 1 << 16
#: Block size in bytes that fits into a core's cache.
_BLOCK_BYTES = 1 << 18
_MAX_BLOCK_BYTES = 1 << 30
_MARK = b"\xef\xbb\xbf"
_NEWLINE, _RETURN = 0x0A, 0x0D
_SLICE = 1 << 16


def _parsing(delimiter: str, *, is_by_line: bool = False) -> pc.ParseOptions:
    return pc.ParseOptions(delimiter=delimiter, newlines_in_values=not is_by_line)


def _count(values: npt.NDArray[np.uint8], byte: int) -> int:
    return sum(int(np.count_nonzero(values[at : at + _SLICE] == byte)) for at in range(0, len(values), _SLICE))


def _blocks(text: Any, records: int | None) -> tuple[int, bool]:
    """Return the block size for parallel parsing, and True if each record is one line, so parsing can start sooner.

    If there are as many lines as records, no quoted field contains a newline, unless carriage returns end the records.
    """
    values = np.frombuffer(text, np.uint8)
    returns = _count(values, _RETURN)
    is_by_line = bool(records) and _count(values, _NEWLINE) + (values[-1] != _NEWLINE) == records
    if is_by_line and (not returns or bytes(text).count(b"\r\n") == returns):
        return _BLOCK_BYTES, True
    # Arrow loses the newline if a block ends between "\r" and "\n" inside quotes.
    return _MAX_BLOCK_BYTES if returns else _BLOCK_BYTES, False


@lru_cache(maxsize=256)
def _names(line: bytes, delimiter: str) -> tuple[str, ...]:
    options = pc.ReadOptions(column_names=None, use_threads=False, block_size=max(len(line), 1))
    return tuple(pc.read_csv(pa.py_buffer(line), options, _parsing(delimiter)).column_names)


class CommaSeparated(TextFormat):
    """Implementation of ``formats.Format`` for CSV."""

    name: ClassVar[str] = "csv"
    suffixes: ClassVar[tuple[str, ...]] = (".csv",)
    may_lack_columns: ClassVar[bool] = False
    delimiter: ClassVar[str] = ","

    def records_end(self, text: bytes) -> int:
        return csv_records_end(text, self.delimiter.encode())

    def head(self, source: Readable, url: str) -> tuple[tuple[str, ...] | None, int, bytes]:
        text = source.read(_HEAD_BYTES)
        mark = len(_MARK) if text.startswith(_MARK) else 0
        while not (end := first_csv_record_end(text[mark:], self.delimiter.encode())):
            more = source.read(len(text) or 1)
            if not more:
                end = len(text) - mark
                break
            text += more
        line = text[mark : mark + end]
        if not line.strip():
            raise CorruptChunkError(f"{url} has no header line: the first line has to name the columns")
        return _names(line, self.delimiter), mark + end, text[mark + end :]

    def parse(self, text: Any, names: tuple[str, ...] | None, request: ReadRequest) -> pa.Table:
        if request.schema is None and ends_quoted(text, self.delimiter.encode()):
            raise ValueError("the text ends within a quoted field")
        assert names is not None  # head() finds them or raises
        needed = request.needed()
        missing = [name for name in needed or () if name not in names]
        if missing:
            raise DataError(f"there is no column {missing[0]!r}: the header has {', '.join(names)[:300]}")
        types = {} if request.schema is None else {field.name: field.type for field in request.schema}
        if request.schema is None and (not text or text.isspace()):
            return pa.schema(
                [pa.field(name, pa.null()) for name in (names if needed is None else needed)]
            ).empty_table()
        convert = pc.ConvertOptions(
            column_types={name: kind for name, kind in types.items() if name in names},
            include_columns=None if needed is None else list(needed),
        )
        block_bytes, is_by_line = _blocks(text, request.records)
        try:
            return self._table(text, names, convert, block_bytes, is_by_line=is_by_line)
        except pa.ArrowInvalid:
            # Parse again as a single block, because a record may be larger than a block, and because only this reports
            # damaged rows.
            return self._table(text, names, convert, _MAX_BLOCK_BYTES)

    def _table(
        self,
        text: Any,
        names: Sequence[str],
        convert: pc.ConvertOptions,
        block_bytes: int,
        *,
        is_by_line: bool = False,
    ) -> pa.Table:
        options = pc.ReadOptions(
            column_names=list(names),
            use_threads=block_bytes < len(text),
            block_size=min(len(text) + 1, block_bytes),
        )
        return pc.read_csv(pa.py_buffer(text), options, _parsing(self.delimiter, is_by_line=is_by_line), convert)

    def _joined(self, schema: pa.Schema | None, found: pa.Schema, url: str, offset: int) -> pa.Schema:  # noqa: ARG002
        """Combine two inferred schemas. A column with several types in a file becomes a column of strings."""
        if schema is None:
            return found
        joined = widened_schema(schema, found, may_lack=False)
        if isinstance(joined, Mismatch):
            kinds = [widened_type(one.type, found.field(one.name).type) or pa.string() for one in schema]
            return pa.schema([pa.field(name, kind) for name, kind in zip(schema.names, kinds, strict=True)])
        return joined

    def write(self, batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[bytes]:
        options = pc.WriteOptions(delimiter=self.delimiter)
        try:
            yield from written(batches, lambda file: pc.CSVWriter(file, schema, write_options=options))
        except pa.ArrowInvalid as error:
            raise DataError(
                f"{self._unwritable(schema)} cannot be written as {self.name} ({str(error)[:200]}): "
                "leave such columns out, or write jsonl, arrow or parquet"
            ) from None

    def _unwritable(self, schema: pa.Schema) -> str:
        nested = [f"{field.name!r} ({field.type})" for field in schema if pa.types.is_nested(field.type)]
        binary = [f"{field.name!r} ({field.type})" for field in schema if is_binary(field.type)]
        return f"column {', '.join(nested or binary)}" if nested or binary else "this"


class TabSeparated(CommaSeparated):
    """Implementation of ``formats.Format`` for TSV."""

    name: ClassVar[str] = "tsv"
    suffixes: ClassVar[tuple[str, ...]] = (".tsv",)
    delimiter: ClassVar[str] = "\t"
