"""First declaration wins; a different one is refused and told what differs."""

from __future__ import annotations

from typing import Any

import msgspec

from flightedl.errors import DeclarationError

_SHOWN = 4


def require_same(what: str, known: msgspec.Struct, declared: msgspec.Struct, *, but: str = "") -> None:
    """Compare two declarations of the same kind; the field ``but`` may differ.

    Raises:
        DeclarationError: they differ; names the fields and both values.
    """
    pairs = _differences("", msgspec.to_builtins(known), msgspec.to_builtins(declared))
    differences = [text for field, text in pairs if field != but]
    if differences:
        shown = "; ".join(differences[:_SHOWN])
        more = f" (and {len(differences) - _SHOWN} more)" if len(differences) > _SHOWN else ""
        way = f"Only {but} may change when a job is resumed: declare" if but else "Declare"
        raise DeclarationError(
            f"this job already has a different {what}: {shown}{more}. {way} the same, or use another job name"
        )


def _differences(path: str, known: Any, declared: Any) -> Any:
    if isinstance(known, dict) and isinstance(declared, dict):
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
