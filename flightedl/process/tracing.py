"""Spans of steps, tasks, checkpoints and recoveries across processes. Disabled unless a tracer is set.

As in logging, one tracer serves the entire process, so it need not be passed around. Without a tracer, a span costs
only a function call and a comparison, and nothing is added to requests.

A request to another process carries its span as a W3C ``traceparent``, either in a header of the Flight call or, on a
stream that stays open between requests, in the message itself.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

Result = TypeVar("Result")
Attribute = str | int | float

#: Header defined by the W3C recommendation "Trace Context".
HEADER = "traceparent"
#: Frequent requests, which are not traced.
_QUIET = frozenset({"status", "log", "events", "stacks"})
NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


class Tracer(Protocol):
    """Receiver of spans. Thread-safe."""

    def span(self, name: str, kind: str, attributes: dict[str, Attribute]) -> AbstractContextManager[object]:
        """Open a span inside the current one; it records exceptions. ``kind`` is "internal", "client" or "server"."""
        ...

    def past(self, name: str, start_s: float, end_s: float) -> None:
        """Record a finished span inside the current one. Times are in seconds of the process's clock."""
        ...

    def carried(self) -> str:
        """Return the current span as a traceparent, or an empty string if there is none."""
        ...

    def continued(self, traceparent: str) -> AbstractContextManager[object]:
        """Make spans inside the block children of another process's span, or roots if the traceparent is invalid."""
        ...

    def lasting(self, name: str, key: int) -> AbstractContextManager[object]:
        """Make spans inside the block children of a span that begins with the first such call for this key."""
        ...

    def over(self, name: str, key: int) -> None:
        """End the lasting span with this key. A call of ``lasting`` with another key also ends the span."""
        ...

    def bound(self, work: Callable[[], Result]) -> Callable[[], Result]:
        """Wrap ``work`` for another thread, so that its spans become children of the current span."""
        ...


#: Receives the spans; None while tracing is disabled. Set by ``use``. Hot paths compare it with None first.
tracer: Tracer | None = None


def use(to: Tracer | None) -> None:
    """Send spans to this tracer from now on. None disables tracing."""
    global tracer  # noqa: PLW0603 - one for the process, like the root of all loggers
    tracer = to


def span(name: str, **attributes: Attribute) -> AbstractContextManager[object]:
    """Record the ``with`` block as the span ``flightedl.NAME``."""
    if tracer is None:
        return NOTHING
    return tracer.span(
        f"flightedl.{name}", "internal", {f"flightedl.{key}": value for key, value in attributes.items()}
    )


def asks(role: str, verb: str, address: str) -> AbstractContextManager[object]:
    """Open the client's span of a request to a server."""
    if tracer is None or verb in _QUIET:
        return NOTHING
    host, _, port = address.rpartition(":")
    more: dict[str, Attribute] = (
        {"server.address": host.strip("[]"), "server.port": int(port)} if port.isdigit() else {}
    )
    return tracer.span(f"flightedl.{role}/{verb}", "client", {**_of_rpc(role, verb), **more})


@contextlib.contextmanager
def _served(to: Tracer, role: str, verb: str, traceparent: str) -> Iterator[None]:
    with to.continued(traceparent), to.span(f"flightedl.{role}/{verb}", "server", _of_rpc(role, verb)):
        yield


def serves(role: str, verb: str, traceparent: str) -> AbstractContextManager[object]:
    """Open the server's span of a request, given the traceparent of the request (empty if it has none)."""
    if tracer is None or verb in _QUIET:
        return NOTHING
    return _served(tracer, role, verb, traceparent)


def _of_rpc(role: str, verb: str) -> dict[str, Attribute]:
    """Return the attributes of a call for either side, as defined by OpenTelemetry's conventions for RPC."""
    return {"rpc.system": "grpc", "rpc.service": f"flightedl.{role}", "rpc.method": verb}


def past(name: str, start_s: float, end_s: float) -> None:
    """Record a finished span ``flightedl.NAME``. Times are in seconds of the process's clock."""
    if tracer is not None:
        tracer.past(f"flightedl.{name}", start_s, end_s)


def carried() -> str:
    """Return the current span as a traceparent to send with a request, or an empty string if there is none."""
    return "" if tracer is None else tracer.carried()


def continued(traceparent: str) -> AbstractContextManager[object]:
    """Make spans inside the block children of another process's span."""
    return NOTHING if tracer is None else tracer.continued(traceparent)


def lasting(name: str, key: int) -> AbstractContextManager[object]:
    """Make spans inside the block children of ``flightedl.NAME``, which lasts from the first call until ``over``."""
    return NOTHING if tracer is None else tracer.lasting(f"flightedl.{name}", key)


def over(name: str, key: int) -> None:
    """End a lasting span."""
    if tracer is not None:
        tracer.over(f"flightedl.{name}", key)


def bound(work: Callable[..., Result], *arguments: object) -> Callable[[], Result]:
    """Wrap a call for another thread, so that its spans become children of this thread's span."""
    call = functools.partial(work, *arguments)
    return call if tracer is None else tracer.bound(call)
