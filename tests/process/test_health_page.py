"""Answers to liveness, readiness and startup probes."""

from __future__ import annotations

import contextlib
import http.client
import socket
from collections.abc import Iterator

import pytest

from flightedl.errors import UsageError
from flightedl.process.health_page import STANDS_STILL_S, Health
from flightedl.process.http_page import HttpPage
from tests.support.clock import FakeClock


def statuses(health: Health) -> tuple[int, int, int]:
    return health.answer("/started")[0], health.answer("/live")[0], health.answer("/ready")[0]


@pytest.fixture
def health(fake_clock: FakeClock) -> Health:
    return Health(fake_clock.now)


def test_a_starting_process_is_alive_but_neither_started_nor_ready(health: Health) -> None:
    assert statuses(health) == (503, 200, 503)


def test_a_waiting_process_is_alive_however_long_it_waits(health: Health, fake_clock: FakeClock) -> None:
    health.waiting("it stands by", is_ready=True)
    fake_clock.advance(100 * STANDS_STILL_S)
    assert statuses(health) == (200, 200, 200)
    health.waiting("it loads a checkpoint")
    assert statuses(health) == (200, 200, 503)
    assert health.answer("/ready") == (503, "it loads a checkpoint")


def test_a_stuck_loop_is_not_alive(health: Health, fake_clock: FakeClock) -> None:
    health.beat("it serves", is_ready=True)
    fake_clock.advance(STANDS_STILL_S - 1)
    assert statuses(health) == (200, 200, 200)
    fake_clock.advance(1)
    assert statuses(health) == (200, 503, 503)
    assert health.answer("/live") == (503, "its main loop has been stuck for 30 s")
    health.beat("it serves", is_ready=True)
    assert statuses(health) == (200, 200, 200)


@pytest.fixture
def page(health: Health) -> Iterator[HttpPage]:
    with contextlib.closing(HttpPage("health page", "127.0.0.1", 0, health.page)) as served:
        yield served


def get(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
        connection.request(method, path)
        reply = connection.getresponse()
        return reply.status, reply.read().decode()


def test_the_page_reports_the_health_of_the_process(page: HttpPage, health: Health) -> None:
    assert get(page.port, "/started") == (503, "starting\n")
    health.beat("it serves", is_ready=True)
    assert get(page.port, "/ready") == (200, "it serves\n")
    assert get(page.port, "/metrics")[0] == 404
    assert get(page.port, "/ready", "POST")[0] == 501


def test_silent_connections_use_a_limited_number_of_threads(page: HttpPage) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(socket.create_connection(("127.0.0.1", page.port), timeout=5))
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            get(page.port, "/live")


def test_an_occupied_port_raises_one_sentence(page: HttpPage, health: Health) -> None:
    with pytest.raises(UsageError, match="health page cannot be served"):
        HttpPage("health page", "127.0.0.1", page.port, health.page)
