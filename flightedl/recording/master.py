"""A master's core that is recorded, and one that is made from a recording."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from flightedl.domain.master.core import MasterCore
from flightedl.domain.master.effects import Effect
from flightedl.domain.master.events import AppliedAnswered, Event, ManifestFailed, SnapshotAnswered, StopAsked
from flightedl.domain.master.state import CoreSettings, StoredState
from flightedl.domain.queue.values import QueueSettings
from flightedl.errors import CorruptError
from flightedl.recording.redacted_values import stored_without
from flightedl.recording.values import by_name, decode, with_counts
from flightedl.recording.writer import Recorder


class MasterBegun(msgspec.Struct, frozen=True):
    """The first event: what the core began with."""

    settings: CoreSettings
    stored: StoredState
    tasks: QueueSettings | None


class RecordedMaster(MasterCore):
    """Records what happens to it; arguments as of ``MasterCore``."""

    def __init__(
        self,
        recorder: Recorder,
        settings: CoreSettings,
        now: float,
        stored: StoredState | None = None,
        tasks: QueueSettings | None = None,
    ) -> None:
        super().__init__(settings, now, stored, tasks)
        self._recorder = recorder.core("master")
        begun = MasterBegun(settings, stored_without(stored or StoredState()), tasks and with_counts(tasks))
        self._recorder.record(now, begun)

    def apply(self, event: Event, now: float) -> list[Effect]:
        said = self._without_reasons(with_counts(event))
        try:
            effects = super().apply(event, now)
        except Exception as error:
            self._recorder.raised(now, said, error)
            raise
        self._recorder.record(now, said, effects)
        return effects

    def _without_reasons(self, event: Event) -> Event:
        """Why a file could not be written or loaded may name places, and is told again later."""
        hidden = self._recorder.hidden
        match event:
            case ManifestFailed(_, reason):
                return dataclasses.replace(event, reason=hidden(reason))
            case StopAsked(_, request):
                return dataclasses.replace(event, request=replace(request, reason=hidden(request.reason)))
            case SnapshotAnswered(_, _, reply) if reply.reason:
                return dataclasses.replace(event, reply=replace(reply, reason=hidden(reply.reason)))
            case AppliedAnswered(reply=reply) if reply is not None and reply.skipped:
                return dataclasses.replace(event, reply=replace(reply, skipped=[*map(hidden, reply.skipped)]))
            case _:
                return event


def master_core(
    recorder: Recorder | None,
    settings: CoreSettings,
    now: float,
    stored: StoredState | None = None,
    tasks: QueueSettings | None = None,
) -> MasterCore:
    """A core, which is recorded where there is something to record it."""
    if recorder is None:
        return MasterCore(settings, now, stored, tasks)
    return RecordedMaster(recorder, settings, now, stored, tasks)


_EVENTS = by_name(typing.get_args(Event))


class MasterPlayer:
    """A core to which recorded events happen."""

    def __init__(self) -> None:
        self._core: MasterCore | None = None

    def play(self, at: float, name: str, event: msgspec.Raw) -> Sequence[object]:
        """Let it happen; the effects."""
        if name == MasterBegun.__name__:
            begun = decode(event, MasterBegun)
            self._core = MasterCore(begun.settings, at, begun.stored, begun.tasks)
            return ()
        if self._core is None or name not in _EVENTS:
            raise CorruptError(f"no event of a master that has begun: {name}")
        effects: Sequence[object] = self._core.apply(decode(event, _EVENTS[name]), at)
        self._core.check()
        return effects
