"""Who talks to whom: the headers of every call.

Request headers: whom the caller means (``flightedl-expect``), who it is (``flightedl-caller``), how long it waits
(``flightedl-timeout``, seconds: relative, because clocks differ), and a checksum of its request
(``flightedl-checksum``; may be left out), for nothing else protects it where there is no TLS. Reply header: who answers
(``flightedl-server``). Messages of a request stream have no headers: their checksum stands before them.

The *generation* is the fence. It is the create_revision of the process's key in etcd, so a later process in the same
place always has another one. 0 stands for "not known": a server before it is registered, a client that does not care.
Headers prove nothing; :mod:`flightedl.rpc.authentication` does.
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

#: gRPC refuses more than 8 kB of headers in all.
_NAME_LIMIT = 1024


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    """One server process of one job. ``generation`` 0: not registered yet, or not known to the client."""

    job: str
    role: str
    index: int = 0
    generation: int = 0

    def __str__(self) -> str:
        generation = f"generation {self.generation}" if self.generation else "not registered"
        return f"{self.role} {self.index} of job {self.job!r} ({generation})"

    def to_header(self) -> str:
        """ASCII text for a header."""
        return f"{quote(self.job, safe='')}/{quote(self.role, safe='')}/{self.index}/{self.generation}"

    @staticmethod
    def from_header(text: str) -> ServerIdentity:
        """The inverse of ``to_header``; MessageError when it is anything else."""
        return _server_named(text)

    def check_meant_by(self, expected: ServerIdentity) -> None:
        """Raise ReplacedError unless this server is the one that ``expected`` means."""
        same_place = (self.job, self.role, self.index) == (expected.job, expected.role, expected.index)
        same_generation = expected.generation in (0, self.generation)
        if not (same_place and same_generation):
            raise ReplacedError(f"this is {self}, not {expected}: look the address up again")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: the role it claims and a name for logs."""

    role: str = ""
    name: str = ""

    def __str__(self) -> str:
        return f"{self.role or 'unknown'}/{self.name or 'unnamed'}"

    def to_header(self) -> str:
        """ASCII text for a header."""
        return f"{quote(self.role, safe='')}/{quote(self.name[:256], safe='')}"

    @staticmethod
    def from_header(text: str) -> Caller:
        """The inverse of ``to_header``; MessageError when it is anything else."""
        return _caller_named(text)


# A server is called by the same few, under the same name, all the time.


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
    """Seconds, finite and positive; MessageError otherwise."""
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = math.nan
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise MessageError("the timeout in a header is not a positive number of seconds")
    return timeout_s


def checksum_of(request: bytes) -> str:
    """What stands in the header for a request: xxh3-64, 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(request)


#: Length of what ``checksum_of`` returns, and so of what stands before a sealed message.
SEAL_BYTES = 16


def sealed(content: bytes) -> bytes:
    """A message of a request stream: the checksum of a request or reply, then itself."""
    return checksum_of(content).encode() + content


def unsealed(message: bytes) -> bytes:
    """What was sealed; raises DamagedError unless it is as it was."""
    content = message[SEAL_BYTES:]
    check_undamaged(content, message[:SEAL_BYTES].decode("latin-1"))
    return content


def check_undamaged(request: bytes, header: str | None) -> None:
    """Raise DamagedError unless a request has the checksum that its header names, if it names one."""
    if header is not None and header != checksum_of(request):
        raise DamagedError("the request does not match its checksum: it was damaged on the way, send it again")
