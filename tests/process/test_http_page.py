"""The server of a process's pages: requests and streams that have ended make room for others."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Iterator

import pytest

from flightedl.process.http_page import _REQUESTS_LIMIT, _STREAMS_LIMIT, Answer, Asked, HttpPage
from tests.support.contracts.coordinator import eventually


def answer(asked: Asked) -> Answer:
    return Answer(iter([b"one ", b"two"]) if asked.path == "/stream" else b"text")


def endless(asked: Asked) -> Answer:
    def parts() -> Iterator[bytes]:
        yield b"begun"
        while not asked.closing.wait(0.01):
            pass

    return Answer(parts() if asked.path == "/stream" else b"text")


def get(port: int, path: str, host: str = "127.0.0.1") -> tuple[int, bytes]:
    with contextlib.closing(http.client.HTTPConnection(host, port, timeout=20)) as connection:
        connection.request("GET", path)
        reply = connection.getresponse()
        return reply.status, reply.read()


@pytest.mark.parametrize(("path", "body"), [("/", b"text"), ("/stream", b"one two")])
def test_places_of_requests_that_have_ended_are_free(path: str, body: bytes) -> None:
    with contextlib.closing(HttpPage("page", "127.0.0.1", 0, answer)) as page:
        for _ in range(2 * _REQUESTS_LIMIT):
            # A place is free a moment after the client has read the answer.
            eventually(lambda: get(page.port, path) == (200, body))


def test_a_page_is_served_on_an_ipv6_address() -> None:
    with contextlib.closing(HttpPage("page", "::1", 0, answer)) as page:
        assert get(page.port, "/", "::1") == (200, b"text")


def test_readers_of_streams_leave_room_for_others_and_are_ended(request: pytest.FixtureRequest) -> None:
    page = HttpPage("page", "127.0.0.1", 0, endless)
    readers = [http.client.HTTPConnection("127.0.0.1", page.port, timeout=20) for _ in range(_STREAMS_LIMIT)]
    replies = []
    for reader in readers:
        reader.request("GET", "/stream")
        replies.append(reader.getresponse())
        assert replies[-1].read(5) == b"begun"
    assert get(page.port, "/stream")[0] == 503
    assert get(page.port, "/") == (200, b"text")
    before = threading.active_count()
    page.close()
    for reader, reply in zip(readers, replies, strict=True):
        assert reply.read() == b"", "closing does not end a stream"
        reader.close()
    eventually(lambda: threading.active_count() < before)
