"""Imports into the checkpoint of a stopped job are exact, also if the import or the resumed job is killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import flightedl as fe
from flightedl.adapters.clock import SystemClock
from flightedl.config import CommonSettings
from flightedl.coordination.coordinators import open_coordinator
from flightedl.coordination.keys import JobKeys
from flightedl.domain.checkpoint.pointer import decode_pointer
from flightedl.errors import UsageError
from flightedl.ports import Put
from flightedl_tools.main import command
from tests.support.contracts.coordinator import eventually
from tests.support.etcd_server import EtcdServer

pytestmark = [pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(180)]

RECORDS, EPOCHS = 8, 3
IDS, NEW = np.arange(50), np.arange(25, 75)
COLUMNS = ["id", "values", "updates", "square_sum"]


def table(*arguments: object) -> str:
    result = CliRunner().invoke(command, ["table", *map(str, arguments)], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(path, columns=COLUMNS).sort_by("id").to_pylist()
    return rows


def files_in(url: Path) -> set[Path]:
    """Return all files of checkpoints, including those that are being written, whose names begin with a dot."""
    return {*url.glob("*/c-*/*"), *url.glob("*/c-*/.*")}


def run(*arguments: object) -> str:
    result = CliRunner().invoke(command, [*map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


def declared(job: fe.Job, place: Path) -> tuple[Any, fe.Table, Iterator[Any]]:
    """Without a learning rate, values stay as they are, and the sum of squares counts batches."""
    data = job.dataset(str(place / "data.parquet"), batch_size=1, epochs=EPOCHS)
    users = job.table(
        "users", 2, optimizer=fe.RowAdagrad(lr=0.0), admit_after=2, evict=fe.Evict(unused_epochs=2, max_rows=5_000_000)
    )
    model = job.parameters({"w": np.zeros(1000, np.float32)}, optimizer=fe.SGD(lr=1.0), mode=fe.Sync())
    return model, users, iter(data)


def test_imported_rows_are_trained_exactly_once(etcd: EtcdServer, job_name: str, tmp_path: Path) -> None:
    """The job resumes with more pservers, one of which is killed before it has written a checkpoint."""
    pq.write_table(pa.table({"k": np.arange(RECORDS)}), tmp_path / "data.parquet", row_group_size=1)
    rows = {"id": NEW, "values": [[float(i), -1.0] for i in NEW], "updates": [3] * 50, "square_sum": [100.0] * 50}
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    url = tmp_path / "checkpoints"
    job_options = ("--job", job_name, "--etcd", etcd.address, "--table", "users")
    into = ("import", tmp_path / "rows.parquet", "--checkpoint", url, *job_options)
    settings: dict[str, Any] = {"checkpoint": str(url), "checkpoint_every_s": 1000.0, "job": job_name}
    settings |= {"etcd": etcd.address, "lease_ttl_s": 2.0}
    with fe.local(pservers=2, **settings) as cluster, cluster.connect() as job:
        model, users, data = declared(job, tmp_path)
        for _ in range(RECORDS):
            next(data)
            users.push(IDS, np.ones((50, 2), np.float32))
            model.step({"w": np.ones(1000, np.float32)})
        with pytest.raises(
            UsageError, match=r"is running \(.*\): stop it first, import the rows into its last checkpoint"
        ):
            table(*into)
        run("checkpoint", "save", *job_options[:4])
    with pytest.raises(UsageError, match=r"has no table 'user': there are users"):
        table(*into[:-1], "user")
    with closing(open_coordinator(CommonSettings(etcd=etcd.address, job=job_name), clock=SystemClock())) as coordinator:
        # As if the last checkpoints had been given up before they had written a file.
        key = JobKeys(job_name).checkpoint_latest
        record = decode_pointer(coordinator.get(key).value)
        record.next_number += 5
        coordinator.transact([], [Put(key, msgspec.json.encode(record))])
    done = json.loads(table(*into, "--json"))
    assert done["place"].endswith(f"/c-{record.next_number}")
    counts = {"rows": 50, "imported": 50, "replaced": 25, "skipped_existing": 0, "skipped_full": 0}
    assert done | counts == done
    with fe.local(pservers=3, resume=True, **settings) as cluster, cluster.connect() as job:
        model, users, data = declared(job, tmp_path)
        for number, _ in enumerate(data):
            if number == 3:
                cluster.kill("pserver", 1)
            users.push(IDS, np.ones((50, 2), np.float32))
            model.step({"w": np.ones(1000, np.float32)})
        table("export", tmp_path / "live.parquet", "--slots", *job_options)
        assert model["w"].tolist() == [-float(RECORDS * EPOCHS)] * 1000
    left = RECORDS * (EPOCHS - 1)
    expected = [
        {
            "id": i,
            "values": [float(i), -1.0] if i >= 25 else [0.0, 0.0],
            "square_sum": (100.0 if i >= 25 else RECORDS - 1.0) + (left if i < 50 else 0.0),
        }
        for i in range(75)
    ]
    found = rows_of(tmp_path / "live.parquet")
    assert [{key: row[key] for key in expected[0]} for row in found] == expected
    table("export", tmp_path / "saved.parquet", "--slots", "--checkpoint", url, *job_options)
    assert rows_of(tmp_path / "saved.parquet") == found
    again = ("import", tmp_path / "saved.parquet", "--checkpoint", url, "--job", "fresh", "--table", "users")
    place = json.loads(table(*again, "--optimizer", "RowAdagrad", "--json"))["place"]
    assert rows_of(Path(place)) == found


def test_an_import_that_is_killed_changes_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    pq.write_table(pa.table({"k": np.arange(RECORDS)}), tmp_path / "data.parquet", row_group_size=1)
    ids = np.random.default_rng(1).integers(-(2**63), 2**63, 300_000)
    values = np.arange(2 * ids.size, dtype=np.float32).reshape(-1, 2)
    np.savez(tmp_path / "rows.npz", ids=ids, values=values)
    np.savez(tmp_path / "few.npz", ids=ids[:5], values=values[:5])
    url = tmp_path / "checkpoints"
    into = ["table", "import", tmp_path / "rows.npz", "--checkpoint", url, "--job", "killed", "--table", "users"]
    with (
        fe.local(pservers=2, checkpoint=str(url), checkpoint_every_s=1000.0, job="killed") as cluster,
        cluster.connect() as job,
    ):
        model, users, data = declared(job, tmp_path)
        for _ in range(RECORDS):
            next(data)
            users.push(IDS, np.ones((50, 2), np.float32))
            model.step({"w": np.ones(1000, np.float32)})
        # Without the address of its etcd, the command cannot know that the job is running. The job replaces and reports
        # the checkpoint.
        own = ("--job", "killed", "--etcd", cluster.etcd_address)
        run("checkpoint", "save", *own)
        few = [*map(str, into[:2]), str(tmp_path / "few.npz"), *map(str, into[3:])]
        eventually(lambda: CliRunner().invoke(command, few).exit_code == 0)  # unless a checkpoint is written meanwhile
        run("checkpoint", "save", *own)
        assert "another job also writes to" in run("events", *own)

    def exported() -> list[dict[str, Any]]:
        table("export", tmp_path / "t.parquet", "--slots", "--checkpoint", url, "--table", "users")
        return rows_of(tmp_path / "t.parquet")

    def manifests() -> set[Path]:
        return set((url / "killed").glob("*/manifest.json"))

    before, complete = exported(), manifests()
    files = files_in(url)
    for wanted in (1, 2):
        # If the import is complete before it is killed, undo it, and kill another one.
        while True:
            process = subprocess.Popen([sys.executable, "-m", "flightedl", *map(str, into)], stderr=subprocess.PIPE)
            while len(files_in(url) - files) < wanted:
                assert process.poll() is None, process.communicate()
            process.send_signal(signal.SIGKILL)
            process.communicate()
            files = files_in(url)
            if manifests() == complete:
                break
            for manifest in manifests() - complete:
                manifest.unlink()
        assert process.returncode == -signal.SIGKILL
        assert exported() == before
    assert "imported: 300,000, replaced: 0" in table(*into[1:])
    found = {row["id"]: row["values"] for row in exported()}
    assert found == {row["id"]: row["values"] for row in before} | dict(zip(ids.tolist(), values.tolist(), strict=True))
