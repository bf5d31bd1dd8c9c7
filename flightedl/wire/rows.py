"""Blocks of parameters as Arrow record batches.

A *row* is one block: its number, a version, a checksum and its elements as little-endian bytes of the parameter's dtype
(``binary``, so that one stream may carry parameters of several dtypes). Big blocks travel one to a batch, without a
copy: the Arrow buffer *is* the array's memory. Small ones share a batch up to ``TARGET_BYTES``, which costs one copy.

Two schemas: ``PUSH_SCHEMA`` (trainer to pserver; ``version`` is the base version the gradient was computed at; empty
``values`` mean that the batch arrives at this block without a gradient) and ``VALUES_SCHEMA`` (pserver to trainer;
``outcome`` tells what became of the pushed row, ``values`` are empty when there are none to send yet).

Received values are read-only views of network memory at any address; they live as long as the batch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from flightedl.errors import DamagedError, MessageError
from flightedl.messages.parameters import Outcome as Outcome  # noqa: PLC0414 - a row has one

#: 1 MiB batches are the fastest on Flight; half loses little, four times loses nothing but memory.
TARGET_BYTES = 1 << 20
_NOTHING = memoryview(b"")
_INT8, _INT32, _INT64, _UINT64, _BINARY = pa.int8(), pa.int32(), pa.int64(), pa.uint64(), pa.binary()
_digest = xxhash.xxh3_64_intdigest
#: ``checksum`` of values that come one piece after the other: ``update(piece)``, then ``intdigest()``.
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
    """One block on its way. ``values`` is a bytes-like view, empty when nothing is carried."""

    block: int
    version: int
    values: memoryview
    outcome: int = 0

    def array(self, dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
        """The elements, (n,) of ``dtype``: read-only and possibly unaligned; a view, valid while the batch lives."""
        return np.frombuffer(self.values, dtype=dtype)


@dataclass(slots=True)
class Rows:
    """A received batch with its checksums verified. Plain lists: comparing and slicing them costs no Python per row.

    Made for each message, so not frozen, which would triple what that costs; nobody changes it.
    """

    blocks: list[int]
    versions: list[int]
    outcomes: list[int]
    #: Where each row's bytes start in ``data``, and where the last one's end.
    offsets: list[int]
    data: memoryview

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, number: int) -> Row:
        return Row(self.blocks[number], self.versions[number], self.bytes_of(number, number + 1), self.outcomes[number])

    def bytes_of(self, start: int, stop: int) -> memoryview:
        """The values of neighbouring rows, which lie next to each other."""
        return self.data[self.offsets[start] : self.offsets[stop]]

    def offsets_of(self, start: int, stop: int) -> list[int]:
        """Where rows start and end, from the first of them."""
        found = self.offsets[start : stop + 1]
        first = found[0]
        return [offset - first for offset in found] if first else found


class Checksums(msgspec.Struct):
    """Those of values that are sent more than once, as they become known."""

    #: Of each row.
    rows: array[int] | None = None
    #: Of all of them together.
    whole: int | None = None


class OutgoingBlocks(msgspec.Struct):
    """Rows of neighbouring blocks, of one version and outcome, to be sent. Not frozen, for the same reason as ``Rows``.

    ``values``: their (n,) elements next to each other, or None for empty rows; must not change until the batch is gone.
    ``offsets``: in bytes, where each block starts and the last one ends.
    """

    blocks: range
    version: int
    outcome: int
    values: npt.NDArray[np.generic] | None
    offsets: Sequence[int]
    #: Receives the values' checksums, to be found here by who sends the same values again; None: nobody does.
    checksums: Checksums | None = None

    @property
    def size_bytes(self) -> int:
        """Of the values carried."""
        return 0 if self.values is None else self.values.nbytes


def checksum(values: memoryview | npt.NDArray[np.generic]) -> int:
    """xxh3-64 of the bytes."""
    return xxhash.xxh3_64_intdigest(memoryview(values) if isinstance(values, memoryview) else values.data)


def encode_rows(
    blocks: Sequence[int],
    versions: Sequence[int],
    values: Sequence[npt.NDArray[np.generic] | None],
    outcomes: Sequence[int] | None = None,
) -> pa.RecordBatch:
    """A batch of ``PUSH_SCHEMA``, or of ``VALUES_SCHEMA`` when ``outcomes`` are given.

    Args:
        blocks: Block numbers.
        versions: One for each block.
        values: One C-contiguous (n,) array for each block, or None for an empty row. Where only one row carries
            values they are not copied, and must not change until the batch is gone.
        outcomes: One for each block.
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
    """A batch of ``VALUES_SCHEMA``; nothing is copied where only one piece carries values."""
    if len(pieces) == 1:
        return _one_piece(pieces[0])
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


def _one_piece(piece: OutgoingBlocks) -> pa.RecordBatch:
    """What most messages are. Columns that are the same in every step are made once."""
    blocks, values = piece.blocks, piece.values
    count = len(blocks)
    data: memoryview
    if values is None:
        data, sums, offsets = _NOTHING, array("Q", [0]) * count, array("i", [0]) * (count + 1)
    else:
        data, offsets = memoryview(values.data).cast("B"), array("i", piece.offsets)
        sums = _checksums(piece, data)
    columns = [
        _block_column(blocks.start, count),
        _version_column(piece.version, count),
        pa.Array.from_buffers(_UINT64, count, [None, pa.py_buffer(sums)], 0),
        pa.Array.from_buffers(_BINARY, count, [None, pa.py_buffer(offsets), pa.py_buffer(data)], 0),
        _outcome_column(piece.outcome, count),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=VALUES_SCHEMA)


def _checksums(piece: OutgoingBlocks, data: memoryview) -> array[int]:
    """Of each row. Two threads may both make them; they are equal."""
    known = piece.checksums
    if known is not None and known.rows is not None:
        return known.rows
    sums = array("Q", [_digest(data[a:b]) for a, b in pairwise(piece.offsets)])
    if known is not None:
        known.rows = sums
    return sums


@lru_cache(4096)
def _block_column(first: int, count: int) -> pa.Array:
    return pa.Array.from_buffers(_INT32, count, [None, pa.py_buffer(array("i", range(first, first + count)))], 0)


@lru_cache(256)
def _version_column(version: int, count: int) -> pa.Array:
    return pa.Array.from_buffers(_INT64, count, [None, pa.py_buffer(array("q", [version]) * count)], 0)


@lru_cache(256)
def _outcome_column(outcome: int, count: int) -> pa.Array:
    return pa.Array.from_buffers(_INT8, count, [None, pa.py_buffer(array("b", [outcome]) * count)], 0)


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
    """The rows of a received batch (already validated against its schema), each with its checksum verified.

    Args:
        batch: As received.
        checked: Its columns, where they are known to have no nulls.

    Raises:
        MessageError: a null.
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
    """The buffer of a hostile column may have any length."""
    return memoryview(buffer).cast("B")[4 * first : 4 * (first + count + 1)].cast("i").tolist()


def decode_rows(batch: pa.RecordBatch) -> Iterator[Row]:
    """``decode_batch``, one row at a time."""
    rows = decode_batch(batch)
    return (rows[number] for number in range(len(rows)))


def group_by_size(sizes: Sequence[int], target_bytes: int = TARGET_BYTES) -> list[range]:
    """Consecutive runs of rows that share a batch: each at most ``target_bytes`` unless it is a single row."""
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
