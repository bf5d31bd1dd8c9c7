"""Replay of recorded events with the cores of the current version, up to the first effect that differs."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flightedl.errors import CorruptError
from flightedl.messages.decoding import builtins_from_json
from flightedl.recording.calls import CorePlayer
from flightedl.recording.cores import CORES
from flightedl.recording.reader import ReadRecord, Recording
from flightedl.recording.values import encode


@dataclass(frozen=True, slots=True)
class Difference:
    """The first effect of a process that differs from the recorded one."""

    process: str
    #: Number of the event in the file of its process, counted from 1.
    number: int
    at: float
    core: str
    #: The event, as JSON.
    event: Any
    #: Number of the effect among its event's effects, counted from 1.
    effect: int
    #: The recorded effect as JSON; None if none was recorded.
    expected: Any
    #: The replay's effect as JSON; None if the replay had none.
    actual: Any
    #: Traceback of an error that the recording does not contain.
    trace: str = ""


@dataclass(frozen=True, slots=True)
class Replayed:
    """Result of replaying one process: the number of replayed events, and the first difference, if any."""

    process: str
    events: int
    difference: Difference | None


def replay(recording: Recording) -> Replayed:
    """Pass the events of a process to new cores, up to the first difference.

    Raises:
        CorruptError: The file is damaged, or has events that this version does not know.
    """
    players: dict[str, CorePlayer] = {}
    count = 0
    for number, record in recording.records():
        kind = record.core.rpartition("-")[0]
        if record.core not in players:
            if kind not in CORES:
                raise CorruptError(f"{recording.path.name}: this flightedl has no core of the kind {kind!r}")
            players[record.core] = CorePlayer(kind)
        try:
            found = _play(players[record.core], record)
        except CorruptError as error:
            raise CorruptError(f"{recording.path.name}, event {number}: {error}") from None
        count = number
        if found is not None:
            effect, expected, actual, trace = found
            event = builtins_from_json(encode(record.event))
            return Replayed(
                recording.name,
                count,
                Difference(recording.name, number, record.at, record.core, event, effect, expected, actual, trace),
            )
    return Replayed(recording.name, count, None)


def _play(player: CorePlayer, record: ReadRecord) -> tuple[int, Any, Any, str] | None:
    try:
        effects = player.play(record.at, record.name, record.fields)
    except CorruptError:
        raise
    except Exception as error:  # noqa: BLE001 - any error of a core is a result to compare
        raised = type(error).__name__
        if raised == record.raised:
            return None
        trace = "".join(traceback.format_exception(error)[-3:])
        return 1, _first_of(record), {"raised": raised, "text": str(error)}, trace
    actual = encode(effects)
    if not record.raised and actual == bytes(record.effects):
        return None
    now = builtins_from_json(actual)
    if record.raised:
        return 1, {"raised": record.raised}, now[0] if now else None, ""
    return first_difference(builtins_from_json(record.effects), now)


def _first_of(record: ReadRecord) -> Any:
    effects = builtins_from_json(record.effects)
    return {"raised": record.raised} if record.raised else effects[0] if effects else None


def first_difference(expected: Sequence[Any], actual: Sequence[Any]) -> tuple[int, Any, Any, str] | None:
    """Return the first difference, like ``_play``, or None if the effects are equal."""
    for number in range(max(len(expected), len(actual))):
        then = expected[number] if number < len(expected) else None
        now = actual[number] if number < len(actual) else None
        if then != now:
            return number + 1, then, now, ""
    return None
