"""The reference: a lock-step DoExchange of 1 MiB batches and a plain optimizer loop, on bare pyarrow.flight.

Both sides run as processes of their own, with the same process settings as flightedl's. ``python -m
flightedl_tools.bench.bare server|client``: the launcher in ``dense`` starts them.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from pyarrow import flight

from flightedl.domain.kernels import kernel_for
from flightedl.domain.optimizers import SGD, Adam, Optimizer

BATCH_ELEMENTS = 1 << 18
WINDOW = 4
_SCHEMA = pa.schema([("values", pa.float32())])
OPTIMIZERS: dict[str, Optimizer] = {"sgd": SGD(lr=0.01), "adam": Adam(lr=0.001)}


def _batch(values: np.ndarray) -> pa.RecordBatch:
    array = pa.Array.from_buffers(pa.float32(), values.size, [None, pa.py_buffer(values)])
    return pa.RecordBatch.from_arrays([array], schema=_SCHEMA)


class BareServer(flight.FlightServerBase):  # type: ignore[misc]
    """Applies each batch to its slice of one array and sends the slice back."""

    def __init__(self, location: str, element_count: int, optimizer: str) -> None:
        rule = OPTIMIZERS[optimizer]
        self._values = np.zeros(element_count, np.float32)
        self._slots = [np.full(element_count, slot.initial, np.float32) for slot in rule.slots]
        self._update = kernel_for(rule, "float32")
        self._version = 0
        super().__init__(location)

    def do_exchange(self, _context: object, _descriptor: object, reader: object, writer: object) -> None:
        """One step."""
        writer.begin(_SCHEMA)  # type: ignore[attr-defined]
        start = 0
        for chunk in reader:  # type: ignore[attr-defined]
            gradient = chunk.data.column(0).to_numpy()
            stop = start + gradient.size
            values = self._values[start:stop]
            self._update(values, gradient, [slot[start:stop] for slot in self._slots], self._version)
            writer.write_batch(_batch(values))  # type: ignore[attr-defined]
            start = stop
        self._version += 1


@contextlib.contextmanager
def _exchange(client: flight.FlightClient) -> Iterator[tuple[object, object]]:
    writer, reader = client.do_exchange(
        flight.FlightDescriptor.for_command(b"step"), flight.FlightCallOptions(timeout=120)
    )
    try:
        writer.begin(_SCHEMA)
        yield writer, reader
    finally:
        writer.close()


def step(client: flight.FlightClient, gradient: np.ndarray, values: np.ndarray) -> None:
    """Push the whole gradient and pull the whole values."""
    with _exchange(client) as (writer, reader):
        read = 0

        def take() -> None:
            nonlocal read
            received = reader.read_chunk().data.column(0).to_numpy()  # type: ignore[attr-defined]
            values[read : read + received.size] = received
            read += received.size

        ahead = 0
        for start in range(0, gradient.size, BATCH_ELEMENTS):
            writer.write_batch(_batch(gradient[start : start + BATCH_ELEMENTS]))  # type: ignore[attr-defined]
            ahead += 1
            if ahead >= WINDOW:
                take()
                ahead -= 1
        writer.done_writing()  # type: ignore[attr-defined]
        while read < gradient.size:
            take()


def run_client(address: str, element_count: int, step_count: int, warm_up: int) -> None:
    """Print the seconds of each step as JSON."""
    client = flight.FlightClient(f"grpc://{address}")
    gradient = np.random.default_rng(0).standard_normal(element_count).astype(np.float32)
    values = np.zeros(element_count, np.float32)
    seconds = []
    for number in range(warm_up + step_count):
        begun = time.perf_counter()
        step(client, gradient, values)
        if number >= warm_up:
            seconds.append(time.perf_counter() - begun)
    client.close()
    sys.stdout.write(json.dumps(seconds) + "\n")


if __name__ == "__main__":
    role, *rest = sys.argv[1:]
    if role == "server":
        server = BareServer("grpc://127.0.0.1:0", int(rest[0]), rest[1])
        sys.stdout.write(f"{server.port}\n")
        sys.stdout.flush()
        sys.stdin.read()
        server.shutdown()
    else:
        run_client(rest[0], int(rest[1]), int(rest[2]), int(rest[3]))
