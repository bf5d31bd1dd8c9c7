"""A user's description of a dataset (files, chunks, columns and filter), created from the declaration."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import xxhash

from flightedl.domain.data_urls import cache_and_target, escaped, has_wildcard, without_query
from flightedl.domain.topics import is_topic, topic_and_ranges
from flightedl.errors import UsageError
from flightedl.formats.chunks import AS_NAMED, IndexOptions, TextOptions, named_type
from flightedl.formats.records import Condition, ReadRequest
from flightedl.messages.declarations import DatasetDeclaration, DeclaredDataset

#: Policies for corrupt content.
ON_CORRUPT = ("fail", "skip")


@dataclass(frozen=True, slots=True)
class DatasetSpec:
    """Description of a dataset and how to read it.

    Args:
        urls: URLs and globs.
        format: Name of the format; empty to derive it from the file names.
        columns: Columns to read; None for all.
        filter: (column, operator, value) conditions, see ``formats.records``.
        batch_size: Records per batch, before the filter.
        steps_per_batch: Number of consecutive batches with the same records.
        on_corrupt: "fail", or "skip" to skip and count corrupt chunks.
        max_records_per_chunk: See ``IndexOptions``.
        text_chunk_bytes: See ``IndexOptions``.
        types: (column, name of its type), for columns whose types are not inferred.
        text: Options of CSV and TSV files.
    """

    urls: tuple[str, ...]
    format: str = ""
    columns: tuple[str, ...] | None = None
    filter: tuple[Condition, ...] = ()
    batch_size: int = 1
    steps_per_batch: int = 1
    on_corrupt: str = "fail"
    max_records_per_chunk: int = 0
    text_chunk_bytes: int = IndexOptions().text_chunk_bytes
    types: tuple[tuple[str, str], ...] = ()
    text: TextOptions = AS_NAMED

    def __post_init__(self) -> None:
        if not self.urls:
            raise UsageError("a dataset needs a list of at least one URL")
        if self.batch_size < 1:
            raise UsageError(f"batch_size has to be at least 1, not {self.batch_size}")
        if self.on_corrupt not in ON_CORRUPT:
            raise UsageError(f"on_corrupt is one of {', '.join(ON_CORRUPT)}, not {self.on_corrupt!r}")
        if self.max_records_per_chunk < 0 or self.text_chunk_bytes < 1:
            raise UsageError("chunks need a size above 0")
        if self.columns is not None and (not self.columns or len(set(self.columns)) != len(self.columns)):
            raise UsageError("columns= needs at least one name, and each only once")
        for _, name in self.types:
            named_type(name)

    def index_options(self) -> IndexOptions:
        is_skipping = self.on_corrupt == "skip"
        return IndexOptions(self.max_records_per_chunk, self.text_chunk_bytes, is_skipping, self.types, self.text)

    def request(self, schema: pa.Schema) -> ReadRequest:
        return ReadRequest(schema, self.columns, self.filter, text=self.text)

    def index_hash(self) -> str:
        """Return a hash of all settings that affect how files are divided. The stored index is named after it."""
        urls = map(without_query, self.urls)
        return xxhash.xxh3_64_hexdigest("\n".join((repr(self.index_options()), self.format, *urls)).encode())


def spec_of(declared: DatasetDeclaration) -> DatasetSpec:
    """Return the description that a trainer has declared. Chunks longer than a task are divided.

    Raises:
        UsageError: a field is out of range, or does not apply to Kafka topics.
    """
    if is_topic(*declared.urls):
        _require_topics(declared)
    return DatasetSpec(
        urls=tuple(declared.urls),
        format=declared.format,
        columns=None if declared.columns is None else tuple(declared.columns),
        filter=tuple(tuple(condition) for condition in declared.filter or ()),
        batch_size=declared.batch_size,
        steps_per_batch=declared.steps_per_batch,
        on_corrupt=declared.on_corrupt,
        max_records_per_chunk=declared.records_per_task,
        types=tuple(sorted(declared.types.items())),
        text=TextOptions(tuple(declared.names), declared.delimiter, tuple(declared.null_values)),
    )


def _require_topics(declared: DatasetDeclaration) -> None:
    if not all(map(is_topic, declared.urls)) or len({*declared.urls}) < len(declared.urls):
        raise UsageError("a dataset of Kafka topics names each of them once, and no files: correct the URLs")
    if any(topic_and_ranges(url)[1] for url in declared.urls):
        raise UsageError("the job chooses partitions and offsets: name only the Kafka topic, kafka://broker/topic")
    if declared.shuffle:
        raise UsageError("Kafka topics are read in the order of their offsets: leave out shuffle=True, and job.mixture")


def schema_of(declared: DeclaredDataset) -> pa.Schema:
    """Return the Arrow schema of a dataset's records, with all columns."""
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(declared.schema)))


def batch_schema_of(declared: DeclaredDataset) -> pa.Schema:
    """Return the Arrow schema of a dataset's batches. With ``decode``, it is the schema before decoding."""
    schema, columns = schema_of(declared), declared.declaration.columns
    if columns is None or not set(columns) <= set(schema.names):
        return schema
    return pa.schema([schema.field(name) for name in columns])


def moved_folders(text: str) -> dict[str, str]:
    """Return the folders in a text such as ``OLD=NEW,OLD2=NEW2``, without slashes at their ends.

    Raises:
        UsageError: a part is not OLD=NEW.
    """
    found = {}
    for part in filter(None, text.split(",")):
        old, _, new = part.partition("=")
        if not old or not new:
            raise UsageError(f"{part!r:.200} is not OLD=NEW (data_moved, --data-moved or FLIGHTEDL_DATA_MOVED)")
        old, new = (absolute_url(folder).removeprefix("file://").rstrip("/") for folder in (old, new))
        found[old] = new
    return found


def absolute_url(url: str) -> str:
    """Return a URL that does not depend on the working directory: relative local paths become absolute."""
    caches, target = cache_and_target(url)
    if "://" in target or target.startswith("/"):
        return url
    folder = escaped(str(Path.cwd())) if has_wildcard(target) else str(Path.cwd())
    return f"{caches}{folder}/{target}"
