"""Tables of a job: loaded from a file, exported while the job runs, and exported from its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import flightedl as fe
from flightedl.errors import BegunAnewError, DataError, FlightedlError, UsageError
from flightedl_tools.main import command
from tests.support.contracts.coordinator import eventually

pytestmark = [pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(180)]

IDS = np.array([3, -4, 2**40, 17], np.int64)


def rows_of(path: Path) -> dict[int, list[float]]:
    table = pq.read_table(path)
    return dict(zip(table["id"].to_pylist(), table["values"].to_pylist(), strict=True))


def test_a_table_is_loaded_from_a_file_and_exported(tmp_path: Path) -> None:
    pq.write_table(pa.table({"k": np.arange(4)}), tmp_path / "data.parquet", row_group_size=1)
    first = {int(row): [float(place), -1.0] for place, row in enumerate(IDS)}
    pq.write_table(pa.table({"id": list(first), "values": list(first.values())}), tmp_path / "first.parquet")
    pq.write_table(pa.table({"id": [1], "values": [[1.0]]}), tmp_path / "narrow.parquet")
    url = str(tmp_path / "checkpoints")
    with fe.local(pservers=2, checkpoint=url, checkpoint_every_s=1000.0) as cluster, cluster.connect() as job:
        data = iter(job.dataset(str(tmp_path / "data.parquet"), batch_size=1))
        users = job.table("users", 2, optimizer=fe.RowAdagrad(lr=1.0))
        plain = job.table("plain/rows", 2, optimizer=fe.SGD(lr=1.0))
        with pytest.raises(DataError, match=r"missing\.parquet"):
            users.load(tmp_path / "missing.parquet")
        users.load(tmp_path / "first.parquet")
        with pytest.raises(UsageError, match=r"already begins with the rows of .*first\.parquet"):
            users.load(tmp_path / "narrow.parquet")
        assert job.table("users", 2, optimizer=fe.RowAdagrad(lr=1.0)) is users
        next(data)
        np.testing.assert_array_equal(users.pull(IDS), np.array(list(first.values()), np.float32))
        assert len(users) == 4
        with pytest.raises(UsageError, match=r"before job\.parameters"):
            plain.load(tmp_path / "first.parquet")
        plain.push([1, 2], -np.ones((2, 2), np.float32))
        users.push(IDS[:1], np.ones((1, 2), np.float32))
        job.step()
        changed = users.pull(IDS[:1])[0].tolist()
        assert changed != first[3]
        assert plain.export(tmp_path / "plain.parquet")
        assert users.export(tmp_path / "users.parquet", slots=True)
        assert rows_of(tmp_path / "plain.parquet") == {1: [1.0, 1.0], 2: [1.0, 1.0]}
        assert rows_of(tmp_path / "users.parquet") == first | {3: changed}
        slots = pq.read_table(tmp_path / "users.parquet")[fe.RowAdagrad().slots[0].name]
        assert sorted(slots.to_pylist()) == [0, 0, 0, 1]
        for _ in data:
            pass
    ran = CliRunner().invoke(command, ["checkpoint", "export", url, str(tmp_path / "all"), "--tables"])
    assert ran.exit_code == 0, ran.output
    assert rows_of(tmp_path / "all" / "users.parquet") == first | {3: changed}
    assert rows_of(tmp_path / "all" / "plain%2Frows.parquet") == {1: [1.0, 1.0], 2: [1.0, 1.0]}
    for arguments, text in (
        (["--table", "items"], "no table 'items': there are plain/rows, users"),
        (["--slots"], "--slots applies to tables"),
        (["--tables", "--format", "npz"], "omit --format"),
    ):
        ran = CliRunner().invoke(command, ["checkpoint", "export", url, str(tmp_path / "x"), *arguments])
        assert text in str(ran.exception), ran.output


def test_a_job_without_checkpoints_exports_its_tables_from_the_pservers(tmp_path: Path) -> None:
    pq.write_table(pa.table({"k": np.arange(4)}), tmp_path / "data.parquet", row_group_size=1)
    with fe.local(pservers=2) as cluster, cluster.connect() as job:
        users = job.table("users", 2, optimizer=fe.RowAdagrad(lr=1.0))
        half = job.table("half", 3, optimizer=fe.SGD(lr=1.0), dtype="float16")
        for batch in job.dataset(str(tmp_path / "data.parquet"), batch_size=1):
            users.push(IDS, np.ones((4, 2), np.float32))
            half.push([str(batch["k"][0])], -np.ones((1, 3), np.float32))
            job.step()
            if batch["k"][0].as_py() == 0:
                assert users.export(tmp_path / "early.parquet", slots=True)
                early = users.pull(IDS).tolist()
        assert users.export(tmp_path / "users.parquet")
        assert half.export(tmp_path / "half.parquet")
        assert rows_of(tmp_path / "early.parquet") == dict(zip(IDS.tolist(), early, strict=True))
        slots = pq.read_table(tmp_path / "early.parquet")[fe.RowAdagrad().slots[0].name]
        assert slots.to_pylist() == [1.0] * 4
        assert rows_of(tmp_path / "users.parquet") == dict(zip(IDS.tolist(), users.pull(IDS).tolist(), strict=True))
        assert rows_of(tmp_path / "half.parquet") == {one: [1.0] * 3 for one in fe.text_ids("0123").tolist()}
        with pytest.raises(FlightedlError, match=r"x\.parquet"):
            users.export(tmp_path / "data.parquet" / "x.parquet")


def _with(text: str, output: str) -> str:
    """Return the output that contains a text, or nothing."""
    return output if text in output else ""


def test_the_initial_rows_of_a_table_are_restored_when_the_model_restarts(tmp_path: Path) -> None:
    """A pserver dies before the first checkpoint, and memory for further rows is exhausted."""
    pq.write_table(pa.table({"k": np.arange(4)}), tmp_path / "data.parquet", row_group_size=1)
    values = np.arange(8, dtype=np.float32).reshape(4, 2)
    pq.write_table(pa.table({"id": IDS, "values": values.tolist()}), tmp_path / "first.parquet")
    with fe.local(pservers=2, table_memory_mb=1, lease_ttl_s=2.0) as cluster:

        def begun(job: fe.Job) -> tuple[Any, fe.Table]:
            data = iter(job.dataset(str(tmp_path / "data.parquet"), batch_size=1, epochs=2))
            users = job.table("users", 2, optimizer=fe.SGD(lr=1.0))
            users.load(tmp_path / "first.parquet")
            next(data)
            np.testing.assert_array_equal(users.pull(IDS), values)
            return data, users

        def lose() -> None:
            with cluster.connect() as job:
                data, users = begun(job)
                users.push(IDS, np.ones((4, 2), np.float32))
                job.step()
                assert not np.array_equal(users.pull(IDS), values)
                cluster.kill("pserver", 0)
                for _ in data:
                    job.step()

        with pytest.raises(BegunAnewError):
            lose()
        with cluster.connect() as job:
            data, users = begun(job)
            many = np.arange(100, 200_000)
            users.push(many, np.ones((many.size, 2), np.float32))
            job.step()
            stats = users.stats()
            assert 0 < stats.refused < many.size
            assert stats.rows + stats.refused == many.size + 4
            asked = ["status", "--job", cluster.job, "--etcd", cluster.etcd_address]
            shown = eventually(lambda: _with("refused: no memory", CliRunner().invoke(command, asked).output))
            assert "table users: " in shown
            for _ in data:
                job.step()
