"""Rate at which any Flight client reads a parameter of 64 MB, against bare Flight: ``python -m benchmarks.reading``.

Both servers are processes of their own with the same settings, and send the same record batch. The sides alternate. The
cuts are read as well: the values of a cut are copied when training changes them, which it does not do here.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import flight

import flightedl as fe
from flightedl.config import tuned_environment

_ELEMENTS = 16_000_000
_TURNS = 15
#: Rows of a batch of the bare server, which are those of the product: 1 MiB.
_BATCH = 1 << 18


class _Bare(flight.FlightServerBase):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self._table = pa.table({"value": np.zeros(_ELEMENTS, np.float32)})

    def do_get(self, _context: object, _ticket: flight.Ticket) -> flight.RecordBatchStream:
        return flight.RecordBatchStream(pa.Table.from_batches(self._table.to_batches(_BATCH)))


def _serve(ports: Any) -> None:
    server = _Bare()
    ports.put(server.port)
    server.serve()


def _read(address: str, ticket: flight.Ticket) -> float:
    began = time.perf_counter()
    read = flight.connect(address).do_get(ticket).read_all()
    assert read.num_rows == _ELEMENTS
    return time.perf_counter() - began


def _tickets(master: str, command: dict[str, str]) -> tuple[str, flight.Ticket]:
    descriptor = flight.FlightDescriptor.for_command(json.dumps({"verb": "read", "name": "w", **command}))
    (endpoint,) = flight.connect(f"grpc://{master}").get_flight_info(descriptor).endpoints
    return endpoint.locations[0].uri.decode(), endpoint.ticket


def main() -> None:
    """Measure, and print a line per kind of read."""
    os.environ.update(tuned_environment())
    context = multiprocessing.get_context("spawn")
    ports = context.Queue()
    bare = context.Process(target=_serve, args=(ports,), daemon=True)
    bare.start()
    sides = {"bare Flight": (f"grpc://127.0.0.1:{ports.get()}", flight.Ticket(b""))}
    folder = Path(tempfile.mkdtemp())
    pq.write_table(pa.table({"k": np.arange(10)}), folder / "data.parquet")
    with fe.local(pservers=1) as cluster, cluster.connect() as job:
        job.dataset(str(folder / "data.parquet"), batch_size=1)
        job.parameters({"w": np.zeros(_ELEMENTS, np.float32)}, optimizer=fe.SGD(lr=1.0), mode=fe.Async())
        with cluster.status() as status:
            master = status.read(10.0).master.address
        sides["latest values"] = _tickets(master, {})
        sides["a cut"] = _tickets(master, {"cut": "new"})
        taken: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(_TURNS):
            for name, side in sides.items():
                taken[name].append(_read(*side))
    floor = statistics.median(taken["bare Flight"])
    for name, found in taken.items():
        median = statistics.median(found)
        print(f"{name}: {4 * _ELEMENTS / median / 1e9:.2f} GB/s, {floor / median:.2f} x bare Flight")


if __name__ == "__main__":
    main()
