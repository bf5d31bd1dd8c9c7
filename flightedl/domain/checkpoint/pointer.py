"""The value of ``checkpoint/latest``: which checkpoint counts, and what a master goes on from.

It is written by the fenced transaction that publishes a checkpoint; pservers and other commands only read it.
"""

from __future__ import annotations

import msgspec

from flightedl.domain.checkpoint.values import Pointer
from flightedl.errors import CorruptError
from flightedl.messages.decoding import from_json

FORMAT = 1


class PointerRecord(msgspec.Struct, forbid_unknown_fields=True):
    """What ``Checkpoints.encode`` stores."""

    format: int
    next_number: int
    latest: tuple[int, str] | None
    rejected: list[int]
    first: int = 0


def decode_pointer(encoded: bytes) -> PointerRecord:
    """What was stored.

    Raises:
        CorruptError: it is something else.
    """
    try:
        record = from_json(encoded, PointerRecord)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"not a stored state of checkpoints: {str(error)[:200]}") from None
    if record.format != FORMAT:
        raise CorruptError(f"checkpoints of format {record.format}; this version reads format {FORMAT}")
    return record


def latest_of(encoded: bytes) -> Pointer | None:
    """The newest complete checkpoint, from what ``Checkpoints.encode`` stored.

    Raises:
        CorruptError: not what it stores.
    """
    record = decode_pointer(encoded)
    return None if record.latest is None else Pointer(*record.latest)


def loadable_of(encoded: bytes) -> range | None:
    """The numbers of checkpoints that may be loaded: from the first one that the pointer named to the latest.

    None: there is no latest. Raises as ``latest_of``.
    """
    record = decode_pointer(encoded)
    return None if record.latest is None else range(record.first, record.latest[0] + 1)


def rejected_of(encoded: bytes) -> frozenset[int]:
    """The numbers of checkpoints that some pserver could not load. Raises as ``latest_of``."""
    return frozenset(decode_pointer(encoded).rejected)
