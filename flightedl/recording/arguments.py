"""Writes the arguments and results of cores' methods that are more than plain values, and reads them again.

Plain values are written as ``values`` says; an error by its class, its text's digest and whether it is transient.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable
from typing import Any

import msgspec

from flightedl import errors
from flightedl.domain.checkpoint.manifest import Skipped
from flightedl.domain.consistency.modes import Mode
from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.master import events
from flightedl.domain.master.state import StoredState
from flightedl.domain.pserver import life_values as happens
from flightedl.domain.queue.values import QueueSettings
from flightedl.domain.retries import is_transient
from flightedl.errors import CorruptError, FlightedlError, JobFailedError, UnavailableError
from flightedl.messages.base import OfPlan
from flightedl.messages.control import (
    AppliedReply,
    AppliedRequest,
    ReloadRequest,
    SnapshotReply,
    SnapshotRequest,
    ViewRequest,
)
from flightedl.messages.tasks import StopRequest
from flightedl.recording.redacted_values import is_sometimes_private, redacted, stored_without
from flightedl.recording.values import PLAIN, by_name, decode, is_written_whole, tagged, with_counts

Hide = Callable[[str], str]

#: Class -> its fields that hold texts which may name places, or values with such fields.
_REASONS: dict[type, tuple[str, ...]] = {
    events.ManifestFailed: ("reason",),
    events.Asked: ("request",),
    StopRequest: ("reason",),
    events.Answered: ("reply",),
    SnapshotReply: ("reason",),
    AppliedReply: ("skipped",),
    happens.Restored: ("skipped",),
    happens.NothingLoadable: ("skipped",),
    Skipped: ("reason",),
    happens.StoreUnreachable: ("why",),
    happens.BuildFailed: ("why",),
    happens.BlocksLost: ("why",),
}


def _without_reasons(value: Any, hide: Hide) -> Any:
    if isinstance(value, str):
        return hide(value)
    if isinstance(value, list | tuple):
        return type(value)(_without_reasons(each, hide) for each in value)
    if (names := _REASONS.get(type(value))) is None:
        return value
    fields = {name: _without_reasons(getattr(value, name), hide) for name in names}
    replace: Any = msgspec.structs.replace if isinstance(value, msgspec.Struct) else dataclasses.replace
    return replace(value, **fields)


def written(value: Any, hide: Hide) -> Any:
    """Write an argument or a result.

    Args:
        value: It.
        hide: Writes a text that may name places.
    """
    kind: type = type(value)
    name = _name_of_plain(kind)
    if name is None:
        return _written(value, hide)
    return {name: value} if name else value


@functools.cache
def _name_of_plain(kind: type) -> str | None:
    """The name under which all values of a class are written as they are; empty: under none; None: they are not."""
    if kind in PLAIN:
        return ""
    is_other = _written.dispatch(kind) is not _written.dispatch(object)
    return None if is_other or is_sometimes_private(kind) or not is_written_whole(kind) else kind.__name__


@functools.singledispatch
def _written(value: Any, hide: Hide) -> Any:
    del hide
    return redacted(value, tagged(value))


def written_event(value: Any, hide: Hide) -> Any:
    """An event of a core with ``apply``, as a value of the same class without what is left out."""
    return with_counts(_without_reasons(value, hide))


@_written.register
def _(value: BaseException, hide: Hide) -> Any:
    text = str(value) or type(value).__name__
    return {"kind": type(value).__name__, "text": hide(text), "is_transient": is_transient(value)}


@_written.register
def _(value: Mode, _: Hide) -> Any:
    return value.to_json()


@_written.register
def _(value: QueueSettings, _: Hide) -> Any:
    return tagged(with_counts(value))


@_written.register
def _(value: StoredState, _: Hide) -> Any:
    return tagged(stored_without(value))


@_written.register
def _(value: AppliedBatches, _: Hide) -> Any:
    # As a result; a protocol that is restored gets all of it, by the gist.
    return {"AppliedBatches": {"blocks": value.block_count}}


class _Error(msgspec.Struct, frozen=True):
    kind: str
    text: str
    is_transient: bool


class CheckedRequest(msgspec.Struct, frozen=True):
    """A master's request, as far as ``PserverLife.check_request`` looks at it."""

    kind: str
    plan_hash: str
    master_generation: int

    @classmethod
    def of(cls, request: OfPlan) -> CheckedRequest:
        """Reduce a request."""
        return cls(type(request).__name__, request.plan_hash, getattr(request, "master_generation", 0))

    def request(self) -> OfPlan:
        """Make a request of the kind again."""
        plan, master = self.plan_hash, self.master_generation
        match self.kind:
            case ViewRequest.__name__:
                return ViewRequest(plan_hash=plan, master_generation=master, serial=0, members=[])
            case SnapshotRequest.__name__:
                return SnapshotRequest(plan_hash=plan, master_generation=master, number=0, serial=0, name="-")
            case AppliedRequest.__name__:
                return AppliedRequest(plan_hash=plan)
            case _:
                return ReloadRequest(plan_hash=plan, master_generation=master)


def _error(raw: msgspec.Raw) -> BaseException:
    """An error of the same class, or one that is as transient."""
    known = decode(raw, _Error)
    kind = getattr(errors, known.kind, None)
    if isinstance(kind, type) and issubclass(kind, FlightedlError):
        return kind(known.text)
    if known.kind == KeyboardInterrupt.__name__:
        return KeyboardInterrupt()
    return UnavailableError(known.text) if known.is_transient else JobFailedError(known.text)


def effects_of(result: Any) -> list[object]:
    """The results of a call, one after the other; ``effects`` of a result follow it."""
    found: list[object] = []
    _add_effects(result, found)
    return found


def _add_effects(result: Any, found: list[object]) -> None:
    if (names := getattr(result, "_fields", None)) is not None:
        fields = dict(zip(names, result, strict=True))
        further = fields.pop("effects", ())
        found.append({type(result).__name__: fields})
        for each in further:
            _add_effects(each, found)
    elif isinstance(result, list | tuple):
        for each in result:
            _add_effects(each, found)
    elif result is not None:
        found.append({"returned": result} if isinstance(result, bool | int | str) else written(result, str))


#: Class of a parameter -> what reads its arguments.
_READERS: dict[Any, Callable[[msgspec.Raw], Any]] = {
    AppliedBatches: lambda raw: AppliedBatches.decode(decode(raw, bytes)),
    BaseException: _error,
    Exception: _error,
    FlightedlError: _error,
    Mode: lambda raw: Mode.from_json(decode(raw, dict[str, Any])),
    OfPlan: lambda raw: decode(raw, dict[str, CheckedRequest])["CheckedRequest"].request(),
}


def read(hint: Any, raw: msgspec.Raw) -> Any:
    """Read an argument of a parameter that is annotated so.

    Raises:
        CorruptError: it is none.
    """
    classes = typing.get_args(hint) if typing.get_origin(hint) in {typing.Union, types.UnionType} else (hint,)
    if bytes(raw) == b"null":
        return None
    for kind in classes:
        if kind in _READERS:
            return _READERS[kind](raw)
    known = by_name(kind for kind in classes if dataclasses.is_dataclass(kind) or hasattr(kind, "__struct_fields__"))
    if not known:
        return decode(raw, hint)
    ((name, fields),) = decode(raw, dict[str, msgspec.Raw]).items()
    if name not in known:
        raise CorruptError(f"no {' or '.join(known)}: {name}")
    return decode(fields, known[name])
