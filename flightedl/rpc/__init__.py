"""Transport: clients and servers that exchange bytes and record batches by Arrow Flight. Nothing else imports Flight.

The server's side:

* ``routes``: table of a server's verbs and handlers. ``call``: a running call, and the limits of calls.
* ``server``: lifecycle of a server. ``admission``: checks before a handler runs. ``service``: the methods of Flight.
* ``streams``: uploads and bidirectional streams.

The client's side:

* ``client``: a connection. ``client_streams``: its calls and streams. ``connector``: creation of connections.
* ``request_stream``: many small requests on one stream. ``reuse``: streams that stay open between requests.

Both sides:

* ``identity``: names and generations in headers. ``authentication``: certificates that prove a role.
* ``errors``: encoding of errors. ``validation``: checks of received batches. ``integrity``: use of checksums.
* ``same_host``: shared memory between two processes on one host. ``line``: their Unix socket. ``channel``: a stream
  combined with both.
* ``arrow_flight``: import of pyarrow.flight in the right order.

A call goes from ``client`` to ``service``, which admits it, looks up its handler in ``routes`` and runs the handler.
The messages of a step use an open stream. A ``channel`` at each end decides whether a message is sent on the stream, on
the line or through shared memory.

Guarantees for every call:

* It has a time limit on both sides. A client call without ``timeout_s`` does not type-check and does not run. A server
  ends streams that exceed their deadline, by closing the connection if the peer does not read.
* The request names the expected server, and the reply names the answering one. A call for another generation is refused
  before anything is done.
* It returns a value or raises an error from :mod:`flightedl.errors`. A *refused* call is distinct from one with an
  *unknown outcome*.
* An upload is complete only if its commit record was received and matches the received batches.

The names below are imported at first use, so that :mod:`flightedl.process.tuning` can run before pyarrow is loaded.
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
