"""Store an index, so that it has to be built only once.

An index is stored as one Arrow IPC file, ``index/<hash of the settings for division into chunks>.arrow``, which
contains the chunks as its only record batch. The schema's metadata contains everything else: the files (an Arrow stream
of url, size_bytes, version, name, format, schema, skipped, mark), their distinct schemas, the common schema, and a
hash, which is verified on loading.

The stored index is only a cache: an index that is unreadable or does not match its hash is rebuilt. The chunks of
unchanged files are taken from it, and only the other files are read.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import xxhash

from flightedl.domain.retries import machine_error
from flightedl.errors import FlightedlError
from flightedl.formats.chunk_index import CHUNKS_SCHEMA, ChunkIndex
from flightedl.formats.chunks import ChunkColumns, FileIndex
from flightedl.formats.dataset_spec import DatasetSpec
from flightedl.formats.index import Progress, build_index
from flightedl.ports import Files, FileStat, Storage

_log = logging.getLogger(__name__)

_LAYOUT = b"3"
_FILES_SCHEMA = pa.schema(
    [
        pa.field("url", pa.string()),
        pa.field("size_bytes", pa.int64()),
        pa.field("version", pa.string()),
        pa.field("name", pa.string()),
        pa.field("format", pa.string()),
        pa.field("schema", pa.int32()),
        pa.field("skipped", pa.list_(pa.string())),
        pa.field("mark", pa.string()),
    ]
)

#: Schema in which the master sends an index to the ranks of a group. Its rows are pieces of the stored form.
PIECES_SCHEMA = pa.schema([pa.field("piece", pa.binary(), nullable=False)])
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class LoadedIndex:
    """An index, and information about how it was obtained."""

    index: ChunkIndex
    #: Number of files that had to be read.
    files_read: int
    #: Name of the stored file.
    name: str
    #: Reason why the index could not be stored; empty if it was stored or if there is no storage.
    trouble: str = ""


def load_or_build(
    files: Files,
    storage: Storage | None,
    spec: DatasetSpec,
    *,
    concurrency: int = 16,
    progress: Progress | None = None,
    stats: Sequence[FileStat] | None = None,
) -> LoadedIndex:
    """Return the index of a dataset. Take unchanged files from the stored index, and store the result.

    ``stats`` are the files to index, in this order; None means all files that match the spec's URLs, sorted by name.
    Without a working storage, the index is built but not stored. Raises the same errors as ``build_index``.
    """
    name = index_name(spec)
    known = None if storage is None else load_stored(storage, spec)
    index = build_index(files, spec, concurrency=concurrency, progress=progress, known=known, stats=stats)
    unchanged = set() if known is None else set(known.stats)
    files_read = len([stat for stat in index.stats if stat not in unchanged])
    is_same = known is not None and known.content_hash() == index.content_hash()
    trouble = "" if storage is None or is_same else store(storage, spec, index)
    return LoadedIndex(index, files_read, name, trouble)


def store(storage: Storage, spec: DatasetSpec, index: ChunkIndex) -> str:
    """Store the index. Return the storage's error, or an empty string. A job can run without a stored index."""
    try:
        storage.publish(index_name(spec), [encode_index(index)])
    except FlightedlError as error:
        _log.info("the index could not be stored and will be rebuilt next time: %s", error)
        return str(error)
    return ""


def index_name(spec: DatasetSpec) -> str:
    """Return the name under which the index of this dataset is stored."""
    return f"index/{spec.index_hash()}.arrow"


def encode_index(index: ChunkIndex) -> bytes:
    """Return the index in its stored form."""
    schemas: dict[bytes, int] = {}
    rows = []
    for file in index.files:
        stat = file.stat
        schema = schemas.setdefault(file.schema.serialize().to_pybytes(), len(schemas))
        described = (stat.url, stat.size_bytes, stat.version, stat.name)
        rows.append((*described, file.format, schema, list(file.skipped), file.mark))
    columns = [
        pa.array(column, field.type) for column, field in zip(zip(*rows, strict=True), _FILES_SCHEMA, strict=True)
    ]
    files = _stream(pa.RecordBatch.from_arrays(columns, schema=_FILES_SCHEMA))
    metadata = {
        b"layout": _LAYOUT,
        b"hash": _hash(index, files),
        b"schema": index.schema.serialize().to_pybytes(),
        b"files": files,
        **{b"schema-%d" % number: text for text, number in schemas.items()},
    }
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, CHUNKS_SCHEMA.with_metadata(metadata)) as writer:
        writer.write_batch(index.chunk_batch().replace_schema_metadata(metadata))
    return sink.getvalue()


def decode_index(data: bytes) -> ChunkIndex:
    """Decode the output of ``encode_index``. Raises ValueError if it is damaged or has a different layout."""
    try:
        with pa.ipc.open_file(pa.py_buffer(data)) as reader:
            if not reader.schema.remove_metadata().equals(CHUNKS_SCHEMA):
                raise ValueError("it has other columns")
            metadata = reader.schema.metadata or {}
            batch = reader.get_batch(0)
        batch.validate(full=True)
        if metadata[b"layout"] != _LAYOUT:
            raise ValueError("it has another layout")
        index = ChunkIndex(_files(batch, metadata), _schema(metadata[b"schema"]))
        is_sound = _hash(index, metadata[b"files"]) == metadata[b"hash"]
    except (pa.ArrowException, OSError, KeyError, IndexError) as error:
        if (lacking := machine_error(error, "the stored index cannot be read")) is not None:
            raise lacking from error
        raise ValueError(f"it is damaged: {error}") from error
    if not is_sound:
        raise ValueError("it does not match its hash")
    return index


def index_to_pieces(index: ChunkIndex) -> list[pa.RecordBatch]:
    """Return the stored form as batches of ``PIECES_SCHEMA``."""
    data = encode_index(index)
    pieces = [data[start : start + _PIECE_BYTES] for start in range(0, len(data), _PIECE_BYTES)]
    return [pa.record_batch([[piece]], schema=PIECES_SCHEMA) for piece in pieces]


def index_from_pieces(batches: Iterable[pa.RecordBatch]) -> ChunkIndex:
    """Return the index in batches from ``index_to_pieces``. Raises ValueError, as ``decode_index`` does."""
    return decode_index(b"".join(piece for batch in batches for piece in batch.column(0).to_pylist()))


def _files(batch: pa.RecordBatch, metadata: dict[bytes, bytes]) -> list[FileIndex]:
    with pa.ipc.open_stream(pa.py_buffer(metadata[b"files"])) as reader:
        rows = reader.read_next_batch()
    rows.validate(full=True)
    file_numbers, *columns = (column.to_numpy() for column in batch.columns)
    bounds = np.searchsorted(file_numbers, np.arange(rows.num_rows + 1)).tolist()
    schemas: dict[int, pa.Schema] = {}
    found = []
    for number, (url, size_bytes, version, name, format_name, schema, skipped, mark) in enumerate(
        zip(*(column.to_pylist() for column in rows.columns), strict=True)
    ):
        if schema not in schemas:
            schemas[schema] = _schema(metadata[b"schema-%d" % schema])
        part = slice(bounds[number], bounds[number + 1])
        chunks = ChunkColumns(*(column[part] for column in columns))
        stat = FileStat(url, size_bytes, version, name)
        found.append(FileIndex(stat, format_name, schemas[schema], chunks, tuple(skipped), mark))
    return found


def load_stored(storage: Storage, spec: DatasetSpec) -> ChunkIndex | None:
    """Return the stored index, which may be outdated, or None if there is no valid one."""
    name = index_name(spec)
    try:
        if not any(file.name == name for file in storage.list(name)):
            return None
        return decode_index(storage.read(name))
    except (FlightedlError, ValueError) as error:
        _log.warning("the stored index %s/%s cannot be used and will be rebuilt: %s", storage.url, name, error)
        return None


def _hash(index: ChunkIndex, files: bytes) -> bytes:
    plain_bytes = index.chunk_batch().column("plain_bytes").to_numpy().tobytes()
    return f"{index.content_hash()}-{xxhash.xxh3_64_hexdigest(files + plain_bytes)}".encode()


def _schema(serialized: bytes) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(serialized))


def _stream(batch: pa.RecordBatch) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()
