"""A follower has the model of a running job, and follows its changes through evictions and deaths of pservers."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.flight as flight
import pyarrow.parquet as pq
import pytest
from ml_dtypes import bfloat16

import flightedl as fe
from flightedl.adapters.clock import SystemClock
from flightedl.adapters.etcd import EtcdCoordinator
from flightedl.adapters.etcd_access import EtcdAccess
from flightedl.client.following.follower import Follower
from flightedl.coordination.keys import JobKeys
from flightedl.errors import DeadlineError, NotFoundError, UsageError
from flightedl.messages.base import decode
from flightedl.messages.feed import Acknowledgement
from flightedl.messages.status import ConsumerStatus
from flightedl.ports import Coordinator, Entry
from flightedl_tools.main import run_command_line
from tests.support.contracts.coordinator import eventually
from tests.support.processes import closed_port

pytestmark = [pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(120)]

VECTOR = np.linspace(-1, 1, 700_000, dtype=np.float32)


def data_of(folder: Path, count: int) -> str:
    pq.write_table(pa.table({"k": np.arange(count)}), folder / "data.parquet", row_group_size=1)
    return str(folder / "data.parquet")


def rows_of(table: Any) -> dict[int, list[float]]:
    ids, values = table.rows()
    return dict(zip(ids.tolist(), values.tolist(), strict=True))


def follow(cluster: fe.LocalCluster, name: str | None = None) -> Follower:
    return fe.Follower(etcd=cluster.etcd_address, job=cluster.job, name=name)


@pytest.fixture
def cluster() -> Iterator[fe.LocalCluster]:
    with fe.local(pservers=2) as made:
        yield made


def test_a_follower_has_what_trainers_read(cluster: fe.LocalCluster, tmp_path: Path) -> None:
    url = data_of(tmp_path, 12)
    with cluster.connect() as job, follow(cluster) as follower:
        with pytest.raises(NotFoundError, match="knows no model"):
            follower.parameters()
        with pytest.raises(DeadlineError, match="no trainer has declared the model"):
            follower.wait(0.1)
        data = iter(job.dataset(url, batch_size=1))
        users = job.table("users", 3, optimizer=fe.RowAdagrad(lr=1.0), init=fe.Uniform(0.5))
        short = job.table("short", 2, optimizer=fe.SGD(lr=1.0), dtype="bfloat16", rounding="nearest")
        strict = job.table("strict", 2, optimizer=fe.SGD(lr=1.0), unknown="error")
        first = {"w": VECTOR, "b": VECTOR[:9].reshape(3, 3).astype(bfloat16), "s": np.float64(1.0).reshape(())}
        model = job.parameters(first, optimizer=fe.Adam(lr=0.1), mode=fe.Async())
        for step, _ in enumerate(data):
            ids = np.arange(step, step + 5)
            for table in (users, short, strict):
                table.push(ids, np.full((5, table.dim), 0.3 * step + 0.1, np.float32))
            before = follower.wait()["w"] if step else VECTOR
            model.step({name: np.full_like(value, 0.5) for name, value in first.items()})
            if step % 4 == 0:
                follower.catch_up(20.0)
                model.pull()
                for name, value in model.items():
                    np.testing.assert_array_equal(follower[name], value)
                    assert follower[name].dtype == value.dtype
                assert before is not follower["w"]
                assert not follower["w"].flags.writeable
                asked = np.arange(-3, 30)
                np.testing.assert_array_equal(follower.tables["users"].lookup(asked), users.pull(asked))
                np.testing.assert_array_equal(follower.tables["short"].lookup(asked), short.pull(asked))
                assert set(rows_of(follower.tables["users"])) == set(range(step + 5))
        follower.catch_up(20.0)
        known = np.arange(3)
        np.testing.assert_array_equal(follower.tables["strict"].lookup(known), strict.pull(known))
        with pytest.raises(NotFoundError, match="1 of 2 ids have no row in table 'strict'"):
            follower.tables["strict"].lookup([1, 10**6])
        assert sorted(follower) == sorted(follower.parameters()) == ["b", "s", "w"]
        assert 0 <= follower.age_s < 20


def test_followers_may_receive_float32_rounded_to_16_bits(cluster: fe.LocalCluster, tmp_path: Path) -> None:
    options = {"etcd": cluster.etcd_address, "job": cluster.job}
    with cluster.connect() as job:
        data = iter(job.dataset(data_of(tmp_path, 3), batch_size=1))
        users = job.table("users", 3, optimizer=fe.SGD(lr=1.0), unknown="zero")
        short = job.table("short", 2, optimizer=fe.SGD(lr=1.0), dtype="bfloat16", unknown="zero")
        first = {"w": VECTOR, "b": VECTOR[:9].astype(np.float16), "d": VECTOR[:4].astype(np.float64)}
        model = job.parameters(first, optimizer=fe.SGD(lr=0.1), mode=fe.Async())
        with fe.Follower(**options, wire="bfloat16") as one, fe.Follower(**options, wire="float16") as other:
            for step, _ in enumerate(data):
                ids = np.arange(step, step + 5)
                for table in (users, short):
                    table.push(ids, np.full((5, table.dim), 0.3 * step + 0.1, np.float32))
                model.step({name: np.full_like(value, 0.37) for name, value in first.items()})
                model.pull()
                for follower, kind in ((one, bfloat16), (other, np.float16)):
                    follower.catch_up(20.0)
                    np.testing.assert_array_equal(follower["w"], model["w"].astype(kind).astype(np.float32))
                    assert not np.array_equal(follower["w"], model["w"])
                    for name in ("b", "d"):
                        np.testing.assert_array_equal(follower[name], model[name])
                    rounded = users.pull(ids).astype(kind).astype(np.float32)
                    np.testing.assert_array_equal(follower.tables["users"].lookup(ids), rounded)
                    np.testing.assert_array_equal(follower.tables["short"].lookup(ids), short.pull(ids))
    with pytest.raises(UsageError, match="wire is 'int8', but it can be bfloat16, float16"):
        fe.Follower(**options, wire="int8")


def consumers_of(cluster: fe.LocalCluster) -> dict[str, ConsumerStatus]:
    with cluster.status() as status:
        return {each.name: each for each in status.read(5.0).consumers}


def test_a_named_follower_is_shown_with_its_lag_and_is_the_only_one_of_its_name(
    cluster: fe.LocalCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"etcd": cluster.etcd_address, "job": cluster.job, "lease_ttl_s": 4.0}
    with cluster.connect() as job, contextlib.closing(coordinator_of(cluster)) as etcd:
        data = iter(job.dataset(data_of(tmp_path, 6), batch_size=1))
        model = job.parameters({"w": VECTOR}, optimizer=fe.SGD(lr=1.0), mode=fe.Async())

        def step() -> None:
            next(data)
            model.step({"w": np.ones_like(VECTOR)})

        with fe.Follower(**options, name="serving") as follower:
            step()
            follower.catch_up(20.0)
            eventually(lambda: consumers_of(cluster)["serving"].age_s is not None, 20.0)
            found = consumers_of(cluster)["serving"]
            assert (found.pid, found.behind) == (os.getpid(), 0)
            assert 0 <= (found.age_s or 0.0) < 20
            assert run_command_line(["status", "--etcd", cluster.etcd_address, "--job", cluster.job]) == 0
            assert f"serving on {found.host}, pid {os.getpid()}, 0 changes and" in capsys.readouterr().out
            with pytest.raises(
                UsageError, match=rf"'serving' already follows job .* as process {os.getpid()} on .*: end"
            ):
                fe.Follower(**options, name="serving")

            # What etcd has is never newer than what was applied.
            keys = JobKeys(cluster.job)
            for _ in range(3):
                step()
                follower.catch_up(20.0)
            for server in range(2):
                entry = etcd.get(keys.acknowledgement("serving", server))
                assert entry is not None
                stored = decode(entry.value, Acknowledgement).position
                applied = follower.model().positions()[server]
                assert (stored.life, stored.generation) == (applied.life, applied.generation)
                assert stored.number <= applied.number
                eventually(
                    lambda server=server, number=applied.number: acknowledged(etcd, keys, server) == number, 20.0
                )

            # A lost name is claimed again, and positions are stored under the new lease.
            former = etcd.get(keys.consumer("serving"))
            assert former is not None
            assert follower._consumer is not None
            follower._consumer._held._lease.revoke()
            eventually(lambda: is_held_anew(etcd, keys, former), 20.0)
            eventually(lambda: consumers_of(cluster)["serving"].age_s is not None, 20.0)
        eventually(lambda: consumers_of(cluster) == {}, 20.0)
        assert not etcd.list(keys.acknowledged).entries
        for wrong in ("", "a/b", "x" * 65):
            with pytest.raises(UsageError, match="needs 1 to 64 letters"):
                fe.Follower(**options, name=wrong)
        with fe.Follower(**options, name="serving") as follower:
            model.pull()
            np.testing.assert_array_equal(follower.catch_up(20.0)["w"], model["w"])
        for _ in data:
            pass


def up_to_date(cluster: fe.LocalCluster) -> list[ConsumerStatus]:
    """Return the consumers whose copies were up to date less than 10 seconds ago."""
    found = consumers_of(cluster).values()
    return [each for each in found if each.age_s is not None and each.age_s < 10.0]


def acknowledged(etcd: Coordinator, keys: JobKeys, server: int) -> int | None:
    entry = etcd.get(keys.acknowledgement("serving", server))
    return None if entry is None else decode(entry.value, Acknowledgement).position.number


def is_held_anew(etcd: Coordinator, keys: JobKeys, former: Entry) -> bool:
    entry = etcd.get(keys.consumer("serving"))
    return entry is not None and entry.create_revision > former.create_revision


def coordinator_of(cluster: fe.LocalCluster) -> EtcdCoordinator:
    return EtcdCoordinator(EtcdAccess(cluster.etcd_address), clock=SystemClock())


@pytest.mark.parametrize(
    "evict",
    [
        fe.Evict(unused_versions=3),
        fe.Evict(unused_epochs=1),
        fe.Evict(max_rows=2048),
        fe.Evict(unused_versions=9, max_rows=4096, unused_epochs=1),
    ],
    ids=["versions", "epochs", "rows", "all"],
)
def test_evicted_rows_leave_a_follower(cluster: fe.LocalCluster, tmp_path: Path, evict: fe.Evict) -> None:
    url = data_of(tmp_path, 10)
    with cluster.connect() as job, follow(cluster) as follower:
        users = job.table("users", 2, optimizer=fe.SGD(lr=1.0), evict=evict, unknown="zero")
        seen: set[int] = set()
        for step, _ in enumerate(job.dataset(url, batch_size=1, epochs=3)):
            ids = np.arange(step * 700, step * 700 + 1000)
            users.push(ids, -np.ones((1000, 2), np.float32))
            job.step()
            seen.update(ids.tolist())
            if step % 7 == 0:
                follower.catch_up(20.0)
                every = np.arange(-5, step * 700 + 1100)
                np.testing.assert_array_equal(follower.tables["users"].lookup(every), users.pull(every))
        follower.catch_up(20.0)
        every = np.arange(30 * 700 + 1100)
        assert len(follower.tables["users"].rows()[0]) == len(users) < len(seen)
        np.testing.assert_array_equal(follower.tables["users"].lookup(every), users.pull(every))


def tables_of(job: fe.Job, unused_versions: int) -> tuple[fe.Table, fe.Table]:
    """Return a table that evicts rows by age and by norm, and a table of bfloat16 values."""
    evict = fe.Evict(unused_versions=unused_versions, norm_below=0.05)
    users = job.table("users", 3, optimizer=fe.RowAdagrad(lr=0.1), evict=evict)
    return users, job.table("short", 3, optimizer=fe.SGD(lr=0.1), dtype="bfloat16")


@pytest.mark.parametrize("mode", [fe.Async(), fe.Sync()], ids=["async", "sync"])
def test_a_follower_is_bit_for_bit_the_checkpoint_of_the_same_state(tmp_path: Path, mode: Any) -> None:
    checkpoint = str(tmp_path / "checkpoints")
    with (
        fe.local(pservers=2, checkpoint=checkpoint, checkpoint_every_s=1000.0) as cluster,
        cluster.connect() as job,
        follow(cluster) as follower,
    ):
        data = iter(job.dataset(data_of(tmp_path, 8), batch_size=1))
        users, short = tables_of(job, unused_versions=3)
        first = {"w": VECTOR, "b": VECTOR[:900].astype(bfloat16)}
        model = job.parameters(first, optimizer=fe.Adam(lr=0.1), mode=mode)
        chance = np.random.default_rng(0)
        for step in range(7):
            next(data)
            for table in (users, short):
                table.push(np.arange(step * 20, step * 20 + 50), chance.normal(size=(50, 3)).astype(np.float32))
            model.step({name: chance.normal(size=value.shape).astype(value.dtype) for name, value in first.items()})
        options = ["--etcd", cluster.etcd_address, "--job", cluster.job]
        assert run_command_line(["checkpoint", "save", *options]) == 0
        follower.catch_up(20.0)
        saved = fe.load(checkpoint)
        assert run_command_line(["checkpoint", "export", checkpoint, str(tmp_path / "rows"), "--tables"]) == 0
        for name, value in saved.items():
            assert follower[name].dtype == value.dtype
            assert follower[name].tobytes() == value.tobytes()
        for name in ("users", "short"):
            table = pq.read_table(tmp_path / "rows" / f"{name}.parquet")
            assert rows_of(follower.tables[name]) == dict(
                zip(table["id"].to_pylist(), table["values"].to_pylist(), strict=True)
            )
        for _ in data:
            pass


@pytest.mark.parametrize("mode", [fe.Async(), fe.Sync()], ids=["async", "sync"])
def test_a_follower_stops_at_exactly_the_state_of_a_checkpoint_while_training_continues(
    tmp_path: Path, mode: Any
) -> None:
    checkpoint = str(tmp_path / "checkpoints")
    with (
        fe.local(pservers=2, checkpoint=checkpoint, checkpoint_every_s=1000.0) as cluster,
        cluster.connect() as job,
        follow(cluster) as follower,
    ):
        data = iter(job.dataset(data_of(tmp_path, 5000), batch_size=1))
        users, short = tables_of(job, unused_versions=30)
        first = {"w": VECTOR, "b": VECTOR[:900].astype(bfloat16)}
        model = job.parameters(first, optimizer=fe.Adam(lr=0.1), mode=mode)
        begun, ended = threading.Event(), threading.Event()

        def train() -> None:
            chance = np.random.default_rng(0)
            for step, _ in enumerate(data):
                for table in (users, short):
                    table.push(np.arange(step * 7, step * 7 + 50), chance.normal(size=(50, 3)).astype(np.float32))
                model.step({name: chance.normal(size=value.shape).astype(value.dtype) for name, value in first.items()})
                if step == 20:
                    begun.set()
                if ended.is_set():
                    break

        training = threading.Thread(target=train)
        training.start()
        assert begun.wait(60)
        follower.wait()
        options = ["--etcd", cluster.etcd_address, "--job", cluster.job]
        try:
            for _ in range(3):
                _compare_at_a_checkpoint(follower, checkpoint, tmp_path, options)
        finally:
            ended.set()
            training.join()
        follower.catch_up(20.0)
        model.pull()
        np.testing.assert_array_equal(follower["w"], model["w"])


@pytest.mark.timeout(180)
def test_a_follower_stops_at_checkpoints_while_pservers_are_added_and_removed(tmp_path: Path) -> None:
    checkpoint = str(tmp_path / "checkpoints")
    wide = np.zeros(3_000_000, np.float32)
    with (
        fe.local(pservers=1, checkpoint=checkpoint, checkpoint_every_s=1000.0) as cluster,
        cluster.connect() as job,
        follow(cluster) as follower,
    ):
        options = ["--etcd", cluster.etcd_address, "--job", cluster.job]
        data = iter(job.dataset(data_of(tmp_path, 20_000), batch_size=1))
        users = job.table("users", 3, optimizer=fe.RowAdagrad(lr=0.1), evict=fe.Evict(unused_versions=30))
        short = job.table("short", 3, optimizer=fe.SGD(lr=0.1), dtype="bfloat16")
        model = job.parameters({"w": wide}, optimizer=fe.SGD(lr=0.1), mode=fe.Async())
        begun, ended = threading.Event(), threading.Event()

        def train() -> None:
            for step, _ in enumerate(data):
                for table in (users, short):
                    table.push(np.arange(step * 7, step * 7 + 50), np.full((50, 3), 0.1 * step, np.float32))
                model.step({"w": np.full_like(wide, -1.0)})
                begun.set()
                if ended.is_set():
                    break

        training = threading.Thread(target=train)
        training.start()
        try:
            assert begun.wait(60)
            follower.wait()
            for pservers in ("3", "1"):
                scaling = threading.Thread(target=run_command_line, args=(["scale", "pservers", pservers, *options],))
                scaling.start()
                is_over = False
                while not is_over:
                    is_over = not scaling.is_alive()
                    _compare_at_a_checkpoint(follower, checkpoint, tmp_path, options)
                assert follower.model().plan.pserver_count == int(pservers)
        finally:
            ended.set()
            training.join()
        follower.catch_up(20.0)
        model.pull()
        np.testing.assert_array_equal(follower["w"], model["w"])


def _compare_at_a_checkpoint(follower: Follower, checkpoint: str, folder: Path, options: list[str]) -> None:
    # The master may give a checkpoint up for a later one.
    while not _is_equal_at_a_checkpoint(follower, checkpoint, folder, options):
        pass


def _is_equal_at_a_checkpoint(follower: Follower, checkpoint: str, folder: Path, options: list[str]) -> bool:
    is_there = threading.Event()

    def save() -> None:
        while not is_there.wait(0.5):
            assert run_command_line(["checkpoint", "save", *options]) == 0

    saving = threading.Thread(target=save)
    saving.start()
    try:
        with follower.at_checkpoint(40.0) as number:
            is_there.set()
            saving.join()
            if not list(Path(checkpoint).glob(f"*/c-{number}/manifest.json")):
                return False
            of_number = ["--number", str(number)]
            export = ["checkpoint", "export", checkpoint]
            assert run_command_line([*export, str(folder / "model.safetensors"), *of_number]) == 0
            assert run_command_line([*export, str(folder / "rows"), "--tables", *of_number]) == 0
            for name, value in fe.load(folder / "model.safetensors").items():
                assert follower[name].tobytes() == value.tobytes()
            for name in ("users", "short"):
                table = pq.read_table(folder / "rows" / f"{name}.parquet")
                saved = dict(zip(table["id"].to_pylist(), table["values"].to_pylist(), strict=True))
                assert rows_of(follower.tables[name]) == saved
                assert saved
            return True
    finally:
        is_there.set()
        saving.join()


def test_a_plain_flight_client_follows_changes(cluster: fe.LocalCluster, tmp_path: Path) -> None:
    """Two increments after a base, with pyarrow alone."""
    options = flight.FlightCallOptions(timeout=20)
    with cluster.connect() as job:
        data = iter(job.dataset(data_of(tmp_path, 4), batch_size=1))
        users = job.table("users", 2, optimizer=fe.SGD(lr=1.0))
        model = job.parameters({"w": VECTOR, "still": VECTOR[:3]}, optimizer=fe.SGD(lr=1.0), mode=fe.Async())
        next(data)
        with cluster.status() as status:
            master = status.read(5.0).master
        assert master is not None
        command = flight.FlightDescriptor.for_command(b'{"verb": "changes"}')
        endpoints = flight.connect(f"grpc://{master.address}").get_flight_info(command, options).endpoints
        assert len(endpoints) == 2
        since: dict[int, Any] = {}
        for step in range(3):
            parts, rows = [], []
            for number, endpoint in enumerate(endpoints):
                ticket = {**json.loads(endpoint.ticket.ticket), "since": since.get(number), "wait_s": 0.0}
                client = flight.connect(endpoint.locations[0])
                stream = client.do_get(flight.Ticket(json.dumps(ticket).encode()), options)
                header = json.loads(stream.schema.metadata[b"flightedl.changes"])
                assert (header["since"] is None) == (step == 0)
                since[number] = header["position"]
                changes = stream.read_all().to_pylist()
                assert changes[-1]["kind"] == "end"
                assert changes[-1]["block"] == len(changes) - 1
                parts += [each for each in changes if each["kind"] == "values"]
                rows += [each for each in changes if each["kind"] == "rows"]
            model.pull()
            whole = sorted((each["start"], each["values"]) for each in parts if each["name"] == "w")
            assert b"".join(values for _, values in whole) == model["w"].tobytes()
            assert any(each["name"] == "still" for each in parts) == (step == 0)
            found = np.sort(np.concatenate([np.frombuffer(each["ids"], np.int64) for each in rows] or [np.empty(0)]))
            assert found.tolist() == ([7, 10 + step - 1] if step else [])
            users.push([7, 10 + step], -np.ones((2, 2), np.float32))
            model.step({"w": -np.ones_like(VECTOR)})
            next(data)
        for wrong in ({"since": 3}, {"wait_s": 99}, {"more": 1}, {"plan_hash": "other"}, {"since": {"number": -1}}):
            ticket = {**json.loads(endpoints[0].ticket.ticket), **wrong}
            with pytest.raises(flight.FlightError) as caught:
                client.do_get(flight.Ticket(json.dumps(ticket).encode()), options).read_all()
            assert json.loads(caught.value.extra_info)["code"] in {"message", "fenced"}
            assert "Traceback" not in str(caught.value)


def fetched(port: int, path: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", None, 10) as reply:
        return json.load(reply)


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", None, 10) as reply:
            return b"up to date" in reply.read()
    except OSError:
        return False


def test_a_copy_is_kept_in_files_and_served(cluster: fe.LocalCluster, tmp_path: Path) -> None:
    options = ["--etcd", cluster.etcd_address, "--job", cluster.job]
    with closed_port() as port, closed_port() as flight_port:
        pass
    with cluster.connect() as job:
        data = iter(job.dataset(data_of(tmp_path, 4), batch_size=1))
        users = job.table("users", 2, optimizer=fe.SGD(lr=1.0))
        short = job.table("sh/ort", 2, optimizer=fe.SGD(lr=1.0), dtype="bfloat16", rounding="nearest")
        model = job.parameters({"w": VECTOR[:6].reshape(2, 3)}, optimizer=fe.SGD(lr=1.0), mode=fe.Async())
        next(data)
        for table in (users, short):
            table.push(np.array([3, -17]), -np.arange(4, dtype=np.float32).reshape(2, 2))
        model.step({"w": np.ones((2, 3), np.float32)})
        model.pull()
        assert run_command_line(["follow", str(tmp_path / "copy"), "--count", "1", "--name", "files", *options]) == 0
        assert pq.read_table(tmp_path / "copy" / "w.parquet")["value"].to_pylist() == model["w"].tolist()
        for name, table in (("users", users), ("sh%2Fort", short)):
            found = pq.read_table(tmp_path / "copy" / name)
            assert found["values"].to_pylist() == table.pull(found["id"].to_numpy()).tolist()
            assert sorted(found["id"].to_pylist()) == [-17, 3]
        ports = ["--port", str(port), "--flight-port", str(flight_port)]
        serving = threading.Thread(target=run_command_line, args=(["serve", "--for-s", "6", *ports, *options],))
        serving.start()
        assert eventually(lambda: answers(port), 20.0)
        assert fetched(port, "/tables/users/3,-17")["values"] == users.pull(np.array([3, -17])).tolist()
        parameter = fetched(port, "/parameters/w")
        assert (parameter["shape"], parameter["values"]) == ([2, 3], model["w"].astype(float).reshape(-1).tolist())
        for path, text in (("/parameters/x", "no parameter 'x'"), ("/tables/x/1", "no table 'x'"), ("/x", "ask for")):
            with pytest.raises(urllib.error.HTTPError, match="404") as caught:
                fetched(port, path)
            assert text in json.load(caught.value)["error"]
            caught.value.close()
        limit = flight.FlightCallOptions(timeout=20)
        ticket = flight.Ticket(b'{"verb": "lookup", "table": "users", "ids": [3, -17]}')
        with flight.connect(f"grpc://127.0.0.1:{flight_port}") as client:
            batch = client.do_get(ticket, limit).read_all()
            with pytest.raises(flight.FlightServerError, match="not a valid LookupTicket"):
                client.do_get(flight.Ticket(b'{"verb": "lookup", "ids": 3}'), limit).read_all()
        assert batch["id"].to_pylist() == [3, -17]
        assert batch["values"].to_pylist() == users.pull(np.array([3, -17])).tolist()
        serving.join(20)
        assert not serving.is_alive()
        for _ in data:
            pass


@pytest.mark.faults
def test_a_copy_in_files_gets_increments_through_evictions_and_the_death_of_a_pserver(tmp_path: Path) -> None:
    folder, checkpoint = tmp_path / "copy", str(tmp_path / "checkpoints")
    with (
        fe.local(pservers=2, checkpoint=checkpoint, checkpoint_every_s=1000.0, lease_ttl_s=2.0) as cluster,
        cluster.connect() as job,
    ):
        options = ["--etcd", cluster.etcd_address, "--job", cluster.job]
        data = iter(job.dataset(data_of(tmp_path, 10), batch_size=1))
        evict = fe.Evict(norm_below=1e-3, unused_versions=4)
        users = job.table("users", 2, optimizer=fe.SGD(lr=1.0), evict=evict)
        model = job.parameters({"w": VECTOR[:6]}, optimizer=fe.SGD(lr=1.0), mode=fe.Async())
        for step, _ in enumerate(data):
            users.push(np.arange(1000), np.full((1000, 2), -1.0 if step == 0 else 0.0, np.float32))
            users.push(np.arange(step * 3, step * 3 + 9) + 2000, np.full((9, 2), -1e-5 if step == 2 else -1.0, "f4"))
            model.step({"w": -np.ones(6, np.float32)})
            if step == 4:
                assert run_command_line(["checkpoint", "save", *options]) == 0
            if step == 6:
                cluster.kill("pserver", 1)
            if step % 4 == 1:
                assert run_command_line(["follow", str(folder), "--count", "1", *options]) == 0
        assert run_command_line(["follow", str(folder), "--count", "1", *options]) == 0
        files = pl.scan_parquet(folder / "users" / "*.parquet")
        newest = files.filter(pl.col("base") == pl.col("base").max()).sort("number").group_by("id").last()
        present = newest.filter(~pl.col("removed")).collect()
        assert len(present) == len(users)
        np.testing.assert_array_equal(present["values"].to_numpy(), users.pull(present["id"].to_numpy()))
        index = json.loads((folder / "copy.json").read_text())
        assert set(index["positions"]) == {"0", "1"}
        # Batches that are repeated after the kill cause further copies, the last of which may be without changes.
        assert index["tables"]["users"]["numbers"][:3] == [1, 2, 3]
        assert index["tables"]["users"]["increment_rows"] < 500
        assert files.select(pl.col("removed").sum()).collect().item() > 10


@pytest.mark.faults
def test_a_follower_drops_what_a_dead_pserver_had_and_its_successor_has_not(tmp_path: Path) -> None:
    url = data_of(tmp_path, 40)
    checkpoint = str(tmp_path / "checkpoints")
    with (
        fe.local(pservers=2, checkpoint=checkpoint, checkpoint_every_s=1.5, lease_ttl_s=2.0) as cluster,
        cluster.connect() as job,
        follow(cluster) as follower,
    ):
        data = job.dataset(url, batch_size=1)
        evict = fe.Evict(norm_below=1e-3, unused_versions=25)
        users = job.table("users", 2, optimizer=fe.SGD(lr=1.0), evict=evict, unknown="zero")
        model = job.parameters({"w": VECTOR}, optimizer=fe.SGD(lr=1.0), mode=fe.Async())
        for step, _ in enumerate(data):
            ids = np.arange(step * 50, step * 50 + 100)
            scale = 1e-5 if step % 3 == 0 else 1.0
            users.push(ids, np.full((100, 2), -scale, np.float32))
            model.step({"w": np.full_like(VECTOR, -1.0)})
            if step in {8, 20}:
                follower.catch_up(30.0)
                cluster.kill("pserver", step % 2)
            if step % 10 == 9:
                assert eventually(lambda: _is_same(follower, model, users), 40.0)
        assert eventually(lambda: _is_same(follower, model, users), 40.0)


@pytest.mark.faults
def test_followers_survive_deaths_of_the_master_a_pserver_and_another_follower(tmp_path: Path) -> None:
    """Rows are evicted by age and norm all the time. A client that stops reading its answer delays no other process."""
    url, checkpoint = data_of(tmp_path, 40), str(tmp_path / "checkpoints")
    with (
        fe.local(pservers=2, checkpoint=checkpoint, checkpoint_every_s=1.5, lease_ttl_s=2.0) as cluster,
        cluster.connect() as job,
        follow(cluster, "serving") as follower,
    ):
        options = ["--etcd", cluster.etcd_address, "--job", cluster.job]
        evict = fe.Evict(norm_below=1e-3, unused_versions=25)
        users = job.table("users", 2, optimizer=fe.SGD(lr=1.0), evict=evict, unknown="zero")
        model = job.parameters({"w": VECTOR}, optimizer=fe.SGD(lr=1.0), mode=fe.Async())
        other: subprocess.Popen[bytes] | None = None
        sleeping: Any = None
        for step, _ in enumerate(job.dataset(url, batch_size=1)):
            ids = np.arange(step * 50, step * 50 + 100)
            users.push(ids, np.full((100, 2), -1e-5 if step % 3 == 0 else -1.0, np.float32))
            model.step({"w": np.full_like(VECTOR, -1.0)})
            if step == 4:
                sleeping = _begin_reading(cluster)
                copying = ["follow", str(tmp_path / "copy"), "--every-s", "0.1", "--name", "copy", *options]
                other = subprocess.Popen([sys.executable, "-m", "flightedl", *copying], stdout=subprocess.DEVNULL)
            if step in {8, 20, 28}:
                follower.catch_up(30.0)
                cluster.kill("master" if step != 20 else "pserver", 0)
            if step == 24:
                assert other is not None
                other.kill()
                other.wait()
        assert eventually(lambda: _is_same(follower, model, users), 40.0)
        # The lease of the process that died has ended, so its name is free.
        with follow(cluster, "copy") as successor:
            assert eventually(lambda: _is_same(successor.wait(), model, users), 40.0)
            expected = {"serving": os.getpid(), "copy": os.getpid()}
            eventually(lambda: {each.name: each.pid for each in up_to_date(cluster)} == expected, 40.0)
        sleeping.cancel()


def _begin_reading(cluster: fe.LocalCluster) -> Any:
    """Request a base as a plain client, and read only its beginning."""
    with cluster.status() as status:
        master = status.read(5.0).master
    assert master is not None
    options = flight.FlightCallOptions(timeout=300)
    command = flight.FlightDescriptor.for_command(b'{"verb": "changes"}')
    endpoint = flight.connect(f"grpc://{master.address}").get_flight_info(command, options).endpoints[0]
    stream = flight.connect(endpoint.locations[0]).do_get(endpoint.ticket, options)
    stream.read_chunk()
    return stream


def _is_same(follower: Follower, model: Any, users: fe.Table) -> bool:
    follower.catch_up(30.0)
    model.pull()
    every = np.arange(-5, 2200)
    is_same = np.array_equal(follower["w"], model["w"])
    return is_same and np.array_equal(follower.tables["users"].lookup(every), users.pull(every))


def test_the_example_serves_what_it_trains_on_arriving_clicks(tmp_path: Path) -> None:
    arguments = ["run", "flightedl.examples.online", "--pservers", "2", "--no-page", "--output", str(tmp_path / "out")]
    ran = subprocess.run(
        [sys.executable, "-m", "flightedl", *arguments, "--", "--files", "40", "--pause-s", "0.3"],
        env={**os.environ, "FLIGHTEDL_FOLLOW_EVERY_S": "0.3"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    logged = pq.read_table(tmp_path / "out" / "metrics.parquet").to_pylist()
    found = {name: [each["value"] for each in logged if each["name"] == name] for name in ("auc", "age_ms", "items")}
    # At the end, a slow machine may train on several files without a pause, while the copy stays the same.
    assert max(found["auc"]) > 0.65
    assert 0 < found["items"][-1] < 40 * 10 + 200
    assert max(found["age_ms"]) < 20_000


def test_a_follower_follows_blocks_that_move_to_another_pserver(tmp_path: Path) -> None:
    url, checkpoint = data_of(tmp_path, 400), str(tmp_path / "checkpoints")
    wide = np.zeros(3_000_000, np.float32)
    with (
        fe.local(pservers=2, checkpoint=checkpoint) as cluster,
        cluster.connect() as job,
        follow(cluster) as follower,
    ):
        options = ["--etcd", cluster.etcd_address, "--job", cluster.job]
        scaling = threading.Thread(target=run_command_line, args=(["scale", "pservers", "1", *options],))
        data = iter(job.dataset(url, batch_size=1))
        evict = fe.Evict(unused_versions=40)
        users = job.table("users", 2, optimizer=fe.SGD(lr=1.0), evict=evict, unknown="zero")
        model = job.parameters({"w": wide}, optimizer=fe.SGD(lr=1.0), mode=fe.Async())
        after = 0
        for step, _ in enumerate(data):
            users.push(np.arange(step * 3, step * 3 + 60), -np.ones((60, 2), np.float32))
            model.step({"w": np.full_like(wide, -1.0)})
            if step == 10:
                scaling.start()
            if step % 20 == 5 or after:
                follower.catch_up(30.0)
                model.pull()
                every = np.arange(step * 3 + 80)
                np.testing.assert_array_equal(follower["w"], model["w"])
                np.testing.assert_array_equal(follower.tables["users"].lookup(every), users.pull(every))
            after += step > 10 and not scaling.is_alive()
            if after > 3:
                break
        assert after > 3, "the blocks have not moved"
        assert model.plan.pserver_count == follower.model().plan.pserver_count == 1
        scaling.join()
