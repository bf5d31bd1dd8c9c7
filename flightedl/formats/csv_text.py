"""CSV and TSV. Fields are quoted as in RFC 4180, so quoted fields may contain newlines.

The first line contains the names of the columns, unless ``TextOptions.names`` does. Then, a first line with exactly
these names is skipped. Without names, a first line with numbers or other values is refused, because it is probably a
record.

The types of columns are null, int64, uint64, double, bool, date, time, timestamp or string (see ``inference``). Empty
lines are skipped. A UTF-8 BOM is permitted. Lines may end with a newline, a carriage return, or both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pc

from flightedl.errors import DataError
from flightedl.formats.chunks import CorruptChunkError, IndexOptions, TextOptions
from flightedl.formats.cutting import Readable, csv_records_end, ends_quoted, first_csv_record_end, record_ends
from flightedl.formats.inference import compute, guess_of_texts
from flightedl.formats.records import ReadRequest
from flightedl.formats.schemas import is_binary
from flightedl.formats.sinks import written
from flightedl.formats.text import MARK, TextFormat, require_utf8

_HEAD_BYTES = 1 << 16
#: Block size in bytes that fits into a core's cache.
_BLOCK_BYTES = 1 << 18
_MAX_BLOCK_BYTES = 1 << 30
_NEWLINE, _RETURN = 0x0A, 0x0D
_SLICE = 1 << 16
#: Texts that are nulls in columns of other types than text.
_NULLS: list[str] = pc.ConvertOptions().null_values
#: Numbers, dates, times, booleans and hashes, none of which is likely to be the name of a column.
_VALUE = re.compile(r"[-+.]?\d[-+.:/,%\d ]*([ET ][-+.:/\d]+)?Z?|true|false|(?=\D*\d)[\da-f]{8}[\da-f-]*", re.IGNORECASE)


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
    options = pc.ReadOptions(column_names=None, use_threads=False, block_size=len(line) + 1)
    return tuple(pc.read_csv(pa.py_buffer(line + b"\n"), options, _parsing(delimiter)).column_names)


def _require_names(found: tuple[str, ...], options: TextOptions, url: str) -> None:
    """Raise DataError if the first line does not contain names, or has another number of fields than ``names``."""
    if len(found) == 1 and (other := next((mark for mark in ";\t|\1" if mark in found[0]), None)):
        raise DataError(f"the columns of {url} are divided by {other!r}: pass delimiter={other!r}")
    if options.names and len(found) != len(options.names):
        raise DataError(
            f"the first record of {url} has {len(found)} fields, but names= has {len(options.names)}: correct names= "
            "or delimiter="
        )
    if not options.names and (value := next(filter(_VALUE.fullmatch, found), None)) is not None:
        raise DataError(
            f"the first line of {url} has {value!r:.80}, which is not the name of a column: pass the names of all "
            "columns as names=, also if this line is a header"
        )


def _is_header(found: tuple[str, ...], names: tuple[str, ...]) -> bool:
    """True if a first line has these names. pandas leaves the name of an index empty."""
    return any(found) and all(text in ("", name) for text, name in zip(found, names, strict=True))


class CommaSeparated(TextFormat):
    """Implementation of ``formats.Format`` for CSV."""

    name: ClassVar[str] = "csv"
    suffixes: ClassVar[tuple[str, ...]] = (".csv",)
    may_lack_columns: ClassVar[bool] = False
    delimiter: ClassVar[str] = ","

    def _delimiter(self, options: TextOptions) -> bytes:
        return (options.delimiter or self.delimiter).encode()

    def records_end(self, text: bytes, options: TextOptions) -> int:
        return csv_records_end(text, self._delimiter(options))

    def record_ends(self, text: bytes, options: TextOptions) -> npt.NDArray[np.int64]:
        return record_ends(text, self._delimiter(options))

    def head(self, source: Readable, url: str, options: TextOptions) -> tuple[tuple[str, ...] | None, bytes, bytes]:
        text = source.read(_HEAD_BYTES)
        mark = len(MARK) if text.startswith(MARK) else 0
        while True:
            # Files without a header line may begin with empty lines, which are skipped as anywhere else.
            start = len(text) - len(text[mark:].lstrip(b"\r\n")) if options.names else mark
            if end := first_csv_record_end(text[start:], self._delimiter(options)):
                break
            more = source.read(len(text) or 1)
            if not more:
                if ends_quoted(text[start:], self._delimiter(options)):
                    raise ValueError("the text ends within a quoted field")
                end = len(text) - start
                break
            text += more
        line = text[start : start + end]
        if options.names and not line:
            return options.names, text, b""
        if not line.strip():
            raise CorruptChunkError(f"{url} has no header line: the first line has to name the columns")
        if line.startswith(b"version https://git-lfs"):
            raise DataError(f"{url} is a pointer of Git LFS: get the file with `git lfs pull`")
        require_utf8(line)
        names = _names(line, self._delimiter(options).decode())
        _require_names(names, options, url)
        if options.names and not _is_header(names, options.names):
            return options.names, text[:mark], text[mark:]
        return options.names or names, text[: start + end], text[start + end :]

    def guess(self, text: bytes, names: tuple[str, ...] | None, options: IndexOptions) -> tuple[int, pa.Schema]:
        assert names is not None  # head() finds them or raises
        if ends_quoted(text, self._delimiter(options.text)):
            raise ValueError("the text ends within a quoted field")
        if not text.strip(b"\r\n"):
            return 0, pa.schema([pa.field(name, pa.null()) for name in names])
        # As texts, except for nulls, which the types that are inferred have but text has not.
        as_texts = pc.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()),
            strings_can_be_null=True,
            null_values=[*_NULLS, *options.text.null_values],
        )
        table = self._parsed(text, names, as_texts, ReadRequest(pa.schema([]), text=options.text))
        declared = options.declared
        fields = [
            pa.field(name, declared[name]) if name in declared else guess_of_texts(name, column)
            for name, column in zip(names, table.columns, strict=True)
        ]
        return len(table), pa.schema(fields)

    def parse(self, text: Any, names: tuple[str, ...] | None, request: ReadRequest) -> pa.Table:
        assert names is not None
        needed = request.needed()
        known = set(names)
        missing = [name for name in needed or () if name not in known]
        if missing:
            raise DataError(f"there is no column {missing[0]!r}: the header has {', '.join(names)[:300]}")
        types = {field.name: field.type for field in request.schema if field.name in known}
        convert = pc.ConvertOptions(
            column_types=types,
            include_columns=needed,
            null_values=[*_NULLS, *request.text.null_values],
        )
        table = self._parsed(text, names, convert, request)
        if request.text.null_values:
            nulls = pa.array(request.text.null_values)
            for number, field in enumerate(table.schema):
                if pa.types.is_string(field.type):
                    column = table.column(number)
                    column = compute().if_else(compute().is_in(column, nulls), None, column)
                    table = table.set_column(number, field, column)
        return table

    def _parsed(self, text: Any, names: Sequence[str], convert: pc.ConvertOptions, request: ReadRequest) -> pa.Table:
        block_bytes, is_by_line = _blocks(text, request.records)
        try:
            return self._table(text, names, convert, request, block_bytes, is_by_line=is_by_line)
        except pa.ArrowInvalid:
            # Parse again as a single block, because a record may be larger than a block, and because only this reports
            # damaged rows.
            return self._table(text, names, convert, request, _MAX_BLOCK_BYTES)

    def _table(
        self,
        text: Any,
        names: Sequence[str],
        convert: pc.ConvertOptions,
        request: ReadRequest,
        block_bytes: int,
        *,
        is_by_line: bool = False,
    ) -> pa.Table:
        options = pc.ReadOptions(
            column_names=list(names),
            use_threads=block_bytes < len(text),
            block_size=min(len(text) + 1, block_bytes),
        )
        parsing = _parsing(self._delimiter(request.text).decode(), is_by_line=is_by_line)
        return pc.read_csv(pa.py_buffer(text), options, parsing, convert)

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
