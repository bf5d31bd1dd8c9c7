"""Client's end of a request stream, which carries many small requests (see :mod:`flightedl.rpc.reuse`).

For the messages and the server's end, see ``request_streams`` of :class:`~flightedl.rpc.routes.Routes`.
"""

from __future__ import annotations

from flightedl.errors import MessageError
from flightedl.ports import Clock
from flightedl.rpc.client import Connection
from flightedl.rpc.identity import sealed, unsealed
from flightedl.rpc.reuse import HeldStream, ReusableExchange
from flightedl.rpc.routes import NO_COLUMNS


class RequestStream:
    """Sends requests to a server on an open stream, one after the other. Not thread-safe.

    Args:
        verb: Verb of the requests.
        clock: Clock of the stream's deadline.
    """

    def __init__(self, verb: str, clock: Clock) -> None:
        self._kept = ReusableExchange(verb, NO_COLUMNS, clock, HeldStream)

    @property
    def is_open(self) -> bool:
        return self._kept.is_open

    def ask(self, connection: Connection, request: bytes, *, timeout_s: float) -> bytes:
        """Send a request and return its reply.

        Args:
            connection: Connection to the server. If it differs from the previous one, the old stream is closed.
            request: The encoded request.
            timeout_s: Time limit of the request. If the server is frozen, the request takes up to five seconds longer.

        Raises:
            FlightedlError: the server's error, or a failure of the connection.
        """
        with self._kept.use(connection, timeout_s=timeout_s) as exchange:
            exchange.write_metadata(sealed(request))
            _, message = exchange.answer()
            if message is None:
                raise MessageError("a message of a request stream has no metadata")
            return unsealed(message)

    def close_idle(self) -> None:
        """Close the stream and ignore any error. The next request opens a new stream."""
        self._kept.close_idle()
