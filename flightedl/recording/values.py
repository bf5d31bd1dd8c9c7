"""Conversion of the cores' arguments, events and effects to JSON and back.

A value is written with the name of its class as the key, as in ``{"Asked": {...}}``. So is a nested value, if its field
may contain values of several classes. Arguments and events are decoded to their classes. Effects are never decoded: the
effects of a replay are encoded in the same way, and then compared.

* An error is written as its class. For an error in an argument, two things are added: a digest of its message, and a
  flag that is true if the error is transient.
* The function that returns the number of batches in a task is written as runs of equal counts.
* Private strings are replaced (see ``redaction``).
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from flightedl import errors
from flightedl.domain.consistency.modes import Mode
from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.master.state import StoredState
from flightedl.domain.retries import is_transient
from flightedl.domain.trainer.feed import AssignedTask
from flightedl.errors import CorruptError, FlightedlError, JobFailedError, UnavailableError
from flightedl.messages.decoding import made_alone
from flightedl.messages.tasks import Assignment
from flightedl.recording.redaction import Hide, field_without, is_private, stored_without

Value = TypeVar("Value")

#: Name of a core's first record.
BEGUN = "Begun"
#: Stands for the fields of the core's previous event of the same name.
AGAIN = "again"
#: Classes whose values are written unchanged.
PLAIN = frozenset({dict, list, tuple, str, bytes, int, float, bool, type(None)})
_Fields = dict[str, msgspec.Raw]


class BatchCounts:
    """Number of batches in each task, as runs of tasks with equal numbers.

    Args:
        runs: (number of batches, number of consecutive tasks with it), in the order of the tasks.
    """

    __slots__ = ("_ends", "runs")

    def __init__(self, runs: Iterable[tuple[int, int]]) -> None:
        self.runs = [(count, length) for count, length in runs]
        self._ends: list[int] = []
        end = 0
        for _, length in self.runs:
            end += length
            self._ends.append(end)

    @classmethod
    def of(cls, batch_counts: Callable[[int], int], task_count: int) -> BatchCounts:
        """Return the batch counts of the first ``task_count`` tasks, given the function that computes them."""
        if isinstance(batch_counts, BatchCounts):
            return batch_counts
        runs: list[tuple[int, int]] = []
        for task in range(task_count):
            count = batch_counts(task)
            if runs and runs[-1][0] == count:
                runs[-1] = (count, runs[-1][1] + 1)
            else:
                runs.append((count, 1))
        return cls(runs)

    def __call__(self, task: int) -> int:
        return self.runs[bisect_right(self._ends, task)][0]


def with_counts(value: Value) -> Value:
    """Return an event or settings in which the function for batch counts is replaced by counts that can be encoded."""
    known: Any = value
    if (counts := getattr(known, "batch_counts", None)) is not None:
        known = dataclasses.replace(known, batch_counts=BatchCounts.of(counts, known.task_count))
    elif (tasks := getattr(known, "tasks", None)) is not None:
        known = dataclasses.replace(known, tasks=with_counts(tasks))
    found: Value = known
    return found


# writing


def written(value: Any, hide: Hide | None = None) -> Any:
    """Convert a value to its fields, under the name of its class, so that it can be encoded as JSON.

    Args:
        value: An argument, an event or an effect.
        hide: Replaces texts that may contain paths. None for effects, whose texts were already replaced in the input.
    """
    kind: Any = type(value)
    name = _name_of_plain(kind, is_input=hide is not None)
    if name is not None:
        return {name: value} if name else value
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, BaseException):
        if hide is None:
            return value
        text = hide(str(value) or kind.__name__)
        return {"error": kind.__name__, "text": text, "is_transient": is_transient(value)}
    if isinstance(value, Mode):
        return value.to_json()
    if kind is AppliedBatches:
        # In results, only the number of blocks is recorded. Arguments of ``restore`` are recorded completely.
        return {"AppliedBatches": {"blocks": len(value.numbers)}}
    if kind is StoredState:
        value = stored_without(value)
    return _written(with_counts(value) if _has_counts(kind) else value, kind, hide)


@functools.cache
def _name_of_plain(kind: Any, *, is_input: bool) -> str | None:
    """Return the name under which a class's values are written unchanged: "" for no name, None if they change."""
    if kind in PLAIN:
        return ""
    if issubclass(kind, set | frozenset | BaseException | Mode) or kind in {AppliedBatches, StoredState}:
        return None
    if not has_fields(kind):
        return ""
    is_plain = not (fields_of(kind)[1] or _has_counts(kind) or is_private(kind, is_input=is_input))
    return str(kind.__name__) if is_plain else None


def _written(value: Any, kind: Any, hide: Hide | None) -> Any:
    plain, open_fields = fields_of(kind)
    content = value if not open_fields else {name: getattr(value, name) for name in plain}
    if is_private(kind, is_input=hide is not None):
        content = field_without(builtins(content), hide)
    if open_fields:
        content |= {name: written(getattr(value, name), hide) for name in open_fields}
    return {kind.__name__: content}


@functools.cache
def _has_counts(kind: Any) -> bool:
    return not {"batch_counts", "tasks"}.isdisjoint(getattr(kind, "__dataclass_fields__", ()))


def has_fields(kind: Any) -> bool:
    """True for dataclasses and messages."""
    return hasattr(kind, "__struct_fields__") or hasattr(kind, "__dataclass_fields__")


@functools.cache
def fields_of(kind: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (fields that are written unchanged, fields that may contain sets or values of several classes)."""
    hints = typing.get_type_hints(kind)
    names = kind.__struct_fields__ if issubclass(kind, msgspec.Struct) else [f.name for f in dataclasses.fields(kind)]
    is_open = {
        name: len(_classes(hints[name])) > 1 or typing.get_origin(hints[name]) in {set, frozenset} for name in names
    }
    return tuple(n for n in names if not is_open[n]), tuple(n for n in names if is_open[n])


def _classes(hint: Any) -> set[Any]:
    """Return those classes with fields whose values a field may contain. A base class counts as several classes."""
    members = typing.get_args(hint) if typing.get_origin(hint) is not None else (hint,)
    found: set[Any] = set()
    for member in members:
        if member is msgspec.Struct or member is object:
            return {msgspec.Struct, object}
        if isinstance(member, type) and has_fields(member):
            found.add(member)
    return found


def _encodable(value: object) -> object:
    if isinstance(value, range):
        return [value.start, value.stop]
    if isinstance(value, BatchCounts):
        return value.runs
    if isinstance(value, BaseException):
        return {"error": type(value).__name__}
    if isinstance(value, AssignedTask):
        a = value.assignment
        return [value.number, a.epoch, a.position, a.task, a.attempt, a.first_batch, a.end_batch, a.batch_count]
    raise TypeError(f"a value of {type(value).__name__} cannot be recorded")


_encoder = msgspec.json.Encoder(enc_hook=_encodable)


def encode(value: object) -> bytes:
    """Encode a value as one line of JSON. Raises TypeError if this is impossible."""
    return _encoder.encode(value)


def builtins(value: object) -> Any:
    """Convert a value to dicts, lists and strings whose JSON is the same as the value's."""
    return msgspec.to_builtins(value, enc_hook=_encodable, str_keys=True)


def effects_of(result: Any) -> list[object]:
    """Return the results of a call as a flat list, in which a result is followed by its ``effects``."""
    found: list[object] = []
    _add_effects(result, found)
    return found


def _add_effects(result: Any, found: list[object]) -> None:
    is_tuple = hasattr(result, "_fields")
    names: Sequence[str] = result._fields if is_tuple else getattr(result, "__struct_fields__", ())
    if is_tuple or "effects" in names:
        fields = {name: getattr(result, name) for name in names}
        effects = fields.pop("effects", ())
        found.append({type(result).__name__: fields})
        for each in effects:
            _add_effects(each, found)
    elif isinstance(result, list | tuple):
        for each in result:
            _add_effects(each, found)
    elif result is not None:
        found.append({"returned": result} if isinstance(result, bool | int | str) else written(result))


# reading


_INTERRUPTIONS: Mapping[str, type[BaseException]] = {
    "KeyboardInterrupt": KeyboardInterrupt,
    "SystemExit": SystemExit,
}


def _error(known: Mapping[str, Any]) -> BaseException:
    name, text = known["error"], known.get("text", "")
    kind = _INTERRUPTIONS.get(name) or getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, FlightedlError | KeyboardInterrupt | SystemExit):
        return kind(text)
    return UnavailableError(text) if known.get("is_transient") else JobFailedError(text)


def _decoded(kind: Any, value: Any) -> Any:
    if kind is range:
        return range(*value)
    if kind is AssignedTask:
        number, epoch, position, task, attempt, first, end, count = value
        return AssignedTask(assignment_of(epoch, task, attempt, end, first, count, position), number)
    if kind is AppliedBatches:
        return AppliedBatches.decode(*msgspec.convert(value, tuple[bytes, list[int]]))
    if isinstance(kind, type) and issubclass(kind, BaseException):
        return _error(value)
    return BatchCounts(value)


@functools.cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return made_alone(lambda: msgspec.json.Decoder(kind, dec_hook=_decoded))


def decode(data: bytes | msgspec.Raw, kind: type[Value]) -> Value:
    """Decode a value of a class.

    Raises:
        CorruptError: The data is not a value of this class.
    """
    try:
        known: Any = kind
        found: Value = _decoder(known).decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, TypeError, ValueError) as error:
        name = getattr(kind, "__name__", str(kind))
        raise CorruptError(f"not a {name} of this version of flightedl: {str(error)[:200]}") from None
    return found


def read(hint: Any, raw: msgspec.Raw) -> Any:
    """Decode an argument, or a field, whose annotation is ``hint``.

    Raises:
        CorruptError: The value does not match the annotation.
    """
    if bytes(raw) == b"null":
        return None
    classes = typing.get_args(hint) if typing.get_origin(hint) in {typing.Union, types.UnionType} else (hint,)
    if Mode in classes:
        return Mode.from_json(decode(raw, dict[str, Any]))
    known = by_name(each for kind in classes if has_fields(kind) for each in _with_subclasses(kind))
    if not known:
        return decode(raw, hint)
    ((name, fields),) = decode(raw, _Fields).items()
    if name not in known:
        raise CorruptError(f"expected {' or '.join(known)}, not {name}")
    return read_value(known[name], fields)


def _with_subclasses(kind: Any) -> list[Any]:
    return [kind, *(each for sub in kind.__subclasses__() for each in _with_subclasses(sub))]


def read_value(kind: Any, raw: msgspec.Raw) -> Any:
    """Decode a value of a class that was written without the class's name."""
    if not (tagged := fields_of(kind)[1]):
        return decode(raw, kind)
    hints, fields = typing.get_type_hints(kind), decode(raw, _Fields).items()
    return kind(**{n: read(hints[n], v) if n in tagged else decode(v, hints[n]) for n, v in fields})


def assignment_of(
    epoch: int,
    task: int,
    attempt: int,
    end_batch: int,
    first_batch: int = 0,
    batch_count: int = 0,
    position: int = 0,
) -> Assignment:
    """Return an assignment with only those fields that cores use."""
    return Assignment(
        epoch=epoch,
        position=position,
        task=task,
        seed=None,
        attempt=attempt,
        first_batch=first_batch,
        end_batch=end_batch,
        batch_count=batch_count or end_batch,
    )


def by_name(classes: Iterable[type]) -> Mapping[str, type]:
    """Return classes by the names under which their values are written."""
    return {kind.__name__: kind for kind in classes}
