"""Rows of embedding tables in a pserver's file of a checkpoint, behind its blocks (see ``shard_files``).

A record batch has one row of the file's schema, and what it is about is said by ``dtype``:

* ``rows:float32``, ``rows:uint16`` (bits of 16-bit floats): rows of table number ``parameter``. ``ids`` (n uint64),
  ``row_updates``, ``row_versions``, ``row_epochs`` (n uint32 each), ``values`` (n * dim elements), ``slot_0`` (float32:
  of each row the numbers of all slots); ``stop`` is n.
* ``waiting``: ids that wait for admission, likewise, without values and slots; ``row_updates`` are their pushes.
* ``table``: what else is said of a table, before all rows: ``ids`` are rows that are no more, of those in the files
  that this one is an increment on, ``stop`` is the version below which rows have been given up, ``values`` are the
  counters of a sketch.

``block`` is the first bucket's position of the span that they are of, ``version`` and ``updates`` are the span's.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from flightedl.errors import CorruptError

if TYPE_CHECKING:
    from typing_extensions import Buffer

Array = npt.NDArray[np.generic]
Words = npt.NDArray[np.uint32]

ROWS_OF = "rows:"
WAITING = "waiting"
TABLE = "table"
KINDS = (f"{ROWS_OF}float32", f"{ROWS_OF}uint16", WAITING, TABLE)
#: Columns that only files with rows have.
ROW_FIELDS = tuple(
    pa.field(name, pa.binary(), nullable=True) for name in ("ids", "row_updates", "row_versions", "row_epochs")
)


class StoredRowSpan(msgspec.Struct, frozen=True, array_like=True):
    """Buckets of one history whose rows a file has."""

    #: Position of the first bucket in the plan, and how many there are.
    first: int
    count: int
    version: int
    updates: int
    #: The highest of the batches in the rows.
    epoch: int

    @property
    def numbers(self) -> range:
        """Positions of the buckets."""
        return range(self.first, self.first + self.count)


#: Of the columns of numbers in both kinds of record batches: Arrow's type, and ``struct``'s.
_NUMBERS = (*((pa.int32(), "i"),) * 2, *((pa.int64(), "q"),) * 4)


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Some rows of a table as they are written and read.

    Attributes:
        span: First bucket's position of their span.
        table: Number of the table.
        kind: One of ``KINDS``.
        ids: (n,) uint64.
        updates: (n,) uint32; so ``versions`` and ``epochs``.
        slots: (n, k) float32.
        values: (n, dim) float32 or uint16; of a ``TABLE`` (m,) uint8.
        oldest: Of a ``TABLE``: rows of lower versions have been given up.
    """

    span: int
    table: int
    kind: str
    ids: npt.NDArray[np.uint64]
    updates: Words
    versions: Words
    epochs: Words
    slots: Array
    values: Array
    oldest: int = 0


def row_checksum(numbers: Sequence[int], dtype: str, arrays: Sequence[Buffer]) -> int:
    """xxh3-64 of what a record batch says."""
    views = [memoryview(array) for array in arrays]
    digest = xxhash.xxh3_64(struct.pack(f"<{len(numbers) + len(views)}q", *numbers, *(v.nbytes for v in views)))
    digest.update(dtype.encode())
    for view in views:
        digest.update(view)
    return digest.intdigest()


def binary(view: Buffer, kind: pa.DataType | None = None) -> pa.Array:
    """A column of one value, which is not copied."""
    offsets = struct.pack("<2i", 0, memoryview(view).nbytes)
    return pa.Array.from_buffers(kind or pa.binary(), 1, [None, pa.py_buffer(offsets), pa.py_buffer(view)])


def fixed_columns(numbers: Sequence[int], dtype: str, arrays: Sequence[memoryview]) -> list[pa.Array]:
    """The columns before the values: two int32, four int64, a string and the checksum, each of one value.

    They are made of buffers: ``pa.array`` would import pandas, if it is installed, in the middle of a checkpoint.
    """
    checksum = row_checksum(numbers, dtype, arrays)
    named = [_fixed(kind, letter, number) for (kind, letter), number in zip(_NUMBERS, numbers, strict=True)]
    return [*named, binary(dtype.encode(), pa.string()), _fixed(pa.uint64(), "Q", checksum)]


def _fixed(kind: pa.DataType, letter: str, number: int) -> pa.Array:
    return pa.Array.from_buffers(kind, 1, [None, pa.py_buffer(struct.pack(f"<{letter}", number))])


def encode_rows(rows: StoredRows, span: StoredRowSpan, schema: pa.Schema, slot_count: int) -> pa.RecordBatch:
    """The record batch of some rows."""
    columns = [rows.values, rows.slots, rows.ids, rows.updates, rows.versions, rows.epochs]
    arrays = [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in columns]
    stop = rows.oldest if rows.kind == TABLE else len(rows.ids)
    numbers = (rows.span, rows.table, 0, stop, span.version, span.updates)
    values, slots, *others = (binary(array) for array in arrays)
    found = [
        *fixed_columns(numbers, rows.kind, arrays),
        values,
        slots,
        *(pa.nulls(1, pa.binary()) for _ in range(slot_count - 1)),
        *others,
    ]
    return pa.RecordBatch.from_arrays(found, schema=schema)


def decode_rows(fixed: Sequence[int], kind: str, expected: int, buffers: Sequence[pa.Buffer]) -> StoredRows:
    """Decode the output of ``encode_rows``.

    Args:
        fixed: The columns of numbers.
        kind: That of ``dtype``.
        expected: Its checksum.
        buffers: Of the binary columns that have something.

    Raises:
        CorruptError: anything else.
    """
    if len(buffers) != 2 + len(ROW_FIELDS) or row_checksum(fixed, kind, buffers) != expected:
        raise CorruptError("rows of a table do not match their checksum")
    span, table, _, stop, _, _ = fixed
    values, slots, *others = buffers
    ids = np.frombuffer(others[0], np.uint64)
    updates, versions, epochs = (np.frombuffer(buffer, np.uint32) for buffer in others[1:])
    if kind == TABLE:
        sketch = np.frombuffer(values, np.uint8)
        return StoredRows(span, table, kind, ids, updates, versions, epochs, _shaped(b"", 0, np.float32), sketch, stop)
    count = len(ids)
    if {stop, len(updates), len(versions), len(epochs)} != {count}:
        raise CorruptError("rows of a table have another number than they say")
    dtype = np.uint16 if kind.endswith("uint16") else np.float32
    found = _shaped(values, count, dtype)
    return StoredRows(span, table, kind, ids, updates, versions, epochs, _shaped(slots, count, np.float32), found)


def _shaped(data: Any, count: int, dtype: type[np.generic]) -> Array:
    flat: Array = np.frombuffer(data, dtype)
    if count and flat.size % count:
        raise CorruptError("rows of a table have values for a part of a row")
    return flat.reshape(count, flat.size // max(count, 1))
