"""A peer of the bench: TCP sockets, which is what the wire allows. The client sends and receives at the same time."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from .orders import say_port, serve
from .peers import BLOCK_ELEMENTS, LEARNING_RATE, blocks, run, serve_until_told


def _receive(connection: socket.socket, into: memoryview) -> bool:
    """Whether all of it arrived before the other side closed."""
    while into:
        count = connection.recv_into(into)
        into = into[count:]
        if not count:
            return False
    return True


def run_server(element_count: int, _option: str) -> None:
    """Answer each block of gradients with its values."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        say_port(listener.getsockname()[1])
        connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    values = np.zeros(element_count, np.float32)
    gradient = np.empty(BLOCK_ELEMENTS, np.float32)

    def answer() -> None:
        while True:
            for part in blocks(element_count):
                block = values[part]
                received = gradient[: block.size]
                if not _receive(connection, received.data.cast("B")):
                    return
                received *= LEARNING_RATE
                block -= received
                connection.sendall(block.data)

    serve_until_told(answer)


def run_client(element_count: int, port: int, _option: str) -> None:
    """Step as ordered."""
    gradient = np.random.default_rng(0).standard_normal(element_count, np.float32)
    values = np.zeros(element_count, np.float32)
    with socket.create_connection(("127.0.0.1", port)) as connection, ThreadPoolExecutor(1) as sender:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def step() -> None:
            sending = sender.submit(connection.sendall, gradient.data)
            _receive(connection, values.data.cast("B"))
            sending.result()

        serve(step)


if __name__ == "__main__":
    run(run_server, run_client)
