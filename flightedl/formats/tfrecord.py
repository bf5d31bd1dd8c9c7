"""TFRecord files of ``tf.train.Example``, as TensorFlow and Beam write them.

A record is its length (uint64), the checksum of the length (uint32), the data, and the checksum of the data, all
little-endian. A checksum is a CRC-32C, rotated, plus a constant. A file may be compressed as a whole with gzip or zlib,
whatever its name, because names do not say so.

Each feature is a column, and columns are sorted by name. Its values are int64, float or bytes in all records. It is a
list, unless each record that has the feature has one value. A record without the feature, or with a Feature without a
list, has null. Indexing verifies all checksums; when a chunk is read, its hash is compared instead.

Text is written as bytes in UTF-8, booleans as integers, and nulls as Features without a list.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flightedl.errors import DataError, UsageError
from flightedl.formats.chunks import IndexOptions, TextOptions
from flightedl.formats.inference import MixedTypesError, guessed
from flightedl.formats.recordio import crc32c
from flightedl.formats.records import LARGE_BYTES, ReadRequest, cast_exactly, plain_column
from flightedl.formats.schemas import common_type, is_binary, large_type
from flightedl.formats.sources import WatchedFile
from flightedl.formats.text import TextFormat
from flightedl.kernels.plain import BYTES, FLOATS, INTEGERS

Numbers = npt.NDArray[np.int64]

_HEADER, _CHECKSUM = struct.Struct("<QI"), struct.Struct("<I")
_MASK = 0xA282EAD8
#: First bytes of files that are compressed with gzip or zlib. Arrow's gzip reads both.
_COMPRESSED = (b"\x1f\x8b", b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")
#: Kind of a list -> types that can represent its values, the preferred type first.
_TYPES = {BYTES: (pa.binary(), pa.string()), FLOATS: (pa.float32(),), INTEGERS: (pa.int64(),)}
_MOST_FEATURES = 10_000


class TFRecord(TextFormat):
    """See ``formats.Format``."""

    name: ClassVar[str] = "tfrecord"
    suffixes: ClassVar[tuple[str, ...]] = (".tfrecord", ".tfrecords", ".tfrec")
    may_lack_columns: ClassVar[bool] = True
    is_utf8: ClassVar[bool] = False
    line_ends: ClassVar[tuple[bytes, ...]] = (b"",)

    def compression(self, source: WatchedFile, url: str) -> str | None:
        start = source.read(_HEADER.size)
        source.seek(0)
        if len(start) == _HEADER.size and _HEADER.unpack(start)[1] == _masked(start[:8]):
            return None
        return "gzip" if start.startswith(_COMPRESSED) else super().compression(source, url)

    def records_end(self, text: bytes, options: TextOptions) -> int:  # noqa: ARG002 - as TextFormat does
        return (_ends(text, is_complete=False) or [0])[-1]

    def record_ends(self, text: bytes, options: TextOptions) -> Numbers:  # noqa: ARG002
        return np.array(_ends(text), np.int64)

    def guess(self, text: bytes, names: Any, options: IndexOptions) -> tuple[int, pa.Schema]:  # noqa: ARG002
        ends = _ends(text)
        for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False), 1):
            if _CHECKSUM.unpack_from(text, end - 4)[0] != _masked(text[start + 12 : end - 4]):
                raise ValueError(f"the data of its record {number} do not match their checksum")
        declared, features = options.declared, sorted(_read(text).features.items())
        fields = [pa.field(n, declared[n]) if n in declared else _guess(n, rows) for n, rows in features]
        return len(ends), pa.schema(fields)

    def parse(self, text: Any, names: Any, request: ReadRequest) -> pa.Table:  # noqa: ARG002
        needed = request.needed()
        fields = [field for field in request.schema if needed is None or field.name in needed]
        found, records = _read(text), request.records or 0
        columns = [found.column(field, records) for field in fields]
        return pa.table(columns, [field.name for field in fields])

    def write(self, batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[bytes]:
        for field in schema:
            if _written_type(field.type) is None:
                raise UsageError(
                    f"TFRecord holds numbers, text, bytes and lists of them, but column {field.name!r} is "
                    f"{field.type}: convert it to one of these, or leave it out"
                )
        for batch in batches:
            columns = [_entries(name, column) for name, column in zip(schema.names, batch.columns, strict=True)]
            examples = [_tagged(10, b"".join(entries)) for entries in zip(*columns, strict=True)]
            yield b"".join(map(_record, examples or [b""] * batch.num_rows))


class _Found(NamedTuple):
    """Features of some records. For their rows and ``values`` see ``kernels.examples.read_examples``."""

    data: npt.NDArray[np.uint8]
    values: Numbers
    #: Name -> (6, n) rows.
    features: dict[str, Numbers]

    def column(self, field: pa.Field, records: int) -> pa.Array:
        """Return a feature as a column with the field's type, or with large offsets if it needs them.

        Raises:
            pa.ArrowInvalid: a value does not fit the type, or a record has several values and the type is no list.
        """
        rows = self.features.get(field.name)
        if rows is None or not rows[3].any():
            return pa.nulls(records, field.type)
        counts, is_null = np.zeros(records, np.int64), np.ones(records, np.bool_)
        counts[rows[0]], is_null[rows[0]] = _counts(rows), rows[3] == 0
        is_list = pa.types.is_list(field.type)
        if not is_list and (several := np.flatnonzero(counts > 1)).size:
            raise pa.ArrowInvalid(
                f"its record {several[0] + 1} has {counts[several[0]]} values of feature {field.name!r}, but "
                f"{field.type} is the type of one: make it list<{field.type}>"
            )
        values, inner = self._values(rows), field.type.value_type if is_list else field.type
        is_large = values.nbytes > LARGE_BYTES
        values, ends = cast_exactly(values, large_type(inner) if is_large else inner), np.cumsum(counts)
        if is_list:
            of = pa.LargeListArray if is_large else pa.ListArray
            return of.from_arrays(np.append(0, ends), values, mask=pa.array(is_null))
        return values if (counts == 1).all() else values.take(pa.array(ends - 1, mask=counts == 0))

    def _values(self, rows: Numbers) -> pa.Array:
        """Return all values of a feature as int64, float or large_binary."""
        kind, sizes = rows[3].max(), rows[5] - rows[4]
        found = self.values[np.arange(sizes.sum()) + np.repeat(rows[5] - np.cumsum(sizes), sizes)]
        if kind == BYTES:
            return _texts(self.data, found)
        numbers = found.astype(np.uint32) if kind == FLOATS else found
        return pa.Array.from_buffers(_TYPES[kind][0], len(numbers), [None, pa.py_buffer(numbers)])


def _masked(data: bytes) -> int:
    checksum = crc32c(data)
    return ((checksum >> 15 | checksum << 17) + _MASK) & 0xFFFFFFFF


def _ends(text: bytes, *, is_complete: bool = True) -> list[int]:
    """Return the ends of the records in ``text``, whose last record may be missing or incomplete if it may be so.

    Raises:
        ValueError: a length is damaged, so that the next record cannot be found.
    """
    found: list[int] = []
    at = 0
    while at < len(text):
        missing = at + _HEADER.size - len(text)
        if missing <= 0:
            length, checksum = _HEADER.unpack_from(text, at)
            if checksum != _masked(text[at : at + 8]):
                if found and not is_complete:
                    return found  # The next piece begins here.
                raise ValueError(f"the length of its record {len(found) + 1} does not match its checksum")
            at += _HEADER.size + length + _CHECKSUM.size
            missing = at - len(text)
        if missing > 0:
            if is_complete:
                raise ValueError(f"the file is truncated, {missing} bytes of its record {len(found) + 1} are missing")
            return found
        found.append(at)
    return found


def _counts(rows: Numbers) -> Numbers:
    """Return the number of values in each row of a feature."""
    return np.asarray((rows[5] - rows[4]) // (2 if rows[3].max() == BYTES else 1))


def _texts(data: npt.NDArray[np.uint8], places: Numbers) -> pa.Array:
    """Return ``data[places[0]:places[1]]``, ``data[places[2]:places[3]]`` and so on. The places ascend."""
    # Every other value of an array that covers the data, as in ``tar_archive``.
    buffers = [None, pa.py_buffer(np.append(places, 0)), pa.py_buffer(data)]
    every = pa.Array.from_buffers(pa.large_binary(), max(len(places) - 1, 0), buffers)
    return every.take(pa.array(np.arange(0, len(places), 2)))


def _read(text: Any) -> _Found:
    """Read the features of all records.

    Raises:
        ValueError: a record is no Example, or has a feature twice.
        MixedTypesError: a feature has values of two types.
    """
    from flightedl.kernels.examples import examples_kernel

    data, read = np.frombuffer(text, np.uint8), examples_kernel()
    record, count, size = read(data, np.zeros((6, 0), np.int64), np.zeros(0, np.int64))
    if count < 0:
        raise ValueError(f"its record {record} is no tf.train.Example, and only such records have columns")
    rows, values = np.empty((6, count), np.int64), np.empty(size, np.int64)
    read(data, rows, values)
    coded = _texts(data, rows[1:3].ravel("F")).cast(pa.large_string()).dictionary_encode()
    names = coded.dictionary.to_pylist()
    if len(names) > _MOST_FEATURES:
        raise ValueError(f"it has {len(names):,} features, but {_MOST_FEATURES:,} are the limit")
    codes = np.asarray(coded.indices).astype(np.uint16)
    order = np.argsort(codes, kind="stable")
    rows, codes = rows[:, order], codes[order]
    is_next = np.diff(codes) == 0
    if (twice := np.flatnonzero(is_next & (np.diff(rows[0]) == 0))).size:
        raise ValueError(f"its record {rows[0, twice[0]] + 1} has feature {names[codes[twice[0]]]!r} twice")
    features = dict(zip(names, np.split(rows, np.flatnonzero(~is_next) + 1, axis=1), strict=bool(count)))
    for name, (records, _, _, kinds, _, _) in features.items():
        if (wrong := np.flatnonzero((kinds > 0) & (kinds != kinds.max()))).size:
            other, common = (_TYPES[kind][0] for kind in (kinds[wrong[0]], kinds.max()))
            what = f"its record {records[wrong[0]] + 1}: feature {name!r}"
            raise MixedTypesError(f"{what} is {other}, but {common} in other records")
    return _Found(data, values, features)


def _guess(name: str, rows: Numbers) -> pa.Field:
    kind = rows[3].max()
    if not kind:
        return pa.field(name, pa.null())
    forms = list(map(str, _TYPES[kind]))
    lists = [f"list<item: {form}>" for form in forms]
    return guessed(name, [*forms, *lists] if (_counts(rows)[rows[3] > 0] == 1).all() else lists)


def _written_type(kind: pa.DataType) -> pa.DataType | None:
    """Return the type in which values of this type, or the values of its lists, are written; None if there is none."""
    kind = common_type([kind]) or kind
    kind = kind.value_type if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind) else kind
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return pa.int64()
    if pa.types.is_floating(kind):
        return pa.float32()
    is_bytes = is_binary(kind) or pa.types.is_string(kind)
    return pa.large_binary() if is_bytes else kind if pa.types.is_null(kind) else None


def _entries(name: str, column: pa.Array) -> list[bytes]:
    """Return the entry of each record in its map of features. Raises DataError if a value cannot be written."""
    kind, plain = _written_type(column.type), plain_column(pa.chunked_array([column]))
    is_list, what = pa.types.is_nested(plain.type), f"column {name!r} cannot be written to TFRecord"
    try:
        values = plain.cast(pa.list_(kind) if is_list else kind).to_pylist()
    except pa.ArrowInvalid as error:
        raise DataError(f"{what}: {str(error)[:200]}") from None
    lists = [value if is_list or value is None else [value] for value in values]
    if any(None in each for each in lists if each is not None):
        raise DataError(f"{what}: its lists have nulls")
    start, encode = _tagged(10, name.encode()), _ENCODERS[str(kind)]
    features = [b"" if each is None else encode(each) for each in lists]
    return [_tagged(10, start + _tagged(18, feature)) for feature in features]


def _varint(number: int) -> bytes:
    found = bytearray()
    number &= (1 << 64) - 1
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes((*found, number))


def _tagged(tag: int, content: bytes) -> bytes:
    return bytes((tag,)) + _varint(len(content)) + content


#: Type of values -> function that encodes a list of them as a Feature.
_ENCODERS: dict[str, Callable[[Sequence[Any]], bytes]] = {
    "null": lambda _: b"",
    "large_binary": lambda values: _tagged(10, b"".join(_tagged(10, value) for value in values)),
    "float": lambda values: _tagged(18, _tagged(10, struct.pack(f"<{len(values)}f", *values))),
    "int64": lambda values: _tagged(26, _tagged(10, b"".join(map(_varint, values)))),
}


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return b"".join((length, _CHECKSUM.pack(_masked(length)), data, _CHECKSUM.pack(_masked(data))))
