"""The floor, a lower bound on the time of a small step: plain Python code that does only what every step must do.

* ``line``: a server with one thread (epoll) and Unix sockets. The server applies no batch twice, runs SGD, and answers
  with the new values (with a barrier, once all clients have pushed). The client checks that its gradient is finite, and
  copies the values.
* ``flight``: the same server over TCP, with one DoExchange per client, and values in the metadata of Flight's messages.
* ``rows`` (in ``floor_rows``): lookups in an embedding table, and pushes to it.

The floor has no leases, views, recovery, recording or metrics. The ratio of the product to the floor shows the cost of
these features.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pyarrow import flight

from .sides import Side, begin
from .workers import print_line, serve, started

COUNT = 650
_HEADER = struct.Struct("<IIQQQQQ")  # kind, length, client, epoch, task, batch, version
_LENGTH = _HEADER.size + 4 * COUNT
_RATE = -0.01


@contextlib.contextmanager
def floor_side(kind: str, clients: int = 1, *, is_sync: bool = False) -> Iterator[Side]:
    """Run the floor "line" or "flight". If ``is_sync``, the server answers only when all clients have pushed."""
    serving, stepping = (serve_lines, step_by_line) if kind == "line" else (serve_flight, step_by_flight)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(started(serving, clients if is_sync else 1))
        workers = begin(stack, stepping, server.line(), count=clients)
        yield Side(workers, [server.process.pid], 4 * COUNT)


def receive(connection: socket.socket, into: memoryview) -> bool:
    """Fill ``into`` from the connection. Return False if the other side has closed the connection."""
    received = 0
    while received < len(into):
        got = connection.recv_into(into[received:])
        if not got:
            return False
        received += got
    return True


@contextlib.contextmanager
def listening() -> Iterator[tuple[socket.socket, str]]:
    """Listen on a Unix socket. Yields its path."""
    with tempfile.TemporaryDirectory(prefix="flightedl-floor-") as directory, socket.socket(socket.AF_UNIX) as listener:
        path = str(Path(directory) / "line")
        listener.bind(path)
        listener.listen(16)
        yield listener, path


def _floats(data: Any) -> npt.NDArray[np.float32]:
    found: npt.NDArray[np.float32] = np.frombuffer(data, np.float32, COUNT, _HEADER.size)
    return found


class _LineServer:
    """State of the server: values, applied batches, and the clients that are waiting for their round to end."""

    def __init__(self, barrier: int) -> None:
        self._barrier = barrier
        self._values, self._total = np.zeros(COUNT, np.float32), np.zeros(COUNT, np.float32)
        self._applied: dict[tuple[int, ...], int] = {}
        self._waiting: list[tuple[socket.socket, bytearray, tuple[int, ...]]] = []
        self._version = 0

    def push(self, connection: socket.socket, message: memoryview, gradient: Any, out: bytearray) -> None:
        """Apply one message, and answer all clients whose round is complete."""
        header = _HEADER.unpack_from(message)
        task, batch = header[2:5], header[5]
        if self._applied.get(task, 0) >> batch & 1:
            self._answer(connection, out, header)
            return
        self._applied[task] = self._applied.get(task, 0) | 1 << batch
        self._total += gradient
        self._waiting.append((connection, out, header))
        if len(self._waiting) < self._barrier:
            return
        np.multiply(self._total, _RATE / len(self._waiting), out=self._total)
        np.add(self._values, self._total, out=self._values)
        self._total[:] = 0
        self._version += 1
        for each in self._waiting:
            self._answer(*each)
        self._waiting.clear()

    def _answer(self, connection: socket.socket, out: bytearray, header: tuple[int, ...]) -> None:
        _HEADER.pack_into(out, 0, *header[:6], self._version)
        out[_HEADER.size :] = self._values.data.cast("B")
        connection.sendall(out)


def serve_lines(barrier: int) -> None:
    """Print the socket's path, then serve until standard input ends."""
    server, connections = _LineServer(barrier), dict[int, tuple[socket.socket, memoryview, Any, bytearray]]()
    poller = select.epoll()
    with listening() as (listener, path):
        poller.register(listener.fileno(), select.EPOLLIN)
        poller.register(sys.stdin.fileno(), select.EPOLLIN)
        print_line(path)
        while True:
            for descriptor, _ in poller.poll():
                if descriptor == sys.stdin.fileno():
                    return
                if descriptor == listener.fileno():
                    connection, _ = listener.accept()
                    buffer = bytearray(_LENGTH)
                    poller.register(connection.fileno(), select.EPOLLIN)
                    connections[connection.fileno()] = (
                        connection,
                        memoryview(buffer),
                        _floats(buffer),
                        bytearray(_LENGTH),
                    )
                    continue
                connection, view, gradient, out = connections[descriptor]
                if receive(connection, view):
                    server.push(connection, view, gradient, out)
                else:
                    poller.unregister(descriptor)
                    connections.pop(descriptor)[0].close()


def step_by_line(path: str) -> None:
    """Run steps as ordered, over a Unix socket."""
    message, reply = bytearray(_LENGTH), bytearray(_LENGTH)
    body, came, view = _floats(message), _floats(reply), memoryview(reply)
    gradient, values = np.random.default_rng(0).random(COUNT, np.float32), np.zeros(COUNT, np.float32)
    process, number = os.getpid(), 0
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)

        def step() -> None:
            nonlocal number
            if not np.isfinite(gradient.sum()):
                raise ValueError("the gradient is not finite")
            body[:] = gradient
            _HEADER.pack_into(message, 0, 1, _LENGTH, process, 0, number >> 10, number & 1023, number)
            number += 1
            connection.sendall(message)
            receive(connection, view)
            values[:] = came

        serve(step)


class _FlightServer(flight.FlightServerBase):  # type: ignore[misc]
    def do_exchange(self, _context: Any, _descriptor: Any, reader: Any, writer: Any) -> None:
        """Serve a single client until it disconnects."""
        values, header = np.zeros(COUNT, np.float32), bytes(_HEADER.size)
        for message in reader:
            values += _RATE * _floats(message.app_metadata)
            writer.write_metadata(header + values.tobytes())


def serve_flight(_barrier: int) -> None:
    """Print the port, then serve until standard input ends."""
    server = _FlightServer("grpc://127.0.0.1:0")
    print_line(server.port)
    sys.stdin.read()
    # Do not shut down, because that would wait for clients that disconnected without closing their streams.
    os._exit(0)


def step_by_flight(port: str) -> None:
    """Run steps as ordered, over Flight."""
    client = flight.FlightClient(f"grpc://127.0.0.1:{port}")
    writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(b"step"))
    gradient, header = np.random.default_rng(0).random(COUNT, np.float32), bytes(_HEADER.size)

    def step() -> None:
        if not np.isfinite(gradient.sum()):
            raise ValueError("the gradient is not finite")
        writer.write_metadata(header + gradient.tobytes())
        _floats(reader.read_chunk().app_metadata).copy()

    serve(step)
