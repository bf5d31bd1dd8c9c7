"""Transport: clients and servers that exchange bytes and record batches over Arrow Flight.

Only this package uses Flight.

The server's side:

* ``routes``: a server's verbs and their handlers. ``call``: a call in progress, and the limits on calls.
* ``server``: lifecycle of a server. ``admission``: checks before a handler runs. ``service``: methods of a Flight
  server.
* ``streams``: the server's end of uploads and bidirectional streams.

The client's side:

* ``client``: a connection to a server. ``client_streams``: its calls and streams. ``connector``: creation of
  connections.
* ``request_stream``: many small requests on one stream. ``reuse``: client streams that stay open between requests.

Both sides:

* ``identity``: names and generations in headers. ``authentication``: certificates that prove a process's role.
* ``errors``: encoding of errors. ``validation``: checks of received batches. ``integrity``: policy for checksums.
* ``same_host``: handshake for sharing memory on one host. ``line``: Unix socket for small messages. ``channel``: one
  end of a stream that uses both of these.
* ``arrow_flight``: import of pyarrow.flight after the environment has been set.

A call goes from ``client`` to ``service``, which admits the call, looks up its handler in ``routes``, and runs the
handler. The messages of steps are exchanged on an open stream. A ``channel`` at each end decides how a message is
transported: on the stream, on the line, or in shared memory.

Guarantees for every call:

* Every call has a time limit on both sides. A client call without ``timeout_s`` neither type-checks nor runs. A server
  ends a stream that exceeds its deadline; if the peer is not reading, it closes the connection.
* Every request names the expected server, and every reply names the server that sent it. A call for another generation
  is refused before it has any effect.
* Every call returns a value or raises an error from :mod:`flightedl.errors`. A *refused* call is distinct from a call
  with an *unknown outcome*.
* An upload is complete only if its commit record has been received and matches the received batches.

The public names are imported at first use, so that :mod:`flightedl.process.tuning` can run before pyarrow is loaded.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flightedl.rpc.authentication import Credentials, Role
    from flightedl.rpc.call import Call, Limits, Message
    from flightedl.rpc.client import Connection
    from flightedl.rpc.client_streams import ClientExchange, Download
    from flightedl.rpc.connector import Connector
    from flightedl.rpc.identity import Caller, ServerIdentity
    from flightedl.rpc.routes import Answer, Endpoint, Endpoints, ExchangeRoute, Outgoing, PutRoute, Routes
    from flightedl.rpc.server import FlightServer
    from flightedl.rpc.streams import Exchange, Incoming
    from flightedl.rpc.validation import BatchLimits

_HOMES = {
    "Answer": "routes",
    "BatchLimits": "validation",
    "Call": "call",
    "Caller": "identity",
    "ClientExchange": "client_streams",
    "Connection": "client",
    "Connector": "connector",
    "Credentials": "authentication",
    "Download": "client_streams",
    "Endpoint": "routes",
    "Endpoints": "routes",
    "Exchange": "streams",
    "ExchangeRoute": "routes",
    "FlightServer": "server",
    "Incoming": "streams",
    "Limits": "call",
    "Message": "call",
    "Outgoing": "routes",
    "PutRoute": "routes",
    "Role": "authentication",
    "Routes": "routes",
    "ServerIdentity": "identity",
}

__all__ = [
    "Answer",
    "BatchLimits",
    "Call",
    "Caller",
    "ClientExchange",
    "Connection",
    "Connector",
    "Credentials",
    "Download",
    "Endpoint",
    "Endpoints",
    "Exchange",
    "ExchangeRoute",
    "FlightServer",
    "Incoming",
    "Limits",
    "Message",
    "Outgoing",
    "PutRoute",
    "Role",
    "Routes",
    "ServerIdentity",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
