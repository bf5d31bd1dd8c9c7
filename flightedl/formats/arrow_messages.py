"""Parser for the parts of Arrow's IPC framing that indexing needs: positions and record counts of messages.

pyarrow reads record batches, but cannot report their position or length without reading their bodies. A message
consists of 0xFFFFFFFF, the size of the metadata (int32), the metadata and the body; files written before 2019 lack the
first word. The metadata is a flatbuffer, and this module reads only three of its numbers. Every access is
bounds-checked. Damage raises IndexError, ValueError or struct.error, which callers convert to an error message.

Sources: Arrow's format documentation, ``Message.fbs``, ``File.fbs`` and ``Schema.fbs``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from flightedl.formats.sources import WatchedFile

MAGIC = b"ARROW1"
#: Offset of the stream within a file, after the magic number, which is padded to 8 bytes.
FILE_START = 8
SCHEMA, DICTIONARY, RECORDS = 1, 2, 3

_CONTINUATION = 0xFFFFFFFF
_BLOCK_BYTES = 24


@dataclass(frozen=True, slots=True)
class MessagePlace:
    """Location of a message. ``size_bytes`` is the distance from the start of its framing to the end of its body."""

    kind: int
    offset: int
    size_bytes: int
    #: Number of records if the message is a record batch; otherwise 0.
    records: int


def messages(source: WatchedFile, start: int, end: int) -> Iterator[MessagePlace]:
    """Yield the messages of the stream at ``start``, up to its end mark, after which nothing may follow.

    Raises:
        EOFError: a message exceeds ``end``.
        ValueError: there are bytes after the end mark.
    """
    offset = start
    while offset < end:
        message = message_at(source, offset)
        if message is None:
            if source.tell() < end:
                raise ValueError("there are bytes after its end mark: do not join streams, but name each of them")
            return
        if offset + message.size_bytes > end:
            missing = offset + message.size_bytes - end
            raise EOFError(f"the file is truncated: the message at byte {offset} misses {missing} bytes")
        yield message
        offset += message.size_bytes


def message_at(source: WatchedFile, offset: int) -> MessagePlace | None:
    """Return the message that begins at ``offset``, or None if the stream's end mark is there."""
    source.seek(offset)
    first = struct.unpack("<I", source.exactly(4))[0]
    framing = 4
    if first == _CONTINUATION:
        first = struct.unpack("<I", source.exactly(4))[0]
        framing = 8
    if first == 0:
        return None
    if first > _MAX_METADATA_BYTES:
        raise ValueError(f"there is no message at byte {offset}")
    table = _Table.root(source.exactly(first))
    kind = table.number(1, "<B")
    records = 0
    if kind == RECORDS:
        header = table.table(2)
        records = 0 if header is None else header.number(0, "<q")
    body = table.number(3, "<q")
    if body < 0 or records < 0:
        raise ValueError(f"the message at byte {offset} is damaged")
    return MessagePlace(kind, offset, framing + first + body, records)


_MAX_METADATA_BYTES = 1 << 28


def record_blocks(source: WatchedFile, size_bytes: int) -> list[tuple[int, int]]:
    """Return (offset, size in bytes) of each record batch in a file's footer."""
    if size_bytes < FILE_START + len(MAGIC) + 4:
        raise EOFError("the file is truncated")
    source.seek(size_bytes - len(MAGIC) - 4)
    footer_bytes, magic = struct.unpack("<i6s", source.exactly(10))
    if magic != MAGIC or not 0 < footer_bytes <= size_bytes - 10 - FILE_START:
        raise EOFError("the file is truncated: it has no footer at its end")
    source.seek(size_bytes - 10 - footer_bytes)
    found = []
    for block in _Table.root(source.exactly(footer_bytes)).structs(3, _BLOCK_BYTES):
        offset, metadata_bytes, body_bytes = struct.unpack("<qi4xq", block)
        if offset < 0 or metadata_bytes < 0 or body_bytes < 0 or offset + metadata_bytes + body_bytes > size_bytes:
            raise ValueError("its footer is damaged")
        found.append((offset, metadata_bytes + body_bytes))
    return found


class _Table:
    """A flatbuffer table, which has numbered, optional fields."""

    def __init__(self, data: bytes, position: int) -> None:
        self._data = data
        self._position = position
        self._fields = position - _unpack("<i", data, position)
        self._field_bytes = _unpack("<H", data, self._fields)

    @staticmethod
    def root(data: bytes) -> _Table:
        return _Table(data, _unpack("<I", data, 0))

    def number(self, field: int, layout: str) -> int:
        place = self._place(field)
        return 0 if place is None else _unpack(layout, self._data, place)

    def table(self, field: int) -> _Table | None:
        place = self._place(field)
        return None if place is None else _Table(self._data, place + _unpack("<I", self._data, place))

    def structs(self, field: int, size_bytes: int) -> list[bytes]:
        place = self._place(field)
        if place is None:
            return []
        vector = place + _unpack("<I", self._data, place)
        count = _unpack("<I", self._data, vector)
        start = vector + 4
        if start + count * size_bytes > len(self._data):
            raise IndexError("a list in its metadata is damaged")
        return [self._data[start + number * size_bytes :][:size_bytes] for number in range(count)]

    def _place(self, field: int) -> int | None:
        entry = 4 + 2 * field
        if entry + 2 > self._field_bytes:
            return None
        distance = _unpack("<H", self._data, self._fields + entry)
        return self._position + distance if distance else None


def _unpack(layout: str, data: bytes, position: int) -> int:
    if position < 0:
        raise IndexError("its metadata is damaged")
    value: int = struct.unpack_from(layout, data, position)[0]
    return value
