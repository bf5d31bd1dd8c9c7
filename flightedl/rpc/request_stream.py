"""The client's side of a request stream: many small requests over one open stream, see :mod:`flightedl.rpc.reuse`.

The server's side, and what travels, is described at ``request_streams`` of :class:`~flightedl.rpc.routes.Routes`.
"""

from __future__ import annotations

from flightedl.errors import MessageError
from flightedl.ports import Clock
from flightedl.rpc.client import Connection
from flightedl.rpc.identity import sealed, unsealed
from flightedl.rpc.reuse import HeldStream, ReusableExchange
from flightedl.rpc.routes import NO_COLUMNS


class RequestStream:
    """Asks a server one thing after the other over an open stream. For one thread.

    Args:
        verb: Of what is asked.
        clock: For the stream's time.
    """

    def __init__(self, verb: str, clock: Clock) -> None:
        self._kept = ReusableExchange(verb, NO_COLUMNS, clock, HeldStream)

    @property
    def is_open(self) -> bool:
        """Whether a stream is held."""
        return self._kept.is_open

    def ask(self, connection: Connection, request: bytes, *, timeout_s: float) -> bytes:
        """Send a request and return its reply.

        Args:
            connection: To whom; another one than last time ends the stream to that.
            request: As bytes.
            timeout_s: What it may take at most, and up to five seconds more if the server freezes.

        Raises:
            FlightedlError: what the server answered, or what happened on the way.
        """
        with self._kept.use(connection, timeout_s=timeout_s) as exchange:
            exchange.write_metadata(sealed(request))
            _, message = exchange.answer()
            if message is None:
                raise MessageError("a message of a request stream has no metadata")
            return unsealed(message)

    def close_idle(self) -> None:
        """Let go of the stream; asking again opens another. What goes wrong does not matter any more."""
        self._kept.close_idle()
