"""All formats: what each one can do, and which one a file is in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar, Protocol

import pyarrow as pa

from flightedl.errors import DataError, UsageError
from flightedl.formats.arrow_ipc import ArrowFile, ArrowStream
from flightedl.formats.chunks import Chunk, FileIndex, IndexOptions
from flightedl.formats.csv_text import CommaSeparated, TabSeparated
from flightedl.formats.json_lines import JsonLines
from flightedl.formats.parquet import Parquet
from flightedl.formats.recordio import RecordIO
from flightedl.formats.records import ReadRequest, Records
from flightedl.formats.sources import compression_of, without_compression
from flightedl.formats.tar_archive import TarArchive
from flightedl.ports import Files, FileStat


class Format(Protocol):
    """A way to keep records in files. Stateless and thread-safe."""

    #: What ``format=`` says.
    name: ClassVar[str]
    #: Ends of file names, in lower case; the first one is used for new files.
    suffixes: ClassVar[tuple[str, ...]]

    def index(self, files: Files, stat: FileStat, options: IndexOptions) -> FileIndex:
        """The chunks of a file, in order, covering each record once.

        Raises:
            CorruptChunkError: its content is broken, unless ``options.skip_corrupt``; names file and place.
            DataError: it cannot be read.
        """
        ...

    def schema(self, files: Files, stat: FileStat) -> pa.Schema:
        """Return the schema of a file's records, without metadata. Raises as ``index`` does."""
        ...

    def read(self, files: Files, chunk: Chunk, request: ReadRequest) -> Records:
        """Exactly the records of the chunk, or those of them that meet the conditions.

        Raises:
            CorruptChunkError: its content is broken, or is not what the index says.
            DataError: it cannot be read, or lacks a column that is asked for.
        """
        ...

    def write(self, batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[bytes]:
        """The parts of a new file with these records; a batch becomes a chunk where the format has such a thing.

        Raises:
            UsageError: the format cannot hold such records.
        """
        ...


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
    )
}


def format_for(url: str, name: str | None = None) -> Format:
    """The format of a file: by ``name``, else by the end of the URL (before ``.gz`` or ``.zst``, for text).

    Raises:
        UsageError: no such format.
        DataError: the URL's end tells no format.
    """
    if name:
        return named_format(name)
    plain = without_compression(url).lower()
    for found in FORMATS.values():
        if plain.endswith(found.suffixes):
            if compression_of(url) is not None and not isinstance(found, CommaSeparated | JsonLines):
                raise DataError(
                    f"{url} is compressed as a whole, which {found.name} cannot be read from: decompress it"
                )
            return found
    raise DataError(f"cannot tell the format of {url} by its name: say format=, one of {', '.join(FORMATS)}")


def named_format(name: str) -> Format:
    """The format of this name.

    Raises:
        UsageError: there is none.
    """
    if name not in FORMATS:
        raise UsageError(f"there is no format {name!r}: use one of {', '.join(FORMATS)}")
    return FORMATS[name]
