"""Batches reported as done without a push are found and repeated before the job ends."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import flightedl as fe
from flightedl.domain.trainer.readings import BatchLoop, HandOut, Item, LoopStep

pytestmark = [pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(120)]

RECORDS, EPOCHS = 60, 2


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, int, int]]:
    """Return (epoch, task, batch) of batches that are skipped the first time but reported as done."""
    left = {(0, 1, 2), (1, 0, 0), (1, 5, 4)}
    accept = BatchLoop.accept

    def leaving_out(self: BatchLoop, item: Item) -> LoopStep:
        step = accept(self, item)
        if isinstance(step, HandOut) and (place := (step.batch.epoch, step.batch.task, step.batch.number)) in left:
            left.remove(place)
            return self.next_step()
        return step

    monkeypatch.setattr(BatchLoop, "accept", leaving_out)
    return left


def test_batches_reported_without_a_push_are_repeated(tmp_path: Path, dropped: set[tuple[int, int, int]]) -> None:
    pq.write_table(pa.table({"k": np.arange(RECORDS)}), tmp_path / "k.parquet", row_group_size=10)
    with fe.local(pservers=2) as cluster, cluster.connect() as job:
        data = job.dataset(str(tmp_path / "k.parquet"), batch_size=2, epochs=EPOCHS)
        model = job.parameters({"v": np.zeros(RECORDS)}, optimizer=fe.SGD(lr=1.0), mode=fe.Sync(reduce="sum"))
        yielded = 0
        for batch in data:
            gradient = np.zeros(RECORDS)
            gradient[batch["k"].to_numpy()] = -1
            model.step({"v": gradient})
            yielded += 1
        model.pull()
        assert not dropped
        np.testing.assert_array_equal(model["v"], np.full(RECORDS, EPOCHS))
        assert yielded == EPOCHS * RECORDS // 2 - 3 + 3 * 5, "each of the three tasks was repeated once"
        with cluster.status() as status:
            assert status.read(5.0).missing_tasks == 3
