"""Messages of a step: the values of blocks in a single column, described by a packed header.

A *part* is a range of consecutive blocks that have the same version and outcome, and that all have values or all have
none. A message is a record batch of ``STEP_SCHEMA`` with a single row, which contains the values of all parts. Its
app_metadata is the header. A column per field, as in ``wire.rows``, would cost more than all other work on a message.

The header is little-endian:

* ``uint64`` xxh3-64 of the rest of the header; ``uint32`` layout; ``uint32`` number of parts
* For each part, 32 bytes: ``int32`` first block; ``int32`` number of blocks; ``int64`` version; ``int32`` outcome (0 in
  messages to the server); ``uint32`` size of the values in bytes; ``uint64`` xxh3-64 of the values. The checksum is 0
  if there are no values, or if the layout is odd, which means that the values are protected by other means
  (``rpc.integrity``).
* The attached bytes, if any: the request in a step's first message; ``STEP_END`` in the server's last message.

The layouts:

* Layouts 2 and 3: the batch contains the values.
* Layouts 4 and 5: there is no batch, and the values are in memory that both sides map (``shared_values``). A ``uint64``
  between the number of parts and the first part is the values' offset in the sender's memory.
* Layouts 6 and 7: there is no batch, and the values follow the header. This saves Arrow's serialization of small
  messages at both ends. The ``uint64`` between the number of parts and the first part is the length of the header. A
  pserver uses these layouts if the client has used them.

Received values are read-only views of network memory. They may be unaligned, and are valid as long as the batch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from functools import lru_cache
from struct import Struct
from types import MappingProxyType

import msgspec
import pyarrow as pa
import xxhash

from flightedl.errors import DamagedError, MessageError
from flightedl.wire.rows import OutgoingBlocks, Rows
from flightedl.wire.shared_values import Inbox, Outbox

#: In messages to the server, ``version`` is the version at which the gradient was computed, and a part without values
#: reports that the batch has no gradient for its blocks. In messages from the server, a part without values means that
#: the values are not available yet.
STEP_SCHEMA = pa.schema([pa.field("values", pa.binary(), nullable=False)])
#: Marks the end of a step. The server attaches it to a message, or sends it as metadata without a batch. The stream
#: stays open.
STEP_END = b"end of step"
#: Maximum number of parts in a message, which limits the size of its header.
PARTS_LIMIT = 1000

_BINARY = STEP_SCHEMA.field(0).type
_START = Struct("<QII")
_PART = Struct("<iiqiIQ")
_ONE = Struct("<IIiiqiIQ")
_ONE_AT = Struct("<IIQiiqiIQ")
_WHOLE_ONE = Struct("<QIIiiqiIQ")
_OFFSET = Struct("<Q")
#: Maximum size of a message whose values travel in its app_metadata.
INLINE_BYTES = 64 << 10


class Place(IntEnum):
    """Place of a message's values."""

    BATCH = 0
    MEMORY = 1
    #: The values follow the header in the same bytes.
    HEADER = 2


#: Layout -> (place of the values, True if the values have checksums).
_LAYOUTS = {2 + n: (Place(n // 2), n % 2 == 0) for n in range(6)}
_LAYOUT_OF = {described: layout for layout, described in _LAYOUTS.items()}
_CHECKED, _UNCHECKED = _LAYOUT_OF[Place.BATCH, True], _LAYOUT_OF[Place.BATCH, False]
_NOTHING = memoryview(b"")
_NO_RUNS: Mapping[int, int] = MappingProxyType({})
_digest = xxhash.xxh3_64_intdigest


class ReceivedBlocks(msgspec.Struct, frozen=True):
    """A received part: consecutive blocks."""

    blocks: range
    version: int
    outcome: int
    #: Values of all of the part's blocks, in order; empty if the part has no values.
    data: memoryview
    #: True if all values, read as 32-bit or 64-bit floats, are known to be finite.
    is_finite: bool = False


#: An encoded message: its values in order (None if they are in shared memory or follow the header), its header, and the
#: size of its values in bytes.
EncodedMessage = tuple[list[memoryview] | None, bytes, int]


def encode_message(
    pieces: Sequence[OutgoingBlocks],
    attached: bytes = b"",
    *,
    checksums: bool = True,
    outbox: Outbox | None = None,
    inline: bool = False,
) -> EncodedMessage:
    """Encode a message. Values are copied only if they are placed in ``outbox`` or after a small header.

    Args:
        pieces: Parts of the message.
        attached: Attached bytes.
        checksums: True to add checksums of the values.
        outbox: Accepts large values if it has room; None if no memory is shared.
        inline: True to append the values to the header if they have at most ``INLINE_BYTES``.
    """
    if len(pieces) == 1 and not inline:
        # Fast path for most messages on a line: a single part, whose values follow the header.
        (piece,) = pieces
        blocks, values = piece.blocks, piece.values
        size_bytes = 0 if values is None else values.nbytes
        if values is not None and size_bytes > 0 and (outbox is None or size_bytes < outbox.least_bytes):
            first, length, version, outcome = blocks.start, len(blocks), piece.version, piece.outcome
            data = values.data.cast("B")
            layout, checksum = (_CHECKED, _checksum(piece, data)) if checksums else (_UNCHECKED, 0)
            body = _ONE.pack(layout, 1, first, length, version, outcome, size_bytes, checksum) + attached
            return [data], _digest(body).to_bytes(8, "little") + body, size_bytes
    return _encoded(pieces, attached, outbox, checksums=checksums, inline=inline)


def _encoded(
    pieces: Sequence[OutgoingBlocks], attached: bytes, outbox: Outbox | None, *, checksums: bool, inline: bool
) -> EncodedMessage:
    filled: list[memoryview] = []
    fields: list[tuple[int, int, int, int, int, int]] = []
    size_bytes = 0
    for piece in pieces:
        blocks, values = piece.blocks, piece.values
        part_bytes = checksum = 0
        if values is not None and values.size:
            data = memoryview(values.data).cast("B")
            part_bytes = len(data)
            size_bytes += part_bytes
            filled.append(data)
            if checksums:
                checksum = _checksum(piece, data)
        fields.append((blocks.start, len(blocks), piece.version, piece.outcome, part_bytes, checksum))
    start = outbox.put(filled, size_bytes) if outbox is not None and size_bytes >= outbox.least_bytes else None
    place = Place.BATCH if start is None else Place.MEMORY
    if inline and start is None:
        header_bytes = _START.size + _OFFSET.size + _PART.size * len(fields) + len(attached)
        if header_bytes + size_bytes <= INLINE_BYTES:
            place, start = Place.HEADER, header_bytes
    layout = _LAYOUT_OF[place, checksums]
    if len(fields) == 1:
        body = _ONE.pack(layout, 1, *fields[0]) if start is None else _ONE_AT.pack(layout, 1, start, *fields[0])
    else:
        offset = b"" if start is None else _OFFSET.pack(start)
        body = b"".join((_START.pack(0, layout, len(fields))[8:], offset, *(_PART.pack(*part) for part in fields)))
    if attached:
        body += attached
    checksum_of_header = _digest(body).to_bytes(8, "little")
    if place is Place.HEADER:
        return None, b"".join((checksum_of_header, body, *filled)), size_bytes
    header = checksum_of_header + body
    return (filled, header, size_bytes) if start is None else (None, header, 0)


def _checksum(piece: OutgoingBlocks, data: memoryview) -> int:
    known = piece.checksums
    if known is None:
        return _digest(data)
    if known.whole is None:
        # If two threads both compute the checksum, their results are equal.
        known.whole = _digest(data)
    return known.whole


def batch_of(filled: Sequence[memoryview]) -> pa.RecordBatch:
    """Return the record batch that carries the values of a message on the Flight stream."""
    values = filled[0] if len(filled) == 1 else b"".join(filled)
    column = pa.Array.from_buffers(_BINARY, 1, [None, _offsets(len(values)), pa.py_buffer(values)], 0)
    return pa.RecordBatch.from_arrays([column], schema=STEP_SCHEMA)


@lru_cache(256)
def _offsets(size_bytes: int) -> pa.Buffer:
    return pa.py_buffer(array("i", (0, size_bytes)))


def decode_message(
    batch: pa.RecordBatch | memoryview | None,
    header: bytes | None,
    columns: Sequence[pa.Array] = (),
    inbox: Inbox | None = None,
) -> tuple[list[ReceivedBlocks], bytes]:
    """Decode a received message and verify its checksums.

    Args:
        batch: A received batch that was validated against ``STEP_SCHEMA``, or values that were received from a line;
            None if the message has neither.
        header: The app_metadata.
        columns: The batch's columns, if the caller has already read them.
        inbox: Reads values from shared memory; None if no memory is shared.

    Returns:
        The parts, and the attached bytes.

    Raises:
        MessageError: the header is invalid, or does not match the values.
        DamagedError: a checksum does not match.
    """
    if isinstance(batch, memoryview) and header is not None and len(header) >= _WHOLE_ONE.size:
        # Fast path for most messages from a line: a single part, whose values follow the header.
        checksum, layout, count, first, length, version, outcome, size_bytes, expected = _WHOLE_ONE.unpack_from(header)
        if (
            count == 1
            and (layout == _UNCHECKED or (layout == _CHECKED and _digest(batch) == expected))
            and 0 < size_bytes == len(batch)
            and first >= 0
            and length > 0
            and _digest(memoryview(header)[8:]) == checksum
        ):
            return [ReceivedBlocks(range(first, first + length), version, outcome, batch)], header[_WHOLE_ONE.size :]
    return _decoded(batch, header, columns, inbox)


def _decoded(
    batch: pa.RecordBatch | memoryview | None, header: bytes | None, columns: Sequence[pa.Array], inbox: Inbox | None
) -> tuple[list[ReceivedBlocks], bytes]:
    fields, attached, where, start, is_checked = _unpacked(header)
    is_finite = False
    data: memoryview
    if where is Place.BATCH:
        data = batch if isinstance(batch, memoryview) else _values_of(batch, columns)
    elif where is Place.HEADER:
        if batch is not None or header is None:
            raise MessageError("a message's header says that its values follow it, but other values arrived with it")
        data = memoryview(header)[start:]
    else:
        if inbox is None or batch is not None:
            raise MessageError("a message's header says that its values are in shared memory, but none is shared")
        data = inbox.take(start, sum(field[4] for field in fields))
        is_finite = inbox.is_finite
    parts: list[ReceivedBlocks] = []
    place = 0
    for first, length, version, outcome, size_bytes, expected in fields:
        if first < 0 or length < 1:
            raise MessageError(f"a message has {length} blocks from {first}")
        stop = place + size_bytes
        if stop > len(data):
            raise MessageError(f"a message's header declares at least {stop} bytes, but {len(data)} arrived")
        values = data[place:stop] if size_bytes else _NOTHING
        if is_checked and size_bytes and _digest(values) != expected:
            raise DamagedError(f"the values of blocks {first} to {first + length - 1} do not match their checksum")
        parts.append(ReceivedBlocks(range(first, first + length), version, outcome, values, is_finite))
        place = stop
    if place != len(data):
        raise MessageError(f"a message's header declares {place} bytes, but {len(data)} arrived")
    return parts, attached


def _unpacked(header: bytes | None) -> tuple[Sequence[tuple[int, ...]], bytes, Place, int, bool]:
    """Return the parts' fields, attached bytes, the place and offset of the values, and True if they have checksums."""
    if header is None or len(header) < _START.size:
        raise MessageError("a message has no header in its app_metadata")
    checksum, layout, count = _START.unpack_from(header)
    where, is_checked = _LAYOUTS.get(layout, (Place.BATCH, False))
    first = _START.size if where is Place.BATCH else _START.size + _OFFSET.size
    start, stop, end = 0, len(header), first + count * _PART.size
    if layout not in _LAYOUTS or stop < end:
        raise MessageError(f"a header of layout {layout} with {count} parts has {stop} bytes: another version?")
    if where is not Place.BATCH:
        (start,) = _OFFSET.unpack_from(header, _START.size)
    if where is Place.HEADER:
        if not end <= start <= stop:
            raise MessageError(f"a header of {start} bytes with {count} parts arrived in a message of {stop} bytes")
        stop = start
    if _digest(memoryview(header)[8:stop]) != checksum:
        raise DamagedError("a message's header does not match its checksum")
    fields = (_PART.unpack_from(header, first),) if count == 1 else tuple(_PART.iter_unpack(header[first:end]))
    return fields, header[end:stop], where, start, is_checked


def place_of(header: bytes | None) -> Place:
    """Return the place of a message's values according to its header, or BATCH if the bytes are not a header."""
    if header is None or len(header) < _START.size:
        return Place.BATCH
    return _LAYOUTS.get(_START.unpack_from(header)[1], (Place.BATCH, False))[0]


def _values_of(batch: pa.RecordBatch | None, columns: Sequence[pa.Array]) -> memoryview:
    if batch is None:
        raise MessageError("a message's header declares values, but none arrived with it")
    if batch.num_rows != 1:
        raise MessageError(f"a message has {batch.num_rows} rows of values, not 1")
    return _value(columns[0] if columns else batch.column(0))


def parts_of(rows: Rows, run_of: Mapping[int, int] = _NO_RUNS) -> Iterator[ReceivedBlocks]:
    """Group rows into parts: consecutive blocks with equal outcome and version, all with values or all without.

    Args:
        rows: The received rows.
        run_of: Run of each block. A part never spans two runs.
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


def _value(column: pa.Array) -> memoryview:
    """Return the only value of a validated binary column. Using a pyarrow scalar would take ten times as long."""
    _, offset_buffer, data_buffer = column.buffers()
    first = 4 * column.offset
    start, stop = memoryview(offset_buffer).cast("B")[first : first + 8].cast("i")
    return _NOTHING if data_buffer is None else memoryview(data_buffer).cast("B")[start:stop]
