"""Tar archives as WebDataset writes them: a record is a sequence of files with the same name and different extensions.

Rules:

* A file's name is divided at its first dot: in ``train/0001.left.png``, ``train/0001`` is the key and ``left.png`` is
  the column. The files of a record are adjacent. The columns contain bytes and are sorted by name, after ``__key__``.
  If a record lacks a file, that column is null.
* Directories, links, and files without an extension or with an empty name are skipped.
* A chunk is a sequence of records with about ``text_chunk_bytes`` in total. Indexing reads only headers.
* In new archives, each record has one file per column of bytes, and one file ``json`` with all other columns.

Damaged content is not detected, because tar archives have checksums only for headers.
"""

from __future__ import annotations

import io
import itertools
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa

from flightedl.errors import DataError, UsageError
from flightedl.formats.chunks import Chunk, ChunkColumns, FileIndex, IndexOptions
from flightedl.formats.json_lines import json_lines
from flightedl.formats.records import ReadRequest, Records, require_columns, select
from flightedl.formats.schemas import is_binary
from flightedl.formats.sources import WatchedFile, opened, parsing, until_damage
from flightedl.ports import Files, FileStat

KEY = "__key__"
_JSON = "json"
_BLOCK = tarfile.BLOCKSIZE
_END = bytes(2 * _BLOCK)
#: Positions of the fields in a tar header.
_NAME, _SIZE, _CHECKSUM, _KIND, _PREFIX = slice(0, 100), slice(124, 136), slice(148, 156), 156, 345
_REGULAR = b"0\0"
_OFFSETS_END = 1 << 31


class _Member(NamedTuple):
    name: str
    #: Offset of its first header.
    offset: int
    offset_data: int
    size: int


@dataclass(slots=True)
class _Sample:
    key: str
    offset: int
    members: dict[str, _Member] = field(default_factory=dict)


class TarArchive:
    """Implementation of ``formats.Format`` for tar archives."""

    name: ClassVar[str] = "tar"
    suffixes: ClassVar[tuple[str, ...]] = (".tar",)

    def index(self, files: Files, stat: FileStat, options: IndexOptions) -> FileIndex:
        records: list[int] = []
        offsets: list[int] = []
        columns: set[str] = set()
        end = 0
        with opened(files, stat.url) as source:
            walk = _Walk(source, stat.size_bytes)
            with until_damage(options) as skipped, parsing(source, "after its last sound record"):
                for sample in walk:
                    is_full = offsets and sample.offset - offsets[-1] >= options.text_chunk_bytes
                    if not offsets or is_full or records[-1] == options.max_records_per_chunk:
                        records.append(0)
                        offsets.append(sample.offset)
                    records[-1] += 1
                    columns |= sample.members.keys()
                    end = walk.end
        ends = [*offsets[1:], end]
        sizes = [stop - start for start, stop in zip(offsets, ends, strict=False)]
        return FileIndex(stat, self.name, _schema(columns), ChunkColumns.of(records, offsets, sizes), tuple(skipped))

    def schema(self, files: Files, stat: FileStat) -> pa.Schema:
        return self.index(files, stat, IndexOptions()).schema

    def read(self, files: Files, chunk: Chunk, request: ReadRequest) -> Records:
        place = f"records at byte {chunk.offset}"
        with opened(files, chunk.url) as source, parsing(source, place):
            source.seek(chunk.offset)
            data = source.buffer(chunk.size_bytes)
        with parsing(source, place):
            members = _plain_members(memoryview(data))
            samples = list(_Walk(io.BytesIO(data) if members is None else None, data.size, members))
            if len(samples) != chunk.records:
                raise ValueError(f"there are {len(samples)} records, not {chunk.records}")
        schema = request.schema or _schema({name for sample in samples for name in sample.members})
        require_columns(schema, request, chunk.url)
        needed = schema.names if request.needed() is None else request.needed()
        columns = [_column(name, samples, data) for name in needed or ()]
        return select(pa.table(columns, schema=pa.schema([schema.field(name) for name in needed or ()])), request)

    def write(self, batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[bytes]:
        for name in schema.names:
            if "/" in name or not name:
                raise UsageError(f"column {name!r} cannot be the ending of a file in a tar archive: leave it out")
        return _archive(batches, schema)


class _Walk:
    """Records of an archive, or of a range of its bytes. Pass ``members`` if they are already known."""

    def __init__(
        self, source: WatchedFile | io.BytesIO | None, size_bytes: int, members: Iterable[_Member] | None = None
    ) -> None:
        self._source = source
        self._size_bytes = size_bytes
        self._known = members
        #: End of the latest record.
        self.end = 0

    def __iter__(self) -> Iterator[_Sample]:
        sample: _Sample | None = None
        for member in self._members() if self._known is None else self._known:
            named = _key_and_column(member.name)
            if named is None:
                continue
            key, column = named
            if sample is not None and sample.key != key:
                yield sample
                sample = None
            if sample is None:
                sample = _Sample(key, member.offset)
            if column in sample.members:
                raise ValueError(f"record {key!r} has two files {column!r}")
            sample.members[column] = member
            self.end = member.offset_data + -(-member.size // _BLOCK) * _BLOCK
        if sample is not None:
            yield sample

    def _members(self) -> Iterator[_Member]:
        assert self._source is not None, "its members are not known"
        if not self._size_bytes:
            raise ValueError("it is empty, without even an end mark")
        try:
            with tarfile.open(fileobj=self._source, mode="r:") as archive:
                while (member := archive.next()) is not None:
                    archive.__dict__["members"].clear()  # Free memory, because the library would keep all members.
                    if member.offset_data + member.size > self._size_bytes:
                        raise ValueError(f"the archive ends within {member.name}")
                    if member.isreg():
                        yield _Member(member.name, member.offset, member.offset_data, member.size)
                stopped_at = archive.offset
        except tarfile.TarError as error:
            raise ValueError(str(error)) from None
        # The standard library mistakes a damaged header for the end of the archive.
        self._source.seek(stopped_at)
        if any(self._source.read(_BLOCK)):
            raise ValueError(f"there is no header at byte {stopped_at}")


def _plain_members(data: memoryview) -> list[_Member] | None:
    """Return the members, or None unless all headers are valid and belong to regular files with short names.

    In the standard library, parsing a header takes ten times as long, and holds the GIL.
    """
    found: list[_Member] = []
    checksums: list[int] = []
    offset = 0
    while offset < len(data):
        header = data[offset : offset + _BLOCK].tobytes()
        name = header[_NAME].partition(b"\0")[0]
        if len(header) < _BLOCK or header[_KIND] not in _REGULAR or header[_PREFIX] or name[-1:] in (b"", b"/"):
            return None
        try:
            size = int(header[_SIZE].rstrip(b"\0 "), 8)
            checksums.append(int(header[_CHECKSUM].rstrip(b"\0 "), 8))
        except ValueError:
            return None
        start = offset + _BLOCK
        found.append(_Member(name.decode("utf-8", "surrogateescape"), offset, start, size))
        offset = start + -(-size // _BLOCK) * _BLOCK
    if offset != len(data):
        return None
    blocks = np.frombuffer(data, np.uint8).reshape(-1, _BLOCK)
    headers = blocks[[member.offset // _BLOCK for member in found]]
    headers[:, _CHECKSUM] = ord(" ")
    return found if headers.sum(axis=1, dtype=np.int64).tolist() == checksums else None


def _key_and_column(name: str) -> tuple[str, str] | None:
    directory, slash, file = name.rpartition("/")
    start, _, ending = file.partition(".")
    return (directory + slash + start, ending) if start and ending else None


def _schema(columns: Iterable[str]) -> pa.Schema:
    return pa.schema([(KEY, pa.string()), *((name, pa.binary()) for name in sorted(columns))])


def _column(name: str, samples: Sequence[_Sample], data: pa.Buffer) -> pa.Array:
    if name == KEY:
        return pa.array([sample.key for sample in samples], pa.string())
    members = [sample.members.get(name) for sample in samples]
    if data.size >= _OFFSETS_END:
        view = memoryview(data)
        found = [None if each is None else view[each.offset_data : each.offset_data + each.size] for each in members]
        return pa.array(found, pa.binary())
    # Arrow copies the members' bytes without holding the GIL. The copies are made from an array that covers the entire
    # archive, in which values at even positions are members, and values at odd positions are the bytes between them.
    ends = [place for each in members if each is not None for place in (each.offset_data, each.offset_data + each.size)]
    count = max(len(ends) - 1, 0)
    values = pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(np.array(ends or [0], np.int32)), data])
    present = np.array([each is not None for each in members])
    return values.take(pa.array(2 * (np.cumsum(present) - 1), mask=~present))


def _archive(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[bytes]:
    is_member = {each.name: each.name != KEY and is_binary(each.type) for each in schema}
    others = [name for name in schema.names if not is_member[name] and name != KEY]
    if others and is_member.get(_JSON):
        raise UsageError(f"a column {_JSON!r} of bytes leaves no name for {', '.join(others)[:200]}: leave either out")
    numbers = itertools.count()
    last = ""
    for batch in batches:
        members: dict[str, list[Any]] = {
            name: batch.column(name).to_pylist() for name in schema.names if is_member[name]
        }
        if others:
            members[_JSON] = json_lines(batch.select(others)).split(b"\n")[:-1]
        known = batch.column(KEY).to_pylist() if KEY in schema.names else None
        keys = known or [f"{number:09d}" for number in itertools.islice(numbers, batch.num_rows)]
        for row, key in enumerate(keys):
            found = [(name, values[row]) for name, values in members.items() if values[row] is not None]
            if not found or key == last or _key_and_column(f"{key}.x") != (key, "x"):
                raise DataError(
                    f"record {key!r} cannot be written as tar: it has no bytes, its key has a dot, or it repeats a key"
                )
            last = key
            yield b"".join(_member(f"{key}.{name}", value) for name, value in found)
    yield _END


def _member(name: str, content: bytes) -> bytes:
    header = tarfile.TarInfo(name)
    header.size = len(content)
    return header.tobuf(tarfile.PAX_FORMAT) + content + bytes(-len(content) % _BLOCK)
