"""The file that a pserver writes for a checkpoint: its blocks and rows, their slots, and its applied batches.

The file is an Arrow IPC file with one block per record batch, so any Arrow reader can open it, and a single block can
be fetched by a range request. Its columns are: ``block``, ``parameter``, ``start`` and ``stop``, which identify the
block; ``version`` and ``updates``, its progress; ``dtype``; ``checksum`` (xxh3-64 of the row); ``values`` and
``slot_0`` …, which contain little-endian elements (null if the block's optimizer has fewer slots).

The schema's metadata has three entries. ``flightedl`` is JSON: format, job, number, index, pservers, plan hash, the
blocks in their order, and the spans of rows. ``applied`` is the output of ``AppliedBatches.encode`` for these blocks
and buckets, in the same order. ``checksum`` is the xxh3-128 of both. Rows of tables follow the blocks (see
``row_batches``).

Damage is detected in three ways:

* ``load_shard`` reads the file in one pass and compares its xxh3-128 hash with the one in the manifest.
* ``read_blocks`` reads only a part of the file, and verifies the checksums of rows and metadata, the plan hash, and the
  number of the file.
* Everything that Arrow returns is validated, and the schema must be the one that this module writes.

A shard is written as a stream, and the storage receives the memory of each array without a copy. Damage to a file
raises a CorruptError that names the file. Errors of the storage are passed on unchanged.

Do not use the blocks that ``load_shard`` yields until it has finished: they may be damaged.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from flightedl.domain.retries import machine_error
from flightedl.errors import CorruptError, FlightedlError
from flightedl.formats.range_file import RangeFile
from flightedl.formats.row_batches import (
    KINDS,
    ROW_FIELDS,
    StoredRows,
    StoredRowSpan,
    binary,
    decode_rows,
    encode_rows,
    fixed_columns,
    row_checksum,
)
from flightedl.formats.sinks import PartsSink
from flightedl.messages.decoding import from_json
from flightedl.ports import Storage

FORMAT = 1
_DTYPES = ("float32", "float64")
_FIXED = (
    pa.field("block", pa.int32(), nullable=False),
    pa.field("parameter", pa.int32(), nullable=False),
    pa.field("start", pa.int64(), nullable=False),
    pa.field("stop", pa.int64(), nullable=False),
    pa.field("version", pa.int64(), nullable=False),
    pa.field("updates", pa.int64(), nullable=False),
    pa.field("dtype", pa.string(), nullable=False),
    pa.field("checksum", pa.uint64(), nullable=False),
    pa.field("values", pa.binary(), nullable=False),
)
_MAGIC = b"ARROW1"
#: Magic number at the beginning of the file, padded to eight bytes. An IPC stream follows, up to the footer.
_STREAM_START = 8
#: Exceptions that Arrow and msgspec raise for invalid bytes, or if this machine lacks memory or open files.
_TROUBLE = (pa.ArrowException, msgspec.DecodeError, StopIteration, OSError, ValueError, TypeError, MemoryError)
_READ_AHEAD_BYTES = 16 << 20
_SMALL_READ_BYTES = 64 << 10
#: Minimum number of bytes to hash on another thread. Hashing fewer bytes takes no longer than passing them on.
_LARGE_BYTES = 256 << 10

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """One block, as stored in files.

    Attributes:
        number: Number of the block in the plan.
        parameter: Number of the block's parameter.
        start: Index of the block's first element in the parameter.
        stop: Index after the block's last element.
        version: Version of the values.
        updates: Number of times the optimizer ran.
        values: (stop - start,) float32 or float64, contiguous; read-only if read from a file.
        slots: The optimizer's arrays, of the same dtype, each (stop - start,) or (1,).
    """

    number: int
    parameter: int
    start: int
    stop: int
    version: int
    updates: int
    values: Array
    slots: tuple[Array, ...] = ()


class ShardHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Description of a file, stored in its metadata."""

    format: int = FORMAT
    job: str
    #: Number of the checkpoint.
    number: int
    index: int
    pservers: int
    plan_hash: str
    #: Numbers of the blocks, in the order of the record batches.
    blocks: list[int]
    #: Spans that have rows in this file, in the order of their positions.
    rows: list[StoredRowSpan] = []


@dataclass(frozen=True, slots=True)
class WrittenShard:
    """Size and hash of a written file, for the manifest."""

    size_bytes: int
    #: xxh3-128 hash of the file, as 32 hexadecimal digits.
    hash: str


@dataclass(frozen=True, slots=True)
class ShardContents:
    """Blocks that were read from a file, and the file's header."""

    header: ShardHeader
    #: Output of ``AppliedBatches.encode`` for *all* blocks in the file.
    applied: bytes
    blocks: tuple[StoredBlock, ...]
    #: Maximum number of slots of a block in the file.
    slot_count: int


# --- writing ---


def write_shard(
    storage: Storage,
    name: str,
    header: ShardHeader,
    applied: bytes,
    blocks: Iterable[StoredBlock],
    slot_count: int,
    rows: Iterable[StoredRows] = (),
) -> WrittenShard:
    """Publish a shard.

    Args:
        storage: Destination.
        name: Name that no other process writes.
        header: Description of the file. ``blocks`` contains the numbers of the blocks, in order.
        applied: Applied sets of the blocks.
        blocks: The blocks in the order of the header. A block may be released when the next one is requested.
        slot_count: Maximum number of slots of a block.
        rows: Rows of the header's spans.

    Raises:
        UnavailableError: the storage failed, and there is no file with this name.
    """
    digest = xxhash.xxh3_128()
    parts = _parts(header, applied, blocks, max(slot_count, bool(header.rows)), rows)
    with ThreadPoolExecutor(1, "hash") as executor:
        size_bytes = storage.publish(name, _hashed(parts, digest, executor))
    return WrittenShard(size_bytes, digest.hexdigest())


def _hashed(
    parts: Iterable[bytes | memoryview], digest: xxhash.xxh3_128, executor: Executor
) -> Iterator[bytes | memoryview]:
    """Yield the parts of the file. Large parts are hashed while the consumer writes them."""
    for part in parts:
        if len(part) < _LARGE_BYTES:
            digest.update(part)
            yield part
        else:
            hashed = executor.submit(digest.update, part)
            yield part
            hashed.result()


def _parts(
    header: ShardHeader, applied: bytes, blocks: Iterable[StoredBlock], slot_count: int, rows: Iterable[StoredRows]
) -> Iterator[bytes | memoryview]:
    schema = _schema(header, applied, slot_count)
    sink = PartsSink(is_copied=False)
    numbers = iter(header.blocks)
    with pa.ipc.new_file(pa.PythonFile(sink, mode="w"), schema) as writer:
        yield from sink.take_parts()
        for block in blocks:
            if next(numbers, None) != block.number:
                raise ValueError(f"block {block.number} is not the next one of the header")
            writer.write_batch(_batch(block, schema))
            yield from sink.take_parts()
        if next(numbers, None) is not None:
            raise ValueError("the header names more blocks than were passed")
        spans = {span.first: span for span in header.rows}
        for some in rows:
            writer.write_batch(encode_rows(some, spans[some.span], schema, slot_count))
            yield from sink.take_parts()
    yield from sink.take_parts()


def _schema(header: ShardHeader, applied: bytes, slot_count: int) -> pa.Schema:
    described = msgspec.json.encode(header)
    metadata = {b"flightedl": described, b"applied": applied, b"checksum": _metadata_checksum(described, applied)}
    slots = [pa.field(f"slot_{number}", pa.binary(), nullable=True) for number in range(slot_count)]
    return pa.schema([*_FIXED, *slots, *(ROW_FIELDS if header.rows else ())], metadata)


def _metadata_checksum(described: bytes, applied: bytes) -> bytes:
    digest = xxhash.xxh3_128(struct.pack("<qq", len(described), len(applied)))
    digest.update(described)
    digest.update(applied)
    return digest.hexdigest().encode()


def _batch(block: StoredBlock, schema: pa.Schema) -> pa.RecordBatch:
    arrays = [array.data.cast("B") for array in (block.values, *block.slots)]
    numbers = (block.number, block.parameter, block.start, block.stop, block.version, block.updates)
    columns = [
        *fixed_columns(numbers, block.values.dtype.name, arrays),
        *(binary(array) for array in arrays),
        *(pa.nulls(1, pa.binary()) for _ in range(len(schema) - len(_FIXED) + 1 - len(arrays))),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


# --- reading ---


def load_shard(
    storage: Storage, name: str, size_bytes: int, expected_hash: str
) -> tuple[ShardHeader, bytes, Iterator[StoredBlock | StoredRows]]:
    """Read a complete shard block by block, in a single pass over the file.

    Returns:
        (header, applied sets, blocks followed by rows). Use the blocks and rows only after the iterator has ended
        without an error.

    Raises:
        CorruptError: the file differs from what was written. The iterator raises this error, too.
        NotFoundError, UnavailableError: raised by the storage.
    """
    digest = xxhash.xxh3_128()
    file = RangeFile(storage, name, size_bytes, _READ_AHEAD_BYTES, digest)
    with _as_corrupt(storage, name):
        if file.read(_STREAM_START).rstrip(b"\0") != _MAGIC:
            raise CorruptError("it is no Arrow file")
        reader = pa.ipc.open_stream(pa.PythonFile(file, mode="r"))
        header, applied = _described(reader.schema)
    return header, applied, _stored_blocks(storage, name, file, reader, header, (digest, expected_hash))


def _stored_blocks(
    storage: Storage,
    name: str,
    file: RangeFile,
    reader: Any,
    header: ShardHeader,
    expected: tuple[xxhash.xxh3_128, str],
) -> Iterator[StoredBlock | StoredRows]:
    for number in header.blocks:
        with _as_corrupt(storage, name):
            block = _block_of(reader.read_next_batch(), reader.schema, number)
        yield block
    while True:
        with _as_corrupt(storage, name):
            try:
                batch = reader.read_next_batch()
            except StopIteration:
                break
            if not header.rows:
                raise CorruptError("it has more blocks than its header names")
            rows = _rows_of(batch, reader.schema, header)
        yield rows
    with _as_corrupt(storage, name):
        while file.read(_READ_AHEAD_BYTES):
            pass
        digest, expected_hash = expected
        if digest.hexdigest() != expected_hash:
            raise CorruptError(f"its hash is {digest.hexdigest()}, not {expected_hash}")


def read_blocks(storage: Storage, name: str, size_bytes: int, blocks: Sequence[int]) -> ShardContents:
    """Read some blocks of a shard. Apart from these blocks, only the file's description is read.

    Raises:
        CorruptError: the content differs from what was written, or a block does not exist.
        NotFoundError, UnavailableError: raised by the storage.
    """
    reader, header, applied = _opened(storage, name, size_bytes, _SMALL_READ_BYTES)
    with _as_corrupt(storage, name):
        places = {number: place for place, number in enumerate(header.blocks)}
        missing = [number for number in blocks if number not in places]
        if missing:
            raise CorruptError(f"it has no block {missing[0]}")
        found = tuple(_block_of(reader.get_batch(places[number]), reader.schema, number) for number in blocks)
        slot_count = len(reader.schema) - len(_FIXED) - (len(ROW_FIELDS) if header.rows else 0)
    return ShardContents(header, applied, found, slot_count)


def read_rows(storage: Storage, name: str, size_bytes: int) -> tuple[ShardHeader, bytes, Iterator[StoredRows]]:
    """Read the rows in a shard, but not its blocks.

    Raises:
        CorruptError: the content differs from what was written. The iterator raises this error, too.
        NotFoundError, UnavailableError: raised by the storage.
    """
    reader, header, applied = _opened(storage, name, size_bytes, _READ_AHEAD_BYTES)

    def rows() -> Iterator[StoredRows]:
        for place in range(len(header.blocks), reader.num_record_batches):
            with _as_corrupt(storage, name):
                found = _rows_of(reader.get_batch(place), reader.schema, header)
            yield found

    return header, applied, rows()


def _opened(storage: Storage, name: str, size_bytes: int, window_bytes: int) -> tuple[Any, ShardHeader, bytes]:
    """Return a reader of the record batches, the header and the applied sets."""
    with _as_corrupt(storage, name):
        reader = pa.ipc.open_file(pa.PythonFile(RangeFile(storage, name, size_bytes, window_bytes), mode="r"))
        header, applied = _described(reader.schema)
        count, least = reader.num_record_batches, len(header.blocks)
        if count < least or (count > least and not header.rows):
            raise CorruptError(f"it has {count} blocks, not {least}")
    return reader, header, applied


def _described(schema: pa.Schema) -> tuple[ShardHeader, bytes]:
    metadata = schema.metadata or {}
    described, applied = metadata.get(b"flightedl", b""), metadata.get(b"applied", b"")
    if metadata.get(b"checksum") != _metadata_checksum(described, applied):
        raise CorruptError("its description does not match its checksum")
    header = from_json(described, ShardHeader)
    if header.format != FORMAT:
        raise CorruptError(f"it is of format {header.format}; this flightedl reads format {FORMAT}")
    slot_count = len(schema) - len(_FIXED) - (len(ROW_FIELDS) if header.rows else 0)
    if slot_count < 0 or not schema.equals(_schema(header, applied, slot_count), check_metadata=False):
        raise CorruptError("its columns are not those of a shard")
    return header, applied


def _row(batch: pa.RecordBatch) -> tuple[list[Any], list[pa.Buffer]]:
    """Return the values of the fixed columns of a record batch, and the buffers of its columns of values."""
    fixed = [column[0].as_py() for column in batch.columns[: len(_FIXED) - 1]]
    buffers = [column[0].as_buffer() for column in batch.columns[len(_FIXED) - 1 :] if column.null_count == 0]
    if None in fixed or len(buffers) == 0:
        raise CorruptError("a block has a null")
    return fixed, buffers


def _rows_of(batch: pa.RecordBatch, schema: pa.Schema, header: ShardHeader) -> StoredRows:
    _require_one(batch, schema)
    (*numbers, kind, expected), buffers = _row(batch)
    if kind not in KINDS or numbers[0] not in {span.first for span in header.rows}:
        raise CorruptError(f"the rows of bucket {numbers[0]} are in no span of its header")
    return decode_rows(numbers, kind, expected, buffers)


def _require_one(batch: pa.RecordBatch, schema: pa.Schema) -> None:
    if batch.num_rows != 1 or not batch.schema.equals(schema, check_metadata=False):
        raise CorruptError("a block is not one row")
    batch.validate(full=True)


def _block_of(batch: pa.RecordBatch, schema: pa.Schema, number: int) -> StoredBlock:
    _require_one(batch, schema)
    (*numbers, dtype, expected), buffers = _row(batch)
    if numbers[0] != number or dtype not in _DTYPES or row_checksum(numbers, dtype, buffers) != expected:
        raise CorruptError(f"block {number} does not match its checksum")
    arrays = [np.frombuffer(buffer, dtype) for buffer in buffers]
    number, parameter, start, stop, version, updates = numbers
    block = StoredBlock(number, parameter, start, stop, version, updates, arrays[0], tuple(arrays[1:]))
    if arrays[0].size != block.stop - block.start or any(slot.size not in {1, arrays[0].size} for slot in block.slots):
        raise CorruptError(f"block {number} does not have the size that it names")
    return block


@contextlib.contextmanager
def _as_corrupt(storage: Storage, name: str) -> Iterator[None]:
    """Convert a reader's exceptions to an error that names the file. The storage's errors pass unchanged.

    Only bytes that Arrow or msgspec rejects are damage: the other pservers drop a checkpoint that one of them rejects.
    """
    try:
        yield
    except CorruptError as error:
        raise CorruptError(f"{storage.url}/{name} is damaged: {error}") from None
    except FlightedlError:
        raise
    except _TROUBLE as error:
        if (lacking := machine_error(error, f"{storage.url}/{name} cannot be read")) is not None:
            raise lacking from None
        raise CorruptError(f"{storage.url}/{name} is damaged: {' '.join(str(error).split())[:200]}") from None
