"""Convert a dataset to another format or another number of files.

Shard i of n is named ``<prefix>-<i>-of-<n><suffix>``, with five digits for each number. Each shard contains an equal
share of consecutive records. The shares are computed before the filter is applied, so a shard does not depend on the
others. Shards are published atomically, so an interrupted conversion can be resumed. The file
``_<prefix>.conversion.json``, which has a name that no pattern matches, describes the source and the settings. Existing
shards with the same description are kept.

Shards that were damaged after they had been written are not detected. Delete them, and convert again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
import pyarrow as pa
import xxhash

from flightedl.errors import UsageError
from flightedl.formats.chunk_index import ChunkIndex
from flightedl.formats.dataset_spec import DatasetSpec
from flightedl.formats.json_lines import json_lines
from flightedl.formats.reader import ChunkReader, Decode, ReadCounts
from flightedl.formats.recordio import SCHEMA as RECORD_SCHEMA
from flightedl.formats.recordio import RecordIO
from flightedl.formats.registry import named_format
from flightedl.messages.decoding import from_json
from flightedl.ports import Files, Storage

MAX_SHARDS = 99_999


@dataclass(frozen=True, slots=True)
class Target:
    """Location and format of the shards that a conversion writes.

    Args:
        prefix: Beginning of the shards' names.
        format: Name of the format.
        shards: Number of files.
        records_per_chunk: Records per row group or record batch, before the filter; also the number to read at a time.
    """

    prefix: str
    format: str
    shards: int = 1
    records_per_chunk: int = 65_536

    def __post_init__(self) -> None:
        named_format(self.format)
        if not 1 <= self.shards <= MAX_SHARDS or self.records_per_chunk < 1:
            raise UsageError(f"the number of shards is 1 to {MAX_SHARDS}, and a chunk has at least one record")
        if not self.prefix or self.prefix.endswith("/"):
            raise UsageError("the shards need a name to start with, such as data/train")

    def shard_name(self, shard: int) -> str:
        """Return the name of a shard, such as ``prefix-00000-of-00009.parquet``."""
        return f"{self.prefix}-{shard:05d}-of-{self.shards:05d}{named_format(self.format).suffixes[0]}"

    @property
    def description_name(self) -> str:
        """Name of the file that describes the conversion."""
        directory, slash, name = self.prefix.rpartition("/")
        return f"{directory}{slash}_{name}.conversion.json"


@dataclass(frozen=True, slots=True)
class ConvertProgress:
    """Progress of a conversion. ``records`` counts the records that were read, and those in existing shards."""

    shards_done: int
    shards: int
    records: int
    record_count: int


@dataclass(frozen=True, slots=True)
class Converted:
    """Outcome of a conversion."""

    names: tuple[str, ...]
    #: Number of shards that already existed.
    kept: int
    size_bytes: int
    counts: ReadCounts


class _Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    source: str
    settings: str


def convert(
    files: Files,
    index: ChunkIndex,
    spec: DatasetSpec,
    storage: Storage,
    target: Target,
    *,
    decode: Decode | None = None,
    overwrite: bool = False,
    progress: Callable[[ConvertProgress], None] | None = None,
) -> Converted:
    """Write the records of ``index``, with the columns and filter of ``spec``, to ``storage`` as shards.

    RecordIO has only one column, so several columns are written as one JSON object per record.

    Args:
        files: Access to the source.
        index: Index of the source.
        spec: Columns, filter and policy for corrupt records; the other fields are ignored.
        storage: Destination of the shards.
        target: Names and form of the shards.
        decode: Decodes the bytes of RecordIO into columns.
        overwrite: True to replace the shards of another conversion with the same prefix.
        progress: Called after each chunk that was read.

    Raises:
        DataError: the source cannot be read, or the format cannot represent it.
        UsageError: the source contains no bytes to decode, or the storage contains another conversion with this prefix.
    """
    if decode is not None and any(stat_format != RecordIO.name for stat_format in _formats(index)):
        raise UsageError("decode= applies to RecordIO only: the other formats have columns of their own")
    is_resumed = _describe(index, spec, storage, target, overwrite)
    there = {file.name: file.size_bytes for file in storage.list(f"{target.prefix}-")} if is_resumed else {}
    counts = ReadCounts()
    ends = np.cumsum(index.records)
    bounds = [shard * index.record_count // target.shards for shard in range(target.shards + 1)]
    names = tuple(target.shard_name(shard) for shard in range(target.shards))
    size_bytes = 0
    for shard, name in enumerate(names):

        def report(records: int, done: int = shard) -> None:
            if progress is not None:
                progress(ConvertProgress(done, target.shards, records, index.record_count))

        if name in there:
            size_bytes += there[name]
        else:
            first, end = (int(place) for place in np.searchsorted(ends, bounds[shard : shard + 2], side="right"))
            chunks = [index.chunk(number) for number in range(first, min(end + 1, len(index)))]
            reader = ChunkReader(files, chunks, spec, index.schema, decode, counts)
            skipped = bounds[shard] - (int(ends[first] - index.records[first]) if chunks else 0)
            batches = _batches(
                reader, range(skipped, skipped + bounds[shard + 1] - bounds[shard]), target, report, bounds[shard]
            )
            size_bytes += storage.publish(name, _encoded(batches, target, _empty_schema(index, spec)))
        report(bounds[shard + 1], shard + 1)
    return Converted(names, len(set(names) & there.keys()), size_bytes, counts)


def _formats(index: ChunkIndex) -> set[str]:
    return {index.file_index(number).format for number in range(len(index.stats))}


def _describe(index: ChunkIndex, spec: DatasetSpec, storage: Storage, target: Target, overwrite: bool) -> bool:
    """Return True if the existing shards belong to this conversion. Otherwise, store the conversion's description."""
    settings = repr((target, spec.columns, spec.filter, spec.on_corrupt))
    wanted = _Description(index.content_hash(), xxhash.xxh3_64_hexdigest(settings.encode()))
    if any(file.name == target.description_name for file in storage.list(target.description_name)):
        try:
            is_same = from_json(storage.read(target.description_name), _Description) == wanted
        except msgspec.DecodeError:
            is_same = False
        if is_same and not overwrite:
            return True
    shards = [file.name for file in storage.list(f"{target.prefix}-")]
    if shards and not overwrite:
        raise UsageError(
            f"{storage.url}/{shards[0]} exists already, from another source or other settings: "
            "choose another prefix, or allow overwriting"
        )
    for name in shards:
        storage.delete(name)
    storage.publish(target.description_name, [msgspec.json.encode(wanted)])
    return False


def _batches(
    reader: ChunkReader, numbers: range, target: Target, report: Callable[[int], None], read_before: int
) -> Iterator[pa.RecordBatch]:
    for start in range(numbers.start, numbers.stop, target.records_per_chunk):
        stop = min(start + target.records_per_chunk, numbers.stop)
        batch = reader.range(range(start, stop))
        if batch.num_rows:
            yield batch
        report(read_before + stop - numbers.start)


def _empty_schema(index: ChunkIndex, spec: DatasetSpec) -> pa.Schema:
    names = (
        index.schema.names if spec.columns is None else [name for name in spec.columns if name in index.schema.names]
    )
    return pa.schema([index.schema.field(name) for name in names])


def _encoded(batches: Iterator[pa.RecordBatch], target: Target, schema: pa.Schema) -> Iterator[bytes]:
    first = next(batches, None)
    if first is not None:
        schema = first.schema
    found = named_format(target.format)
    if found.name == RecordIO.name and len(schema) != 1:
        return found.write(map(_as_json_records, _chained(first, batches)), RECORD_SCHEMA)
    return found.write((_conforming(batch, schema) for batch in _chained(first, batches)), schema)


def _chained(first: pa.RecordBatch | None, rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    if first is not None:
        yield first
        yield from rest


def _conforming(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Convert the batch to the schema of the first batch. For a column of nulls, ``decode`` may infer another type."""
    return batch if batch.schema.equals(schema) else batch.select(schema.names).cast(schema)


def _as_json_records(batch: pa.RecordBatch) -> pa.RecordBatch:
    lines = json_lines(batch).split(b"\n")[:-1]
    return pa.RecordBatch.from_arrays([pa.array(lines, pa.binary())], schema=RECORD_SCHEMA)
