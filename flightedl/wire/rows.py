"""Blocks of parameters as Arrow record batches.

Any Flight client can send and read this format. It is used for initial values, and for pushes and pulls outside of
steps; steps use ``parts``.

A *row* is one block: its number, version and checksum, and its elements as little-endian bytes of the parameter's
dtype. The column of elements is ``binary``, so that one stream can carry parameters of different dtypes. A large block
has its own batch and is not copied, because the Arrow buffer is the array's memory. Small blocks are copied to batches
of up to ``TARGET_BYTES``.

There are two schemas:

* ``PUSH_SCHEMA``, from trainer to pserver: ``version`` is the version at which the gradient was computed. If ``values``
  is empty, the batch has no gradient for the block.
* ``VALUES_SCHEMA``, from pserver to trainer: ``outcome`` is the outcome of the pushed row. If ``values`` is empty, the
  values are not available yet.

Received values are read-only views of network memory. They may be unaligned, and are valid as long as the batch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from flightedl.errors import DamagedError, MessageError
from flightedl.messages.parameters import Outcome as Outcome  # noqa: PLC0414 - a row has one

#: Maximum bytes of values in a batch with several rows. 1 MiB is fastest on Flight. With half of that, sending is
#: slightly slower; four times as much only uses more memory.
TARGET_BYTES = 1 << 20
Array = npt.NDArray[np.generic]
Dtype = np.dtype[np.generic]
_NOTHING = memoryview(b"")
_INT8, _INT32, _INT64, _UINT64, _BINARY = pa.int8(), pa.int32(), pa.int64(), pa.uint64(), pa.binary()
_digest = xxhash.xxh3_64_intdigest
#: Checksum of values that are read in pieces: call ``update(piece)`` for each piece, then ``intdigest()``.
RunningChecksum = xxhash.xxh3_64

PUSH_SCHEMA = pa.schema(
    [
        pa.field("block", pa.int32(), nullable=False),
        pa.field("version", pa.int64(), nullable=False),
        pa.field("checksum", pa.uint64(), nullable=False),
        pa.field("values", pa.binary(), nullable=False),
    ]
)

VALUES_SCHEMA = pa.schema([*PUSH_SCHEMA, pa.field("outcome", pa.int8(), nullable=False)])


@dataclass(frozen=True, slots=True)
class Row:
    """One block of a batch. ``values`` is a bytes-like view, which is empty if the row has no values."""

    block: int
    version: int
    values: memoryview
    outcome: int = 0

    def array(self, dtype: npt.DTypeLike) -> Array:
        """Return the elements, (n,) of ``dtype``: a possibly unaligned, read-only view, valid as long as the batch."""
        return np.frombuffer(self.values, dtype=dtype)


@dataclass(slots=True)
class Rows:
    """The rows of a received batch, whose checksums have been verified.

    The fields are lists, because lists can be compared and sliced without running Python code for each row. The class
    is not frozen, because an instance is created for every message, and freezing would triple that cost. Instances are
    never modified.
    """

    blocks: list[int]
    versions: list[int]
    outcomes: list[int]
    #: (n + 1,) offsets in ``data``: the start of each row's bytes, followed by the end of the last row's bytes.
    offsets: list[int]
    data: memoryview

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, number: int) -> Row:
        return Row(self.blocks[number], self.versions[number], self.bytes_of(number, number + 1), self.outcomes[number])

    def bytes_of(self, start: int, stop: int) -> memoryview:
        """Return the values of rows ``start`` (inclusive) to ``stop`` (exclusive), which are contiguous."""
        return self.data[self.offsets[start] : self.offsets[stop]]


class Checksums(msgspec.Struct):
    """Cached checksums of values that are sent more than once."""

    #: Checksum of each row; None until computed.
    rows: array[int] | None = None
    #: Checksum of all rows together; None until computed.
    whole: int | None = None


class OutgoingBlocks(msgspec.Struct):
    """Outgoing rows of consecutive blocks with the same version and outcome.

    Not frozen, because freezing would slow down the creation of instances (see ``Rows``).

    ``values`` are the contiguous (n,) elements of all blocks, which must not change until the batch has been sent; None
    if the rows are empty. ``offsets`` are the byte offsets of each block's start and the last block's end.
    """

    blocks: range
    version: int
    outcome: int
    values: Array | None
    offsets: Sequence[int]
    #: Cache for the checksums, reused when the same values are sent again; None disables caching.
    checksums: Checksums | None = None

    @property
    def size_bytes(self) -> int:
        return 0 if self.values is None else self.values.nbytes


def checksum(values: memoryview | Array) -> int:
    """Return the xxh3-64 of the bytes."""
    return xxhash.xxh3_64_intdigest(memoryview(values) if isinstance(values, memoryview) else values.data)


def encode_rows(
    blocks: Sequence[int],
    versions: Sequence[int],
    values: Sequence[Array | None],
    outcomes: Sequence[int] | None = None,
) -> pa.RecordBatch:
    """Return a batch of ``VALUES_SCHEMA`` if ``outcomes`` are given, otherwise a batch of ``PUSH_SCHEMA``.

    Args:
        blocks: Block numbers.
        versions: Version of each block.
        values: A C-contiguous (n,) array for each block; None for an empty row. If only one row has values, they are
            not copied, and must not change until the batch has been sent.
        outcomes: Outcome of each block.
    """
    offsets = array("i", [0])
    sums = array("Q")
    filled = []
    end = 0
    for part in values:
        if part is None or not part.size:
            sums.append(0)
        else:
            data = part.data
            filled.append(data)
            sums.append(_digest(data))
            end += data.nbytes
        offsets.append(end)
    return _batch(blocks, versions, sums, offsets, filled, outcomes)


def encode_pieces(pieces: Sequence[OutgoingBlocks]) -> pa.RecordBatch:
    """Return a batch of ``VALUES_SCHEMA``. If only one piece has values, these are not copied."""
    blocks: list[int] = []
    versions: list[int] = []
    outcomes: list[int] = []
    offsets = array("i", [0])
    sums = array("Q")
    filled = []
    end = 0
    for piece in pieces:
        count = len(piece.blocks)
        blocks.extend(piece.blocks)
        versions.extend([piece.version] * count)
        outcomes.extend([piece.outcome] * count)
        if piece.values is None:
            sums.extend([0] * count)
            offsets.extend([end] * count)
            continue
        data = memoryview(piece.values.data).cast("B")
        filled.append(data)
        sums.extend(_checksums(piece, data))
        offsets.extend([end + stop for stop in piece.offsets[1:]])
        end += data.nbytes
    return _batch(blocks, versions, sums, offsets, filled, outcomes)


def _checksums(piece: OutgoingBlocks, data: memoryview) -> array[int]:
    """Return the checksum of each row. If two threads compute them at the same time, the results are equal."""
    known = piece.checksums
    if known is not None and known.rows is not None:
        return known.rows
    sums = array("Q", [_digest(data[a:b]) for a, b in pairwise(piece.offsets)])
    if known is not None:
        known.rows = sums
    return sums


def _batch(
    blocks: Sequence[int],
    versions: Sequence[int],
    sums: array[int],
    offsets: array[int],
    filled: Sequence[memoryview],
    outcomes: Sequence[int] | None,
) -> pa.RecordBatch:
    count = len(blocks)
    data = filled[0] if len(filled) == 1 else b"".join(filled)
    columns = [
        pa.Array.from_buffers(_INT32, count, [None, pa.py_buffer(array("i", blocks))], 0),
        pa.Array.from_buffers(_INT64, count, [None, pa.py_buffer(array("q", versions))], 0),
        pa.Array.from_buffers(_UINT64, count, [None, pa.py_buffer(sums)], 0),
        pa.Array.from_buffers(_BINARY, count, [None, pa.py_buffer(offsets), pa.py_buffer(data)], 0),
    ]
    if outcomes is None:
        return pa.RecordBatch.from_arrays(columns, schema=PUSH_SCHEMA)
    columns.append(pa.Array.from_buffers(_INT8, count, [None, pa.py_buffer(array("b", outcomes))], 0))
    return pa.RecordBatch.from_arrays(columns, schema=VALUES_SCHEMA)


def decode_batch(batch: pa.RecordBatch, checked: Sequence[pa.Array] = ()) -> Rows:
    """Decode a received batch and verify its checksums.

    Args:
        batch: A batch that was validated against its schema.
        checked: The batch's columns, if they are known to contain no nulls.

    Raises:
        MessageError: a row contains a null.
        DamagedError: a row's values do not match its checksum.
    """
    columns = checked or batch.columns
    if not checked and any(column.null_count for column in columns):
        raise MessageError("a row has a null")
    blocks, versions, sums = (columns[i].to_numpy().tolist() for i in range(3))
    count = len(blocks)
    outcomes = columns[4].to_numpy().tolist() if len(columns) > 4 else [0] * count
    values = columns[3]
    _, offset_buffer, data_buffer = values.buffers()
    offsets = _offsets(offset_buffer, values.offset, count) if count else [0]
    data = _NOTHING if data_buffer is None else memoryview(data_buffer).cast("B")
    for block, start, stop, expected in zip(blocks, offsets[:-1], offsets[1:], sums, strict=True):
        if start != stop and _digest(data[start:stop]) != expected:
            raise DamagedError(f"the values of block {block} do not match their checksum")
    return Rows(blocks, versions, outcomes, offsets, data)


def _offsets(buffer: pa.Buffer, first: int, count: int) -> list[int]:
    """Return the offsets of a binary column. In a hostile message, the buffer may have any length."""
    return memoryview(buffer).cast("B")[4 * first : 4 * (first + count + 1)].cast("i").tolist()


def decode_rows(batch: pa.RecordBatch) -> Iterator[Row]:
    """Yield the rows of a received batch. Raises the same errors as ``decode_batch``."""
    rows = decode_batch(batch)
    return (rows[number] for number in range(len(rows)))


def group_by_size(sizes: Sequence[int], target_bytes: int = TARGET_BYTES) -> list[range]:
    """Divide rows into consecutive groups, one per batch: at most ``target_bytes``, or a single row."""
    groups: list[range] = []
    start = total = 0
    for number, size in enumerate(sizes):
        if number > start and total + size > target_bytes:
            groups.append(range(start, number))
            start, total = number, 0
        total += size
    if start < len(sizes):
        groups.append(range(start, len(sizes)))
    return groups
