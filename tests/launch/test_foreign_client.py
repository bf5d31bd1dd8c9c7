"""Any Arrow Flight client can read the live model and receive tasks, with only pyarrow and ``schemas/``."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pyarrow.parquet as pq
import pytest
import xxhash

import flightedl as fe
from flightedl.adapters.clock import SystemClock
from flightedl.adapters.etcd import EtcdCoordinator
from flightedl.coordination.keeper import HeldKey
from flightedl.coordination.keys import JobKeys
from tests.support.contracts.coordinator import eventually

pytestmark = pytest.mark.etcd


def test_a_plain_flight_client_reads_the_live_model(tmp_path: Path) -> None:
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


def test_a_plain_flight_client_receives_tasks_by_gets_and_on_a_request_stream(tmp_path: Path) -> None:
    for number in range(4):
        pq.write_table(pa.table({"x": np.arange(8)}), tmp_path / f"{number}.parquet")
    options = flight.FlightCallOptions(timeout=10)
    with fe.local() as cluster, cluster.connect() as job:
        data = job.dataset(str(tmp_path / "*.parquet"), batch_size=4, epochs=1)
        assert data.task_count == 4
        with cluster.status() as status:
            master = status.read(5.0).master
        assert master is not None
        coordinator = EtcdCoordinator(cluster.etcd_address, clock=SystemClock())
        held = HeldKey.claim(coordinator, SystemClock(), JobKeys(cluster.job).trainer("bare"), b'{"id":"bare"}', 10.0)
        assert held is not None
        ticket = {"verb": "tasks", "trainer": "bare", "generation": held.generation, "want": 1}
        received: list[str] = []
        named = ("epoch", "position", "attempt")
        with flight.FlightClient(f"grpc://{master.address}") as client:

            def first() -> flight.FlightStreamReader | None:
                # The master refuses a trainer until its own watch has shown the trainer's key.
                with contextlib.suppress(flight.FlightUnavailableError):
                    return client.do_get(flight.Ticket(json.dumps(ticket).encode()), options)
                return None

            reader = eventually(first)
            reply = json.loads(reader.schema.metadata[b"reply"])
            received += reader.read_all()["url"].to_pylist()
            command = flight.FlightDescriptor.for_command(b'{"verb": "tasks"}')
            writer, answers = client.do_exchange(command, options)
            with writer:
                writer.begin(pa.schema([]))
                while reply["outcome"] != "epochs_done":
                    finished = [{key: each[key] for key in named} for each in reply["assignments"]]
                    request = json.dumps({**ticket, "finished": finished}).encode()
                    writer.write_metadata(xxhash.xxh3_64_hexdigest(request).encode() + request)
                    answer = answers.read_chunk()
                    checksum, text = answer.app_metadata.to_pybytes()[:16], answer.app_metadata.to_pybytes()[16:]
                    assert checksum.decode() == xxhash.xxh3_64_hexdigest(text)
                    reply = json.loads(text)
                    received += [chunk[0] for each in reply["assignments"] for chunk in each["chunks"]]
                writer.write_metadata(b'{"commit": {"batches": 0, "rows": 0, "bytes": 0}}')
                writer.done_writing()
                with pytest.raises(StopIteration):
                    answers.read_chunk()
        job.wait_for_end()
        held.release()
        coordinator.close()
    assert sorted(Path(url).name for url in received) == [f"{number}.parquet" for number in range(4)]


def test_a_client_written_from_the_schemas_joins_and_pushes_and_pulls(tmp_path: Path) -> None:
    """Each batch's gradient of -1 counts once although it is pushed twice. The client does not import flightedl."""
    pq.write_table(pa.table({"x": np.arange(16)}), tmp_path / "x.parquet", row_group_size=8)
    with fe.local() as cluster:
        with cluster.connect() as job:
            job.dataset(str(tmp_path / "*.parquet"), batch_size=4)
            job.parameters({"w": np.zeros(5, np.float32)}, optimizer=fe.SGD(lr=1.0))
        program = [
            sys.executable,
            str(Path(__file__).with_name("foreign_client.py")),
            cluster.etcd_address,
            cluster.job,
        ]
        ran = subprocess.run(program, capture_output=True, text=True, timeout=50, check=False)
    assert ran.returncode == 0, ran.stderr
    seen = json.loads(ran.stdout)
    assert all(reply["member"] > 0 for reply in seen["joined"])
    assert [reply["accepted"] for reply in seen["pushed"]] == [1] * 4
    assert [(reply["accepted"], reply["already_applied"]) for reply in seen["repeated"]] == [(0, 1)] * 4
    assert seen["values"] == [4.0] * 5
    assert not seen["imported"]
