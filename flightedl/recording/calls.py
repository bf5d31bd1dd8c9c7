"""Records and replays the inputs of any core.

A recorded core is an instance of a subclass, which is created once for each class in ``cores``. Each input calls the
original method, then writes a record of the call: the method's name, its arguments by name, and its result. The first
record of a core is ``Begun``, with the constructor's arguments. The argument ``now`` becomes the time of the record. If
an input calls another input, only the outer call is recorded.

A player constructs the original core from the recorded arguments and calls the same methods. The annotations of each
method determine the classes to which its arguments are decoded.
"""

from __future__ import annotations

import functools
import inspect
import threading
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from flightedl.errors import CorruptError
from flightedl.recording.cores import APPLY, BY_CLASS, CORES, Kind
from flightedl.recording.redaction import field_without
from flightedl.recording.values import AGAIN, BEGUN, by_name, decode, effects_of, encode, read, read_value, written
from flightedl.recording.writer import CoreRecorder, Recorder

_NUMBERS = frozenset({bool, int, float, type(None)})
_Fields = dict[str, msgspec.Raw]


@functools.cache
def _parameters(method: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(name for name in inspect.signature(method).parameters if name != "self")


class _Calls:
    def __init__(self, recorder: CoreRecorder, kind: Kind) -> None:
        self._recorder = recorder
        self._kind = kind
        self._lock = threading.RLock()
        self._is_inside = False
        #: Method -> arguments of its last call, as JSON.
        self._last: dict[str, object] = {}

    def begun(self, about: Mapping[str, object], arguments: dict[str, Any]) -> None:
        """Record the construction of the core."""
        at = arguments.pop("now", self._recorder.now())
        fields = {name: self._argument(BEGUN, name, value) for name, value in arguments.items()}
        self._recorder.keep_hidden()
        self._recorder.record(at, {BEGUN: {"about": dict(about)} | fields})

    def call(self, core: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the original method and record the call."""
        kind = self._kind
        method = getattr(kind.core, name)
        with self._lock:
            if self._is_inside:
                return method(core, *args, **kwargs)
            self._is_inside = True
            given = dict(zip(_parameters(method), args, strict=False))
            given.update(kwargs)
            try:
                result = method(core, *args, **kwargs)
            except Exception as error:
                self._last.clear()
                at, event, _ = self._event(name, given)
                self._recorder.raised(at, event, error)
                raise
            finally:
                self._is_inside = False
            if not kind.skips(core, name, result):
                self._write(core, name, given, result)
        return result

    def _write(self, core: Any, name: str, given: dict[str, Any], result: Any) -> None:
        at, event, (key, fields) = self._event(name, given)
        if (parameter := self._kind.repeated.get(key)) is not None:
            mark = encode(fields[parameter] if parameter else fields)
            is_same, self._last[key] = self._last.get(key) == mark, mark
            if is_same and name != APPLY:
                return
            event = {key: AGAIN} if is_same else event
        self._recorder.record(at, event, _effects(self._kind, core, given, result))

    def _event(self, name: str, given: dict[str, Any]) -> tuple[float, object, tuple[str, Any]]:
        at = given.pop("now") if "now" in given else self._recorder.now()
        if name == APPLY:
            (happened,) = given.values()
            event = written(happened, self._recorder.hidden)
            return at, event, next(iter(event.items()))
        fields = given
        for key, value in given.items():
            # A fast path, because most arguments are numbers.
            if type(value) not in _NUMBERS:
                fields[key] = self._argument(name, key, value)
        return at, {name: fields}, (name, fields)

    def _argument(self, name: str, key: str, value: Any) -> Any:
        if (gist := self._kind.gists.get((name, key))) is not None:
            value = gist(value)
        if type(value) is str:
            return field_without(value, self._recorder.hidden, key)
        return written(value, self._recorder.hidden)


def _effects(kind: Kind, core: Any, given: Mapping[str, Any], result: Any) -> list[object]:
    found = effects_of(result)
    return found if kind.state is None else found + [written(each) for each in kind.state(core, given, result)]


@functools.cache
def _recorded_class(core: type) -> type:
    def method(name: str) -> Callable[..., Any]:
        @functools.wraps(getattr(core, name))
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return self._calls.call(self, name, args, kwargs)

        return call

    return type(f"Recorded{core.__name__}", (core,), {name: method(name) for name in BY_CLASS[core].methods})


def recorded_core(
    recorder: Recorder, about: Mapping[str, object], core: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> object:
    """Construct a recorded core; see ``recorded.recorded``."""
    kind = BY_CLASS[core]
    given = dict(zip(_parameters(core), args, strict=False)) | kwargs
    made: Any = _recorded_class(core)
    found: object = made(*args, **kwargs)
    # Set only after construction. This is safe because no core's constructor calls one of the core's inputs.
    calls = vars(found)["_calls"] = _Calls(recorder.core(kind.name), kind)
    calls.begun(about, given)
    return found


class CorePlayer:
    """A core that repeats recorded calls.

    Args:
        kind: Kind of the core, a key of ``CORES``.
    """

    def __init__(self, kind: str) -> None:
        self._kind = CORES[kind]
        self._core: Any = None

    def play(self, at: float, name: str, event: msgspec.Raw) -> Sequence[object]:
        """Repeat a recorded call, and return its effects.

        Raises:
            CorruptError: The core has no such input, or was not begun.
        """
        kind = self._kind
        if name == BEGUN:
            self._core = kind.core(**self._arguments(kind.core.__init__, event, at))
            return ()
        if self._core is None or name not in {*kind.methods, *_events(kind.core)} or name == APPLY:
            raise CorruptError(f"not an event of a {kind.name} core, or the core was not begun: {name}")
        if name in _events(kind.core):
            name, given = APPLY, self._event(name, event, at)
        else:
            given = self._arguments(getattr(kind.core, name), event, at)
        result = getattr(self._core, name)(**given)
        if kind.is_checked and hasattr(self._core, "check"):
            self._core.check()
        return _effects(kind, self._core, given, result)

    def _event(self, name: str, event: msgspec.Raw, at: float) -> dict[str, Any]:
        method = self._kind.core.apply
        first, *more = _parameters(method)
        return {first: read_value(_events(self._kind.core)[name], event)} | dict.fromkeys(more, at)

    def _arguments(self, method: Callable[..., Any], event: msgspec.Raw, at: float) -> dict[str, Any]:
        hints = typing.get_type_hints(method)
        fields = decode(event, _Fields)
        fields.pop("about", None)
        found = {name: read(hints[name], value) for name, value in fields.items() if name in hints}
        return found | ({"now": at} if "now" in hints else {})


@functools.cache
def _events(core: Any) -> Mapping[str, type]:
    if not hasattr(core, APPLY):
        return {}
    hints = typing.get_type_hints(core.apply)
    return by_name(typing.get_args(hints[_parameters(core.apply)[0]]))
