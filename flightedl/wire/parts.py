"""Blocks of parameters in the messages of a step: one column of values, and a packed header beside it.

A *part* is neighbouring blocks of one version and outcome, all with values or all without. A message carries one batch
of ``STEP_SCHEMA`` with one row, the values of all its parts one after the other, and in its app_metadata a header that
says what they are. Five columns, as in ``wire.rows``, say the same, but making and taking them apart costs more than
everything else that is done for a message.

The header, little-endian: ``uint64`` xxh3-64 of what follows in it; ``uint32`` 2, the version of this layout, or 3
where the values carry no checksums, because something else protects them (``rpc.integrity``);
``uint32`` number of parts; then for each part 32 bytes: ``int32`` first block, ``int32`` number of blocks, ``int64``
version, ``int32`` outcome (0 to the server), ``uint32`` bytes of values, ``uint64`` xxh3-64 of those bytes (0 where
there are none, and in layout 3); then what is attached, mostly nothing: to the server the request of the step that
begins with this message, from the server the word that the step is over (a message of its own, for so little, costs as
much as another megabyte's Python). So in layout 2 a checksum covers every bit that is used. Where a part's blocks begin
is known from the shard plan.

Where both sides map memory of each other's (``shared_values``), a message may have its values there. Then it is a
header alone, of layout 4 with checksums or 5 without, in which ``uint64``, the offset of the values in the sender's
memory, stands between the number of parts and the first of them.

Received values are read-only views of network memory at any address; they live as long as the batch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from struct import Struct
from types import MappingProxyType
from typing import NamedTuple

import pyarrow as pa
import xxhash

from flightedl.errors import DamagedError, MessageError
from flightedl.wire.rows import OutgoingBlocks, Rows
from flightedl.wire.shared_values import Inbox, Outbox

#: To the server ``version`` is the base version that the gradient was computed at; no values: an arrival without one.
#: From the server no values: there are none to send yet.
STEP_SCHEMA = pa.schema([pa.field("values", pa.binary(), nullable=False)])
#: From the server, attached to a message or as one of metadata alone: the step is over. Another one may follow on the
#: stream.
STEP_END = b"end of step"
#: A message has no more of them, so that its header is small.
PARTS_LIMIT = 1000

#: (the values are shared, they carry checksums) -> the layout that says so.
_LAYOUT_OF = {(False, True): 2, (False, False): 3, (True, True): 4, (True, False): 5}
_LAYOUTS = {layout: of for of, layout in _LAYOUT_OF.items()}
_BINARY = STEP_SCHEMA.field(0).type
_START = Struct("<QII")
_PART = Struct("<iiqiIQ")
_ONE = Struct("<IIiiqiIQ")
_OFFSET = Struct("<Q")
_NOTHING = memoryview(b"")
_NO_RUNS: Mapping[int, int] = MappingProxyType({})
_digest = xxhash.xxh3_64_intdigest


class ReceivedBlocks(NamedTuple):
    """Neighbouring blocks as they were received."""

    blocks: range
    version: int
    outcome: int
    #: Of all the blocks, one after the other; empty: none came.
    data: memoryview
    #: They are known to be finite, if they are floats of 32 or 64 bits.
    is_finite: bool = False


class EncodedMessage(NamedTuple):
    """A message that is about to be sent."""

    #: To be sent one after the other; None: they lie in memory.
    values: list[memoryview] | None
    header: bytes
    #: Of the values that are to be sent.
    size_bytes: int


def encode_parts(
    pieces: Sequence[OutgoingBlocks], attached: bytes = b"", *, checksums: bool = True, outbox: Outbox | None = None
) -> tuple[pa.RecordBatch | None, bytes]:
    """A message of a stream: its batch, None where the values lie in memory, and its header.

    No values are copied where only one piece carries any, but to ``outbox``. Arguments as of ``encode_message``.
    """
    values, header, _ = encode_message(pieces, attached, checksums=checksums, outbox=outbox)
    return None if values is None else batch_of(values), header


def encode_message(
    pieces: Sequence[OutgoingBlocks], attached: bytes = b"", *, checksums: bool = True, outbox: Outbox | None = None
) -> EncodedMessage:
    """A message, with what is attached to it. Nothing is copied, but to ``outbox``.

    Args:
        pieces: What it brings.
        attached: Beside it.
        checksums: Whether the values carry any.
        outbox: Takes the values where they are worth it and there is room.
    """
    filled: list[memoryview] = []
    fields = [_fields(piece, filled, checksums) for piece in pieces]
    size_bytes = sum(map(len, filled))
    start = None if outbox is None else outbox.put(filled, size_bytes)
    layout = _LAYOUT_OF[start is not None, checksums]
    if len(fields) == 1 and start is None:
        body = _ONE.pack(layout, 1, *fields[0])
    else:
        offset = b"" if start is None else _OFFSET.pack(start)
        body = b"".join((_START.pack(0, layout, len(fields))[8:], offset, *(_PART.pack(*part) for part in fields)))
    if attached:
        body += attached
    header = _digest(body).to_bytes(8, "little") + body
    return EncodedMessage(filled, header, size_bytes) if start is None else EncodedMessage(None, header, 0)


def batch_of(filled: Sequence[memoryview]) -> pa.RecordBatch:
    """What a stream carries of a message's values."""
    values = filled[0] if len(filled) == 1 else b"".join(filled)
    column = pa.Array.from_buffers(_BINARY, 1, [None, _offsets(len(values)), pa.py_buffer(values)], 0)
    return pa.RecordBatch.from_arrays([column], schema=STEP_SCHEMA)


@lru_cache(256)
def _offsets(size_bytes: int) -> pa.Buffer:
    """Of a column with one value."""
    return pa.py_buffer(array("i", (0, size_bytes)))


def _fields(piece: OutgoingBlocks, filled: list[memoryview], checksums: bool) -> tuple[int, int, int, int, int, int]:
    blocks, values = piece.blocks, piece.values
    if values is None or not values.size:
        return blocks.start, len(blocks), piece.version, piece.outcome, 0, 0
    data = memoryview(values.data).cast("B")
    filled.append(data)
    known = piece.checksums
    if not checksums:
        checksum = 0
    elif known is None:
        checksum = _digest(data)
    else:
        # Two threads may both make it; they are equal.
        if known.whole is None:
            known.whole = _digest(data)
        checksum = known.whole
    return blocks.start, len(blocks), piece.version, piece.outcome, len(data), checksum


def decode_parts(
    batch: pa.RecordBatch | memoryview | None,
    header: bytes | None,
    columns: Sequence[pa.Array] = (),
    inbox: Inbox | None = None,
) -> list[ReceivedBlocks]:
    """The parts of a received message (its batch validated against ``STEP_SCHEMA``), with its checksums verified.

    Args:
        batch: As received, or the values that came without one; None: there was none.
        header: Its app_metadata.
        columns: Those of the batch, where somebody has them already.
        inbox: Where values lie that are not in a batch; None: nothing is shared.

    Raises:
        MessageError: the header is not one, or does not fit the values.
        DamagedError: a checksum does not match.
    """
    if header is None or len(header) < _START.size:
        raise MessageError("a message has no header in its app_metadata")
    checksum, layout, count = _START.unpack_from(header)
    start, end = _bounds(layout, count)
    if not end or len(header) < end:
        raise MessageError(f"a header of layout {layout} with {count} parts has {len(header)} bytes: another version?")
    if _digest(header[8:]) != checksum:
        raise DamagedError("a message's header does not match its checksum")
    fields = [_PART.unpack_from(header, start)] if count == 1 else list(_PART.iter_unpack(header[start:end]))
    is_shared, is_checked = _LAYOUTS[layout]
    is_finite = False
    if not is_shared:
        data = _values_of(batch, columns)
    elif inbox is None or batch is not None:
        raise MessageError("a message's values are said to lie in memory, but none is shared for them")
    else:
        data = inbox.take(_OFFSET.unpack_from(header, _START.size)[0], sum(field[4] for field in fields))
        is_finite = inbox.is_finite
    return _parts_in(data, fields, is_checked=is_checked, is_finite=is_finite)


def is_shared(header: bytes | None) -> bool:
    """Whether a message of a header alone has its values in memory."""
    if header is None or len(header) < _START.size:
        return False
    return _LAYOUTS.get(_START.unpack_from(header)[1], (False,))[0]


def _bounds(layout: int, count: int) -> tuple[int, int]:
    """Where the parts of a header begin and end; zeros: there is no such layout."""
    if layout not in _LAYOUTS:
        return 0, 0
    start = _START.size + (_OFFSET.size if _LAYOUTS[layout][0] else 0)
    return start, start + count * _PART.size


def _values_of(batch: pa.RecordBatch | memoryview | None, columns: Sequence[pa.Array]) -> memoryview:
    if isinstance(batch, memoryview):
        return batch
    if batch is None:
        raise MessageError("a message has a header that tells of values, and none came with it")
    if batch.num_rows != 1:
        raise MessageError(f"a message has {batch.num_rows} rows of values, not 1")
    return _value(columns[0] if columns else batch.column(0))


def _parts_in(
    data: memoryview, fields: Iterable[Sequence[int]], *, is_checked: bool, is_finite: bool
) -> list[ReceivedBlocks]:
    parts: list[ReceivedBlocks] = []
    start = 0
    for first, length, version, outcome, size_bytes, expected in fields:
        if first < 0 or length < 1:
            raise MessageError(f"a message has {length} blocks from {first}")
        stop = start + size_bytes
        if stop > len(data):
            raise MessageError(f"a message's header tells of {stop} bytes or more, {len(data)} came")
        values = data[start:stop] if size_bytes else _NOTHING
        if is_checked and size_bytes and _digest(values) != expected:
            raise DamagedError(f"the values of blocks {first} to {first + length - 1} do not match their checksum")
        parts.append(ReceivedBlocks(range(first, first + length), version, outcome, values, is_finite))
        start = stop
    if start != len(data):
        raise MessageError(f"a message's header tells of {start} bytes, {len(data)} came")
    return parts


def parts_of(rows: Rows, run_of: Mapping[int, int] = _NO_RUNS) -> Iterator[ReceivedBlocks]:
    """Received rows as parts: neighbours with the same outcome and version, all with values or all without.

    Args:
        rows: As received.
        run_of: Block -> its run: no part has blocks of two runs.
    """
    blocks, versions, outcomes, offsets = rows.blocks, rows.versions, rows.outcomes, rows.offsets
    count = len(blocks)
    start = 0
    for place in range(1, count + 1):
        if (
            place == count
            or blocks[place] != blocks[place - 1] + 1
            or versions[place] != versions[start]
            or outcomes[place] != outcomes[start]
            or run_of.get(blocks[place]) != run_of.get(blocks[start])
            or (offsets[place + 1] == offsets[place]) != (offsets[start + 1] == offsets[start])
        ):
            first = blocks[start]
            found = range(first, first + place - start)
            yield ReceivedBlocks(found, versions[start], outcomes[start], rows.bytes_of(start, place))
            start = place


def attached_to(header: bytes | None) -> bytes:
    """What a header carries beside the parts; it was decoded, so it is there and sound."""
    assert header is not None, "decode_parts refuses a message without a header"
    _, layout, count = _START.unpack_from(header)
    return header[_bounds(layout, count)[1] :]


def _value(column: pa.Array) -> memoryview:
    """The only value of a sound binary column; making a scalar of it takes ten times as long."""
    _, offset_buffer, data_buffer = column.buffers()
    first = 4 * column.offset
    start, stop = memoryview(offset_buffer).cast("B")[first : first + 8].cast("i")
    return _NOTHING if data_buffer is None else memoryview(data_buffer).cast("B")[start:stop]
