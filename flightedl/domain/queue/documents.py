"""The task queue's durable state as JSON.

Rules:

* Two documents. The *dispatch* document changes with every dispatch. It has a fixed part, each trainer's name once, and
  about 30 bytes for each row of work: tasks that follow each other and were given at once, or wait, are one row, see
  ``backlog`` and ``waiting``. The *failures* document changes only when a piece is quarantined, retried or
  dropped, or when sizes of earlier epochs are put away there; its serial is named in the dispatch document, so that the
  two cannot be mixed up.
* Instants are not in it: a clock means nothing to another process.
* A document of an unknown version, or with anything missing or unknown in it, is a CorruptError.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from flightedl.domain.queue.values import FailedPiece
from flightedl.errors import CorruptError
from flightedl.messages.decoding import from_json

VERSION = 4

Natural = Annotated[int, msgspec.Meta(ge=0)]


class _Document(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    version: Natural


class HeldDocument(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What one registration of a trainer holds."""

    generation: Natural
    #: See ``backlog``; a piece with two holders is in the rows of both.
    rows: list[list[Natural]]


class DispatchDocument(_Document, kw_only=True):
    """Where the queue stands."""

    #: (first epoch, seed or None), see ``seeds``.
    seeds: list[tuple[Natural, Natural | None]]
    revision: Natural
    epoch: Natural
    cursor: Natural
    next_attempt: Natural
    #: The recent ones, (first epoch, base, size), see ``order``.
    sizes: list[tuple[Natural, Natural, Natural]]
    growth_ended: bool = False
    #: trainer -> what it holds; never nothing.
    held: dict[str, HeldDocument] = {}
    #: (epoch, start, end, failures): whole tasks that wait.
    runs: list[tuple[Natural, Natural, Natural, Natural]] = []
    #: (epoch, position, first batch, end batch, failures): other pieces that wait.
    parts: list[tuple[Natural, Natural, Natural, Natural, Natural]] = []
    #: (epoch, position, attempts): finished pieces of tasks of which another piece is still open.
    finished_parts: list[tuple[Natural, Natural, list[Natural]]] = []
    #: (epoch, ``IntervalSet.encode``): positions of tasks that have to be done also in a job that was stopped.
    due: list[tuple[Natural, bytes]] = []
    average_s: float | None = None
    average_count: Natural = 0
    copies: Natural = 0
    failures_serial: Natural = 0


class FailuresDocument(_Document, kw_only=True):
    """What hardly ever changes: what was quarantined, and the older sizes of epochs."""

    serial: Natural
    #: (epoch, position, first batch, end batch, …).
    failed: list[list[Natural]] = []
    dropped: list[list[Natural]] = []
    details: list[FailedPiece] = []
    forgotten: Natural = 0
    #: The older ones, as in the other document.
    sizes: list[tuple[Natural, Natural, Natural]] = []


class QueueDocument(_Document, kw_only=True):
    """Both in one."""

    dispatch: msgspec.Raw
    failures: msgspec.Raw


Document = TypeVar("Document", bound=_Document)


def encode_document(document: msgspec.Struct) -> bytes:
    """JSON bytes of a document."""
    return msgspec.json.encode(document)


def decode_document(data: bytes | msgspec.Raw, kind: type[Document]) -> Document:
    """The document in ``data``.

    Raises:
        CorruptError: see the module's rules.
    """
    try:
        document = from_json(data, kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptError(f"the stored task queue cannot be read: {str(error)[:200]}") from None
    if document.version != VERSION:
        raise CorruptError(
            f"the stored task queue is of version {document.version}, this flightedl reads version {VERSION}: "
            "use the flightedl that wrote it, or begin a new job"
        )
    return document
