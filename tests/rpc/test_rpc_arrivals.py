"""A call's headers are passed from its middleware to its method, and no call runs with unchecked headers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from pyarrow import flight

from flightedl.errors import InternalError
from flightedl.rpc import Caller, Connection, FlightServer
from flightedl.rpc.service import Arrivals, _Place

from .rpc_support import TIMEOUT_S, Handlers


def test_a_method_without_checked_headers_is_rejected(server: FlightServer) -> None:
    with pytest.raises(InternalError, match="not checked"):
        Arrivals(server).pop()


def test_headers_can_be_read_only_once(server: FlightServer) -> None:
    class Begun:
        method = flight.FlightMethod.DO_GET

    arrivals = Arrivals(server)
    arrivals.start_call(Begun(), {"a": ["1"]})
    assert arrivals.pop() == {"a": "1"}
    with pytest.raises(InternalError):
        arrivals.pop()


def test_a_rejected_call_does_not_leave_the_headers_of_an_earlier_one(server: FlightServer) -> None:
    """The thread of the rejected call may never have run the method of the earlier one."""
    begun = SimpleNamespace(method=flight.FlightMethod.DO_GET)
    arrivals = Arrivals(server._admission)
    arrivals.start_call(begun, {"a": ["1"]})
    with pytest.raises(flight.FlightError, match="occurs twice"):
        arrivals.start_call(begun, {"flightedl-caller": ["1", "2"]})
    with pytest.raises(InternalError):
        arrivals.pop()


def test_calls_of_one_thread_have_separate_headers(serve: Callable[..., FlightServer], handlers: Handlers) -> None:
    server = serve(handlers.routes())
    for name in ("first", "second", "first"):
        with Connection(server.address, caller=Caller("trainer", name)) as connection:
            connection.action("echo", b"", timeout_s=TIMEOUT_S)
    assert [call.caller.name for call in handlers.calls] == ["first", "second", "first"]


def test_a_stream_that_never_starts_frees_its_slot() -> None:
    released: list[object] = []

    class Server:
        release = released.append

    def stream(place: object) -> object:
        yield place

    call = object()
    unstarted = stream(_Place(Server(), call))  # type: ignore[arg-type]
    assert not released
    del unstarted
    assert released == [call]
