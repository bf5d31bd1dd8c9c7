"""Validate received batches before their values are used, and check the commit record of uploads.

Each check makes the next one safe. The checks are, in this order: sizes; ``validate(full=True)``, because reading a
column whose offsets point outside of its data crashes the process; nulls. The schema is checked only when the stream
opens, because all batches of an Arrow stream have the same schema. Handlers check the values.

Uploads may contain only flat columns (fixed width, binary, text), because the time to check and count these does not
depend on their content. In Arrow, an aborted upload ends exactly like a complete one. Therefore the last message of an
upload must be the *commit record*, a message without a batch: ``{"commit": {"batches": n, "rows": n, "bytes": n}}``.
``bytes`` counts values without padding, validity bits and offsets, so that it is the same in all languages.

A message must be in memory before it can be checked. So the limits prevent the use of a large message, but not its
receipt; only TLS prevents strangers from sending one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import pyarrow as pa

from flightedl.errors import MessageError, UsageError
from flightedl.messages.decoding import from_json
from flightedl.rpc.errors import shortened

_COMMIT_PREFIX = b'{"commit":'


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Limits on a batch and on a stream. A stream that exceeds a limit is rejected."""

    batch_rows: int = 1 << 20
    batch_bytes: int = 64 << 20
    stream_rows: int = 1 << 32
    stream_bytes: int = 64 << 30
    #: Large enough for the header of a message with many parts, plus a request for many batches.
    metadata_bytes: int = 128 << 10


class _Totals(msgspec.Struct, forbid_unknown_fields=True):
    batches: int = 0
    rows: int = 0
    bytes: int = 0


class _CommitRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    commit: _Totals


def check_flat(schema: pa.Schema) -> None:
    """Raise UsageError unless all columns are fixed-width, binary or text."""
    for field in schema:
        _bits_per_value(field)


def check_schema(received: pa.Schema, declared: pa.Schema) -> None:
    """Raise MessageError unless names, types, order and nullability match the declaration. Metadata is ignored."""
    if not received.equals(declared, check_metadata=False):
        raise MessageError(f"the stream's schema is [{_brief(received)}], but it must be [{_brief(declared)}]")


class Tally:
    """Counts the batches in one direction of a stream, and creates or checks the commit record.

    The cost depends on the number of columns, not on the number of values. That matters because this code runs between
    messages of a megabyte each, which evict Python's data from the processor's cache.
    """

    __slots__ = ("_binary", "_limits", "_not_null", "_odd_bits", "_row_bytes", "_totals")

    def __init__(self, schema: pa.Schema, limits: BatchLimits) -> None:
        bits = [_bits_per_value(field) for field in schema]
        #: Bytes per row in all columns whose values occupy whole bytes.
        self._row_bytes = sum(count // 8 for count in bits if count and count % 8 == 0)
        #: Bits per value in the columns that pack several values into a byte.
        self._odd_bits = [count for count in bits if count and count % 8]
        #: Columns of variable width, each with the format of its offsets.
        self._binary: list[tuple[int, Literal["i", "q"]]] = [
            (number, "q" if _is_large(schema.field(number).type) else "i")
            for number, count in enumerate(bits)
            if count is None
        ]
        self._not_null = not_null_columns(schema)
        self._limits = limits
        self._totals = _Totals()

    def take(self, batch: pa.RecordBatch) -> list[pa.Array]:
        """Validate and count a received batch. Raises MessageError if it is invalid or exceeds a limit.

        Returns:
            The batch's columns, because reading them again would cost as much as the checks.
        """
        columns = check_batch(batch, self._limits, self._not_null)
        self.add(batch, columns)
        return columns

    def add(self, batch: pa.RecordBatch, columns: Sequence[pa.Array] | None = None) -> int:
        """Count a valid batch. Return the bytes of its values. Raises MessageError if the stream exceeds a limit."""
        rows = batch.num_rows
        size_bytes: int = rows * self._row_bytes
        for bits in self._odd_bits:
            size_bytes += (rows * bits + 7) // 8
        if rows:
            for number, offset_format in self._binary:
                column = batch.column(number) if columns is None else columns[number]
                offsets = _offsets(column, rows, offset_format)
                size_bytes += int(offsets[column.offset + rows] - offsets[column.offset])
        self.add_known(rows, size_bytes)
        return size_bytes

    def add_known(self, rows: int, size_bytes: int) -> None:
        """Count a valid batch with known numbers of rows and bytes. Raises the same errors as ``add``."""
        totals, limits = self._totals, self._limits
        totals.batches += 1
        totals.rows += rows
        totals.bytes += size_bytes
        if totals.rows > limits.stream_rows or totals.bytes > limits.stream_bytes:
            raise MessageError(f"the stream carries more than {limits.stream_rows} rows or {limits.stream_bytes} bytes")

    def commit_record(self) -> bytes:
        return msgspec.json.encode(_CommitRecord(self._totals))

    def check(self, record: bytes) -> None:
        """Raise MessageError unless the commit record matches the counted batches."""
        try:
            declared = from_json(record, _CommitRecord).commit
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise MessageError("the upload's commit record is not valid") from None
        if declared != self._totals:
            raise MessageError(f"the upload's commit record says {declared}, but {self._totals} arrived")


def check_batch(batch: pa.RecordBatch, limits: BatchLimits, not_null: Sequence[int]) -> list[pa.Array]:
    """Validate a received batch. Return its columns.

    Args:
        batch: The received batch.
        limits: Limits of a batch.
        not_null: Numbers of the columns that are declared without nulls.

    Raises:
        MessageError: the batch exceeds a limit, is invalid, or contains nulls in these columns.
    """
    if batch.num_rows > limits.batch_rows:
        raise MessageError(f"a batch has {batch.num_rows} rows, at most {limits.batch_rows} are allowed")
    size_bytes = batch.get_total_buffer_size()
    if size_bytes > limits.batch_bytes:
        raise MessageError(f"a batch has {size_bytes} bytes, at most {limits.batch_bytes} are allowed")
    try:
        batch.validate(full=True)
    except pa.ArrowException as error:
        raise MessageError(f"a batch is not valid: {shortened(str(error), 200)}") from None
    columns: list[pa.Array] = batch.columns
    for number in not_null:
        if columns[number].null_count:
            raise MessageError(f"column {shortened(batch.schema.field(number).name, 80)!r} has a null")
    return columns


def not_null_columns(schema: pa.Schema) -> list[int]:
    """Return the indices of the columns that are declared without nulls."""
    return [number for number, field in enumerate(schema) if not field.nullable]


def _offsets(column: pa.Array, rows: int, offset_format: Literal["i", "q"]) -> memoryview:
    """Return the offsets of a non-empty column. In a hostile message, the buffer may have any length."""
    end = (column.offset + rows + 1) * (4 if offset_format == "i" else 8)
    return memoryview(column.buffers()[1]).cast("B")[:end].cast(offset_format)


def is_commit_record(metadata: bytes) -> bool:
    """Return True if a message without a batch is a commit record."""
    return metadata.startswith(_COMMIT_PREFIX)


def _brief(schema: pa.Schema) -> str:
    fields = (f"{field.name}: {field.type}{'' if field.nullable else ' not null'}" for field in schema)
    return shortened(", ".join(fields), 150)


def _bits_per_value(field: pa.Field) -> int | None:
    """Return the width of a fixed-width column; None for binary and text. Raises UsageError for other types."""
    kind = field.type
    if pa.types.is_binary(kind) or pa.types.is_string(kind) or _is_large(kind):
        return None
    try:
        bits: int = 0 if pa.types.is_nested(kind) or pa.types.is_dictionary(kind) else kind.bit_width
    except ValueError:
        bits = 0
    if not bits:
        raise UsageError(f"column {field.name!r} is {kind}, but streams to a server carry flat columns only")
    return bits


def _is_large(kind: pa.DataType) -> bool:
    return bool(pa.types.is_large_binary(kind) or pa.types.is_large_string(kind))
