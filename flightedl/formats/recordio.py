"""RecordIO, a format for chunks of byte records, in its three historical dialects.

A file is a sequence of chunks. A chunk consists of a header (five little-endian uint32, beginning with ``MAGIC``) and a
payload, which contains the records, each as (uint32 length, bytes), compressed together. The other four numbers depend
on the dialect:

* edl (Go), the dialect that this module writes: checksum, compressor, size, records. The compressors are 0 for none, 1
  for snappy (framed) and 2 for gzip. The payload's checksum is CRC-32 (IEEE).
* fluid: records, checksum, compressor, size. The compressors and the payload's checksum are the same as in edl.
* pyrecordio: records, checksum, compressor, size. The compressors are 1 for none, 2 for snappy (raw) and 3 for gzip.
  The payload's checksum is CRC-32C.

The compressor code and the checksum of the first chunk determine the dialect. Indexing reads this chunk and otherwise
only headers, so damage to another chunk is detected only when that chunk is read.

Each record becomes a row with a single column, ``record: binary``.
"""

from __future__ import annotations

import gzip
import itertools
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import cramjam
import pyarrow as pa
import xxhash

from flightedl.errors import DataError, UsageError
from flightedl.formats.chunks import Chunk, ChunkColumns, CorruptChunkError, FileIndex, IndexOptions
from flightedl.formats.records import ReadRequest, Records, conformed, require_columns, select
from flightedl.formats.schemas import common_type
from flightedl.formats.sources import WatchedFile, opened, parsing, until_damage
from flightedl.ports import Files, FileStat

MAGIC = 0x01020304
HEADER_BYTES = 20
SCHEMA = pa.schema([pa.field("record", pa.binary())])
#: Formats that are read with this schema if ``decode`` converts their records to columns.
UNDECODED = ("recordio", "lines", "kafka")
#: Maximum uncompressed size of the records in a written chunk, in bytes. A single record may be larger.
MAX_CHUNK_BYTES = 32 << 20

_HEADER = struct.Struct("<5I")
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Header:
    """Numbers in the header of a chunk. Their order here is the same for all dialects."""

    checksum: int
    compressor: int
    size_bytes: int
    records: int


@dataclass(frozen=True, slots=True, eq=False)
class Dialect:
    """Layout of a chunk."""

    name: str
    #: True if the record count is the first number after the magic number, False if it is the last.
    is_count_first: bool
    #: compressor code -> name.
    compressors: dict[int, str]
    checksum: Callable[[bytes], int]

    def header(self, data: bytes) -> Header | None:
        """Return the header in these 20 bytes, or None if the magic number or the compressor is unknown."""
        magic, *numbers = _HEADER.unpack(data)
        if self.is_count_first:
            numbers = [*numbers[1:], numbers[0]]
        header = Header(*numbers)
        return header if magic == MAGIC and header.compressor in self.compressors else None


def crc32c(data: bytes) -> int:
    """Return the checksum CRC-32C."""
    # Imported lazily: only TFRecord and one historical dialect of RecordIO need it.
    import google_crc32c

    return int(google_crc32c.value(data))


_CODES = {0: "none", 1: "snappy", 2: "gzip"}
EDL = Dialect("edl", False, _CODES, zlib.crc32)
FLUID = Dialect("fluid", True, _CODES, zlib.crc32)
PYRECORDIO = Dialect("pyrecordio", True, {1: "none", 2: "raw snappy", 3: "gzip"}, crc32c)
DIALECTS = (EDL, FLUID, PYRECORDIO)


class RecordIO:
    """Implementation of ``formats.Format`` for RecordIO."""

    name: ClassVar[str] = "recordio"
    suffixes: ClassVar[tuple[str, ...]] = (".recordio", ".rio", ".rec")

    def index(self, files: Files, stat: FileStat, options: IndexOptions) -> FileIndex:
        with opened(files, stat.url) as source:
            dialect = _dialect(source, stat)
            headers: list[Header] = []
            hashes: list[int] = []
            offsets: list[int] = []
            with until_damage(options) as skipped:
                for offset, data, header in _walk(source, stat, dialect):
                    if not header.records:
                        _require_empty(source, offset, header, dialect)
                    offsets.append(offset)
                    headers.append(header)
                    hashes.append(xxhash.xxh3_64_intdigest(data))
        sizes = [HEADER_BYTES + header.size_bytes for header in headers]
        chunks = ChunkColumns.of([header.records for header in headers], offsets, sizes, hashes)
        return FileIndex(stat, self.name, SCHEMA, chunks, tuple(skipped))

    def read(self, files: Files, chunk: Chunk, request: ReadRequest) -> Records:
        with opened(files, chunk.url) as source, parsing(source, f"chunk at byte {chunk.offset}"):
            source.seek(chunk.offset)
            data = source.exactly(chunk.size_bytes)
        with parsing(source, f"chunk at byte {chunk.offset}"):
            chunk.require_hash(xxhash.xxh3_64_intdigest(data[:HEADER_BYTES]))
            records = decode_chunk(data)
            if len(records) != chunk.records:
                raise ValueError(f"it has {len(records)} records, not {chunk.records}")
            require_columns(SCHEMA, request, f"{chunk.url}, unless decode= makes it")
            table = pa.table([pa.array(records, pa.binary())], schema=SCHEMA)
            return select(conformed(table, request, chunk), request)

    def write(self, batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[bytes]:
        if len(schema) != 1 or common_type(schema.types) not in (pa.string(), pa.binary()):
            raise UsageError(
                f"RecordIO holds one column of bytes or text, and this has {', '.join(schema.names)[:200]}"
            )
        return itertools.chain.from_iterable(encode_records(bytes_of(batch.column(0))) for batch in batches)


def decode_chunk(data: bytes, dialect: Dialect | None = None) -> list[bytes]:
    """Return the records of one chunk (header and payload), in the given dialect or the first one that matches.

    Raises:
        ValueError: no dialect's checksum matches, or the payload contradicts the header.
        EOFError, OSError, zlib.error: the payload is not gzip, although its checksum matches.
    """
    payload = data[HEADER_BYTES:]
    for candidate in DIALECTS if dialect is None else (dialect,):
        header = candidate.header(data[:HEADER_BYTES])
        if header is not None and header.size_bytes == len(payload) and candidate.checksum(payload) == header.checksum:
            return _records(_decompressed(payload, candidate.compressors[header.compressor]), header.records)
    raise ValueError("the checksum does not match its bytes")


def encode_chunk(records: Iterable[bytes], compressor: str = "snappy", dialect: Dialect = EDL) -> bytes:
    """Return one chunk (header and payload). Raises UsageError if the dialect does not have this compressor."""
    codes = {name.removeprefix("raw "): code for code, name in dialect.compressors.items()}
    if compressor not in codes:
        raise UsageError(f"RecordIO has no compressor {compressor!r}: use one of {', '.join(codes)}")
    parts: list[bytes] = []
    for record in records:
        parts += (_LENGTH.pack(len(record)), record)
    payload = _compressed(b"".join(parts), dialect.compressors[codes[compressor]])
    numbers = [dialect.checksum(payload), codes[compressor], len(payload)]
    count = len(parts) // 2
    numbers = [count, *numbers] if dialect.is_count_first else [*numbers, count]
    return _HEADER.pack(MAGIC, *numbers) + payload


def encode_records(
    records: Iterable[bytes], compressor: str = "snappy", max_chunk_bytes: int = MAX_CHUNK_BYTES, dialect: Dialect = EDL
) -> Iterator[bytes]:
    """Yield a complete file chunk by chunk. If a record would exceed ``max_chunk_bytes``, another chunk begins."""
    waiting: list[bytes] = []
    size = 0
    for record in records:
        if waiting and size + len(record) > max_chunk_bytes:
            yield encode_chunk(waiting, compressor, dialect)
            waiting, size = [], 0
        waiting.append(record)
        size += len(record)
    if waiting:
        yield encode_chunk(waiting, compressor, dialect)


def _require_empty(source: WatchedFile, offset: int, header: Header, dialect: Dialect) -> None:
    """Verify that an empty chunk is empty: such chunks are never read, and no checksum covers the record count."""
    source.seek(offset)
    with parsing(source, f"chunk at byte {offset}"):
        decode_chunk(source.exactly(HEADER_BYTES + header.size_bytes), dialect)


def _dialect(source: WatchedFile, stat: FileStat) -> Dialect:
    offset = 0
    while offset < stat.size_bytes:
        source.seek(offset)
        data = source.read(HEADER_BYTES)
        if len(data) < HEADER_BYTES or _HEADER.unpack(data)[0] != MAGIC:
            raise CorruptChunkError(f"{stat.url} is not a RecordIO file: byte {offset} is not the start of a chunk")
        headers = {dialect: header for dialect in DIALECTS if (header := dialect.header(data)) is not None}
        fitting = {d: h for d, h in headers.items() if offset + HEADER_BYTES + h.size_bytes <= stat.size_bytes}
        for dialect, header in fitting.items():
            source.seek(offset + HEADER_BYTES)
            if header.size_bytes and dialect.checksum(source.exactly(header.size_bytes)) == header.checksum:
                return dialect
        if all(header.size_bytes for header in fitting.values()):
            what = "its checksum does not match its bytes" if fitting else "it is truncated, or its header is damaged"
            raise CorruptChunkError(f"{stat.url} is corrupt, chunk at byte {offset}: {what}")
        offset += HEADER_BYTES
    return EDL


def _walk(source: WatchedFile, stat: FileStat, dialect: Dialect) -> Iterator[tuple[int, bytes, Header]]:
    """Yield (offset, header as bytes, header) of each chunk. Raises CorruptChunkError if the file is malformed."""
    offset = 0
    while offset < stat.size_bytes:
        place = f"{stat.url} is corrupt, chunk at byte {offset}"
        if stat.size_bytes - offset < HEADER_BYTES:
            raise CorruptChunkError(f"{place}: the file is truncated, it ends within a header")
        source.seek(offset)
        data = source.exactly(HEADER_BYTES)
        header = dialect.header(data)
        if header is None:
            raise CorruptChunkError(f"{place}: this is not the header of a chunk")
        end = offset + HEADER_BYTES + header.size_bytes
        if end > stat.size_bytes:
            raise CorruptChunkError(f"{place}: the file is truncated, {end - stat.size_bytes} bytes are missing")
        yield offset, data, header
        offset = end


def _records(raw: bytes, count: int) -> list[bytes]:
    found: list[bytes] = []
    position, end = 0, len(raw)
    unpack = _LENGTH.unpack_from
    for _ in range(count):
        if position + 4 > end:
            raise ValueError(f"its records end after {len(found)} of {count}")
        start = position + 4
        position = start + unpack(raw, position)[0]
        if position > end:
            raise ValueError(f"record {len(found)} is longer than its chunk")
        found.append(raw[start:position])
    if position != end:
        raise ValueError(f"{end - position} bytes follow its last record")
    return found


def _decompressed(payload: bytes, compressor: str) -> bytes:
    if compressor == "none":
        return payload
    if compressor == "gzip":
        return gzip.decompress(payload)
    try:
        if compressor == "snappy":
            return bytes(cramjam.snappy.decompress(payload))
        return bytes(cramjam.snappy.decompress_raw(payload))
    except cramjam.DecompressionError as error:
        raise ValueError(f"snappy: {error}") from None


def _compressed(raw: bytes, compressor: str) -> bytes:
    if compressor == "none":
        return raw
    if compressor == "gzip":
        return gzip.compress(raw, mtime=0)
    if compressor == "snappy":
        return bytes(cramjam.snappy.compress(raw))
    return bytes(cramjam.snappy.compress_raw(raw))


def bytes_of(column: pa.Array) -> list[bytes]:
    """Return the records of a column of bytes or text. Raises DataError if there are nulls."""
    if column.null_count:
        raise DataError("RecordIO and lines have no nulls: filter them out before converting")
    values: list[bytes] = column.cast(pa.large_binary()).to_pylist()
    return values
