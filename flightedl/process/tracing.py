"""Spans: what a step, a task, a checkpoint or a recovery consists of, across processes. Off unless a tracer is set.

Like logging it is one for the whole process, so that nobody has to hand a tracer from hand to hand. As long as there is
none, a span costs a function call and a comparison, and nothing is sent along.

Where a request goes to another process, the span that it belongs to goes with it as W3C's ``traceparent``: in a header
of the Flight call, or, on a stream that is kept open from one request to the next, in the message itself.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

Result = TypeVar("Result")
Attribute = str | int | float

#: The header of W3C's Trace Context.
HEADER = "traceparent"
#: Questions that are asked all the time, and belong to nothing.
_QUIET = frozenset({"status", "log", "events", "stacks"})
NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


class Tracer(Protocol):
    """Receiver of spans. Thread-safe."""

    def span(self, name: str, kind: str, attributes: dict[str, Attribute]) -> AbstractContextManager[object]:
        """Inside the current one; an exception that leaves it is noted. ``kind``: internal, client or server."""
        ...

    def past(self, name: str, began_s: float, ended_s: float) -> None:
        """One that is over, inside the current one; seconds of the process's clock."""
        ...

    def carried(self) -> str:
        """The current one as a traceparent; empty: there is none."""
        ...

    def continued(self, traceparent: str) -> AbstractContextManager[object]:
        """Make spans that begin inside children of another process's span, or of none if the traceparent is broken."""
        ...

    def lasting(self, name: str, key: int) -> AbstractContextManager[object]:
        """What begins inside belongs to a span that begins with the first such call for this key."""
        ...

    def over(self, name: str, key: int) -> None:
        """That one has ended. One that another key follows has ended, too."""
        ...

    def bound(self, work: Callable[[], Result]) -> Callable[[], Result]:
        """``work`` for another thread, where it belongs to the span that is the current one here."""
        ...


#: Receives the spans; None while tracing is off. Set by ``use``; hot paths compare it with None before they call.
tracer: Tracer | None = None


def use(to: Tracer | None) -> None:
    """Send spans to this tracer from now on; None turns tracing off."""
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
    """A request to a server."""
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
    """A request of somebody who has sent this traceparent along, or none (empty)."""
    if tracer is None or verb in _QUIET:
        return NOTHING
    return _served(tracer, role, verb, traceparent)


def _of_rpc(role: str, verb: str) -> dict[str, Attribute]:
    """The attributes that OpenTelemetry's conventions for RPC give a call, of either side."""
    return {"rpc.system": "grpc", "rpc.service": f"flightedl.{role}", "rpc.method": verb}


def past(name: str, began_s: float, ended_s: float) -> None:
    """What has happened in this time, as ``flightedl.NAME``; seconds of the process's clock."""
    if tracer is not None:
        tracer.past(f"flightedl.{name}", began_s, ended_s)


def carried() -> str:
    """The current span as a traceparent, to be sent along; empty: there is none."""
    return "" if tracer is None else tracer.carried()


def continued(traceparent: str) -> AbstractContextManager[object]:
    """Make spans that begin inside children of that span."""
    return NOTHING if tracer is None else tracer.continued(traceparent)


def lasting(name: str, key: int) -> AbstractContextManager[object]:
    """What begins inside belongs to ``flightedl.NAME``, which lasts from the first such call until ``over``."""
    return NOTHING if tracer is None else tracer.lasting(f"flightedl.{name}", key)


def over(name: str, key: int) -> None:
    """A span that lasted has ended."""
    if tracer is not None:
        tracer.over(f"flightedl.{name}", key)


def bound(work: Callable[..., Result], *arguments: object) -> Callable[[], Result]:
    """A call for another thread, which belongs to the span of this one."""
    call = functools.partial(work, *arguments)
    return call if tracer is None else tracer.bound(call)
