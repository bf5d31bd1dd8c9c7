"""Settings: immutable objects that users create, that validate themselves, and that are sent as tagged JSON objects.

A setting is a frozen dataclass derived from :class:`Setting`. Its constructor converts every field to its annotated
type and checks the field's limits (:func:`number`); a wrong value raises a :class:`UsageError` that names the class and
the field.

``to_json`` encodes all fields along with ``kind``, the name of the class, and ``from_json`` accepts nothing else. So
equal settings have equal JSON, and invalid JSON causes the same messages as wrong arguments.

The JSON contains only plain values (dict, list, str, int, float, bool, None), but no infinities and no NaN.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Self

import numpy as np

from flightedl.errors import UsageError


@dataclass(frozen=True, slots=True)
class Limits:
    """Range of a number. A limit of None means that the range is unlimited on that side."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def allow(self, value: float) -> bool:
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        names = {"at_least": "at least", "above": "above", "at_most": "at most", "below": "below"}
        parts = [f"{text} {value:g}" for name, text in names.items() if (value := getattr(self, name)) is not None]
        return " and ".join(parts)


def number(
    default: Any = MISSING,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    kw_only: Any = MISSING,
) -> Any:
    """Declare a dataclass field for a number with limits, or a tuple of them; required unless it has a ``default``."""
    return field(default=default, kw_only=kw_only, metadata={"limits": Limits(at_least, above, at_most, below)})


class Setting:
    """Base class of all settings; see the module's docstring."""

    __slots__ = ()

    #: Class name -> the class, for all settings that are not abstract.
    kinds: ClassVar[dict[str, type[Setting]]] = {}

    def __init_subclass__(cls) -> None:
        # Python creates a dataclass with slots twice. The second class, which is the one in use, overwrites the first.
        Setting.kinds[cls.__name__] = cls

    def __post_init__(self) -> None:
        for name, (hint, limits) in _rules(type(self)).items():
            object.__setattr__(self, name, checked(f"{type(self).__name__}: {name}", getattr(self, name), hint, limits))
        self.check()

    def check(self) -> None:
        """Check rules that concern several fields, and raise UsageError. Subclasses with such rules override this."""

    def check_within(self, name: str, limits: Limits) -> None:
        """Check this setting instead of a number that has these limits.

        Raises UsageError with a message that begins with ``name``. Most settings ignore this, because their numbers
        have limits of their own.
        """

    def to_json(self) -> dict[str, Any]:
        rules = _rules(type(self))
        return {"kind": type(self).__name__} | {name: _plain(getattr(self, name)) for name in rules}

    @classmethod
    def chosen(cls, value: Any) -> Self:
        """Return the setting, given the setting itself, or a name or class that has defaults for all fields.

        Raises:
            UsageError: it is not in this family, or a field without a default is missing.
        """
        if isinstance(value, cls):
            return value
        kinds = {name: kind for name, kind in Setting.kinds.items() if issubclass(kind, cls) and kind not in _FAMILIES}
        by_name = {name.lower(): kind for name, kind in kinds.items()}
        found = by_name.get(value.lower()) if isinstance(value, str) else value
        if not isinstance(found, type) or found not in kinds.values():
            raise UsageError(
                f"there is no {cls.__name__.lower()} {value!r:.80}; choose one of {', '.join(sorted(kinds))}"
            )
        if missing := sorted(_required(found)):
            raise UsageError(
                f"{found.__name__} needs {missing[0]!r}: write {found.__name__}({missing[0]}=...) with a value for it"
            )
        return typing.cast("Self", found())

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Return the setting encoded by ``to_json``.

        Raises:
            UsageError: not an object, of an unknown ``kind``, or with an unknown, missing or wrong field.
        """
        if not isinstance(data, Mapping) or not isinstance(data.get("kind"), str):
            raise UsageError(f"{cls.__name__.lower()} settings must be an object with a 'kind', got {data!r:.80}")
        found = Setting.kinds.get(data["kind"])
        if found is None or not issubclass(found, cls) or found in _FAMILIES:
            known = sorted(
                name for name, kind in Setting.kinds.items() if issubclass(kind, cls) and kind not in _FAMILIES
            )
            raise UsageError(
                f"there is no {cls.__name__.lower()} {data['kind']!r:.80}; choose one of {', '.join(known)}"
            )
        rules = _rules(found)
        arguments = {str(name): decoded(value) for name, value in data.items() if name != "kind"}
        if unknown := sorted(arguments.keys() - rules.keys()):
            raise UsageError(f"{found.__name__} has no setting {unknown[0]!r:.80}; it has {', '.join(rules)}")
        if missing := sorted(_required(found) - arguments.keys()):
            raise UsageError(f"{found.__name__} needs {missing[0]!r}")
        return found(**arguments)


def _required(kind: type[Setting]) -> set[str]:
    return {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}  # type: ignore[arg-type]


#: Abstract settings, which do not count as kinds.
_FAMILIES: set[type[Setting]] = set()


def family(cls: type[Setting]) -> None:
    """Declare that ``cls`` is the abstract base of a family, and not a kind."""
    _FAMILIES.add(cls)


def fields_of(kind: type[Setting]) -> dict[str, tuple[Any, Limits | None]]:
    """Return the annotated type and the limits of each field of a setting."""
    return _rules(kind)


#: Setting -> the annotated type and the limits of each field. Cached, because resolving annotations is slow.
_FIELDS: dict[type[Setting], dict[str, tuple[Any, Limits | None]]] = {}


def _rules(kind: type[Setting]) -> dict[str, tuple[Any, Limits | None]]:
    if kind not in _FIELDS:
        hints = typing.get_type_hints(kind)
        _FIELDS[kind] = {f.name: (hints[f.name], f.metadata.get("limits")) for f in fields(kind)}  # type: ignore[arg-type]
    return _FIELDS[kind]


def checked(name: str, value: Any, hint: Any, limits: Limits | None) -> Any:
    """Return ``value`` after converting it to the annotated type.

    Raises:
        UsageError: it has another type or is outside the limits; the message begins with ``name``.
    """
    choices = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for choice in choices:
        if typing.get_origin(choice) is tuple and isinstance(value, list | tuple):
            return tuple(checked(name, part, typing.get_args(choice)[0], limits) for part in value)
        if choice in (int, float) and _is_number(value, choice):
            return _limited(name, choice(value), limits)
        if _fits(value, choice):
            if limits is not None and isinstance(value, Setting):
                value.check_within(name, limits)
            return value
    raise UsageError(f"{name} is {value!r:.80}, but must be {_described(choices)}")


def _is_number(value: Any, kind: type) -> bool:
    accepted = (int, np.integer) if kind is int else (int, float, np.integer, np.floating)
    return isinstance(value, accepted) and not isinstance(value, bool)


def _fits(value: Any, choice: Any) -> bool:
    if choice in (int, float):
        return False
    if typing.get_origin(choice) is typing.Literal:
        return isinstance(value, str) and value in typing.get_args(choice)
    return isinstance(value, typing.get_origin(choice) or choice)


def _limited(name: str, value: Any, limits: Limits | None) -> Any:
    if not math.isfinite(value):
        raise UsageError(f"{name} is {value}, but must be a finite number")
    if limits is not None and not limits.allow(value):
        raise UsageError(f"{name} is {value:g}, but must be {limits}")
    return value


def _described(choices: tuple[Any, ...]) -> str:
    names: list[str] = []
    for choice in choices:
        if choice is float:
            names.append("a number")
        elif choice is int:
            names.append("a whole number")
        elif choice is str:
            names.append("text")
        elif choice is bool:
            names.append("True or False")
        elif choice is types.NoneType:
            names.append("None")
        elif typing.get_origin(choice) is typing.Literal:
            names.append("one of " + ", ".join(repr(value) for value in typing.get_args(choice)))
        elif typing.get_origin(choice) is tuple:
            names.append("a list of numbers")
        elif isinstance(choice, type) and issubclass(choice, Setting):
            names.append(f"a {choice.__name__}")
        else:
            names.append("a mapping")
    return " or ".join(names)


def _plain(value: Any) -> Any:
    if isinstance(value, Setting):
        return value.to_json()
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return value


def decoded(value: Any) -> Any:
    """Return a JSON value in which each tagged object is replaced with its setting."""
    if isinstance(value, Mapping):
        if isinstance(value.get("kind"), str):
            return Setting.from_json(value)
        return {key: decoded(part) for key, part in value.items()}
    if isinstance(value, list):
        return tuple(decoded(part) for part in value)
    return value
