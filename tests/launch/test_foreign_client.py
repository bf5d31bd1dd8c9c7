"""Any Arrow Flight client reads the live model: nothing but pyarrow and the contract in ``schemas/``."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pyarrow.parquet as pq
import pytest
import xxhash

import flightedl as fe

pytestmark = pytest.mark.etcd


def test_the_live_model_is_read_by_bare_flight(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": np.arange(8)}), tmp_path / "x.parquet")
    first = np.arange(40_000, dtype=np.float32)
    with fe.local(pservers=2) as cluster, cluster.connect() as job:
        data = job.dataset(str(tmp_path / "*.parquet"), batch_size=4)
        model = job.parameters({"w": first}, optimizer=fe.SGD(lr=1.0))
        for _ in data:
            model.step({"w": np.full_like(first, -1)})
        with cluster.status() as status:
            master = status.read(5.0).master
        assert master is not None
        blocks = {}
        options = flight.FlightCallOptions(timeout=10)
        with flight.FlightClient(f"grpc://{master.address}") as client:
            command = flight.FlightDescriptor.for_command(json.dumps({"verb": "parameters"}).encode())
            info = client.get_flight_info(command, options)
        assert len(info.endpoints) == 2
        for endpoint in info.endpoints:
            with flight.FlightClient(endpoint.locations[0]) as client:
                for row in client.do_get(endpoint.ticket, options).read_all().to_pylist():
                    assert row["checksum"] == xxhash.xxh3_64_intdigest(row["values"])
                    assert row["version"] == 2
                    blocks[row["block"]] = np.frombuffer(row["values"], np.float32)
    np.testing.assert_array_equal(np.concatenate([blocks[n] for n in sorted(blocks)]), first + 2)
