"""Removal of private strings from recordings: passwords in URLs, and error messages, which may quote records.

Fields with certain names are replaced wherever they occur in an event, an argument or an effect. The replacement
depends only on the original string, so equal strings remain equal. A string that was replaced before does not change.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import msgspec

from flightedl.domain.master.state import StoredState
from flightedl.domain.queue.failed import shortened
from flightedl.messages.declarations import JobDeclaration
from flightedl.messages.decoding import builtins_from_json, made_alone
from flightedl.recording.texts import text_without, url_without, value_without

#: Function that replaces a string with possible paths, now and in all later output of the core.
Hide = Callable[[str], str]


#: Field -> function that returns the replacement of its content.
_REPLACED: Mapping[str, Callable[[Any], Any]] = {
    "urls": lambda urls: [url_without(url) for url in urls],
    # Cores cut errors before they repeat them, and both must have the same replacement.
    "error": lambda text: text_without(shortened(text)),
    "place": text_without,
    "lost_places": lambda places: [text_without(place) for place in places],
    # What a trainer waits for may end with a colon and the error that stopped it.
    "waiting_for": lambda text: text.partition(": ")[0],
    "filter": lambda given: [[column, how, value_without(value)] for column, how, value in given],
}
#: Input fields that ``Hide`` replaces, because the core may repeat their strings in its output.
HIDDEN = frozenset({"reason", "why", "storage"})


def field_without(tree: Any, hide: Hide | None, name: str = "") -> Any:
    """Return a field's content as dicts, lists and strings, without private strings. For ``hide`` see ``written``."""
    if tree and name in _REPLACED and isinstance(tree, str | list | tuple):
        return _REPLACED[name](tree)
    if hide is not None and name in HIDDEN and isinstance(tree, str):
        return hide(tree)
    if isinstance(tree, dict):
        return {key: field_without(value, hide, key) for key, value in tree.items()}
    return [field_without(each, hide) for each in tree] if isinstance(tree, list | tuple) else tree


@cache
def is_private(kind: Any, *, is_input: bool) -> bool:
    """True if values of a class, or values nested in them, may have a private field."""
    names = _REPLACED.keys() | (HIDDEN if is_input else ())
    pending, seen = [kind], set[Any]()
    while pending:
        if (hint := pending.pop()) in seen:
            continue
        seen.add(hint)
        pending += [each for each in typing.get_args(hint) if not isinstance(each, list)]
        if isinstance(hint, type) and (dataclasses.is_dataclass(hint) or issubclass(hint, msgspec.Struct)):
            hints = typing.get_type_hints(hint)
            pending += hints.values()
            if any(name in names and not _is_error(of) for name, of in hints.items()):
                return True
    return False


def _is_error(hint: Any) -> bool:
    return any(isinstance(each, type) and issubclass(each, BaseException) for each in (hint, *typing.get_args(hint)))


def stored_without(stored: StoredState) -> StoredState:
    """Return a master's stored state with private strings replaced."""
    tree = field_without(msgspec.to_builtins(stored.declaration), text_without)
    declaration = made_alone(lambda: msgspec.convert(tree, JobDeclaration))
    return dataclasses.replace(
        stored,
        declaration=msgspec.structs.replace(declaration, arrivals=[]),
        failures=_document_without(stored.failures),
        evaluations=_document_without(stored.evaluations),
        stop=stored.stop and msgspec.structs.replace(stored.stop, reason=text_without(stored.stop.reason)),
    )


def _document_without(document: bytes | None) -> bytes | None:
    if document is None:
        return None
    tree = field_without(builtins_from_json(document), None)
    for each in tree.get("evaluations", ()):
        if each["queue"]:
            each["queue"] = msgspec.json.encode(field_without(builtins_from_json(each["queue"]), None)).decode()
    return msgspec.json.encode(tree)
