"""A job's data with real servers: the stored index, changed files, and handling of failed tasks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import flightedl as fe
from flightedl.errors import DataError, LostDataError, NotFoundError
from flightedl.launch.cluster import LocalCluster
from flightedl.messages.status import StatusReply
from flightedl_tools.main import command

pytestmark = [pytest.mark.etcd, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(120)]

Until = Callable[..., None]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    for number in range(2):
        table = pa.table({"k": np.arange(number * 40, number * 40 + 40)})
        pq.write_table(table, tmp_path / "data" / f"{number}.parquet", row_group_size=10)
    return tmp_path


def status_of(cluster: LocalCluster) -> StatusReply | None:
    with cluster.status() as status:
        try:
            return status.read(2.0)
        except fe.errors.FlightedlError:
            return None


def master_log(cluster: LocalCluster) -> str:
    return (cluster.directory / "logs" / "master.log").read_text()


def test_the_index_is_kept_for_later_jobs_and_masters(data: Path, until: Until) -> None:
    urls = str(data / "data" / "*.parquet")
    for files_read in (2, 0):
        with (
            fe.local(checkpoint=str(data / "kept"), output_dir=data / f"out-{files_read}") as cluster,
            cluster.connect() as job,
        ):
            batches = iter(job.dataset(urls, batch_size=5))
            seen = next(batches)["k"].to_pylist()
            # The launcher writes the log slightly after the master has printed its line.
            line = f"files=2 files_read={files_read}"
            until(lambda line=line: line in master_log(cluster))
            (data / "data").rename(data / "away")
            before = cluster.kill("master")
            until(lambda before=before: cluster.pid("master") not in {None, before})
            until(lambda: master_log(cluster).count("master ready") == 2, 30.0)
            (data / "away").rename(data / "data")
            for batch in batches:
                seen += batch["k"].to_pylist()
            assert sorted(seen) == list(range(80))


def test_a_file_that_changes_during_the_job_is_rejected(data: Path) -> None:
    sentence = r"1\.parquet has changed since it was indexed"
    with fe.local() as cluster:
        job = cluster.connect()
        batches = iter(job.dataset(str(data / "data" / "*.parquet"), batch_size=5, epochs=None))
        next(batches)
        pq.write_table(pa.table({"k": np.arange(99)}), data / "data" / "1.parquet", row_group_size=10)
        with pytest.raises(DataError, match=sentence):
            for _ in batches:
                pass
        # The session does not end as if nothing had happened.
        with pytest.raises(DataError, match=sentence):
            job.close()


def test_failed_work_is_listed_and_retried_or_dropped(data: Path) -> None:
    with fe.local(attempts_limit=1) as cluster:
        where = ["--etcd", cluster.etcd_address, "--job", cluster.job]

        def train(poison: int) -> list[int]:
            seen: list[int] = []
            with cluster.connect() as job:
                for batch in job.dataset(str(data / "data" / "*.parquet"), batch_size=5, epochs=1):
                    if poison in batch["k"].to_pylist():
                        raise ValueError("bad record")
                    seen += batch["k"].to_pylist()
            return seen

        def tasks(*arguments: str) -> str:
            result = CliRunner().invoke(command, ["tasks", *arguments[:1], *where, *arguments[1:]])
            if result.exception is not None:
                raise result.exception
            return result.stdout

        for _ in range(3):
            with pytest.raises(ValueError, match="bad record"):
                train(57)
        with pytest.raises(
            LostDataError, match=r"1 batches with 5 records .*1.parquet, records 15-19: ValueError: bad"
        ):
            train(-1)
        (failed,) = json.loads(tasks("list", "--json"))["failed"]
        assert failed["url"].endswith("1.parquet")
        assert (failed["chunk"], failed["first_record"], failed["records"]) == (1, 15, 5)
        assert failed["error"] == "ValueError: bad record"
        found = status_of(cluster)
        assert found is not None
        assert (found.state, found.tasks.failed, found.tasks.failed_batches) == ("done", 1, 1)
        assert "1 failed batches are queued again" in tasks("retry", "--task", "5")
        assert train(-1) == list(range(55, 60))
        with pytest.raises(NotFoundError, match="no failed task matches"):
            tasks("drop", "--all")
        assert tasks("list") == "no task has failed\n"


def test_data_without_a_model_requires_no_pservers(data: Path) -> None:
    with fe.local(pservers=0, standby=True, checkpoint=str(data / "kept")) as cluster, cluster.connect() as job:
        batches = job.dataset(str(data / "data" / "*.parquet"), batch_size=5, epochs=2, explicit_done=True)
        with pytest.raises(fe.errors.UsageError, match="explicit_done is for jobs without parameters"):
            job.parameters({"w": [0.0]})
        seen = 0
        while not batches.is_over:
            ahead = list(batches)
            seen += sum(batch.num_rows for batch in ahead)
            for batch in ahead:
                batches.done(batch)
        job.wait_for_end()
        assert seen == 2 * batches.record_count
        assert all(process.slot.role != "pserver" for process in cluster.processes)
