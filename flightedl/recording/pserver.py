"""A pserver's life that is recorded, and one that is made from a recording."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from flightedl.domain.pserver.life import PserverLife
from flightedl.domain.pserver.life_values import CaughtUp, Effect, Effects, Event, Facts, Fail, Seen, StartAgain
from flightedl.errors import CorruptError
from flightedl.recording.values import by_name, decode
from flightedl.recording.writer import Recorder

#: Stands for the URL of the checkpoints.
_STORAGE = "(the checkpoints' URL)"


class LifeBegun(msgspec.Struct, frozen=True):
    """The first event: whether the process was told where checkpoints lie."""

    has_storage: bool


class SeenAgain(msgspec.Struct, frozen=True):
    """The directory was looked at, and says what it said before."""


class RecordedLife(PserverLife):
    """Records what happens to it; ``storage`` as of ``PserverLife``."""

    def __init__(self, recorder: Recorder, storage: str | None) -> None:
        super().__init__(storage)
        self._recorder = recorder.core("life")
        self._now = recorder.now
        self._url = storage
        self._seen: Facts | None = None
        self._recorder.record(self._now(), LifeBegun(storage is not None))

    def apply(self, event: Event) -> Effects:
        effects = super().apply(event)
        said: Event | SeenAgain = event
        if isinstance(event, Seen):
            said = SeenAgain() if event.facts == self._seen else event
        if isinstance(event, Seen | CaughtUp):
            self._seen = event.facts
        self._recorder.record(self._now(), said, [self._without_url(effect) for effect in effects])
        return effects

    def _without_url(self, effect: Effect) -> Effect:
        if self._url and isinstance(effect, Fail | StartAgain):
            return replace(effect, why=effect.why.replace(self._url, _STORAGE))
        return effect


def pserver_life(recorder: Recorder | None, storage: str | None) -> PserverLife:
    """A life, which is recorded where there is something to record it."""
    return PserverLife(storage) if recorder is None else RecordedLife(recorder, storage)


_EVENTS = by_name(typing.get_args(Event))


class LifePlayer:
    """A life to which recorded events happen."""

    def __init__(self) -> None:
        self._life: PserverLife | None = None
        self._seen = Facts()

    def play(self, _at: float, name: str, event: msgspec.Raw) -> Sequence[object]:
        """Let it happen; the effects."""
        if name == LifeBegun.__name__:
            self._life = PserverLife(_STORAGE if decode(event, LifeBegun).has_storage else None)
            return ()
        if self._life is None or name not in {*_EVENTS, SeenAgain.__name__}:
            raise CorruptError(f"no event of a pserver that has begun: {name}")
        happened: Event = Seen(self._seen) if name == SeenAgain.__name__ else decode(event, _EVENTS[name])
        if isinstance(happened, Seen | CaughtUp) and happened.facts is not None:
            self._seen = happened.facts
        effects = self._life.apply(happened)
        self._life.check()
        return effects
