"""All formats: their common protocol, and the choice of a file's format."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import ClassVar, Protocol

import pyarrow as pa

from flightedl.domain.data_urls import path_of
from flightedl.domain.topics import is_topic
from flightedl.errors import DataError, UsageError
from flightedl.formats.arrow_ipc import ArrowFile, ArrowStream
from flightedl.formats.chunks import Chunk, FileIndex, IndexOptions
from flightedl.formats.csv_text import CommaSeparated, TabSeparated
from flightedl.formats.indices import Indices
from flightedl.formats.json_lines import JsonLines
from flightedl.formats.json_records import JsonRecords
from flightedl.formats.lines import Lines, Slots, Svmlight
from flightedl.formats.parquet import Parquet
from flightedl.formats.recordio import RecordIO
from flightedl.formats.records import ReadRequest, Records
from flightedl.formats.sources import compression_of, without_compression
from flightedl.formats.tar_archive import TarArchive
from flightedl.formats.text import TextFormat
from flightedl.formats.tfrecord import TFRecord
from flightedl.formats.topics import Topic
from flightedl.ports import Files, FileStat


class Format(Protocol):
    """A file format for records. Its methods are stateless and thread-safe."""

    #: Value of ``format=``.
    name: ClassVar[str]
    #: Extensions of file names, in lower case. New files get the first one.
    suffixes: ClassVar[tuple[str, ...]]

    def index(self, files: Files, stat: FileStat, options: IndexOptions) -> FileIndex:
        """Return the chunks of a file, in order. Each record must be in exactly one of them.

        Raises:
            CorruptChunkError: the content is damaged, unless ``options.skip_corrupt``. Names the file and location.
            DataError: the file cannot be read.
        """
        ...

    def read(self, files: Files, chunk: Chunk, request: ReadRequest) -> Records:
        """Return the chunk's records: all of them, or those that meet the conditions.

        Raises:
            CorruptChunkError: the content is damaged, or contradicts the index.
            DataError: the file cannot be read, or lacks a requested column.
        """
        ...

    def write(self, batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[bytes]:
        """Yield the parts of a new file with these records. If the format has chunks, each batch becomes a chunk.

        Raises:
            UsageError: the format cannot represent such records.
        """
        ...


#: Formats of files, by name.
FORMATS: dict[str, Format] = {
    format_.name: format_
    for format_ in (
        Parquet(),
        ArrowFile(),
        ArrowStream(),
        RecordIO(),
        CommaSeparated(),
        TabSeparated(),
        JsonLines(),
        TarArchive(),
        TFRecord(),
        Lines(),
        Svmlight(),
        Slots(),
    )
}


#: Formats that no file name implies.
_OTHERS: dict[str, Format] = {found.name: found for found in (Indices(), JsonRecords(), Topic())}


def format_for(url: str, name: str | None = None) -> Format:
    """Return the format named ``name`` or, if it is empty, the one that the URL implies.

    The URL may end with ``.gz`` or ``.zst``, or with the number of a shard, such as ``.tfrecord-00000-of-00002``.

    Raises:
        UsageError: the format does not exist.
        DataError: the URL does not imply a format.
    """
    if is_topic(url) or name == Topic.name:
        if name not in (None, "", Topic.name) or not is_topic(url):
            raise DataError(f"{url} is not {name}: leave out format=; decode= converts the messages of Kafka topics")
        return named_format(Topic.name)
    plain = re.sub(r"-\d{5,}-of-\d{5,}$", "", without_compression(path_of(url)).lower())
    implied = next((found for found in FORMATS.values() if plain.endswith(found.suffixes)), None)
    if name == JsonRecords.name and implied is not None and implied.name != RecordIO.name:
        raise DataError(f"decode= applies to RecordIO only, but {url} is {implied.name}, which has columns of its own")
    if name:
        return named_format(name)
    if implied is None:
        raise DataError(f"the name of {url} implies no format: pass format=, one of {', '.join(FORMATS)}")
    if compression_of(path_of(url)) is not None and not isinstance(implied, TextFormat):
        raise DataError(f"{url} is compressed as a whole, and {implied.name} needs random access: decompress it")
    return implied


def named_format(name: str) -> Format:
    """Return the format with this name. Raises UsageError if there is none."""
    found = FORMATS.get(name) or _OTHERS.get(name)
    if found is None:
        raise UsageError(f"there is no format {name!r}: use one of {', '.join(FORMATS)}")
    return found
