"""Events and effects without the texts that a recording leaves out, and what a predecessor left, likewise.

Only who records or replays imports this: it knows the values of all processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from flightedl.domain.master import effects as out
from flightedl.domain.master import events
from flightedl.domain.master.state import StoredState
from flightedl.domain.queue.values import Quarantined
from flightedl.domain.trainer.feed import Ask
from flightedl.messages.declarations import DatasetDeclaration, DeclaredDataset, EvaluationDeclaration, JobDeclaration
from flightedl.messages.decoding import builtins_from_json, made_alone
from flightedl.messages.tasks import TasksTicket
from flightedl.recording.redaction import text_without, url_without, value_without
from flightedl.recording.values import builtins

#: Field -> what is written in its place, in the values that ``_is_private`` names.
_REPLACED: dict[str, Callable[[Any], Any]] = {
    "urls": lambda urls: [url_without(url) for url in urls],
    "error": text_without,
    "place": text_without,
    "filter": lambda given: given and [[column, how, value_without(value)] for column, how, value in given],
}
_PRIVATE = frozenset({events.Asked, events.DatasetIndexed, events.EvaluationIndexed, Ask, out.QueueNews, out.Answer})


def is_sometimes_private(kind: type) -> bool:
    """Whether some values of a class have texts that are left out."""
    return kind in _PRIVATE


def _is_private(value: object) -> bool:
    match value:
        case events.Asked(_, TasksTicket() as reports) | Ask(reports):
            return bool(reports.failed)
        case events.Asked(_, request):
            return isinstance(request, DatasetDeclaration | EvaluationDeclaration)
        case out.QueueNews(_, effect):
            return isinstance(effect, Quarantined)
        case out.Answer(_, reply):
            return isinstance(reply, DeclaredDataset)
        case _:
            return type(value) in _PRIVATE


def redacted(value: object, written: object) -> object:
    """What is written of an event or effect, without what it should not tell."""
    return _without(builtins(written)) if _is_private(value) else written


def _without(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {
            key: _REPLACED[key](value) if key in _REPLACED and value is not None else _without(value)
            for key, value in tree.items()
        }
    return [_without(each) for each in tree] if isinstance(tree, list | tuple) else tree


def stored_without(stored: StoredState) -> StoredState:
    """What a predecessor left, likewise; documents that tell nothing stay as they are."""
    tree = _without(msgspec.to_builtins(stored.declaration))
    declaration = made_alone(lambda: msgspec.convert(tree, JobDeclaration))
    return replace(
        stored,
        declaration=msgspec.structs.replace(declaration, arrivals=[]),
        failures=_document_without(stored.failures),
        evaluations=_document_without(stored.evaluations),
        stop=stored.stop and msgspec.structs.replace(stored.stop, reason=text_without(stored.stop.reason)),
    )


def _document_without(document: bytes | None) -> bytes | None:
    if document is None:
        return None
    tree = _without(builtins_from_json(document))
    for each in tree.get("evaluations", ()):
        if each["queue"]:
            each["queue"] = msgspec.json.encode(_without(builtins_from_json(each["queue"]))).decode()
    return msgspec.json.encode(tree)
