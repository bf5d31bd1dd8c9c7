"""Comparison of two declarations. If they differ, an error names the differing fields."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import msgspec

from flightedl.domain.model.optimizers import Optimizer, SlotSpec
from flightedl.errors import DeclarationError

_SHOWN = 4


def require_same(
    what: str,
    known: msgspec.Struct,
    declared: msgspec.Struct,
    *,
    may_differ: Callable[[str], bool] = lambda _: False,
    but: str = "",
) -> None:
    """Raise an error unless two declarations of the same kind are equal.

    Args:
        what: The part of the job that they declare.
        known: The job's declaration.
        declared: A trainer's declaration.
        may_differ: True for the path of a field, such as "optimizer.lr", that is not compared.
        but: Description of the fields that may differ because the job was resumed.

    Raises:
        DeclarationError: they differ; the message names the fields and both values.
    """
    pairs = _differences("", _by_name(known), _by_name(declared))
    differences = [text for field, text in pairs if not may_differ(field)]
    if differences:
        shown = "; ".join(differences[:_SHOWN])
        more = f" (and {len(differences) - _SHOWN} more)" if len(differences) > _SHOWN else ""
        way = f"Only {but} may change when a job is resumed: declare" if but else "Declare"
        raise DeclarationError(
            f"this job already has a different {what}: {shown}{more}. {way} the same, or use another job name"
        )


def require_same_slots(
    names: Iterable[str], known: Optimizer, declared: Optimizer, kind: Literal["parameter", "table"] = "parameter"
) -> None:
    """Raise an error unless an optimizer's new settings use the same slots as its previous settings.

    Raises:
        DeclarationError: the slots of a parameter, or of the rows of a table, differ.
    """
    for name in names:
        before, now = known.for_parameter(name).slots, declared.for_parameter(name).slots
        if before != now:
            raise DeclarationError(
                f"the optimizer's slots of {kind} {name!r} would change from {_named(before)} to {_named(now)}, which "
                "is not possible when a job is resumed. Declare an optimizer with the same slots, or use another job "
                "name"
            )


def _named(slots: Sequence[SlotSpec]) -> str:
    return (
        ", ".join(slot.name + (f" (from {slot.initial:g} on)" if slot.initial else "") for slot in slots) or "nothing"
    )


def _by_name(declared: msgspec.Struct) -> Any:
    """Return a declaration as plain values, with parameters and tables keyed by name to make differences readable."""
    found = msgspec.to_builtins(declared)
    for kind in ("parameters", "tables"):
        if kind in found:
            found[kind] = {each.get("name", ""): each for each in found[kind] or ()}
    return found


def _differences(path: str, known: Any, declared: Any) -> Any:
    if isinstance(known, dict) and isinstance(declared, dict):
        if path == "parameters" and list(known) != list(declared) and known.keys() == declared.keys():
            yield path, f"the order of the parameters is {_short(list(known))}, not {_short(list(declared))}"
        for key in sorted({*known, *declared}):
            yield from _differences(f"{path}.{key}" if path else str(key), known.get(key), declared.get(key))
    elif isinstance(known, list) and isinstance(declared, list) and len(known) == len(declared):
        for number, (one, other) in enumerate(zip(known, declared, strict=True)):
            yield from _differences(f"{path}[{number}]", one, other)
    elif known != declared:
        yield path, f"{path} is {_short(known)}, not {_short(declared)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
