"""Convert a dataset to another format or another number of files.

Shard i of n is named ``<prefix>-<i>-of-<n><suffix>``, with five digits for each number. Each shard contains an equal
share of consecutive records. The shares are computed before the filter is applied, so a shard does not depend on the
others. Shards are published atomically, so an interrupted conversion can be resumed. The file
``_<prefix>.conversion.json``, which has a name that no pattern matches, describes the source and the settings. Existing
shards with the same description are kept.

Before a shard is published, it is read back and compared with the source (see ``readback``). If a format cannot
represent a value, nothing stays written, unless the conversion may be lossy. A split copies the bytes of text records,
and writes Parquet and Arrow with the schema of the source.

Shards that were damaged after they had been written are not detected. Delete them, and convert again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import xxhash

from flightedl.errors import LossyError, UsageError
from flightedl.formats.arrow_ipc import ArrowFile
from flightedl.formats.chunk_index import ChunkIndex
from flightedl.formats.dataset_spec import DatasetSpec
from flightedl.formats.json_lines import json_lines
from flightedl.formats.parquet import Parquet
from flightedl.formats.readback import Readback
from flightedl.formats.reader import ChunkReader, ReadCounts
from flightedl.formats.recordio import SCHEMA as RECORD_SCHEMA
from flightedl.formats.recordio import RecordIO
from flightedl.formats.registry import named_format
from flightedl.formats.text import TextFormat
from flightedl.messages.decoding import from_json
from flightedl.ports import Files, Storage

MAX_SHARDS = 99_999
_PART_BYTES = 16 << 20


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
class Converted:
    """Outcome of a conversion."""

    names: tuple[str, ...]
    #: Number of shards that already existed.
    kept: int
    size_bytes: int
    counts: ReadCounts
    #: Columns whose values differ from the source; only if the conversion may be lossy.
    changed: tuple[str, ...] = ()


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
    overwrite: bool = False,
    is_split: bool = False,
    is_lossy: bool = False,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Converted:
    """Write the records of ``index``, with the columns and filter of ``spec``, to ``storage`` as shards.

    RecordIO has only one column, so several columns are written as one JSON object per record.

    Args:
        files: Access to the source.
        index: Index of the source.
        spec: Columns, filter and policy for corrupt records; the other fields are ignored.
        storage: Destination of the shards.
        target: Names and form of the shards.
        overwrite: True to replace the shards of another conversion with the same prefix.
        is_split: True if only the number of files changes: text is copied, and schemas are kept.
        is_lossy: True to accept that the format changes values.
        progress: Called after each chunk that was read, with the number of records that were read or are in existing
            shards, and the number of all records.

    Raises:
        DataError: the source cannot be read, or the format cannot represent it. Then, no shard of this call remains.
        UsageError: the storage contains another conversion with this prefix.
    """
    if overwrite and storage.list(f"{target.prefix}-"):
        # The shards are replaced only if this succeeds.
        nowhere: Any = _Nowhere()
        convert(files, index, spec, nowhere, target, is_split=is_split, is_lossy=is_lossy)
    is_resumed = _describe(index, spec, storage, target, overwrite)
    there = {file.name: file.size_bytes for file in storage.list(f"{target.prefix}-")} if is_resumed else {}
    counts = ReadCounts()
    total = index.record_count
    schema = _written_schema(files, index) if is_split else index.schema
    shown = spec.request(schema).shown
    is_text = isinstance(named_format(target.format), TextFormat)
    is_copied = is_split and is_text and not spec.columns and not spec.filter
    chunks = [index.chunk(number) for number in range(len(index))]
    source, again = (ChunkReader(files, chunks, spec, schema, None, each) for each in (counts, None))
    readback = Readback(target.format, is_lossy=is_lossy)
    names: list[str] = []
    size_bytes = 0
    try:
        for shard in range(target.shards):
            records = range(shard * total // target.shards, (shard + 1) * total // target.shards)
            names.append(target.shard_name(shard))
            if names[-1] in there:
                size_bytes += there[names[-1]]
                if is_text and not is_copied:  # The types of columns depend on all shards.
                    for _ in readback.checked(_stored(storage, names[-1], there), _batches(again, records, target)):
                        pass
            else:
                if is_copied:
                    parts = _copied(files, index, records, spec)
                else:
                    read = _batches(source, records, target, lambda done: progress(done, total))
                    parts = readback.checked(encoded(read, target.format, shown), _batches(again, records, target))
                size_bytes += storage.publish(names[-1], parts)
            progress(records.stop, total)
        changed = readback.changed()
    except LossyError:
        for name in (*names, target.description_name):
            storage.delete(name)
        raise
    return Converted(tuple(names), len(set(names) & there.keys()), size_bytes, counts, changed)


class _Nowhere:
    """Storage that keeps nothing."""

    def publish(self, name: str, parts: Iterable[bytes]) -> int:  # noqa: ARG002 - as Storage does
        return sum(map(len, parts))

    def list(self, prefix: str) -> tuple[()]:  # noqa: ARG002 - as Storage does
        return ()

    def delete(self, name: str) -> None:
        pass


def _stored(storage: Storage, name: str, sizes: Mapping[str, int]) -> Iterator[bytes]:
    for start in range(0, sizes[name], _PART_BYTES):
        yield storage.read_range(name, start, min(_PART_BYTES, sizes[name] - start))


def _written_schema(files: Files, index: ChunkIndex) -> pa.Schema:
    """Return the schema with which all files were written, or the common schema if they differ."""
    first = index.files[0]
    form = named_format(first.format)
    if any(file.schema != first.schema for file in index.files) or not isinstance(form, Parquet | ArrowFile):
        return index.schema
    return form.written_schema(files, first.stat)


def _copied(files: Files, index: ChunkIndex, records: range, spec: DatasetSpec) -> Iterator[bytes]:
    """Yield a header and the bytes of the given records."""
    form = named_format(index.files[0].format)
    assert isinstance(form, TextFormat)
    first, header, _ = form.copied(files, index.chunk(0), range(0), spec.text)
    yield header if header.endswith((b"\n", b"\r")) or not header else header + b"\n"
    ends = np.cumsum(index.records)
    for number in range(int(np.searchsorted(ends, records.start, side="right")), len(index)):
        chunk = index.chunk(number)
        start = int(ends[number]) - chunk.records
        wanted = range(max(records.start - start, 0), min(records.stop - start, chunk.records))
        if not wanted:
            return
        names, _, text = form.copied(files, chunk, wanted, spec.text)
        if names != first:
            raise UsageError(f"{chunk.url} has its columns in another order than {index.stats[0].url}: use convert")
        yield text


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
    reader: ChunkReader, numbers: range, target: Target, report: Callable[[int], None] = lambda _: None
) -> Iterator[pa.RecordBatch]:
    for start in range(numbers.start, numbers.stop, target.records_per_chunk):
        stop = min(start + target.records_per_chunk, numbers.stop)
        batch = reader.range(range(start, stop))
        if batch.num_rows:
            yield batch
        report(stop)


def encoded(batches: Iterator[pa.RecordBatch], format_name: str, schema: pa.Schema) -> Iterator[bytes]:
    """Yield the parts of a new file with these records, as JSON objects if RecordIO would have several columns."""
    first = next(batches, None)
    if first is not None:
        batches = chain([first], batches)
        schema = schema if first.schema.equals(schema) else first.schema
    found = named_format(format_name)
    if found.name == RecordIO.name and len(schema) != 1:
        return found.write(map(_as_json_records, batches), RECORD_SCHEMA)
    return found.write(batches, schema)


def _as_json_records(batch: pa.RecordBatch) -> pa.RecordBatch:
    lines = json_lines(batch).split(b"\n")[:-1]
    return pa.RecordBatch.from_arrays([pa.array(lines, pa.binary())], schema=RECORD_SCHEMA)
