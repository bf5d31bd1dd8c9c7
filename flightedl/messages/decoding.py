"""Thread-safe decoding with msgspec.

msgspec inspects the fields of a type when the type is first used, and stores the result before the inspection is
complete. Other threads may run during the inspection, because resolving annotations executes Python code. A thread that
decodes the same type at that time reads uninitialized memory, and the process is killed by SIGSEGV. Therefore this
module creates and caches decoders under a lock. Any thread may use them.
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
    """Call a function that creates decoders or uses a type for the first time. Only one thread at a time may do so."""
    with _making:
        return make()


def builtins_from_json(data: bytes | str | msgspec.Raw) -> Any:
    """Decode JSON to dicts, lists and strings. Raises the same errors as ``msgspec.json.decode``."""
    return _of_anything.decode(data)


def decoder_of(kind: type[Value]) -> msgspec.json.Decoder[Value]:
    """Return the cached JSON decoder of a type, for callers that cannot afford the lookup in ``from_json``."""
    decoder = _of_json.get(kind)
    if decoder is None:
        decoder = _of_json[kind] = made_alone(lambda: msgspec.json.Decoder(kind))
    return decoder


def from_json(data: bytes | str | msgspec.Raw, kind: type[Value]) -> Value:
    """Decode JSON to a value of the given type. Raises the same errors as ``msgspec.json.decode``."""
    value: Value = (_of_json.get(kind) or decoder_of(kind)).decode(data)
    return value


def from_msgpack(data: bytes, kind: type[Value]) -> Value:
    """Decode MessagePack to a value of the given type. Raises the same errors as ``msgspec.msgpack.decode``."""
    decoder = _of_msgpack.get(kind)
    if decoder is None:
        decoder = _of_msgpack[kind] = made_alone(lambda: msgspec.msgpack.Decoder(kind))
    value: Value = decoder.decode(data)
    return value
