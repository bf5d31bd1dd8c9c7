"""Batches that a trainer reports as done without having pushed them are found and done again before the job ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import flightedl as fe
from flightedl.client.data.dataset import Dataset
from flightedl.client.data.feed import TaskFeed
from flightedl.domain.trainer.readings import BatchLoop, Handed

pytestmark = [pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(120)]

RECORDS, EPOCHS = 60, 2


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, int, int]]:
    """(epoch, task, batch) of batches that are left out the first time, and taken for settled all the same."""
    left = {(0, 1, 2), (1, 0, 0), (1, 5, 4)}
    hand_out = Dataset._hand_out

    def leaving_out(
        self: Dataset, loop: BatchLoop[pa.RecordBatch], feed: TaskFeed, handed: Handed[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        assignment = handed.item.task.assignment
        place = (assignment.epoch, assignment.task, handed.item.number)
        if place in left:
            left.remove(place)
            return
        yield from hand_out(self, loop, feed, handed)

    monkeypatch.setattr(Dataset, "_hand_out", leaving_out)
    return left


def test_what_was_reported_without_being_pushed_is_done_again(
    tmp_path: Path, dropped: set[tuple[int, int, int]]
) -> None:
    pq.write_table(pa.table({"k": np.arange(RECORDS)}), tmp_path / "k.parquet", row_group_size=10)
    with fe.local(pservers=2) as cluster, cluster.connect() as job:
        data = job.dataset(str(tmp_path / "k.parquet"), batch_size=2, epochs=EPOCHS)
        model = job.parameters({"v": np.zeros(RECORDS)}, optimizer=fe.SGD(lr=1.0), mode=fe.Sync(reduce="sum"))
        handed = 0
        for batch in data:
            gradient = np.zeros(RECORDS)
            gradient[batch["k"].to_numpy()] = -1
            model.step({"v": gradient})
            handed += 1
        model.pull()
        assert not dropped
        np.testing.assert_array_equal(model["v"], np.full(RECORDS, EPOCHS))
        assert handed == EPOCHS * RECORDS // 2 - 3 + 3 * 5, "each of the three tasks was done once more"
        with cluster.status() as status:
            assert status.read(5.0).missing_tasks == 3
