"""Reads recordings. A recording is one file per process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from flightedl.errors import CorruptError, NotFoundError
from flightedl.recording.values import AGAIN, decode, encode
from flightedl.recording.writer import FORMAT, SUFFIX, Header


class ReadRecord(msgspec.Struct, frozen=True):
    """A ``writer.Record`` whose event and effects are still encoded as JSON."""

    at: float
    core: str
    event: dict[str, msgspec.Raw]
    effects: msgspec.Raw = msgspec.Raw(b"[]")
    raised: str = ""

    @property
    def name(self) -> str:
        """Name of the event."""
        return next(iter(self.event))

    @property
    def fields(self) -> msgspec.Raw:
        """Fields of the event."""
        return self.event[self.name]


@dataclass(frozen=True, slots=True)
class Recording:
    """The file of one process.

    Args:
        path: Path of the file.
        header: First line of the file.
    """

    path: Path
    header: Header

    @property
    def name(self) -> str:
        """Name of the process for display."""
        return f"{self.header.process} {self.header.name}"

    def records(self) -> Iterator[tuple[int, ReadRecord]]:
        """Yield (number of the event, counted from 1; the event), up to the last complete event.

        Raises:
            CorruptError: A line before the last one is damaged.
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
                    # If the machine crashed, the last line may be incomplete.
                    damaged = CorruptError(f"{self.path.name}: event {number} is damaged")
                else:
                    yield number, _with_fields(record, last)


def recordings_in(directory: Path) -> list[Recording]:
    """Return all recordings in a directory, in the order in which their processes started.

    Raises:
        NotFoundError: There are no recordings.
        CorruptError: A recording has a different format.
    """
    found = [each for path in sorted(directory.glob(f"*{SUFFIX}")) if (each := _opened(path)) is not None]
    if not found:
        raise NotFoundError(f"{directory} has no recordings (*{SUFFIX})")
    return sorted(found, key=lambda each: (each.header.wall_s, each.path.name))


def _opened(path: Path) -> Recording | None:
    with path.open("rb") as lines:
        first = lines.readline()
    if not first.endswith(b"\n"):
        return None
    header = decode(first, Header)
    if header.format != FORMAT:
        raise CorruptError(f"{path.name} has format {header.format}, but this flightedl reads format {FORMAT}")
    return Recording(path, header)


def _with_fields(record: ReadRecord, last: dict[tuple[str, str], msgspec.Raw]) -> ReadRecord:
    """Replace a reference to the core's previous event of the same name with the fields of that event."""
    key = record.core, record.name
    if bytes(record.fields) == encode(AGAIN):
        return msgspec.structs.replace(record, event={record.name: last.get(key, record.fields)})
    last[key] = record.fields
    return record
