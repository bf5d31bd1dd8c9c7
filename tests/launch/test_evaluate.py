"""``job.evaluate`` with real servers: one result for all trainers, even if the master is killed."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import flightedl as fe

pytestmark = [pytest.mark.etcd, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name, count in (("train", 60), ("test", 70)):
        pq.write_table(pa.table({"k": np.arange(count)}), tmp_path / f"{name}.parquet", row_group_size=10)
    return tmp_path


def mean(batch: pa.RecordBatch) -> dict[str, float]:
    return {"mean": float(batch["k"].to_numpy().mean()), "ones": 1.0}


def test_an_evaluation_runs_within_a_training_loop(data: Path) -> None:
    with fe.local(pservers=1) as cluster, cluster.connect() as job:
        seen, found = [], {}
        for number, batch in enumerate(job.dataset(str(data / "train.parquet"), batch_size=10)):
            seen += batch["k"].to_pylist()
            if number == 2:
                found = job.evaluate(str(data / "test.parquet"), mean, batch_size=4, name="middle")
        assert found == {"mean": pytest.approx(34.5), "ones": pytest.approx(1.0)}
        assert sorted(seen) == list(range(60))
        assert job.evaluate(str(data / "test.parquet"), mean, batch_size=4, name="middle") == found
        with cluster.status() as status:
            (shown,) = status.read(5.0).evaluations
        assert (shown.name, shown.is_done, shown.tasks.done) == ("middle", True, 7)
        with pytest.raises(fe.errors.DeclarationError, match="batch_size is 4, not 5"):
            job.evaluate(str(data / "test.parquet"), mean, batch_size=5, name="middle")
        with pytest.raises(fe.errors.DataError, match="no file"):
            job.evaluate(str(data / "absent.parquet"), mean, batch_size=5, name="other")


def test_several_trainers_and_a_killed_master_produce_one_result(data: Path) -> None:
    with fe.local(pservers=1, lease_ttl_s=2.0) as cluster:
        results: list[dict[str, float]] = []
        counted: list[int] = []
        killed = threading.Event()

        def measure(batch: pa.RecordBatch) -> dict[str, float]:
            counted.extend(batch["k"].to_pylist())
            if len(counted) > 12 and not killed.is_set():
                killed.set()
                cluster.kill("master")
            return mean(batch)

        def evaluate() -> None:
            with cluster.connect() as job:
                results.append(job.evaluate(str(data / "test.parquet"), measure, batch_size=4))

        threads = [threading.Thread(target=evaluate) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(90)
        assert results == [{"mean": pytest.approx(34.5), "ones": pytest.approx(1.0)}] * 2
        assert set(counted) == set(range(70))
