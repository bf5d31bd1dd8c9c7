"""Memory of a real server process, with its real allocator, after messages from strangers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyarrow import flight

SERVER = """
import sys, threading
from flightedl.process import tuning as process_tuning
process_tuning.apply()
from flightedl.adapters.clock import SystemClock
from flightedl.rpc import FlightServer, Routes, ServerIdentity
identity = ServerIdentity("demo", "pserver", 0, 1)
server = FlightServer(Routes(actions={"echo": lambda body, _: body}), identity, clock=SystemClock())
server.start_serving(identity)
print(server.port, flush=True)
sys.stdin.read()
server.stop(0.5)
"""
MESSAGE_BYTES = 64 << 20
#: Allowed growth. It is less than one message, and more than the allocator leaves in its arenas.
GROWTH_BYTES = 60 << 20
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")


class Server:
    """A server process, and a client that does not belong to its job."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")},
        )
        assert self._process.stdout is not None
        self.client = flight.connect(f"grpc://127.0.0.1:{int(self._process.stdout.readline())}")
        self.options = flight.FlightCallOptions(timeout=30)
        self.act(b"x")

    def act(self, body: bytes) -> bytes:
        (result,) = self.client.do_action(flight.Action("echo", body), self.options)
        return result.body.to_pybytes()

    @property
    def resident_bytes(self) -> int:
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        (found,) = (line for line in lines if line.startswith("VmRSS"))
        return int(found.split()[1]) << 10

    def close(self) -> None:
        self.client.close()
        self._process.communicate(timeout=20)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def test_a_server_does_not_grow_by_rejected_messages(server: Server) -> None:
    before = server.resident_bytes
    body = b"x" * MESSAGE_BYTES
    attempts: list[Callable[[], object]] = [
        lambda: server.act(body),
        lambda: server.client.do_get(flight.Ticket(body), server.options),
        lambda: server.client.get_schema(flight.FlightDescriptor.for_command(body), server.options),
    ]
    for attempt in attempts:
        with pytest.raises((flight.FlightError, OSError)):
            attempt()
    until = time.monotonic() + 20
    while server.resident_bytes > before + GROWTH_BYTES and time.monotonic() < until:
        time.sleep(0.1)
    assert server.resident_bytes <= before + GROWTH_BYTES
    assert server.act(b"y") == b"y"
