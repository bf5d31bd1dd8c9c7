"""Tar archives as WebDataset writes them: a record is a sequence of files with the same name and different extensions.

Rules:

* A file's name is divided at its first dot: in ``train/0001.left.PNG``, ``train/0001`` is the key and ``left.png``, in
  lower case, is the column. The files of a record are adjacent. The columns contain bytes and are sorted by name, after
  ``__key__``. If a record lacks a file, that column is null.
* Links, sparse files, devices, and files whose names have no key or ending are left out, and counted by reason.
* An archive ends with two blocks of zeros, and only zeros may follow. So truncated archives are detected, and archives
  that were joined byte by byte. A single block of zeros between members is counted and skipped.
* A chunk is a sequence of records with about ``text_chunk_bytes`` in total. Indexing reads only headers.
* In new archives, each record has one file per column of bytes, and one file ``json`` with all other columns.

Damaged content is not detected, because tar archives have checksums only for headers.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash

from flightedl.errors import DataError, UsageError
from flightedl.formats.chunks import Chunk, ChunkColumns, FileIndex, IndexOptions
from flightedl.formats.json_lines import json_lines
from flightedl.formats.records import ReadRequest, Records, conformed, require_columns, select
from flightedl.formats.schemas import is_binary
from flightedl.formats.sources import WatchedFile, opened, parsing, until_damage
from flightedl.ports import Files, FileStat

KEY = "__key__"
_JSON = "json"
_BLOCK = tarfile.BLOCKSIZE
_END = bytes(2 * _BLOCK)
_ZEROS = bytes(_BLOCK)
#: Positions of the fields in a tar header.
_NAME, _SIZE, _CHECKSUM, _KIND = slice(0, 100), slice(124, 136), slice(148, 156), slice(156, 157)
_FORMAT, _PREFIX, _IS_SPREAD, _IS_SPREAD_FURTHER = slice(257, 263), slice(345, 500), 482, 504
_REASONS = dict.fromkeys((b"0", b"\0", b"7"), "") | dict.fromkeys((b"1", b"2"), "link") | {b"S": "sparse file"}
#: Kinds of members that contain nothing: directories, labels, and attributes of others.
_EMPTY = (b"5", b"D", b"V", b"g", b"K")
_METADATA = re.compile(r"(^|/)(PaxHeaders?(\.\d+)?|@PaxHeader|__MACOSX)/")
_TAIL_BYTES = 1 << 20
_OFFSETS_END = 1 << 31


class _Member(NamedTuple):
    name: str
    #: Offset of its first header.
    offset: int
    offset_data: int
    size: int
    #: Reason why it is left out; empty if it may belong to a record.
    reason: str


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
        digest = xxhash.xxh3_64()
        with opened(files, stat.url, digest) as source:
            walk = _Walk(source)
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
        chunks = ChunkColumns.of(records, offsets, sizes)
        skipped += walk.left_out()
        schema = pa.schema([(KEY, pa.string()), *((name, pa.binary()) for name in sorted(columns))])
        return FileIndex(stat, self.name, schema, chunks, tuple(skipped), digest.hexdigest())

    def read(self, files: Files, chunk: Chunk, request: ReadRequest) -> Records:
        place = f"records at byte {chunk.offset}"
        with opened(files, chunk.url) as source, parsing(source, place):
            source.seek(chunk.offset)
            data = source.buffer(chunk.size_bytes)
        with parsing(source, place):
            samples = list(_Walk(WatchedFile(io.BytesIO(data), chunk.url), data.size))
            if len(samples) != chunk.records:
                raise ValueError(f"there are {len(samples)} records, not {chunk.records}")
            require_columns(request.schema, request, chunk.url)
            needed = request.needed() or request.schema.names
            columns = [_column(name, samples, data) for name in needed]
            return select(conformed(pa.table(columns, needed), request, chunk), request)

    def write(self, batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[bytes]:
        for name in schema.names:
            if "/" in name or not name:
                raise UsageError(f"column {name!r} cannot be the ending of a file in a tar archive: leave it out")
        return _archive(batches, schema)


class _Walk:
    """Records of an archive, or of its first ``size_bytes``, which contain complete members and no end mark."""

    def __init__(self, source: WatchedFile, size_bytes: int | None = None) -> None:
        self._source = source
        self._size_bytes = size_bytes
        #: Reason -> names of the members that are left out.
        self._left_out: dict[str, list[str]] = {}
        #: End of the latest record.
        self.end = 0

    def left_out(self) -> list[str]:
        """Return a sentence about the members that are left out, if any."""
        counts = [f"{len(names)} x {reason} (first: {names[0]!a})" for reason, names in self._left_out.items()]
        return [f"{self._source.url} has members that are no data: {', '.join(counts)}"] if counts else []

    def __iter__(self) -> Iterator[_Sample]:
        keys: set[str] = set()
        sample: _Sample | None = None
        for key, column, member in self._named():
            if sample is not None and sample.key != key:
                yield sample
                sample = None
            if sample is None:
                if key in keys:
                    text = f"{self._source.url} has files of record {key!r} in several places, again at byte"
                    raise DataError(f"{text} {member.offset}: write the archive with `tar --sort=name`")
                keys.add(key)
                sample = _Sample(key, member.offset)
            if column in sample.members:
                raise ValueError(f"record {key!r} has two files {column!r}")
            sample.members[column] = member
            self.end = _padded(member.offset_data + member.size)
        if sample is not None:
            yield sample
        while self._size_bytes is None and (data := self._source.read(_TAIL_BYTES)):
            if data.strip(b"\0"):
                raise ValueError("there are bytes after its end mark: do not join archives, but name each of them")

    def _named(self) -> Iterator[tuple[str, str, _Member]]:
        """Yield the members of records with their keys and columns. Note the others."""
        for member in self._members():
            named = _key_and_column(member.name)
            if member.reason or named is None:
                self._left_out.setdefault(member.reason or "name without key or ending", []).append(member.name)
                continue
            if named[1] == KEY or not _is_utf8(member.name):
                text = f"{self._source.url} has the file {member.name!a} at byte {member.offset}"
                raise DataError(f"{text}, but names must be UTF-8 and not end in .{KEY}: write the archive again")
            yield *named, member

    def _members(self) -> Iterator[_Member]:
        """Yield all members up to the end mark, which is read. Long names are in members that precede theirs."""
        offset = first = 0
        said: dict[str, bytes] = {}
        while offset != self._size_bytes:
            header = self._read(offset)
            if header == _ZEROS:
                if self._size_bytes is None and self._read(offset + _BLOCK) == _ZEROS:
                    return
                yield _Member(f"byte {offset}", offset, offset, 0, "lone block of zeros")
                offset = first = offset + _BLOCK
                continue
            kind, size, start = header[_KIND], _size(header, offset), offset + _BLOCK
            is_spread = kind == b"S" and header[_IS_SPREAD]
            while is_spread:
                is_spread = self._read(start)[_IS_SPREAD_FURTHER]
                start += _BLOCK
            size = 0 if b"1" <= kind <= b"6" else int(said.get("size", size))
            if size < 0:
                raise ValueError(f"the size of the member at byte {first} is negative")
            offset = _padded(start + size)
            if kind in (b"x", b"L"):
                content = self._read(start, size)
                said |= _pax(content) if kind == b"x" else {"path": content.partition(b"\0")[0]}
                continue
            name = said.get("path", _name(header)).decode(errors="surrogateescape")
            if kind not in _EMPTY and not name.endswith("/"):
                is_sparse = any(key.startswith("GNU.sparse.") for key in said)
                reason = "sparse file" if is_sparse else _REASONS.get(kind, f"member of kind {kind!r}")
                yield _Member(name, first, start, size, "metadata" if _METADATA.search(name) else reason)
            if kind not in (b"g", b"K"):
                said, first = {}, offset

    def _read(self, offset: int, count: int = _BLOCK) -> bytes:
        self._source.seek(offset)
        with contextlib.suppress(EOFError):
            return self._source.exactly(count)
        raise ValueError("it ends without an end mark: it is truncated, or still being written")


def _size(header: bytes, offset: int) -> int:
    """Return the size of the member that begins at ``offset``. Raises ValueError if it has no valid header there."""
    checksum = int(np.frombuffer(header, np.uint8).sum()) - sum(header[_CHECKSUM]) + len(header[_CHECKSUM]) * ord(" ")
    with contextlib.suppress(ValueError):
        if int(header[_CHECKSUM].strip(b"\0 "), 8) == checksum:
            text = header[_SIZE]
            # Sizes from 8 GiB on are binary. The highest bit marks them.
            return int.from_bytes(text[1:], "big") if text[0] == 0x80 else int(text.strip(b"\0 ") or b"0", 8)
    raise ValueError(f"there is no header at byte {offset}")


def _name(header: bytes) -> bytes:
    name, prefix = (header[field].partition(b"\0")[0] for field in (_NAME, _PREFIX))
    return prefix + b"/" + name if prefix and header[_FORMAT] == b"ustar\0" else name


def _pax(content: bytes) -> dict[str, bytes]:
    """Return the records of a pax header. Each of them is its length, a space, KEY=VALUE and a newline."""
    found: dict[str, bytes] = {}
    while content.strip(b"\0"):
        length = int(content.partition(b" ")[0])
        key, equals, value = content[:length].partition(b" ")[2].partition(b"=")
        if not equals or value[-1:] != b"\n":
            raise ValueError("a pax header is damaged")
        found[key.decode(errors="replace")] = value[:-1]
        content = content[length:]
    return found


def _padded(offset: int) -> int:
    return -(-offset // _BLOCK) * _BLOCK


def _is_utf8(name: str) -> bool:
    return name.encode(errors="surrogateescape").decode(errors="replace") == name


def _key_and_column(name: str) -> tuple[str, str] | None:
    directory, slash, file = name.rpartition("/")
    start, _, ending = file.partition(".")
    return (directory + slash + start, ending.lower()) if start and ending else None


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
    written: set[str] = set()
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
            if not found or key in written or _key_and_column(f"{key}.x") != (key, "x"):
                raise DataError(
                    f"record {key!r} cannot be written as tar: it has no bytes, its key has a dot, or it repeats a key"
                )
            written.add(key)
            yield b"".join(_member(f"{key}.{name}", value) for name, value in found)
    yield _END


def _member(name: str, content: bytes) -> bytes:
    header = tarfile.TarInfo(name)
    header.size = len(content)
    return header.tobuf(tarfile.PAX_FORMAT) + content + bytes(-len(content) % _BLOCK)
