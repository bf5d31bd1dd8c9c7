"""JSON lines: one object per line.

pyarrow infers the types of columns: null, bool, int64, double, string, timestamp (for strings in that format), list or
object. Whole numbers that are not int64 are uint64, or text if a double would change them (see ``inference``). A column
that pyarrow cannot parse, for example because its types differ, is text too: strings as they are, and other values as
they are written. If a key is missing from a line, the record has null in that column. Empty lines are skipped.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.json as pj

from flightedl.errors import DataError
from flightedl.formats.chunks import IndexOptions, TextOptions
from flightedl.formats.cutting import line_end, record_ends
from flightedl.formats.inference import DOUBLE, EXACT, UINT64, forms_of_dates, forms_of_whole, guessed
from flightedl.formats.records import ReadRequest
from flightedl.formats.schemas import plain_schema
from flightedl.formats.text import MARK, TextFormat

_MAX_BLOCK_BYTES = 1 << 30
#: Levels of objects and lists. Parsers are recursive.
_DEEPEST = 100
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')
_WHOLE = re.compile(rb"(?<![\d.eE+-])-?\d+(?![\d.eE])")
_TINY = re.compile(rb"(?<![\d.])[\d.]+[eE]-\d{3,}")
#: Numbers that a double, or an integer, may not represent as they are written.
_SPECIAL = re.compile(rb"\d{16}|-0(?![\d.eE])|[eE]-\d{3}")
_TEXT = msgspec.json.Decoder(str)
_ROWS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class JsonLines(TextFormat):
    """See ``formats.Format``."""

    name: ClassVar[str] = "jsonl"
    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".ndjson", ".json")
    may_lack_columns: ClassVar[bool] = True
    #: True if texts that are all dates become timestamps.
    has_dates: ClassVar[bool] = True

    def records_end(self, text: bytes, options: TextOptions) -> int:  # noqa: ARG002 - as TextFormat does
        return line_end(text)

    def record_ends(self, text: bytes, options: TextOptions) -> npt.NDArray[np.int64]:  # noqa: ARG002
        return record_ends(text, None)

    def guess(
        self,
        text: bytes,
        names: tuple[str, ...] | None,  # noqa: ARG002
        options: IndexOptions,
    ) -> tuple[int, pa.Schema]:
        text = text.removeprefix(MARK)
        if not text or text.isspace():
            return 0, pa.schema([])
        require_objects(text)
        rows: list[dict[str, msgspec.Raw]] | None = None
        try:
            table = _parsed(text, pa.schema([]))
        except pa.ArrowInvalid as error:
            rows = _raw_rows(text, error)
            _require_unique_keys(text)
            table = None
        count = len(table) if rows is None else len(rows)
        has_special = _SPECIAL.search(text) is not None
        fields = []
        for name in table.schema.names if rows is None else dict.fromkeys(name for row in rows for name in row):
            if name in options.declared:
                fields.append(pa.field(name, options.declared[name]))
                continue
            column = _column(rows or (), name) if table is None else table.column(name)
            if column is not None and has_special:
                rows = _raw_rows(text) if rows is None else rows
                column = _with_whole_numbers(rows, name, column)
            if column is not None:
                # As text, because pyarrow would drop zones from timestamps.
                kind = replaced(column.type, pa.types.is_timestamp, pa.string())
                if kind != column.type or pa.types.is_nested(kind):  # Inferred from [null, [1]], values are wrong.
                    column = _parsed(text, pa.schema([(name, kind)]), only=True).column(0)
            fields.append(
                guessed(name, ()) if column is None else _guess(name, column.combine_chunks(), has_dates=self.has_dates)
            )
        return count, pa.schema(fields)

    def parse(self, text: Any, names: tuple[str, ...] | None, request: ReadRequest) -> pa.Table:  # noqa: ARG002
        text = memoryview(text).cast("B")
        text = text[len(MARK) :] if text[: len(MARK)] == MARK else text
        needed = request.needed()
        schema = request.schema
        if needed is not None:
            schema = pa.schema([field for field in schema if field.name in needed])
        # Conditions may use columns that the schema does not contain; the types of these columns are inferred.
        is_complete = set(needed or schema.names) <= set(schema.names)
        try:
            return _parsed(text, schema, only=is_complete)
        except pa.ArrowInvalid as error:
            rows = _raw_rows(bytes(text), error)
            texts = {field.name: _texts(rows, field.name) for field in schema if pa.types.is_string(field.type)}
            rest = pa.schema([field for field in schema if field.name not in texts])
            table = _parsed(_lines(rows, rest.names), rest, only=True)
            columns = [texts[name] if name in texts else table.column(name) for name in schema.names]
            return pa.Table.from_arrays(columns, schema=schema)

    def write(self, batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[bytes]:  # noqa: ARG002
        for batch in batches:
            yield json_lines(batch)


def _parsed(text: Any, schema: pa.Schema, *, only: bool = False) -> pa.Table:
    """Parse lines. The columns in the schema have its types; others are inferred or, with ``only``, left out."""
    reading = pj.ReadOptions(use_threads=False, block_size=min(len(text) + 1, _MAX_BLOCK_BYTES))
    behavior = "ignore" if only else "infer"
    return pj.read_json(pa.py_buffer(text), reading, pj.ParseOptions(schema, unexpected_field_behavior=behavior))


def require_objects(text: bytes) -> None:
    """Raise ValueError if a text has something else, or nested values, on which pyarrow would crash the process."""
    first = text.lstrip()
    if first.startswith(b"["):
        raise ValueError("it is an array, but each line must be an object: write each element on a line of its own")
    if first.startswith(b"null") or b"\nnull" in text:
        raise ValueError("a line is null, but each line must be an object: remove the line")
    if _is_deep(text) and _is_deep(_STRING.sub(b"", text)):
        raise ValueError(f"a value is nested more than {_DEEPEST} times: write it as text")


def _is_deep(text: bytes) -> bool:
    return any(ends * _DEEPEST in text for ends in (b"]", b"}", b"]}"))


def _raw_rows(text: bytes, error: Exception | None = None) -> list[dict[str, msgspec.Raw]]:
    """Return the values of each line as they are written. Raises ``error`` if a line is not an object."""
    try:
        return [_ROWS.decode(line) for line in text.splitlines() if line.strip()]
    except msgspec.DecodeError:
        if error is None:
            raise
        raise error from None


def _require_unique_keys(text: bytes) -> None:
    """Raise ValueError if an object has a key twice. pyarrow reports this too, but only if nothing else is wrong."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError(f"an object has a key twice: {', '.join(name for name, _ in pairs)[:200]}")
        return found

    for line in text.splitlines():
        if line.strip():
            json.loads(line, object_pairs_hook=unique)


def _lines(rows: Sequence[dict[str, msgspec.Raw]], names: Sequence[str]) -> bytes:
    return b"".join(msgspec.json.encode({name: row[name] for name in names if name in row}) + b"\n" for row in rows)


def _column(rows: Sequence[dict[str, msgspec.Raw]], name: str, kind: pa.DataType | None = None) -> Any:
    """Parse a column alone. Return None if pyarrow cannot, for example because the types of its values differ."""
    try:
        return _parsed(_lines(rows, [name]), pa.schema([] if kind is None else [(name, kind)])).column(name)
    except pa.ArrowInvalid:
        return None


def _texts(rows: Sequence[dict[str, msgspec.Raw]], name: str) -> pa.Array:
    """Return a column as text: strings as they are, and other values as they are written."""
    raw = [bytes(row[name]) if name in row else b"null" for row in rows]
    values = [_TEXT.decode(each) if each[:1] == b'"' else None if each == b"null" else each for each in raw]
    return pa.array([each.decode() if isinstance(each, bytes) else each for each in values], pa.string())


def _with_whole_numbers(rows: Sequence[dict[str, msgspec.Raw]], name: str, column: Any) -> Any:
    """Return the column with the type that represents all of its whole numbers exactly; None if there is none."""
    raw = _STRING.sub(b'""', b"\n".join(row[name] for row in rows if name in row))
    if not _SPECIAL.search(raw):
        return column
    if any(not float(number) and re.match(rb"[0.]*[1-9]", number) for number in _TINY.findall(raw)):
        return None
    whole = _WHOLE.findall(raw)
    kind = column.type
    if b"-0" in whole:
        kind = replaced(kind, pa.types.is_integer, pa.float64())
    if any(abs(int(number)) > EXACT for number in whole):
        kind = replaced(kind, pa.types.is_floating, pa.uint64())
    return column if kind == column.type else _column(rows, name, kind)


def replaced(kind: pa.DataType, is_replaced: Any, by: pa.DataType) -> pa.DataType:
    """Return a type with some of its types replaced, also within lists and objects."""
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, replaced(field.type, is_replaced, by)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(replaced(kind.value_type, is_replaced, by))
    return by if is_replaced(kind) else kind


def _guess(name: str, values: pa.Array, *, has_dates: bool) -> pa.Field:
    kind = values.type
    if pa.types.is_struct(kind):
        parts = zip(kind, values.flatten(), strict=True)
        inner = [_guess(field.name, part, has_dates=has_dates) for field, part in parts]
        return pa.field(name, pa.struct(inner), metadata=guessed(name, ()).metadata)
    if pa.types.is_list(kind):
        item = _guess("item", values.flatten(), has_dates=has_dates)
        return pa.field(name, pa.list_(item), metadata=guessed(name, ()).metadata)
    values = values.drop_null()
    if not len(values):
        return pa.field(name, pa.null())
    if kind == pa.int64():
        return guessed(name, forms_of_whole(values))
    if pa.types.is_string(kind):
        return guessed(name, forms_of_dates(values, has_dates=False) if has_dates else ())
    return guessed(name, ["bool|true" if pa.types.is_boolean(kind) else UINT64 if kind == pa.uint64() else DOUBLE])


class JsonTexts(JsonLines):
    """JSON lines whose texts remain text, even if they are dates."""

    has_dates: ClassVar[bool] = False


def lines_of(records: Sequence[bytes]) -> bytes:
    """Return JSON objects as lines."""
    return b"".join(record.replace(b"\n", b" ").replace(b"\r", b" ") + b"\n" for record in records)


def json_columns(records: Sequence[bytes]) -> pa.Table:
    """Return the columns of JSON objects, each of which is a record (see ``JsonTexts``).

    Raises:
        pa.ArrowInvalid: a record is not an object.
    """
    text = lines_of(records)
    _, schema = JsonTexts().guess(text, None, IndexOptions())
    return JsonTexts().parse(text, None, ReadRequest(schema=plain_schema(schema)))


def json_lines(batch: pa.RecordBatch) -> bytes:
    """Return the records as lines: bytes as base64, dates and times as ISO 8601, NaN and infinities as null."""
    try:
        return b"".join(msgspec.json.encode(_finite(row)) + b"\n" for row in batch.to_pylist())
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"this cannot be written as JSON: {str(error)[:200]}") from None


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value
