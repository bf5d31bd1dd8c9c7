"""Encoding of a moving unit's content: a *parcel* is a record batch with a header in its metadata.

A batch has one row. Each column contains one array, or is empty. The header describes the content and the arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from flightedl.domain.pserver.block_values import ReleasedBlocks
from flightedl.errors import CorruptError
from flightedl.formats.row_batches import AnyArray, StoredRowSpan, binary
from flightedl.messages.decoding import from_msgpack
from flightedl.messages.moving import CopyId

Batch = pa.RecordBatch

_COLUMNS = 8
SCHEMA = pa.schema([pa.field(f"array_{number}", pa.binary(), nullable=False) for number in range(_COLUMNS)])


class SpanState(msgspec.Struct, frozen=True, array_like=True, tag="span"):
    """State of adjacent blocks of a span; see ``ReleasedBlocks``. The first array contains the applied batches.

    For buckets, the next arrays contain the versions, ``given_up`` and counters of ``MovedBuckets``.
    """

    first: int
    count: int
    version: int
    updates: int
    view: tuple[int, int]
    members: dict[int, int]
    clocks: dict[int, int]
    #: (block, election)
    elections: list[tuple[int, int]]
    is_copied_at_once: bool
    is_behind: bool
    #: Epoch by which rows expire.
    epoch: int = 0

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + self.count)

    @classmethod
    def of(cls, state: ReleasedBlocks, epoch: int = 0) -> SpanState:
        return cls(
            state.numbers.start,
            len(state.numbers),
            state.version,
            state.updates,
            state.view,
            dict(state.members),
            dict(state.clocks),
            list(state.elections.items()),
            state.is_copied_at_once,
            state.is_behind,
            epoch,
        )

    def released(self, applied: bytes) -> ReleasedBlocks:
        elections: Mapping[int, int] = dict(self.elections)
        history = (self.version, self.updates, applied, self.view, self.members, self.clocks)
        return ReleasedBlocks(self.numbers, *history, elections, self.is_copied_at_once, self.is_behind)


class SketchState(msgspec.Struct, frozen=True, array_like=True, tag="sketch"):
    """Counters of a table's ids that wait for admission, (buckets of a span, counters of a bucket)."""

    first: int
    table: int


class SomeRows(msgspec.Struct, frozen=True, array_like=True, tag="rows"):
    """Rows of a span, or ids that wait for admission: the arrays of a ``RowChunk``."""

    first: int
    table: int
    is_waiting: bool


class BlockState(msgspec.Struct, frozen=True, array_like=True, tag="block"):
    """A dense block: the arrays are its values and slots; see ``StoredBlock``."""

    number: int
    parameter: int
    start: int
    stop: int
    version: int
    updates: int


class CopyHead(msgspec.Struct, frozen=True, array_like=True, tag="head"):
    """Beginning of a copy for a standby."""

    copy: CopyId
    #: Spans of buckets whose rows the copy contains.
    spans: list[StoredRowSpan]


class CopyRows(msgspec.Struct, frozen=True, array_like=True, tag="copied"):
    """Rows in a copy for a standby; see ``StoredRows``. The arrays are those of ``StoredRows``, in the same order."""

    span: int
    table: int
    kind: str
    oldest: int


class CopyEnd(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """End of a copy for a standby. The array contains the applied batches."""

    #: Digest of all earlier parcels.
    digest: str


Content = SpanState | SketchState | SomeRows | BlockState | CopyHead | CopyRows | CopyEnd


class Parcel(NamedTuple):
    """A part of a unit's content."""

    content: Content
    arrays: Sequence[AnyArray]


class _Header(msgspec.Struct, frozen=True, array_like=True):
    content: Content
    #: (dtype, shape) of each array.
    arrays: list[tuple[str, list[int]]]


def encode(parcel: Parcel) -> tuple[pa.RecordBatch, bytes]:
    """Return a record batch and its metadata. The arrays are not copied if they are contiguous."""
    assert len(parcel.arrays) <= _COLUMNS, "a parcel has too many arrays"
    arrays = [np.ascontiguousarray(array) for array in parcel.arrays]
    header = _Header(parcel.content, [(array.dtype.str, list(array.shape)) for array in arrays])
    columns = [binary(array.reshape(-1).view(np.uint8).data) for array in arrays]
    columns += [binary(b"")] * (_COLUMNS - len(columns))
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA), msgspec.msgpack.encode(header)


def decode(columns: Sequence[pa.Array], metadata: bytes | None) -> Parcel:
    """Decode the output of ``encode``. The arrays are copies.

    Raises:
        CorruptError: The data is not the output of ``encode``.
    """
    try:
        header = from_msgpack(metadata or b"", _Header)
        arrays = []
        for column, (dtype, shape) in zip(columns, header.arrays, strict=False):
            content = np.frombuffer(column[0].as_buffer(), np.uint8).copy()
            arrays.append(content.view(np.dtype(dtype)).reshape(shape))
        if len(arrays) != len(header.arrays):
            raise CorruptError(f"a parcel has {len(arrays)} arrays, but announces {len(header.arrays)}")
    except (msgspec.MsgspecError, TypeError, ValueError, IndexError) as error:
        raise CorruptError(f"not a part of a moving block: {str(error)[:200]}") from None
    return Parcel(header.content, arrays)


class Digest:
    """Digest of all parcels sent or received. If the digests are equal, so are the contents."""

    def __init__(self) -> None:
        # Imported lazily: most pservers never move blocks.
        import xxhash

        self._state = xxhash.xxh3_64()

    def update(self, columns: Sequence[pa.Array], metadata: bytes | None) -> None:
        self._state.update(metadata or b"")
        for column in columns:
            self._state.update(column[0].as_buffer())

    @property
    def text(self) -> str:
        return self._state.hexdigest()
