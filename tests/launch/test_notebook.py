"""Cells of a notebook that are interrupted, repeated, or run after the cluster has ended."""

from __future__ import annotations

import _thread
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import flightedl as fe
from flightedl.client.data.dataset import Dataset
from flightedl.client.model.parameters import Parameters
from flightedl.client.session import Job
from flightedl.errors import UsageError

pytestmark = pytest.mark.etcd

RECORDS = 600


def declared(job: Job, url: str) -> tuple[Dataset, Parameters]:
    data = job.dataset(url, batch_size=5, records_per_task=60)
    start = {"w": np.zeros(2), "b": np.zeros(1)}
    return data, job.parameters(start, optimizer=fe.SGD(lr=1.0), mode=fe.Sync(reduce="sum"))


def cell(data: Dataset, model: Parameters, *, interrupt_at: int | None = None, after_s: float = 0.0) -> None:
    """Sum the records. The interruption arrives during a step, approximately."""
    for number, batch in enumerate(data):
        if number == interrupt_at:
            threading.Timer(after_s, _thread.interrupt_main).start()
        model.step({"w": np.full(2, -float(batch.num_rows))})
        if number == interrupt_at:
            time.sleep(5.0)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Enable interruptions even if the tests run in the background of a shell, which ignores SIGINT there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_interrupted_cells_can_be_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = str(tmp_path / "a.parquet")
    pq.write_table(pa.table({"k": np.arange(RECORDS)}), url)
    with fe.local(pservers=2) as cluster:
        job = cluster.connect()
        data, model = declared(job, url)
        for after_s in (0.0, 0.002, 0.3):
            with pytest.raises(KeyboardInterrupt):
                cell(data, model, interrupt_at=7, after_s=after_s)
        cell(data, model)
        np.testing.assert_array_equal(model["w"], [RECORDS, RECORDS])
        with pytest.raises(UsageError, match="this loop has already received all batches"):
            cell(data, model)
        capsys.readouterr()
        with cluster.connect() as again:
            cell(*declared(again, url))
        assert "`cluster.connect(fresh=True)` restarts it from scratch" in capsys.readouterr().err
        _, fresh = declared(cluster.connect(fresh=True), url)
        with pytest.raises(UsageError, match="this session is over: the cluster of job local was stopped"):
            model.pull()
        left_open = fresh
    for ask in (left_open.pull, lambda: left_open.step({}), cluster.connect):
        started = time.monotonic()
        with pytest.raises(UsageError, match=r"is over|is not running"):
            ask()
        assert time.monotonic() - started < 1.0
    np.testing.assert_array_equal(left_open["w"], [0.0, 0.0])
