"""Location of failed batches: from batches of a task to records of its files."""

from __future__ import annotations

import pyarrow as pa
import pytest

from flightedl.domain.queue.batching import record_order
from flightedl.domain.queue.tasks import TaskQueue
from flightedl.domain.queue.values import FailedPiece, QueueSettings
from flightedl.formats.dataset_spec import DatasetSpec
from flightedl.formats.index import build_index
from flightedl.formats.layout import TaskLayout
from flightedl.formats.registry import named_format
from flightedl.master.failures import failed_piece, lost_data
from flightedl.master.indexing import IndexedDataset
from flightedl.messages.declarations import DatasetDeclaration, DeclaredDataset
from flightedl.messages.status import RecordRange
from tests.support.memory import MemoryFiles


def indexed() -> IndexedDataset:
    """Two files of 12 records, 4 per row group; a task is 8 records, so the second one is in both files."""
    files = MemoryFiles()
    for name in ("a", "b"):
        batches = pa.table({"k": range(12)}).to_batches(max_chunksize=4)
        files.contents[f"{name}.parquet"] = b"".join(named_format("parquet").write(batches, batches[0].schema))
    declared = DatasetDeclaration(urls=["*.parquet"], batch_size=3)
    index = build_index(files, DatasetSpec(("*.parquet",)))
    layout = TaskLayout(index, 3, records_per_task=8)
    reply = DeclaredDataset(index_hash="", task_count=3, record_count=24, schema="", declaration=declared)
    return IndexedDataset(layout, reply)


def failed(task: int, first: int, end: int, epoch: int = 1) -> FailedPiece:
    return FailedPiece(epoch, 0, task, first, end, 5, "t", "broken")


@pytest.mark.parametrize(
    ("piece", "place", "ranges"),
    [
        (failed(0, 0, 1), ("a.parquet", 0, 0, 3), [("a.parquet", 0, 0, 3)]),
        (failed(0, 1, 2), ("a.parquet", 0, 3, 3), [("a.parquet", 0, 3, 1), ("a.parquet", 1, 4, 2)]),
        (failed(1, 1, 2), ("a.parquet", 2, 11, 1), [("a.parquet", 2, 11, 1), ("b.parquet", 0, 0, 2)]),
        (failed(2, 2, 3), ("b.parquet", 2, 10, 2), [("b.parquet", 2, 10, 2)]),
    ],
)
def test_in_stored_order_batches_are_ranges_of_records(piece: FailedPiece, place: tuple, ranges: list) -> None:
    found = failed_piece(piece, indexed(), None)
    assert (found.url, found.chunk, found.first_record, found.records) == place
    assert [(r.url, r.chunk, r.first_record, r.records) for r in found.ranges] == ranges


def test_shuffled_batches_are_located_where_trainers_read_them() -> None:
    found = failed_piece(failed(0, 0, 1), indexed(), 7)
    numbers = sorted(int(number) for number in record_order(8, 7, 1, 0)[:3])
    assert [n for r in found.ranges for n in range(r.first_record, r.first_record + r.records)] == numbers
    assert (found.first_record, found.records) == (numbers[0], numbers[-1] - numbers[0] + 1)
    assert all(isinstance(each, RecordRange) for each in found.ranges)


def test_the_end_of_a_loop_names_all_quarantined_records_by_error() -> None:
    dataset = indexed()
    queue = TaskQueue(QueueSettings(3, lambda _: 3, epochs=2))
    assert lost_data(queue, dataset) == {"failed": 0, "lost_records": 0, "lost_places": []}
    for position, first, end, error in ((0, 0, 2, "torn"), (2, 2, 3, "odd"), (1, 1, 2, "torn")):
        queue.failed.quarantine(FailedPiece(0, position, position, first, end, 5, "t", error))
    assert lost_data(queue, dataset) == {
        "failed": 4,
        "lost_records": 6 + 2 + 3,
        "lost_places": [
            "a.parquet, records 0-5, 11; b.parquet, records 0-1: torn",
            "b.parquet, records 10-11: odd",
        ],
    }
