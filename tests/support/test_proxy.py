"""Every fault of the proxy has its documented effect on connections."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.support.processes import closed_port
from tests.support.proxy import TcpProxy


@pytest.fixture
def echo() -> Iterator[tuple[str, list[bytes]]]:
    """Run a server that echoes data. Yield its address and the list of what it received."""
    got: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []
    connections: list[socket.socket] = []

    def serve(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            while data := connection.recv(65536):
                got.append(data)
                connection.sendall(data)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connections.append(connection)
                threads.append(threading.Thread(target=serve, args=(connection,)))
                threads[-1].start()

    acceptor = threading.Thread(target=accept)
    acceptor.start()
    yield f"127.0.0.1:{listener.getsockname()[1]}", got
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    acceptor.join()
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join()


@pytest.fixture
def proxy(echo: tuple[str, list[bytes]]) -> Iterator[TcpProxy]:
    with TcpProxy(echo[0]) as proxy:
        yield proxy


def connect(proxy: TcpProxy) -> socket.socket:
    host, _, port = proxy.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=5)


def ask(connection: socket.socket, data: bytes) -> bytes:
    connection.sendall(data)
    answer = b""
    while len(answer) < len(data):
        part = connection.recv(65536)
        if not part:
            break
        answer += part
    return answer


def test_data_and_end_of_stream_are_forwarded_both_ways(proxy: TcpProxy) -> None:
    with connect(proxy) as one, connect(proxy) as other:
        data = bytes(range(256)) * 100
        assert ask(one, data) == data
        assert ask(other, b"2") == b"2"
        one.shutdown(socket.SHUT_WR)
        assert one.recv(1) == b""


def test_cut_resets_only_open_connections(proxy: TcpProxy) -> None:
    with connect(proxy) as one:
        ask(one, b"1")
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            one.recv(1)
    with connect(proxy) as other:
        assert ask(other, b"2") == b"2"


def test_refuse_resets_new_connections_until_healed(proxy: TcpProxy) -> None:
    proxy.refuse()
    with pytest.raises(ConnectionError), connect(proxy) as one:
        assert ask(one, b"1") == b"1"
    proxy.heal()
    with connect(proxy) as one:
        assert ask(one, b"1") == b"1"


def test_a_dead_target_resets_connections(proxy: TcpProxy) -> None:
    with closed_port() as port:
        proxy.redirect(f"127.0.0.1:{port}")
        with pytest.raises(ConnectionError), connect(proxy) as one:
            assert ask(one, b"1") == b"1"


def test_delay_holds_back_data(proxy: TcpProxy) -> None:
    proxy.delay(0.1)
    with connect(proxy) as one:
        start = time.monotonic()
        assert ask(one, b"1") == b"1"
        assert time.monotonic() - start >= 0.2


def test_cut_after_request_forwards_the_request_and_drops_its_reply(
    proxy: TcpProxy, echo: tuple[str, list[bytes]]
) -> None:
    with connect(proxy) as one:
        ask(one, b"before")
        proxy.cut_after_request()
        one.sendall(b"request")
        with pytest.raises(ConnectionResetError):
            one.recv(1)
    assert proxy.wait_until_cut(5)
    assert echo[1] == [b"before", b"request"]
    with connect(proxy) as other:
        assert ask(other, b"after") == b"after"


def test_a_half_open_connection_is_silent(proxy: TcpProxy, echo: tuple[str, list[bytes]]) -> None:
    with connect(proxy) as one:
        ask(one, b"1")
        proxy.half_open()
        one.sendall(b"2")
        one.settimeout(0.2)
        with pytest.raises(TimeoutError):
            one.recv(1)
        proxy.heal()
        one.settimeout(5)
        with pytest.raises(ConnectionResetError):
            one.recv(1)
    assert echo[1] == [b"1"]


def test_one_bit_is_flipped_once_in_a_large_enough_chunk(proxy: TcpProxy) -> None:
    proxy.flip_bit(smallest_bytes=100)
    with connect(proxy) as one:
        assert ask(one, b"x" * 50) == b"x" * 50
        flipped = ask(one, b"x" * 200)
        assert proxy.wait_until_flipped(1)
        assert sum((a ^ ord("x")).bit_count() for a in flipped) == 1
        assert ask(one, b"x" * 200) == b"x" * 200
