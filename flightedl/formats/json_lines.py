"""JSON lines: one object per line.

pyarrow infers the types of columns: null, bool, int64, double, string, timestamp (for strings in that format), list or
object. If a key is missing from a line, the record has null in that column. Empty lines are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import msgspec
import pyarrow as pa
import pyarrow.json as pj

from flightedl.errors import DataError
from flightedl.formats.cutting import Readable, line_end
from flightedl.formats.records import ReadRequest
from flightedl.formats.text import TextFormat

_MAX_BLOCK_BYTES = 1 << 30


class JsonLines(TextFormat):
    """See ``formats.Format``."""

    name: ClassVar[str] = "jsonl"
    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".ndjson", ".json")
    may_lack_columns: ClassVar[bool] = True

    def records_end(self, text: bytes) -> int:
        return line_end(text)

    def head(self, source: Readable, url: str) -> tuple[tuple[str, ...] | None, int, bytes]:  # noqa: ARG002
        return None, 0, b""

    def parse(self, text: Any, names: tuple[str, ...] | None, request: ReadRequest) -> pa.Table:  # noqa: ARG002
        needed = request.needed()
        schema = request.schema
        if schema is not None and needed is not None:
            schema = pa.schema([field for field in schema if field.name in needed])
        if request.schema is None and (not text or text.isspace()):
            return pa.schema([]).empty_table()
        reading = pj.ReadOptions(use_threads=False, block_size=min(len(text) + 1, _MAX_BLOCK_BYTES))
        # Conditions may use columns that the schema does not contain; the types of these columns are inferred.
        is_complete = schema is not None and set(needed or schema.names) <= set(schema.names)
        behavior = "ignore" if is_complete else "infer"
        parsing = pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior=behavior)
        return pj.read_json(pa.py_buffer(text), reading, parsing)

    def write(self, batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[bytes]:  # noqa: ARG002
        for batch in batches:
            yield json_lines(batch)


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
