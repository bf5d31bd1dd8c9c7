"""Any Arrow Flight client reads parameters and tables of a running job as columns, with nothing but pyarrow."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.flight as flight
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from ml_dtypes import bfloat16

import flightedl as fe
from flightedl.adapters.clock import SystemClock
from flightedl.config import CommonSettings
from flightedl.launch.status import JobStatus, answered_within
from flightedl.messages.checkpoints import CheckpointRequest
from flightedl_tools.main import command, run_command_line

pytestmark = [pytest.mark.etcd, pytest.mark.slow]

OPTIONS = flight.FlightCallOptions(timeout=20)
IDS = np.array([3, -4, 2**40, 17, 5], np.int64)
VECTOR = np.linspace(-1, 1, 3_000_000, dtype=np.float32)
MATRIX = np.arange(1201 * 997, dtype=np.float32).reshape(1201, 997)


class Job(NamedTuple):
    """A job with a trained model."""

    master: str
    cluster: fe.LocalCluster
    model: Any
    users: fe.Table


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    folder = tmp_path_factory.mktemp("job")
    pq.write_table(pa.table({"k": np.arange(4)}), folder / "data.parquet", row_group_size=1)
    checkpoint = str(folder / "checkpoints")
    with fe.local(pservers=2, checkpoint=checkpoint, checkpoint_every_s=1000.0) as cluster, cluster.connect() as job:
        data = iter(job.dataset(str(folder / "data.parquet"), batch_size=1))
        users = job.table("users", 3, optimizer=fe.RowAdagrad(lr=1.0), evict=fe.Evict(unused_versions=100))
        tags = job.table("tags", 2, optimizer=fe.SGD(lr=1.0), dtype="bfloat16")
        first = {
            "vector": VECTOR,
            "matrix": MATRIX,
            "short": VECTOR[:1000].astype(bfloat16),
            "half": VECTOR[:6].reshape(3, 2).astype(np.float16),
            "double": np.float64(0.1).reshape(()),
        }
        model = job.parameters(first, optimizer=fe.SGD(lr=1.0))
        next(data)
        users.push(IDS, -np.arange(15, dtype=np.float32).reshape(5, 3))
        tags.push(IDS[:2], -np.full((2, 2), 0.5, np.float32))
        model.step({name: np.full_like(value, -1) for name, value in first.items()})
        next(data)
        with cluster.status() as status:
            master = status.read(5.0).master
        assert master is not None
        yield Job(f"grpc://{master.address}", cluster, model, users)
        for _ in data:
            pass


def read(master: str, **command: Any) -> pa.Table:
    """Read as a stranger would: with pyarrow alone."""
    info = flight.connect(master).get_flight_info(
        flight.FlightDescriptor.for_command(json.dumps({"verb": "read", **command}).encode()), OPTIONS
    )
    return pa.concat_tables(
        flight.connect(endpoint.locations[0]).do_get(endpoint.ticket, OPTIONS).read_all() for endpoint in info.endpoints
    )


def about(schema: pa.Schema, name: str) -> str:
    return schema.metadata[f"flightedl.{name}".encode()].decode()


def save(job: Job) -> None:
    """Make a checkpoint and wait for it."""
    settings = CommonSettings(etcd=job.cluster.etcd_address, job=job.cluster.job)
    with JobStatus(settings, SystemClock()) as status:
        ticket = status.checkpoint(CheckpointRequest(reason="a test"), 5.0).ticket
        request = CheckpointRequest(ticket=ticket, wait_s=1.0)
        assert answered_within(
            20.0, SystemClock(), lambda left_s: status.checkpoint(request, left_s), lambda reply: reply.complete
        ).complete


def test_all_parameters_and_tables_are_listed_with_schemas_and_endpoints(job: Job) -> None:
    found = {about(info.schema, "name"): info for info in flight.connect(job.master).list_flights(options=OPTIONS)}
    assert found.keys() == {"vector", "matrix", "short", "half", "double", "users", "tags"}
    assert all(info.ordered and info.endpoints for info in found.values())
    assert found["matrix"].schema.field("value").type == pa.list_(pa.float32(), 997)
    assert json.loads(about(found["matrix"].schema, "shape")) == [1201, 997]
    assert (found["matrix"].total_records, found["matrix"].total_bytes) == (1201, 4 * MATRIX.size)
    assert found["users"].schema.names == ["id", "values"]
    assert {place.uri for info in found.values() for end in info.endpoints for place in end.locations}
    chosen = list(flight.connect(job.master).list_flights(b"ma", OPTIONS))
    assert [about(info.schema, "name") for info in chosen] == ["matrix"]


@pytest.mark.parametrize("cut", ["latest", "checkpoint"])
def test_values_of_each_dtype_are_those_that_trainers_read(job: Job, cut: str) -> None:
    if cut == "checkpoint":
        save(job)
    job.model.pull()
    for name, value in job.model.items():
        table = read(job.master, name=name, cut=cut)
        column = table["value"].combine_chunks()
        flat = column.flatten() if pa.types.is_fixed_size_list(column.type) else column
        np.testing.assert_array_equal(flat.to_numpy().reshape(value.shape), value.astype(flat.type.to_pandas_dtype()))
        assert about(table.schema, "dtype") == value.dtype.name
    rows = read(job.master, name="users", cut=cut)
    np.testing.assert_array_equal(job.users.pull(rows["id"].to_numpy()), np.stack(rows["values"].to_numpy()))
    assert sorted(rows["id"].to_pylist()) == sorted(IDS.tolist())
    tags = read(job.master, name="tags", cut=cut)
    assert tags["values"].to_pylist() == [[0.5, 0.5]] * 2


@pytest.mark.parametrize("cut", ["latest", "checkpoint"])
def test_ranges_and_columns_are_chosen_in_the_command(job: Job, cut: str) -> None:
    save(job)
    some = read(job.master, name="vector", start=999_990, stop=1_500_001, cut=cut)["value"].to_numpy()
    np.testing.assert_array_equal(some, job.model["vector"][999_990:1_500_001])
    rows = read(job.master, name="matrix", start=600, stop=1200, cut=cut)["value"].combine_chunks()
    np.testing.assert_array_equal(rows.flatten().to_numpy().reshape(600, 997), job.model["matrix"][600:1200])
    assert read(job.master, name="matrix", start=3, stop=3, cut=cut).num_rows == 0
    assert read(job.master, name="users", start=3, stop=3, cut=cut).num_rows == 0
    users = read(job.master, name="users", columns=["version", "id", "updates", "square_sum"], cut=cut)
    assert users.column_names == ["version", "id", "updates", "square_sum"]
    assert set(users["version"].to_pylist()) == {1}
    halves = [read(job.master, name="users", start=a, stop=b, cut=cut)["id"] for a, b in ((0, 300), (300, 1024))]
    assert sorted(halves[0].to_pylist() + halves[1].to_pylist()) == sorted(IDS.tolist())


def test_rows_go_straight_into_duckdb_polars_and_pandas(job: Job) -> None:
    tables = {"users": read(job.master, name="users"), "vector": read(job.master, name="vector")}
    command = flight.FlightDescriptor.for_command(b'{"verb": "read", "name": "users"}')
    end = flight.connect(job.master).get_flight_info(command, OPTIONS).endpoints[0]
    first = flight.connect(end.locations[0]).do_get(end.ticket, OPTIONS).to_reader()
    with duckdb.connect() as database:
        for name, table in {**tables, "reader": first}.items():
            database.register(name, table)
        (total,) = database.sql("select sum(list_sum(values)) from users").fetchall()[0]
        assert total == pytest.approx(float(job.users.pull(IDS).sum()))
        assert database.sql("select max(value) from vector").fetchall() == [(float(job.model["vector"].max()),)]
        assert 0 < database.sql("select count(*) from reader").fetchall()[0][0] < IDS.size
    assert pl.from_arrow(tables["users"]).height == len(tables["users"].to_pandas()) == IDS.size


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ({"name": "nothing"}, "the model has no 'nothing'"),
        ({"name": "users", "kind": "parameter"}, "the model has no 'users'"),
        ({"name": "vector", "stop": 3_000_001}, "it has rows 0 to 3000000"),
        ({"name": "vector", "columns": ["id"]}, "column 'id' of 'vector' cannot be read"),
        ({"name": "users", "columns": ["id", "id"]}, "name each of id, values, updates"),
        ({"name": "users", "stop": 1025}, "the buckets of users"),
        ({"name": "vector", "cut": "tomorrow"}, "not a valid ReadCommand"),
        ({"name": "vector", "start": -1}, "not a valid ReadCommand"),
    ],
)
def test_invalid_commands_get_one_sentence(job: Job, command: dict[str, Any], text: str) -> None:
    with pytest.raises(flight.FlightServerError, match=text) as caught:
        read(job.master, **command)
    assert "Traceback" not in str(caught.value)


def test_hostile_tickets_get_one_sentence(job: Job) -> None:
    info = flight.connect(job.master).get_flight_info(
        flight.FlightDescriptor.for_command(b'{"verb": "read", "name": "vector"}'), OPTIONS
    )
    right = json.loads(info.endpoints[0].ticket.ticket)
    for change in (
        {"name": "x" * 300},
        {"name": "nothing"},
        {"kind": "table"},
        {"start": 2**70},
        {"start": 9, "stop": 8},
        {"stop": 2**62},
        {"stop": 3_000_000},
        {"plan_hash": "other"},
        {"checkpoint": 10**9},
        {"columns": []},
        {"more": 1},
    ):
        ticket = flight.Ticket(json.dumps({**right, **change}).encode())
        with pytest.raises(flight.FlightError) as caught:
            flight.connect(info.endpoints[0].locations[0]).do_get(ticket, OPTIONS).read_all()
        assert json.loads(caught.value.extra_info)["code"] in {"message", "not_found", "fenced", "stale_placement"}, (
            change
        )
        assert len(str(caught.value)) < 1500
        assert "Traceback" not in str(caught.value)
    with pytest.raises(flight.FlightServerError, match="the master sends"):
        flight.connect(job.master).do_get(flight.Ticket(json.dumps(right).encode()), OPTIONS).read_all()


@pytest.mark.parametrize("mode", [fe.Async(), fe.Sync()], ids=["async", "sync"])
def test_a_cut_is_one_state_of_all_pservers_while_training_continues(tmp_path: Path, mode: Any) -> None:
    """Every step adds 1 to all values, so in sync mode all values of one state are equal."""
    pq.write_table(pa.table({"k": np.arange(4000)}), tmp_path / "data.parquet", row_group_size=100)
    first = {"a": np.zeros(1_000_000, np.float32), "b": np.zeros(300_000, np.float32).astype(bfloat16)}
    begun, stop = threading.Event(), threading.Event()
    with fe.local(pservers=2) as cluster, cluster.connect() as job:
        users = job.table("users", 2, optimizer=fe.SGD(lr=1.0), evict=fe.Evict(unused_versions=50))
        model = job.parameters(first, optimizer=fe.SGD(lr=1.0), mode=mode)
        data = iter(job.dataset(str(tmp_path / "data.parquet"), batch_size=1))

        def train() -> None:
            for _ in data:
                users.push(np.arange(40), -np.ones((40, 2), np.float32))
                model.step({name: np.full_like(value, -1) for name, value in first.items()})
                begun.set()
                if stop.is_set():
                    break

        with cluster.status() as status:
            record = status.read(5.0).master
        assert record is not None
        master, options = f"grpc://{record.address}", ["--etcd", cluster.etcd_address, "--job", cluster.job]
        with pytest.raises(flight.FlightServerError, match="request a new one"):
            read(master, name="a", cut="kept")
        trainer = threading.Thread(target=train)
        trainer.start()
        assert begun.wait(60)
        cuts, names = [], []
        for _ in range(3):
            tables = [
                read(master, name="a", cut="new"),
                *(read(master, name=name, cut="kept") for name in ("b", "users")),
            ]
            again = read(master, name="users", cut="kept")
            assert again.sort_by("id") == tables[2].sort_by("id")
            values = [set(tables[0]["value"].to_pylist()), set(tables[1]["value"].to_pylist())]
            values.append(set(read(master, name="users", cut="kept", columns=["version"])["version"].to_pylist()))
            cuts.append(values)
            names.append({about(table.schema, "cut") for table in tables})
        stop.set()
        trainer.join()
        assert all(len(each) == 1 for each in names)
        assert len(set.union(*names)) == 3
        if isinstance(mode, fe.Sync):
            assert all(values[0] == values[2] for values in cuts)
            assert all({float(bfloat16(value)) for value in values[0]} == values[1] for values in cuts)
            assert all(len(each) == 1 for values in cuts for each in values)
        else:
            # On each pserver, a part of a push may have been applied.
            assert all(len(each) <= 4 for values in cuts for each in values)
        assert min(cuts[0][0]) < min(cuts[2][0])
        written = CliRunner().invoke(command, ["model", "get", "a", str(tmp_path / "a.npy"), "--cut", "kept", *options])
        assert written.exit_code == 0, written.output
        assert set(np.load(tmp_path / "a.npy").tolist()) == cuts[2][0]
        endpoint = (
            flight.connect(master)
            .get_flight_info(
                flight.FlightDescriptor.for_command(b'{"verb": "read", "name": "a", "cut": "kept"}'), OPTIONS
            )
            .endpoints[0]
        )
        for wrong, text in (
            ([1, 99], "is no longer kept"),
            ([1], "not a valid ReadTicket"),
            ("x", "not a valid ReadTicket"),
        ):
            ticket = flight.Ticket(json.dumps({**json.loads(endpoint.ticket.ticket), "cut": wrong}).encode())
            with pytest.raises(flight.FlightError, match=text):
                flight.connect(endpoint.locations[0]).do_get(ticket, OPTIONS).read_all()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("mode", [fe.Async(), fe.Sync()], ids=["async", "sync"])
def test_cuts_are_made_while_blocks_move_to_other_pservers(tmp_path: Path, mode: Any) -> None:
    """Every step adds 1 to all values, so in sync mode all values of one state are equal."""
    pq.write_table(pa.table({"k": np.arange(40_000)}), tmp_path / "data.parquet", row_group_size=1000)
    first = {"a": np.zeros(4_000_000, np.float32), "b": np.zeros(300_000, np.float32)}
    begun, stop = threading.Event(), threading.Event()
    # A trainer whose lease ends leaves the rounds: until it repeats its batch, some blocks lack it in the same round.
    with fe.local(pservers=1, lease_ttl_s=30.0) as cluster, cluster.connect() as job:
        users = job.table("users", 2, optimizer=fe.SGD(lr=1.0), evict=fe.Evict(unused_versions=50))
        model = job.parameters(first, optimizer=fe.SGD(lr=1.0), mode=mode)
        data = iter(job.dataset(str(tmp_path / "data.parquet"), batch_size=1))

        def train() -> None:
            for step, _ in enumerate(data):
                users.push(np.arange(step, step + 2000), -np.ones((2000, 2), np.float32))
                model.step({name: np.full_like(value, -1) for name, value in first.items()})
                begun.set()
                if stop.is_set():
                    break

        with cluster.status() as status:
            record = status.read(5.0).master
        assert record is not None
        master, options = f"grpc://{record.address}", ["--etcd", cluster.etcd_address, "--job", cluster.job]
        trainer = threading.Thread(target=train)
        scaling = threading.Thread(target=run_command_line, args=(["scale", "pservers", "3", *options],))
        trainer.start()
        try:
            assert begun.wait(60)
            scaling.start()
            owners, after, oldest = set(), 0, 0.0
            while after < 2:
                after += not scaling.is_alive()
                endpoints, whole = read_cut(master, "a", "new")
                owners.add(endpoints)
                values = set(whole["value"].unique().to_pylist())
                ages = set(read_cut(master, "users", "kept", ["version"])[1]["version"].unique().to_pylist())
                if isinstance(mode, fe.Sync):
                    assert values == set(read_cut(master, "b", "kept")[1]["value"].unique().to_pylist()) == {max(ages)}
                    assert max(ages) - min(ages) <= 51
                else:
                    # The pservers make the cut at different moments, when each may have applied a part of a push.
                    assert len(values) <= 2 * 3
                    assert max(ages) - min(ages) <= 52 + max(values) - min(values)
                    assert min(values) >= oldest
                    oldest = min(values)
        finally:
            stop.set()
            trainer.join()
            scaling.join()
        assert {1, 3} <= owners


def read_cut(master: str, name: str, cut: str, columns: list[str] | None = None) -> tuple[int, pa.Table]:
    """Return the number of different pservers from which a parameter or table was read, and its rows."""
    request = {"verb": "read", "name": name, "cut": cut, "columns": columns}
    descriptor = flight.FlightDescriptor.for_command(json.dumps(request).encode())
    endpoints = flight.connect(master).get_flight_info(descriptor, OPTIONS).endpoints
    # Blocks continue to move after the locations are known.
    threading.Event().wait(0.1)
    parts = [flight.connect(each.locations[0]).do_get(each.ticket, OPTIONS).read_all() for each in endpoints]
    return len({each.locations[0].uri for each in endpoints}), pa.concat_tables(parts)


def run(job: Job, *arguments: str) -> str:
    options = ["--etcd", job.cluster.etcd_address, "--job", job.cluster.job]
    result = CliRunner().invoke(command, ["model", *arguments, *options], catch_exceptions=True)
    return result.output if result.exception is None else str(result.exception)


def test_the_command_lists_shows_and_writes_the_model(job: Job, tmp_path: Path) -> None:
    listed = run(job, "list")
    assert all(name in listed for name in ("vector", "matrix", "[1201, 997]", "rows of 3", "12.0 MB"))
    shown = run(job, "show", "matrix")
    assert "latest" in shown
    assert "value: fixed_size_list<item: float>[997]" in shown
    for name, rows in (("vector", "5:50"), ("matrix", ":7"), ("half", ":")):
        where = tmp_path / f"{name}.npy"
        assert str(where) in run(job, "get", name, str(where), "--rows", rows)
        first, _, stop = rows.partition(":")
        expected = job.model[name][int(first or 0) : int(stop) if stop else None]
        np.testing.assert_array_equal(np.load(where), expected)
    run(job, "get", "users", str(tmp_path / "u"), "--to", "parquet", "--columns", "id,version")
    assert pq.read_table(tmp_path / "u").column_names == ["id", "version"]
    run(job, "get", "half", str(tmp_path / "half.csv"))
    lines = (tmp_path / "half.csv").read_text("utf-8").splitlines()
    assert lines[0] == '"value_0","value_1"'
    assert [float(text) for text in lines[2].split(",")] == job.model["half"][1].tolist()
    for arguments, text in (
        (["get", "users"], "--to parquet, --to npy or --to csv"),
        (["get", "users", "--to", "npy"], "write the table with --to parquet"),
        (["get", "vector", "x.npy", "--rows", "3"], "START:STOP"),
        (["show", "nothing"], "the model has no 'nothing'"),
    ):
        assert text in run(job, *arguments)
