"""Token: position of a group in its data, as text for the user's own checkpoint.

Rules:

* A token contains a digest of the data and the seed, but it does not depend on the number of ranks or the batch size.
  Any group that reads the same data with the same seed can therefore resume from it.
* Equal tokens are encoded as equal strings on all ranks.
* The string is at most 4 kB long for groups of up to 512 ranks, even if there are millions of tasks.
* A string that is incomplete, was altered, or comes from a newer version is rejected with a one-sentence error.
"""

from __future__ import annotations

from base64 import b85decode, b85encode
from itertools import accumulate, pairwise
from zlib import crc32

import msgspec

from flightedl.domain.groups.plan import Position
from flightedl.errors import UsageError
from flightedl.messages.decoding import from_msgpack

VERSION = 1
_NAME = "flightedl-data"


class Token(msgspec.Struct, frozen=True):
    """Position in certain data."""

    #: Digest of the data.
    data: str
    #: Seed with which the data is shuffled; None if the data is not shuffled.
    seed: int | None
    position: Position

    def __str__(self) -> str:
        position = self.position
        return f"epoch {position.epoch + 1} after {position.records:,} records"


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    data: str
    seed: int | None
    #: The position, without its opened tasks.
    position: Position
    #: Indices of the opened tasks. All but the first are stored as differences from the previous index.
    gaps: list[int]
    firsts: list[int]


def encode(token: Token) -> str:
    """Return the token as a string that consists of its name, version, checksum and content."""
    position = token.position
    numbers = [number for number, _ in position.opened]
    stored = _Stored(
        token.data,
        token.seed,
        msgspec.structs.replace(position, opened=()),
        [after - before for before, after in pairwise([0, *numbers])],
        [first for _, first in position.opened],
    )
    return _text(msgspec.msgpack.encode(stored))


def decode(text: object) -> Token:
    """Decode a token.

    Raises:
        UsageError: The text is damaged, comes from a newer version, or is not a token.
    """
    name, _, rest = text.partition(":") if isinstance(text, str) else ("", "", "")
    version, _, rest = rest.partition(":")
    if name != _NAME or not version.isdecimal():
        raise UsageError("this is not a position in flightedl's data: load the result of data.state_dict()")
    if int(version) > VERSION:
        raise UsageError(
            f"this position was saved by a newer flightedl (format {version}, this one knows {VERSION}): "
            "install the newer version, or load an older checkpoint"
        )
    try:
        content = b85decode(rest.partition(":")[2])
        stored = from_msgpack(content, _Stored)
        opened = tuple(zip(accumulate(stored.gaps), stored.firsts, strict=True))
    except (ValueError, msgspec.MsgspecError):
        content, stored, opened = b"", None, ()
    if stored is None or _text(content) != text:
        raise UsageError("this position in the data is damaged or incomplete: load an older checkpoint")
    return Token(stored.data, stored.seed, msgspec.structs.replace(stored.position, opened=opened))


def require_same_data(token: Token, data: str, seed: int | None) -> None:
    """Raise UsageError unless the token belongs to the same data and seed."""
    if token.data != data:
        raise UsageError(
            f"this position belongs to other data (digest {token.data}, here {data}): declare the same files, "
            "unchanged, with the same records_per_task, or start without load_state_dict()"
        )
    if token.seed != seed:
        raise UsageError(
            f"this position belongs to {_shuffled(token.seed)}, but the data is declared with {_shuffled(seed)}: "
            "declare the same order, or start without load_state_dict()"
        )


def _text(content: bytes) -> str:
    return f"{_NAME}:{VERSION}:{crc32(content):08x}:{b85encode(content).decode()}"


def _shuffled(seed: int | None) -> str:
    return "shuffle=False" if seed is None else f"seed={seed}"
