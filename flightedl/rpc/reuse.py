"""Client streams that stay open between requests.

Opening a call takes several times as long as a message on an open stream. Therefore a client that sends many requests
to a server keeps a stream open for a few seconds. Each request is answered completely before the next one is sent.

Keeping a stream does not change the semantics of a request: it goes to the same server of the same generation, and if
its outcome is unknown, it may have been carried out. After an error, the stream is closed, and the next request opens a
new one.

Streams are short-lived, because the server authorizes the caller only when a stream is opened. An idle client may call
``close_idle``, but need not, because a stopping server does not wait for idle streams.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import msgspec
import pyarrow as pa

from flightedl.ports import Clock
from flightedl.rpc.client import Connection
from flightedl.rpc.client_streams import ClientExchange

#: Seconds for which an open stream accepts new requests. If the server is frozen, a caller may wait for this long
#: beyond its timeout.
_LIFETIME_S = 5.0


class Held(Protocol):
    """An open stream that is kept for further requests."""

    @property
    def connection(self) -> Connection: ...

    @property
    def exchange(self) -> ClientExchange: ...

    @property
    def old_at(self) -> float:
        """Time after which the stream accepts no more requests."""
        ...

    @property
    def ends_at(self) -> float: ...


@dataclass(frozen=True, slots=True)
class HeldStream:
    """An open stream that carries no other state."""

    connection: Connection
    exchange: ClientExchange
    old_at: float
    ends_at: float


HeldKind = TypeVar("HeldKind", bound=Held)


class ReusableExchange(Generic[HeldKind]):
    """Keeps at most one open stream. While it is in use, other threads get separate streams. Thread-safe.

    Args:
        verb: Verb with which the stream is opened. Requests are messages on the stream.
        schema: Schema of the client's messages.
        clock: Clock of the stream's deadline.
        make: Creates the kept object from a newly opened stream. Its arguments are the fields of ``Held``, in order.
    """

    def __init__(
        self,
        verb: str,
        schema: pa.Schema,
        clock: Clock,
        make: Callable[[Connection, ClientExchange, float, float], HeldKind],
    ) -> None:
        self._make = make
        self._descriptor = msgspec.json.encode({"verb": verb})
        self._schema = schema
        self._clock = clock
        self._lock = threading.Lock()
        self._held: HeldKind | None = None

    @property
    def is_open(self) -> bool:
        """True if a stream is open and no request is using it."""
        return self._held is not None

    @contextmanager
    def use(self, connection: Connection, *, timeout_s: float) -> Iterator[ClientExchange]:
        """Yield an open stream for one request, which must be answered completely before the block ends.

        Args:
            connection: Connection to the server. If a stream on another connection is open, it is closed.
            timeout_s: Time limit of the request. If the server is frozen, the request takes up to five seconds longer.
        """
        held = self.begin(connection, timeout_s=timeout_s)
        try:
            yield held.exchange
        except BaseException as error:
            self.end(held, error)
            raise
        self.end(held)

    def begin(self, connection: Connection, *, timeout_s: float) -> HeldKind:
        """Return an open stream for one request (see ``use``). The caller must call ``end`` after the request."""
        held = self._keep(None)
        if held is not None:
            now = self._clock.now()
            if connection is held.connection and now <= held.old_at and now + timeout_s <= held.ends_at:
                return held
            _end(held.exchange)
        return self._open(connection, timeout_s)

    def end(self, held: HeldKind, error: BaseException | None = None) -> None:
        """Keep the stream if its request was answered completely. Close it if the request failed."""
        if error is not None:
            held.exchange.__exit__(type(error), error, error.__traceback__)
            return
        other = self._keep(held)
        if other is not None:
            _end(other.exchange)

    def close_idle(self) -> None:
        """Close the stream without waiting. The next request opens a new one."""
        held = self._keep(None)
        if held is not None:
            _end(held.exchange)

    def _keep(self, held: HeldKind | None) -> HeldKind | None:
        """Replace the stream that is kept. Return the previous one."""
        with self._lock:
            before, self._held = self._held, held
            return before

    def _open(self, connection: Connection, timeout_s: float) -> HeldKind:
        now, lifetime_s = self._clock.now(), _LIFETIME_S + timeout_s
        exchange = connection.exchange(self._descriptor, self._schema, timeout_s=lifetime_s).__enter__()
        try:
            return self._make(connection, exchange, now + _LIFETIME_S, now + lifetime_s)
        except BaseException as error:
            exchange.__exit__(type(error), error, error.__traceback__)
            raise


def _end(exchange: ClientExchange) -> None:
    """Abort the stream: no request is in progress, and a normal end could take a long time."""
    exchange.__exit__(None, None, None)
