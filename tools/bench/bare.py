"""Reference for steps with bare pyarrow.flight: a DoExchange of 1 MiB batches in lockstep, and a plain optimizer loop.

Clients and servers run in separate processes with the product's settings (``config.tuned_environment``,
``process.tuning``, and ``SCHED_BATCH`` for servers). A server has one array, and no blocks, batch identities or checks.
A client divides its array evenly among the servers.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import flight

from flightedl.domain.model.optimizers import SGD, Adagrad, Adam, Momentum, Optimizer
from flightedl.process import tuning

from .workers import print_line, serve

BATCH_ELEMENTS = 1 << 18
WINDOW = 4
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": SGD(lr=0.01),
    "momentum": Momentum(lr=0.01),
    "adagrad": Adagrad(lr=0.01),
    "adam": Adam(lr=0.001),
}

Floats = npt.NDArray[np.float32]

_SCHEMA = pa.schema([("values", pa.float32())])


def _batch(values: Floats) -> pa.RecordBatch:
    array = pa.Array.from_buffers(pa.float32(), values.size, [None, pa.py_buffer(values)])
    return pa.RecordBatch.from_arrays([array], schema=_SCHEMA)


class BareServer(flight.FlightServerBase):  # type: ignore[misc]
    """A server that applies each batch to the matching slice of its array, and returns the slice."""

    def __init__(self, location: str, element_count: int, optimizer: str) -> None:
        from flightedl.kernels.compiled import kernel_for

        rule = OPTIMIZERS[optimizer]
        self._values = np.zeros(element_count, np.float32)
        self._slots = [np.full(element_count, slot.initial, np.float32) for slot in rule.slots]
        self._update = kernel_for(rule, "float32")
        self._version = 0
        super().__init__(location)

    def do_exchange(self, _context: Any, _descriptor: Any, reader: Any, writer: Any) -> None:
        writer.begin(_SCHEMA)
        start = 0
        for chunk in reader:
            gradient = chunk.data.column(0).to_numpy()
            stop = start + gradient.size
            values = self._values[start:stop]
            self._update(values, gradient, [slot[start:stop] for slot in self._slots], self._version, self._version)
            writer.write_batch(_batch(values))
            start = stop
        self._version += 1


@contextlib.contextmanager
def _exchange(client: flight.FlightClient) -> Iterator[tuple[Any, Any]]:
    writer, reader = client.do_exchange(
        flight.FlightDescriptor.for_command(b"step"), flight.FlightCallOptions(timeout=120)
    )
    try:
        writer.begin(_SCHEMA)
        yield writer, reader
    finally:
        writer.close()


def step(client: flight.FlightClient, gradient: Floats, values: Floats) -> None:
    """Push the gradient and pull all values."""
    with _exchange(client) as (writer, reader):
        read = 0

        def receive() -> None:
            nonlocal read
            received = reader.read_chunk().data.column(0).to_numpy()
            values[read : read + received.size] = received
            read += received.size

        ahead = 0
        for start in range(0, gradient.size, BATCH_ELEMENTS):
            writer.write_batch(_batch(gradient[start : start + BATCH_ELEMENTS]))
            ahead += 1
            if ahead >= WINDOW:
                receive()
                ahead -= 1
        writer.done_writing()
        while read < gradient.size:
            receive()


def run_client(element_count: int, addresses: list[str]) -> None:
    """Run the requested steps."""
    tuning.apply()
    gradient = np.random.default_rng(0).standard_normal(element_count).astype(np.float32)
    values = np.zeros(element_count, np.float32)
    clients = [flight.FlightClient(f"grpc://{address}") for address in addresses]
    shares = list(
        zip(clients, np.array_split(gradient, len(clients)), np.array_split(values, len(clients)), strict=True)
    )
    if len(shares) == 1:
        serve(lambda: step(*shares[0]))
        return
    with ThreadPoolExecutor(len(shares)) as pool:
        serve(lambda: list(pool.map(lambda share: step(*share), shares)))


def run_server(element_count: int, optimizer: str) -> None:
    """Print the server's address, then serve until standard input ends."""
    tuning.apply()
    tuning.avoid_preemption()
    server = BareServer("grpc://127.0.0.1:0", element_count, optimizer)
    print_line(f"127.0.0.1:{server.port}")
    sys.stdin.read()
    server.shutdown()
