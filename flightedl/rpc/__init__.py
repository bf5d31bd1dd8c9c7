"""The one place that speaks Arrow Flight: everything above it says verbs, bytes and record batches.

Reading order: ``routes`` (what a server is made of), ``server`` (its life and its admission), ``service`` and
``streams`` (how it answers), ``client`` and ``client_streams`` (how it is asked), ``request_stream`` (again and again),
``reuse`` (streams that stay open from one request to the next), ``errors`` (how they cross), ``validation`` (what is
checked of every batch), ``integrity`` (which values carry checksums), ``same_host`` (memory beside a stream), ``line``
(a socket beside it), ``channel`` (how either end uses all of them).
``identity`` says who talks to whom, ``authentication`` proves it, and ``connector`` opens connections accordingly;
``arrow_flight`` imports pyarrow.flight in the right order.

Rules that hold for every call:

* It has a time limit on both sides. A client call without ``timeout_s`` does not type-check and does not run; a server
  ends streams that outlive their deadline, by closing the connection when the peer does not even read.
* It names the server that is meant and the server that answers. The wrong generation is refused before anything is
  done.
* It ends with a value or with an error of :mod:`flightedl.errors`; *refused* and *outcome unknown* stay apart.
* An upload is complete only when its commit record was seen and agrees with what arrived.

The names below load on first use, so that :mod:`flightedl.process.tuning` can run before pyarrow is loaded.
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
