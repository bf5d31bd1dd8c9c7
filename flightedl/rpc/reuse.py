"""Streams that carry one request after the other and stay open between them: the client's side.

Opening a call costs several times what a message on an open stream costs. A client that asks the same server again and
again therefore keeps the stream for a few seconds. Each request is answered completely before the next one is sent.

A kept stream does not change what a request means: it is for the same server of the same generation, and after an
unknown outcome it may have been carried out. An error ends the stream, and the next request opens another. The server
checks the caller's token once for each stream, so streams are short-lived. A client that has nothing to ask for a while
calls ``close_idle``, or leaves the stream: a server does not wait for a stream that has nothing under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import msgspec
import pyarrow as pa

from flightedl.ports import Clock
from flightedl.rpc.client import Connection
from flightedl.rpc.client_streams import ClientExchange

#: Seconds for which an open stream takes new requests. A server that freezes holds the caller up for so much longer
#: than the caller's own time limit.
_LIFETIME_S = 5.0


class Held(Protocol):
    """An open stream, as it is kept between requests."""

    @property
    def connection(self) -> Connection:
        """The connection that it was opened on."""
        ...

    @property
    def exchange(self) -> ClientExchange:
        """The Flight stream."""
        ...

    @property
    def old_at(self) -> float:
        """Instant after which it takes no more requests."""
        ...

    @property
    def ends_at(self) -> float:
        """Instant at which the stream's own time is over."""
        ...


@dataclass(frozen=True, slots=True)
class HeldStream:
    """An open stream with nothing beside it."""

    connection: Connection
    exchange: ClientExchange
    old_at: float
    ends_at: float


HeldKind = TypeVar("HeldKind", bound=Held)


class ReusableExchange(Generic[HeldKind]):
    """At most one open stream. A thread that comes while another one uses it gets a stream of its own.

    Args:
        verb: What the stream is opened with; requests are messages on it.
        schema: Of what is written.
        clock: For the stream's time.
        make: Makes what is kept of a stream that was just opened; takes the fields of ``Held`` in their order.
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
        self._held: HeldKind | None = None

    @property
    def is_open(self) -> bool:
        """True if a stream is kept."""
        return self._held is not None

    @contextmanager
    def use(self, connection: Connection, *, timeout_s: float) -> Iterator[ClientExchange]:
        """Lend an open stream for one request, which is answered completely if the block ends without an exception.

        Args:
            connection: The server's; the stream to another one ends.
            timeout_s: Time limit of the request; five seconds more if the server freezes.
        """
        held = self.begin(connection, timeout_s=timeout_s)
        try:
            yield held.exchange
        except BaseException as error:
            self.end(held, error)
            raise
        self.end(held)

    def begin(self, connection: Connection, *, timeout_s: float) -> HeldKind:
        """Return an open stream for one request, see ``use``. Call ``end`` afterwards, whatever happens."""
        held, self._held = self._held, None
        if held is not None:
            now = self._clock.now()
            if connection is held.connection and now <= held.old_at and now + timeout_s <= held.ends_at:
                return held
            _end(held.exchange)
        return self._open(connection, timeout_s)

    def end(self, held: HeldKind, error: BaseException | None = None) -> None:
        """Keep the stream of a request that was answered completely, or end the stream of one that failed."""
        if error is not None:
            held.exchange.__exit__(type(error), error, error.__traceback__)
            return
        other, self._held = self._held, held
        if other is not None:
            _end(other.exchange)

    def close_idle(self) -> None:
        """Let go of the stream, without waiting for anybody; the next use opens another."""
        held, self._held = self._held, None
        if held is not None:
            _end(held.exchange)

    def _open(self, connection: Connection, timeout_s: float) -> HeldKind:
        now, lifetime_s = self._clock.now(), _LIFETIME_S + timeout_s
        exchange = connection.exchange(self._descriptor, self._schema, timeout_s=lifetime_s).__enter__()
        try:
            return self._make(connection, exchange, now + _LIFETIME_S, now + lifetime_s)
        except BaseException as error:
            exchange.__exit__(type(error), error, error.__traceback__)
            raise


def _end(exchange: ClientExchange) -> None:
    """Break the stream off. Nothing is under way, and waiting for its end could take long."""
    exchange.__exit__(None, None, None)
