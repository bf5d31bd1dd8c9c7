"""The client's side of a dialogue: many small requests over one open stream.

Opening a call costs both sides several times what a message on an open stream does, and a server whose callers are many
spends most of its time on it. So whoever asks the same server again and again keeps the stream for a few seconds. The
server's side, and what travels, is described at ``dialogues`` of :class:`~flightedl.rpc.routes.Routes`.

A dialogue changes nothing about a request: it is meant for the same server of the same generation, ends with a value or
an error of :mod:`flightedl.errors`, and after an unknown outcome may have been carried out. An error ends the stream,
and the next request opens another. The token of the caller is looked at once for each stream: that is why one does not
live long. Whoever does not ask for a while lets the stream go by ``rest``, so that a server that stops need not wait.
"""

from __future__ import annotations

from contextlib import ExitStack

import msgspec

from flightedl.errors import FlightedlError, MessageError, OutcomeUnknownError
from flightedl.ports import Clock
from flightedl.rpc.client import Connection
from flightedl.rpc.client_streams import ClientExchange
from flightedl.rpc.identity import sealed, unsealed
from flightedl.rpc.routes import NO_COLUMNS

#: A stream is asked for so long after it was opened; then the next one is. A server that freezes holds the caller up to
#: so much longer than its own time limit.
_LIFETIME_S = 5.0


class Dialogue:
    """Asks a server one thing after the other over an open stream. For one thread.

    Args:
        verb: Of what is asked.
        clock: For the stream's time.
    """

    def __init__(self, verb: str, clock: Clock) -> None:
        self._descriptor = msgspec.json.encode({"verb": verb})
        self._clock = clock
        self._connection: Connection | None = None
        self._exchange: ClientExchange | None = None
        self._held = ExitStack()
        #: Until when requests are sent, and when the stream ends.
        self._old_at = self._ends_at = 0.0

    @property
    def is_open(self) -> bool:
        """Whether a stream is held."""
        return self._exchange is not None

    def ask(self, connection: Connection, request: bytes, *, timeout_s: float) -> bytes:
        """Send a request and return its reply.

        Args:
            connection: To whom; another one than last time ends the stream to that.
            request: As bytes.
            timeout_s: What it may take at most, and up to five seconds more if the server freezes.

        Raises:
            FlightedlError: what the server answered, or what happened on the way.
        """
        exchange = self._opened(connection, timeout_s)
        try:
            exchange.write_metadata(sealed(request))
            return _reply(exchange)
        except BaseException as error:
            self._exchange = self._connection = None
            self._held.__exit__(type(error), error, error.__traceback__)
            raise

    def rest(self) -> None:
        """Let go of the stream; asking again opens another. What goes wrong does not matter any more."""
        exchange, self._exchange, self._connection = self._exchange, None, None
        if exchange is None:
            return
        try:
            exchange.done_writing()
            self._held.close()
        except FlightedlError as error:
            self._held.__exit__(type(error), error, error.__traceback__)

    def _opened(self, connection: Connection, timeout_s: float) -> ClientExchange:
        now = self._clock.now()
        if connection is not self._connection or now > self._old_at or now + timeout_s > self._ends_at:
            self.rest()
        if self._exchange is None:
            lifetime_s = _LIFETIME_S + timeout_s
            opened = connection.exchange(self._descriptor, NO_COLUMNS, timeout_s=lifetime_s)
            self._exchange = self._held.enter_context(opened)
            self._connection = connection
            self._old_at, self._ends_at = now + _LIFETIME_S, now + lifetime_s
        return self._exchange


def _reply(exchange: ClientExchange) -> bytes:
    answer = exchange.read()
    if answer is None:
        raise OutcomeUnknownError("the server ended the dialogue before it answered")
    _, message = answer
    if message is None:
        raise MessageError("a message of a dialogue has no metadata")
    return unsealed(message)
