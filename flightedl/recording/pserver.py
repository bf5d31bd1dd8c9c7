"""A pserver's life that is recorded, and one that is made from a recording."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from flightedl.domain.checkpoint.manifest import Skipped
from flightedl.domain.pserver.life import PserverLife
from flightedl.domain.pserver.life_values import (
    BlocksLost,
    BuildFailed,
    CaughtUp,
    Effect,
    Effects,
    Event,
    Facts,
    Fail,
    NothingLoadable,
    Restored,
    Seen,
    StartAgain,
    StoreUnreachable,
)
from flightedl.errors import CorruptError, FlightedlError
from flightedl.messages.base import OfPlan
from flightedl.messages.control import AppliedRequest, ReloadRequest, SnapshotRequest, ViewRequest
from flightedl.recording.values import by_name, decode
from flightedl.recording.writer import Recorder

#: Stands for the URL of the checkpoints.
_STORAGE = "(the checkpoints' URL)"


class LifeBegun(msgspec.Struct, frozen=True):
    """The first event: whether the process was told where checkpoints lie."""

    has_storage: bool


class SeenAgain(msgspec.Struct, frozen=True):
    """The directory was looked at, and says what it said before."""


class MasterHeard(msgspec.Struct, frozen=True):
    """As ``PserverLife.hear_of_master``, where it is a newer one."""

    generation: int


class RequestChecked(msgspec.Struct, frozen=True):
    """As ``PserverLife.check_request``; not where it was the same request the last time, and nothing came of it."""

    #: view or snapshot; applied: names no master; else reload or seal, which only the newest master may order.
    kind: str
    plan_hash: str
    master_generation: int


class NewestMaster(msgspec.Struct, frozen=True):
    """The effect of both."""

    generation: int


def _checked(request: OfPlan) -> RequestChecked:
    name = type(request).__name__.removesuffix("Request").lower()
    return RequestChecked(name, request.plan_hash, getattr(request, "master_generation", 0))


def _request(checked: RequestChecked) -> OfPlan:
    """One of the kind, as far as it is looked at."""
    plan, master = checked.plan_hash, checked.master_generation
    match checked.kind:
        case "view":
            return ViewRequest(plan_hash=plan, master_generation=master, serial=0, members=[])
        case "snapshot":
            return SnapshotRequest(plan_hash=plan, master_generation=master, number=0, serial=0, name="-")
        case "applied":
            return AppliedRequest(plan_hash=plan)
        case _:
            return ReloadRequest(plan_hash=plan, master_generation=master)


class RecordedLife(PserverLife):
    """Records what happens to it; ``storage`` as of ``PserverLife``."""

    def __init__(self, recorder: Recorder, storage: str | None) -> None:
        super().__init__(storage)
        self._recorder = recorder.core("life")
        self._now = recorder.now
        self._url = storage
        self._seen: Facts | None = None
        self._checked: dict[str, RequestChecked] = {}
        #: What is heard meanwhile is a part of the event that happens.
        self._is_inside = False
        self._recorder.record(self._now(), LifeBegun(storage is not None))

    def apply(self, event: Event) -> Effects:
        self._is_inside = True
        try:
            effects = super().apply(event)
        finally:
            self._is_inside = False
        said: Event | SeenAgain = event
        if isinstance(event, Seen):
            said = SeenAgain() if event.facts == self._seen else event
        if isinstance(event, Seen | CaughtUp):
            self._seen = event.facts
        said = self._without_reasons(said)
        self._recorder.record(self._now(), said, [self._without_url(effect) for effect in effects])
        return effects

    def hear_of_master(self, generation: int) -> None:
        is_news = generation > self.newest_master
        super().hear_of_master(generation)
        if is_news and not self._is_inside:
            self._recorder.record(self._now(), MasterHeard(generation), [NewestMaster(self.newest_master)])

    def check_request(self, request: OfPlan) -> None:
        event = _checked(request)
        self._is_inside = True
        try:
            super().check_request(request)
        except FlightedlError as error:
            self._checked.clear()
            self._recorder.raised(self._now(), event, error)
            raise
        finally:
            self._is_inside = False
        if self._checked.get(event.kind) != event:
            self._checked[event.kind] = event
            self._recorder.record(self._now(), event, [NewestMaster(self.newest_master)])

    def _without_reasons(self, event: Event | SeenAgain) -> Event | SeenAgain:
        """Why something failed may name places, and is told in the end."""
        hidden = self._recorder.hidden
        if isinstance(event, Restored | NothingLoadable):
            skipped = tuple(Skipped(each.number, hidden(each.reason)) for each in event.skipped)
            return replace(event, skipped=skipped)
        if isinstance(event, StoreUnreachable | BuildFailed | BlocksLost):
            return replace(event, why=hidden(event.why))
        return event

    def _without_url(self, effect: Effect) -> Effect:
        if self._url and isinstance(effect, Fail | StartAgain):
            return replace(effect, why=effect.why.replace(self._url, _STORAGE))
        return effect


def pserver_life(recorder: Recorder | None, storage: str | None) -> PserverLife:
    """A life, which is recorded where there is something to record it."""
    return PserverLife(storage) if recorder is None else RecordedLife(recorder, storage)


_EVENTS = by_name(typing.get_args(Event))
_ASKED = {MasterHeard.__name__, RequestChecked.__name__}


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
        life = self._life
        if life is None or name not in {*_EVENTS, *_ASKED, SeenAgain.__name__}:
            raise CorruptError(f"no event of a pserver that has begun: {name}")
        if name in _ASKED:
            if name == RequestChecked.__name__:
                life.check_request(_request(decode(event, RequestChecked)))
            else:
                life.hear_of_master(decode(event, MasterHeard).generation)
            return (NewestMaster(life.newest_master),)
        happened: Event = Seen(self._seen) if name == SeenAgain.__name__ else decode(event, _EVENTS[name])
        if isinstance(happened, Seen | CaughtUp) and happened.facts is not None:
            self._seen = happened.facts
        effects = life.apply(happened)
        life.check()
        return effects
