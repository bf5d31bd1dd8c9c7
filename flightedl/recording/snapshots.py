"""Which snapshot a pserver is at: recorded, and from a recording. Why one failed may name places: it is left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from flightedl.domain.checkpoint.manifest import ShardFile
from flightedl.domain.checkpoint.snapshot import REASON_LIMIT, PserverSnapshots
from flightedl.domain.checkpoint.values import OrderNumber, SnapshotCommand
from flightedl.errors import CorruptError
from flightedl.recording.values import by_name, decode
from flightedl.recording.writer import CoreRecorder, Recorder


class _Event(msgspec.Struct, frozen=True):
    """What happens to the snapshots of a pserver."""


class SnapshotsBegun(_Event, frozen=True):
    """The first event."""

    pserver: int
    generation: int


class SnapshotOrdered(_Event, frozen=True):
    """As ``PserverSnapshots.take``; ``versions``: (version, how many blocks in a row have it)."""

    command: SnapshotCommand
    versions: list[tuple[int, int]]
    highest_open_round: int


class CopiesTaken(_Event, frozen=True):
    """As ``PserverSnapshots.taken``."""

    order: OrderNumber


class FileWritten(_Event, frozen=True):
    """As ``PserverSnapshots.written``."""

    order: OrderNumber
    file: ShardFile


class SnapshotFailed(_Event, frozen=True):
    """As ``PserverSnapshots.failed``."""

    order: OrderNumber
    reason: str


class CutMade(msgspec.Struct, frozen=True):
    """Blocks are to be copied, at this round or at once."""

    at_round: int | None


class NotWanted(msgspec.Struct, frozen=True):
    """Something newer was ordered meanwhile."""


_EVENTS = by_name(_Event.__subclasses__())


def _effects(snapshots: PserverSnapshots, *more: object) -> list[object]:
    """What the master is told after an event, and what else came of it."""
    return [*([] if snapshots.progress is None else [snapshots.progress]), *more]


def _wanted(is_wanted: bool) -> list[object]:
    return [] if is_wanted else [NotWanted()]


def _made(command: SnapshotCommand, is_begun: bool) -> list[object]:
    return [CutMade(command.round)] if is_begun else []


class RecordedSnapshots(PserverSnapshots):
    """Records what happens to it.

    Args:
        recorder: Of the core.
        pserver: Its index and generation.
    """

    def __init__(self, recorder: CoreRecorder, pserver: tuple[int, int]) -> None:
        super().__init__()
        self._recorder = recorder
        self._said: SnapshotCommand | None = None
        recorder.record(recorder.now(), SnapshotsBegun(*pserver))

    def _record(self, event: _Event, found: Sequence[object]) -> None:
        self._recorder.record(self._recorder.now(), event, _effects(self, *found))

    def take(self, snapshot: SnapshotCommand, versions: Sequence[int], highest_open_round: int) -> bool:
        is_begun = super().take(snapshot, versions, highest_open_round)
        # It is said again and again.
        if snapshot != self._said:
            self._said = snapshot
            self._record(SnapshotOrdered(snapshot, _runs(versions), highest_open_round), _made(snapshot, is_begun))
        return is_begun

    def taken(self, order: OrderNumber) -> bool:
        found = super().taken(order)
        self._record(CopiesTaken(order), _wanted(found))
        return found

    def written(self, order: OrderNumber, file: ShardFile) -> bool:
        found = super().written(order, file)
        self._record(FileWritten(order, file), _wanted(found))
        return found

    def failed(self, order: OrderNumber, reason: str) -> bool:
        found = super().failed(order, reason)
        self._record(SnapshotFailed(order, self._recorder.hidden(reason[:REASON_LIMIT])), _wanted(found))
        return found


def _runs(versions: Sequence[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for version in versions:
        count = found.pop()[1] if found and found[-1][0] == version else 0
        found.append((version, count + 1))
    return found


def pserver_snapshots(recorder: Recorder | None, pserver: tuple[int, int]) -> PserverSnapshots:
    """Which snapshot a pserver is at, which is recorded where there is something to record it.

    Args:
        recorder: Of the process.
        pserver: Its index and generation.
    """
    return PserverSnapshots() if recorder is None else RecordedSnapshots(recorder.core("snapshots"), pserver)


class SnapshotsPlayer:
    """Snapshots to which recorded events happen."""

    def __init__(self) -> None:
        self._snapshots = PserverSnapshots()

    def play(self, _at: float, name: str, event: msgspec.Raw) -> Sequence[object]:
        """Let it happen; the effects."""
        if name not in _EVENTS:
            raise CorruptError(f"no event of a pserver's snapshots: {name}")
        happened: Any = decode(event, _EVENTS[name])
        found: list[object] = []
        match happened:
            case SnapshotsBegun():
                return ()
            case SnapshotOrdered(command, runs, highest_open_round):
                versions = [version for version, count in runs for _ in range(count)]
                found = _made(command, self._snapshots.take(command, versions, highest_open_round))
            case CopiesTaken(order):
                found = _wanted(self._snapshots.taken(order))
            case FileWritten(order, file):
                found = _wanted(self._snapshots.written(order, file))
            case SnapshotFailed(order, reason):
                found = _wanted(self._snapshots.failed(order, reason))
        return _effects(self._snapshots, *found)
