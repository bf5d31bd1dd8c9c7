"""Every order in which threads use and close the stream that is kept between requests."""

from __future__ import annotations

from typing import Any, Self

import pyarrow as pa
import pytest

from flightedl.rpc import reuse
from flightedl.rpc.reuse import HeldStream, ReusableExchange
from tests.support.planting import Planted, bug, rewrites, swaps

from .scheduler import Run, VirtualClock, explore, finds


class Stream:
    """A stream that notes its users."""

    def __init__(self) -> None:
        self.users = self.ends = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.ends += 1


class Server:
    """A connection that opens streams."""

    def __init__(self) -> None:
        self.opened: list[Stream] = []

    def exchange(self, *_: object, **__: object) -> Stream:
        self.opened.append(Stream())
        return self.opened[-1]


def using(run: Run) -> None:
    """Only one request at a time uses a stream. Every stream but a kept one is ended, each once."""
    server: Any = Server()
    kept = ReusableExchange("tasks", pa.schema([]), VirtualClock(), HeldStream)
    with kept.use(server, timeout_s=1.0):
        pass

    def ask() -> None:
        with kept.use(server, timeout_s=1.0) as exchange:
            stream: Any = exchange
            stream.users += 1
            run.point()
            assert (stream.users, stream.ends) == (1, 0), "a stream is used by two requests, or after its end"
            stream.users -= 1

    run.threads(ask, ask, kept.close_idle)
    assert kept.is_open == any(not stream.ends for stream in server.opened)
    kept.close_idle()
    assert [stream.ends for stream in server.opened] == [1] * len(server.opened)


def test_a_stream_serves_one_request_at_a_time_and_is_ended_once() -> None:
    assert explore(using, [reuse], deviations=2).is_complete


@pytest.mark.parametrize(
    "flaw",
    [
        bug(
            "two threads take the same stream",
            swaps("rpc.reuse:ReusableExchange._keep", "with self._lock:", "if True:"),
        ),
        bug(
            "a stream that was kept by another thread is forgotten",
            rewrites(
                "rpc.reuse:ReusableExchange.end",
                "other = self._keep(held)",
                """
                other, self._held = self._held, held
                """,
            ),
        ),
    ],
    ids=lambda flaw: flaw.what,
)
def test_two_users_of_a_stream_are_found(flaw: Planted) -> None:
    finds(flaw, using, [reuse])
