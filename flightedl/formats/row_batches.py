"""Rows of embedding tables in a pserver's checkpoint file, where they follow the blocks (see ``shard_files``).

Each record batch has one row with the file's schema. ``dtype`` states the kind of its content:

* ``rows:float32`` or ``rows:uint16`` (bits of 16-bit floats): n rows of the table with number ``parameter``. ``ids``
  contains n uint64; ``row_updates``, ``row_versions`` and ``row_epochs`` contain n uint32 each; ``values`` contains n *
  dim elements; ``slot_0`` contains the values of all slots, row by row, as float32. ``stop`` is n.
* ``waiting``: ids that wait for admission, in the same form as rows but without values and slots. ``row_updates``
  counts pushes.
* ``table``: the rest of a table's state. This batch precedes all of the table's rows.

Columns of a ``table`` batch:

* ``ids``: ids of rows that were removed since the files that this increment builds on
* ``stop``: version below which rows are expired
* ``values``: counters of the table's sketch
* ``row_versions``: *shifts* of all buckets (1024 int32), which are the differences between the versions of a bucket's
  rows and the span's version; empty if all shifts are zero
* ``row_updates``: for each bucket, the version below which rows were evicted because there were too many (1024 uint32);
  empty without a limit, and in files from older versions of flightedl, in which ``stop`` applies to all buckets
* ``row_epochs``: a single 1 if the sketch has separate counters for each bucket; otherwise empty

``block`` is the position of the span's first bucket. ``version`` and ``updates`` belong to the span.
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

from flightedl.domain.tables.placement import BUCKETS
from flightedl.errors import CorruptError

if TYPE_CHECKING:
    from typing_extensions import Buffer

Array = npt.NDArray[np.generic]
#: An array whose type of elements is known only from the data.
AnyArray = npt.NDArray[Any]
Words = npt.NDArray[np.uint32]

ROWS_OF = "rows:"
WAITING = "waiting"
TABLE = "table"
#: Value of ``row_epochs`` in a ``TABLE`` whose sketch has separate counters for each bucket.
SKETCH_BY_BUCKET = np.ones(1, np.uint32)
KINDS = (f"{ROWS_OF}float32", f"{ROWS_OF}uint16", WAITING, TABLE)
#: Columns that exist only in files with rows.
ROW_FIELDS = tuple(
    pa.field(name, pa.binary(), nullable=True) for name in ("ids", "row_updates", "row_versions", "row_epochs")
)


class StoredRowSpan(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive buckets with the same history, whose rows are in the same file."""

    #: Position of the first bucket in the plan, and number of buckets.
    first: int
    count: int
    version: int
    updates: int
    #: Highest epoch of any batch applied to the rows.
    epoch: int
    #: Positions of the buckets whose rows are all in an increment. A base contains all rows.
    complete: list[int] = []

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + self.count)


#: Types of the columns of numbers in both kinds of record batches, as Arrow types and as ``struct`` codes.
_NUMBERS = (*((pa.int32(), "i"),) * 2, *((pa.int64(), "q"),) * 4)


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Some rows of a table, as stored in files.

    Attributes:
        span: Position of the first bucket of the rows' span.
        table: Number of the table.
        kind: One of ``KINDS``.
        ids: (n,) uint64.
        updates: (n,) uint32, like ``versions`` and ``epochs``. For ``TABLE``, see ``given_up`` and ``shifts``.
        slots: (n, k) float32.
        values: (n, dim) float32 or uint16; (m,) uint8 for ``TABLE``.
        oldest: For ``TABLE``: rows with lower versions have expired.
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

    @property
    def sketch(self) -> Array:
        """Counters of a ``TABLE`` by bucket; empty if the sketch does not count by bucket."""
        return self.values if self.epochs.size else self.values[:0]

    @property
    def given_up(self) -> npt.NDArray[np.int64]:
        """For each bucket of a ``TABLE``: the version below which rows were evicted because there were too many."""
        return self.updates.astype(np.int64) if self.updates.size else np.full(BUCKETS, max(self.oldest, 0))

    @property
    def shifts(self) -> npt.NDArray[np.int64]:
        return self.versions.view(np.int32).astype(np.int64)


def row_checksum(numbers: Sequence[int], dtype: str, arrays: Sequence[Buffer]) -> int:
    """Return the xxh3-64 checksum of the content of a record batch."""
    views = [memoryview(array) for array in arrays]
    digest = xxhash.xxh3_64(struct.pack(f"<{len(numbers) + len(views)}q", *numbers, *(v.nbytes for v in views)))
    digest.update(dtype.encode())
    for view in views:
        digest.update(view)
    return digest.intdigest()


def binary(view: Buffer, kind: pa.DataType | None = None) -> pa.Array:
    """Return a column with a single value, which is not copied."""
    offsets = struct.pack("<2i", 0, memoryview(view).nbytes)
    return pa.Array.from_buffers(kind or pa.binary(), 1, [None, pa.py_buffer(offsets), pa.py_buffer(view)])


def fixed_columns(numbers: Sequence[int], dtype: str, arrays: Sequence[memoryview]) -> list[pa.Array]:
    """Return the columns before the values, each with one value: two int32, four int64, a string and the checksum.

    The columns are built from buffers, because ``pa.array`` would import pandas (if installed) during a checkpoint.
    """
    checksum = row_checksum(numbers, dtype, arrays)
    named = [_fixed(kind, letter, number) for (kind, letter), number in zip(_NUMBERS, numbers, strict=True)]
    return [*named, binary(dtype.encode(), pa.string()), _fixed(pa.uint64(), "Q", checksum)]


def _fixed(kind: pa.DataType, letter: str, number: int) -> pa.Array:
    return pa.Array.from_buffers(kind, 1, [None, pa.py_buffer(struct.pack(f"<{letter}", number))])


def encode_rows(rows: StoredRows, span: StoredRowSpan, schema: pa.Schema, slot_count: int) -> pa.RecordBatch:
    """Return the record batch that contains these rows."""
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
        fixed: Values of the columns of numbers.
        kind: Value of ``dtype``.
        expected: Value of ``checksum``.
        buffers: Values of the binary columns that are not null.

    Raises:
        CorruptError: the content differs from what was written.
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
        raise CorruptError("the number of rows of a table does not match its columns")
    dtype = np.uint16 if kind.endswith("uint16") else np.float32
    found = _shaped(values, count, dtype)
    return StoredRows(span, table, kind, ids, updates, versions, epochs, _shaped(slots, count, np.float32), found)


def _shaped(data: Any, count: int, dtype: type[np.generic]) -> Array:
    flat: Array = np.frombuffer(data, dtype)
    if count and flat.size % count:
        raise CorruptError("the values of a table end within a row")
    return flat.reshape(count, flat.size // max(count, 1))
