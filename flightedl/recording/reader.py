"""Reads recordings: one file for each process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from flightedl.errors import CorruptError, NotFoundError
from flightedl.recording.values import AGAIN, decode, encode
from flightedl.recording.writer import FORMAT, SUFFIX, Header


class ReadRecord(msgspec.Struct, frozen=True):
    """As ``writer.Record``; what happened, and what came of it, are JSON under the name of a class."""

    at: float
    core: str
    event: dict[str, msgspec.Raw]
    effects: msgspec.Raw = msgspec.Raw(b"[]")
    raised: str = ""

    @property
    def name(self) -> str:
        """Of what happened."""
        return next(iter(self.event))

    @property
    def fields(self) -> msgspec.Raw:
        """Of what happened."""
        return self.event[self.name]


@dataclass(frozen=True, slots=True)
class Recording:
    """One process's file.

    Args:
        path: Of it.
        header: Its first line.
    """

    path: Path
    header: Header

    @property
    def name(self) -> str:
        """The process, for people."""
        return f"{self.header.process} {self.header.name}"

    def records(self) -> Iterator[tuple[int, ReadRecord]]:
        """(number of the event, from 1; the event), up to the last one that is whole.

        Raises:
            CorruptError: a line in the middle is damaged.
        """
        damaged: CorruptError | None = None
        last: dict[tuple[str, str], msgspec.Raw] = {}
        with self.path.open("rb") as lines:
            next(lines)
            for number, line in enumerate(lines, 1):
                if damaged is not None:
                    raise damaged
                if not line.endswith(b"\n"):
                    return
                try:
                    record = decode(line, ReadRecord)
                except CorruptError:
                    # The last line may be cut by a crash of the machine.
                    damaged = CorruptError(f"{self.path.name}: event {number} is damaged")
                else:
                    yield number, _with_fields(record, last)


def recordings_in(directory: Path) -> list[Recording]:
    """All recordings of a directory, in the order in which their processes began.

    Raises:
        NotFoundError: there are none.
        CorruptError: one is of another format.
    """
    found = [each for path in sorted(directory.glob(f"*{SUFFIX}")) if (each := _opened(path)) is not None]
    if not found:
        raise NotFoundError(f"{directory} has no recordings (*{SUFFIX})")
    return sorted(found, key=lambda each: (each.header.wall_s, each.path.name))


def _opened(path: Path) -> Recording | None:
    """None: the process died before it had written anything."""
    with path.open("rb") as lines:
        first = lines.readline()
    if not first.endswith(b"\n"):
        return None
    header = decode(first, Header)
    if header.format != FORMAT:
        raise CorruptError(f"{path.name} is of format {header.format}, this flightedl reads format {FORMAT}")
    return Recording(path, header)


def _with_fields(record: ReadRecord, last: dict[tuple[str, str], msgspec.Raw]) -> ReadRecord:
    """The record, with the fields of the core's last event of this name where it refers to that."""
    key = record.core, record.name
    if bytes(record.fields) == encode(AGAIN):
        return msgspec.structs.replace(record, event={record.name: last.get(key, record.fields)})
    last[key] = record.fields
    return record
