"""The client's side of a stream that carries one request after the other, kept open from one to the next.

Opening a call costs both sides several times what a message on an open stream does. So whoever asks the same server
again and again keeps the stream for a few seconds. Each request on it is answered wholly before the next one is sent;
what travels is the user's affair.

It changes nothing about a request: it is meant for the same server of the same generation, and after an unknown outcome
may have been carried out. An error ends the stream, and the next request opens another. The token of the caller is
looked at once for each stream: that is why one does not live long. Whoever does not ask for a while lets the stream go
by ``close_idle``, or leaves it: a server does not wait for a stream on which nothing is under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa

from flightedl.ports import Clock
from flightedl.rpc.client import Connection
from flightedl.rpc.client_streams import ClientExchange

#: A stream is used for so long after it was opened; then the next one is. A server that freezes holds the caller up to
#: so much longer than its own time limit.
_LIFETIME_S = 5.0


@dataclass(frozen=True, slots=True)
class HeldStream:
    """An open stream."""

    connection: Connection
    exchange: ClientExchange
    #: What was made of it when it was opened.
    greeted: Any
    #: Until when requests are sent, and when the stream ends.
    old_at: float
    ends_at: float


class ReusableExchange:
    """At most one open stream. A thread that comes while another one uses it gets a stream of its own.

    Args:
        verb: What the stream is opened with; requests are messages on it.
        schema: Of what is written.
        clock: For the stream's time.
        greet: Told of each stream that was opened, before its first request; gives what ``use_greeted`` has with it.
    """

    def __init__(
        self,
        verb: str,
        schema: pa.Schema,
        clock: Clock,
        greet: Callable[[Connection, ClientExchange], object] = lambda _connection, _exchange: None,
    ) -> None:
        self._greet = greet
        self._descriptor = msgspec.json.encode({"verb": verb})
        self._schema = schema
        self._clock = clock
        self._held: HeldStream | None = None

    @property
    def is_open(self) -> bool:
        """Whether a stream is held."""
        return self._held is not None

    @contextmanager
    def use(self, connection: Connection, *, timeout_s: float) -> Iterator[ClientExchange]:
        """An open stream for one request, which is answered wholly when the block is left without an exception.

        Args:
            connection: To whom; another one than last time ends the stream to that.
            timeout_s: What the request may take at most, and up to five seconds more if the server freezes.
        """
        with self.use_greeted(connection, timeout_s=timeout_s) as (exchange, _):
            yield exchange

    @contextmanager
    def use_greeted(self, connection: Connection, *, timeout_s: float) -> Iterator[tuple[ClientExchange, Any]]:
        """As ``use``, with what was made of the stream when it was opened."""
        held = self.begin(connection, timeout_s=timeout_s)
        try:
            yield held.exchange, held.greeted
        except BaseException as error:
            self.end(held, error)
            raise
        self.end(held, None)

    def begin(self, connection: Connection, *, timeout_s: float) -> HeldStream:
        """As ``use_greeted``, where a step is so short that a ``with`` block of the library counts; then ``end``."""
        return self._take(connection, timeout_s) or self._open(connection, timeout_s)

    def end(self, held: HeldStream, error: BaseException | None) -> None:
        """The request was answered wholly, or ended with this error, which ends the stream."""
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

    def _take(self, connection: Connection, timeout_s: float) -> HeldStream | None:
        held, self._held = self._held, None
        if held is None:
            return None
        now = self._clock.now()
        if connection is held.connection and now <= held.old_at and now + timeout_s <= held.ends_at:
            return held
        _end(held.exchange)
        return None

    def _open(self, connection: Connection, timeout_s: float) -> HeldStream:
        now, lifetime_s = self._clock.now(), _LIFETIME_S + timeout_s
        exchange = connection.exchange(self._descriptor, self._schema, timeout_s=lifetime_s).__enter__()
        try:
            greeted = self._greet(connection, exchange)
        except BaseException as error:
            exchange.__exit__(type(error), error, error.__traceback__)
            raise
        return HeldStream(connection, exchange, greeted, now + _LIFETIME_S, now + lifetime_s)


def _end(exchange: ClientExchange) -> None:
    """Nothing is under way, so the stream is simply broken off: waiting for its end could take long."""
    exchange.__exit__(None, None, None)
