"""Decoding that threads may begin together.

msgspec looks at a type's fields when it is used for the first time, and stores the result before it is complete: a
second thread that decodes the same type meanwhile reads uninitialized memory, and the process dies by SIGSEGV.
Resolving annotations runs Python code, so that the other thread gets its turn. Here one thread at a time makes
decoders; they are kept, and every thread may use them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

Value = TypeVar("Value")

_making = threading.Lock()
_of_json: dict[Any, msgspec.json.Decoder[Any]] = {}
_of_anything = msgspec.json.Decoder()
_of_msgpack: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def made_alone(make: Callable[[], Value]) -> Value:
    """Call a function that makes decoders, or uses a type for the first time, while no other thread does so."""
    with _making:
        return make()


def builtins_from_json(data: bytes | str | msgspec.Raw) -> Any:
    """Decode JSON to dicts, lists and texts. Raises as ``msgspec.json.decode`` does."""
    return _of_anything.decode(data)


def decoder_of(kind: type[Value]) -> msgspec.json.Decoder[Value]:
    """Return the decoder of a type in JSON, for a caller to whom ``from_json`` takes too long."""
    decoder = _of_json.get(kind)
    if decoder is None:
        decoder = _of_json[kind] = made_alone(lambda: msgspec.json.Decoder(kind))
    return decoder


def from_json(data: bytes | str | msgspec.Raw, kind: type[Value]) -> Value:
    """Decode JSON to a value of a type. Raises as ``msgspec.json.decode`` does."""
    value: Value = (_of_json.get(kind) or decoder_of(kind)).decode(data)
    return value


def from_msgpack(data: bytes, kind: type[Value]) -> Value:
    """Decode MessagePack to a value of a type. Raises as ``msgspec.msgpack.decode`` does."""
    decoder = _of_msgpack.get(kind)
    if decoder is None:
        decoder = _of_msgpack[kind] = made_alone(lambda: msgspec.msgpack.Decoder(kind))
    value: Value = decoder.decode(data)
    return value
