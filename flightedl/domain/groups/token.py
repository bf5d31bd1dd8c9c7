"""Token: position of a group in its data, as text for the user's own checkpoint.

Rules:

* A token contains a digest of the data, the seed and the settings of the order, but it does not depend on the number of
  ranks or the batch size. Any group that declares the same data and order can therefore resume from it.
* Equal tokens are encoded as equal strings on all ranks. They have about 100 characters.
* A string that is incomplete, was altered, or comes from another version is rejected with a one-sentence error.
"""

from __future__ import annotations

from base64 import b85decode, b85encode
from zlib import crc32

import msgspec

from flightedl.domain.groups.plan import Position
from flightedl.domain.groups.shuffling import Shuffling
from flightedl.errors import UsageError
from flightedl.messages.decoding import from_msgpack

VERSION = 3
_NAME = "flightedl-data"


class Token(msgspec.Struct, frozen=True, array_like=True):
    """Position in certain data."""

    #: Digest of the data.
    data: str
    #: Seed with which the data is shuffled; None if the data is not shuffled.
    seed: int | None
    position: Position
    shuffling: Shuffling = Shuffling()

    def __str__(self) -> str:
        position = self.position
        return f"epoch {position.epoch + 1} after {position.records:,} records"


def encode(token: Token) -> str:
    """Return the token as a string that consists of its name, version, checksum and content."""
    return _text(msgspec.msgpack.encode(token))


def decode(text: object) -> Token:
    """Decode a token.

    Raises:
        UsageError: The text is damaged, comes from another version, or is not a token.
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
    if int(version) < VERSION:
        raise UsageError(
            f"this position was saved by an older flightedl (format {version}, this one reads {VERSION}), which "
            "read records in another order: resume with that version, or start without load_state_dict()"
        )
    try:
        content = b85decode(rest.partition(":")[2])
        token = from_msgpack(content, Token)
    except (ValueError, msgspec.MsgspecError):
        content, token = b"", None
    if token is None or _text(content) != text:
        raise UsageError("this position in the data is damaged or incomplete: load an older checkpoint")
    return token


def require_same_data(token: Token, data: str, seed: int | None, shuffling: Shuffling) -> None:
    """Raise UsageError unless the token belongs to the same data and order."""
    if token.data != data:
        raise UsageError(
            f"this position belongs to other data (digest {token.data}, here {data}): declare the same files, "
            "unchanged and with the same names=, delimiter= and null_values=, or start without load_state_dict()"
        )
    if token.seed != seed:
        raise UsageError(
            f"this position belongs to {_shuffled(token.seed)}, but the data is declared with {_shuffled(seed)}: "
            "declare the same order, or start without load_state_dict()"
        )
    if token.shuffling != shuffling:
        raise UsageError(
            f"this position belongs to {token.shuffling}, but the data is declared with {shuffling}: declare the same "
            "order, or start without load_state_dict()"
        )


def _text(content: bytes) -> str:
    return f"{_NAME}:{VERSION}:{crc32(content):08x}:{b85encode(content).decode()}"


def _shuffled(seed: int | None) -> str:
    return "shuffle=False" if seed is None else f"seed={seed}"
