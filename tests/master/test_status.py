"""The number of records in the status."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from flightedl.domain.queue.tasks import TaskQueue
from flightedl.domain.queue.values import FailedSelector, QueueSettings, TaskGiven
from flightedl.formats.dataset_spec import DatasetSpec
from flightedl.formats.index import build_index
from flightedl.formats.layout import TaskLayout
from flightedl.formats.registry import named_format
from flightedl.master.indexing import IndexedDataset
from flightedl.master.status import records_trained
from flightedl.messages.declarations import DatasetDeclaration, DeclaredDataset
from tests.support.memory import MemoryFiles


def test_records_of_failed_work_are_not_counted() -> None:
    batches = pa.table({"k": range(40)}).to_batches(max_chunksize=10)
    files = MemoryFiles({"a.parquet": b"".join(named_format("parquet").write(batches, batches[0].schema))})
    layout = TaskLayout(build_index(files, DatasetSpec(("*",))), 5)
    declared = DatasetDeclaration(urls=["*"], batch_size=5, epochs=2)
    reply = DeclaredDataset(index_hash="", task_count=4, record_count=40, schema="", declaration=declared)
    dataset = IndexedDataset(layout, reply)
    queue = TaskQueue(QueueSettings(4, layout.batch_count, epochs=2, attempts_limit=1, confirmations=0))

    def do() -> None:
        """Do one piece; batch 1 of task 1 fails in the first epoch."""
        given = queue.request("t", 0.0)
        assert isinstance(given, TaskGiven)
        a = given.assignment
        if (a.epoch, a.task) == (0, 1) and a.first_batch <= 1 < a.end_batch:
            queue.fail("t", a.epoch, a.position, a.attempt, 1.0, error="bad", batch=1)
        else:
            queue.finish("t", a.epoch, a.position, a.attempt, 1.0)

    assert records_trained(queue, dataset) == 0
    do()
    assert records_trained(queue, dataset) == 10
    while not queue.epoch:
        do()
    (failed,) = queue.failed.details
    assert (failed.first_batch, failed.end_batch) == (1, 2)
    assert records_trained(queue, dataset) == 35
    queue.drop_failed(FailedSelector())
    assert records_trained(queue, dataset) == 35
    for _ in range(4):
        do()
    assert queue.is_done
    assert records_trained(queue, dataset) == 75


def test_whole_tasks_are_whole_records() -> None:
    """5 of 97 tasks of 300 records are 1,500 records, and not 1,499."""
    counts = SimpleNamespace(done=5, failed=0, total=97, failed_batches=0, dropped_batches=0)
    queue: Any = SimpleNamespace(counts=lambda: counts, is_done=False, epoch=0)
    dataset: Any = SimpleNamespace(
        layout=SimpleNamespace(record_count=97 * 300, batch_size=100, steps_per_batch=1),
    )
    assert records_trained(queue, dataset) == 1_500
