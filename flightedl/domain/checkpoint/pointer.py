"""The value of the key ``checkpoint/latest``: the newest checkpoint, and the state of the master's ``Checkpoints``.

Only the fenced transaction that publishes a checkpoint writes this value; pservers and commands only read it.
"""

from __future__ import annotations

import msgspec

from flightedl.domain.checkpoint.values import Pointer
from flightedl.errors import CorruptError
from flightedl.messages.decoding import from_json

FORMAT = 1


class PointerRecord(msgspec.Struct, forbid_unknown_fields=True):
    """The stored form of ``Checkpoints``."""

    format: int
    next_number: int
    latest: tuple[int, str] | None
    rejected: list[int]
    first: int = 0


def decode_pointer(encoded: bytes) -> PointerRecord:
    """Decode the output of ``Checkpoints.encode``. Raises CorruptError for anything else."""
    try:
        record = from_json(encoded, PointerRecord)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"not a stored state of checkpoints: {str(error)[:200]}") from None
    if record.format != FORMAT:
        raise CorruptError(f"the pointer has format {record.format}, but this version reads format {FORMAT}")
    return record


def latest_of(encoded: bytes) -> Pointer | None:
    """Return the newest complete checkpoint, or None. Raises the same errors as ``decode_pointer``."""
    record = decode_pointer(encoded)
    return None if record.latest is None else Pointer(*record.latest)


def loadable_of(encoded: bytes) -> range | None:
    """Return the range of loadable checkpoints, or None. Raises the same errors as ``decode_pointer``.

    The range extends from the pointer's first checkpoint to its latest one.
    """
    record = decode_pointer(encoded)
    return None if record.latest is None else range(record.first, record.latest[0] + 1)


def rejected_of(encoded: bytes) -> frozenset[int]:
    """Return the numbers of checkpoints that a pserver failed to load. Raises the same errors as ``decode_pointer``."""
    return frozenset(decode_pointer(encoded).rejected)
