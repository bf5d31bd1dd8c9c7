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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from flightedl.errors import CorruptError, MessageError

#: 1 MiB batches are the fastest on Flight; half loses little, four times loses nothing but memory.
TARGET_BYTES = 1 << 20
_NOTHING = memoryview(b"")

PUSH_SCHEMA = pa.schema(
    [
        pa.field("block", pa.int32(), nullable=False),
        pa.field("version", pa.int64(), nullable=False),
        pa.field("checksum", pa.uint64(), nullable=False),
        pa.field("values", pa.binary(), nullable=False),
    ]
)

VALUES_SCHEMA = pa.schema([*PUSH_SCHEMA, pa.field("outcome", pa.int8(), nullable=False)])


class Outcome(IntEnum):
    """What became of a pushed row."""

    #: The row only carries values; nothing was pushed.
    NONE = 0
    ACCEPTED = 1
    ALREADY_APPLIED = 2
    #: The base version is older than the open round: pull, recompute, push again under the same identity.
    STALE = 3
    #: The sender is not a member of the view: join, pull, recompute.
    NOT_MEMBER = 4


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
            values they are not copied, and must not change until the batch was written.
        outcomes: One for each block.
    """
    count = len(blocks)
    parts = [_NOTHING if array is None else memoryview(array.data).cast("B") for array in values]
    filled = [part for part in parts if len(part)]
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    data = pa.py_buffer(filled[0] if len(filled) == 1 else b"".join(filled))
    sums = np.array([checksum(part) if len(part) else 0 for part in parts], np.uint64)
    columns = [
        pa.array(np.asarray(blocks, np.int32)),
        pa.array(np.asarray(versions, np.int64)),
        pa.array(sums),
        pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), data]),
    ]
    if outcomes is None:
        return pa.RecordBatch.from_arrays(columns, schema=PUSH_SCHEMA)
    columns.append(pa.array(np.asarray(outcomes, np.int8)))
    return pa.RecordBatch.from_arrays(columns, schema=VALUES_SCHEMA)


def decode_rows(batch: pa.RecordBatch) -> Iterator[Row]:
    """The rows of a received batch (already validated against its schema), each with its checksum verified.

    Raises:
        MessageError: a null or an inconsistent column.
        CorruptError: a row's values do not match its checksum.
    """
    if any(column.null_count for column in batch.columns):
        raise MessageError("a row has a null")
    blocks = batch.column(0).to_numpy()
    versions = batch.column(1).to_numpy()
    sums = batch.column(2).to_numpy()
    values = batch.column(3)
    outcomes = batch.column(4).to_numpy() if batch.num_columns > 4 else np.zeros(len(blocks), np.int8)
    _, offset_buffer, data_buffer = values.buffers()
    offsets = np.frombuffer(offset_buffer, np.int32)[values.offset : values.offset + len(blocks) + 1].tolist()
    data = memoryview(b"" if data_buffer is None else data_buffer)
    for number, (block, version, expected, outcome) in enumerate(
        zip(blocks.tolist(), versions.tolist(), sums.tolist(), outcomes.tolist(), strict=True)
    ):
        part = data[offsets[number] : offsets[number + 1]]
        if len(part) and checksum(part) != expected:
            raise CorruptError(f"the values of block {block} do not match their checksum")
        yield Row(block, version, part, outcome)


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
