"""Headers of calls and replies: identities of caller and server, timeout, and checksum.

Headers of a request:

* ``flightedl-expect``: the expected server
* ``flightedl-caller``: the caller
* ``flightedl-timeout``: the caller's timeout in seconds. A point in time would be unreliable, because clocks differ.
* ``flightedl-checksum``: optional checksum of the request. Without TLS, it is the request's only protection.

The header of a reply, ``flightedl-server``, names the server that sent it. Messages of a request stream have no
headers; each begins with its checksum.

The *generation* fences off replaced processes. It is the create_revision of the process's key in etcd, so a successor
always has a different one. 0 stands for a server that has not registered yet, or for a client that accepts any
generation. Headers prove nothing; certificates do (:mod:`flightedl.rpc.authentication`).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from urllib.parse import quote, unquote

import xxhash

from flightedl.errors import DamagedError, MessageError, ReplacedError

SERVER_HEADER = "flightedl-server"
EXPECT_HEADER = "flightedl-expect"
CALLER_HEADER = "flightedl-caller"
TIMEOUT_HEADER = "flightedl-timeout"
CHECKSUM_HEADER = "flightedl-checksum"

#: gRPC rejects calls with more than 8 kB of headers.
_NAME_LIMIT = 1024


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    """A server process of a job. ``generation`` is 0 if the server is unregistered, or the client does not know it."""

    job: str
    role: str
    index: int = 0
    generation: int = 0

    def __str__(self) -> str:
        generation = f"generation {self.generation}" if self.generation else "not registered"
        return f"{self.role} {self.index} of job {self.job!r} ({generation})"

    def to_header(self) -> str:
        return f"{quote(self.job, safe='')}/{quote(self.role, safe='')}/{self.index}/{self.generation}"

    @staticmethod
    def from_header(text: str) -> ServerIdentity:
        """Decode a text from ``to_header``. Raises MessageError if it is invalid."""
        return _server_named(text)

    def check_meant_by(self, expected: ServerIdentity) -> None:
        """Raise ReplacedError unless this server matches ``expected``."""
        same_place = (self.job, self.role, self.index) == (expected.job, expected.role, expected.index)
        same_generation = expected.generation in (0, self.generation)
        if not (same_place and same_generation):
            raise ReplacedError(f"this is {self}, not {expected}: look the address up again")


@dataclass(frozen=True, slots=True)
class Caller:
    """Identity of a caller: the role that it claims, and a name for logs."""

    role: str = ""
    name: str = ""

    def __str__(self) -> str:
        return f"{self.role or 'unknown'}/{self.name or 'unnamed'}"

    def to_header(self) -> str:
        return f"{quote(self.role, safe='')}/{quote(self.name[:256], safe='')}"

    @staticmethod
    def from_header(text: str) -> Caller:
        """Decode a text from ``to_header``. Raises MessageError if it is invalid."""
        return _caller_named(text)


# Cached, because a server has few callers and their names never change.


@functools.lru_cache(maxsize=256)
def _server_named(text: str) -> ServerIdentity:
    parts = text.split("/")
    if len(parts) != 4 or len(text) > _NAME_LIMIT or not (parts[2].isdecimal() and parts[3].isdecimal()):
        raise MessageError("a server's name in a header does not have the form job/role/index/generation")
    return ServerIdentity(unquote(parts[0]), unquote(parts[1]), int(parts[2]), int(parts[3]))


@functools.lru_cache(maxsize=1024)
def _caller_named(text: str) -> Caller:
    role, slash, name = text.partition("/")
    if not slash or len(text) > _NAME_LIMIT:
        raise MessageError("a caller's name in a header does not have the form role/name")
    return Caller(unquote(role), unquote(name))


def timeout_from_header(text: str) -> float:
    """Return the timeout in seconds. Raises MessageError unless it is a finite, positive number."""
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = math.nan
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise MessageError("the timeout in a header is not a positive number of seconds")
    return timeout_s


def checksum_of(request: bytes) -> str:
    """Return the checksum of a request as a header: xxh3-64 in 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(request)


#: Length in bytes of the checksum at the start of a sealed message.
SEAL_BYTES = 16


def sealed(content: bytes) -> bytes:
    """Return a message of a request stream: the content, preceded by its checksum."""
    return checksum_of(content).encode() + content


def unsealed(message: bytes) -> bytes:
    """Return the content of a sealed message. Raises DamagedError if the checksum does not match."""
    content = message[SEAL_BYTES:]
    check_undamaged(content, message[:SEAL_BYTES].decode("latin-1"))
    return content


def check_undamaged(request: bytes, header: str | None) -> None:
    """Raise DamagedError if the header contains a checksum that does not match the request."""
    if header is not None and header != checksum_of(request):
        raise DamagedError("the request does not match its checksum: it was damaged on the way, send it again")
