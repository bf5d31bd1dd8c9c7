"""Events and effects as JSON, and events back from it.

A value is written under the name of its class, ``{"Asked": {...}}``, and so is a value within it wherever the field
may hold values of several classes. Events are read by their classes; effects are never read: those of a replay are
written the same way, and compared.

* An error is written as the name of its class only: its text is for people, and may name files.
* Which batches a task has is a function; it is written as runs of equal counts.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from flightedl import errors
from flightedl.domain.trainer.feed import AssignedTask
from flightedl.errors import CorruptError
from flightedl.messages.decoding import made_alone
from flightedl.messages.tasks import Assignment

Value = TypeVar("Value")

#: Stands for the fields of the core's last event of the same name.
AGAIN = "again"
#: Classes whose values are written as they are.
PLAIN = frozenset({dict, list, tuple, str, bytes, int, float, bool, type(None)})


class BatchCounts:
    """How many batches each task has, as runs of tasks with equal counts.

    Args:
        runs: (batches of a task, how many tasks in a row have so many), in the order of the tasks.
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
        """Of the first tasks, as a function says."""
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
    """The same event or settings, with batch counts that can be written."""
    known: Any = value
    if (counts := getattr(known, "batch_counts", None)) is not None:
        known = dataclasses.replace(known, batch_counts=BatchCounts.of(counts, known.task_count))
    elif (tasks := getattr(known, "tasks", None)) is not None:
        known = dataclasses.replace(known, tasks=with_counts(tasks))
    found: Value = known
    return found


def tagged(value: object) -> object:
    """A value that can be written: of an event or effect, its fields under the name of its class."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, set | frozenset):
        return sorted(value)
    if not _has_fields(type(value)):
        return value
    kind: Any = type(value)
    plain, open_fields = fields_of(kind)
    if not open_fields:
        return {kind.__name__: value}
    fields = {name: getattr(value, name) for name in plain}
    return {kind.__name__: fields | {name: tagged(getattr(value, name)) for name in open_fields}}


def _has_fields(kind: Any) -> bool:
    return hasattr(kind, "__struct_fields__") or hasattr(kind, "__dataclass_fields__")


def is_written_whole(kind: Any) -> bool:
    """True if values of this class are written unchanged, under the class name."""
    return _has_fields(kind) and not fields_of(kind)[1]


@functools.cache
def fields_of(kind: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(fields that are written as they are, fields that may hold sets or values of several classes)."""
    hints = typing.get_type_hints(kind)
    names = kind.__struct_fields__ if issubclass(kind, msgspec.Struct) else [f.name for f in dataclasses.fields(kind)]
    is_open = {
        name: len(_classes(hints[name])) > 1 or typing.get_origin(hints[name]) in {set, frozenset} for name in names
    }
    return tuple(n for n in names if not is_open[n]), tuple(n for n in names if is_open[n])


def _classes(hint: Any) -> set[Any]:
    """The classes with fields among those that a field may hold; a base class stands for many."""
    members = typing.get_args(hint) if typing.get_origin(hint) is not None else (hint,)
    found: set[Any] = set()
    for member in members:
        if member is msgspec.Struct or member is object:
            return {msgspec.Struct, object}
        if isinstance(member, type) and (issubclass(member, msgspec.Struct) or dataclasses.is_dataclass(member)):
            found.add(member)
    return found


def _written(value: object) -> object:
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


def _read(kind: Any, value: Any) -> Any:
    if kind is range:
        return range(*value)
    if kind is AssignedTask:
        number, epoch, position, task, attempt, first, end, count = value
        return AssignedTask(assignment_of(epoch, task, attempt, end, first, count, position), number)
    if kind is Exception:
        known = getattr(errors, value["error"], None)
        return known("") if known is not None else Exception(value["error"])
    return BatchCounts(value)


_encoder = msgspec.json.Encoder(enc_hook=_written)


def encode(value: object) -> bytes:
    """One line of JSON. TypeError: it cannot be written."""
    return _encoder.encode(value)


def builtins(value: object) -> Any:
    """As dicts, lists and texts, which are written as the value is."""
    return msgspec.to_builtins(value, enc_hook=_written, str_keys=True)


@functools.cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return made_alone(lambda: msgspec.json.Decoder(kind, dec_hook=_read))


def decode(data: bytes | msgspec.Raw, kind: type[Value]) -> Value:
    """The value of a class.

    Raises:
        CorruptError: it is another one.
    """
    try:
        known: Any = kind
        found: Value = _decoder(known).decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, TypeError, ValueError) as error:
        name = getattr(kind, "__name__", str(kind))
        raise CorruptError(f"not a {name} of this version of flightedl: {str(error)[:200]}") from None
    return found


def assignment_of(
    epoch: int,
    task: int,
    attempt: int,
    end_batch: int,
    first_batch: int = 0,
    batch_count: int = 0,
    position: int = 0,
) -> Assignment:
    """Return an assignment with the fields that cores look at."""
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
    """Classes by the names under which their values are written."""
    return {kind.__name__: kind for kind in classes}
