"""Batches that a script requests by number."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pyarrow as pa
import pytest

from flightedl.client.data.numbered_dataset import NumberedDataset
from flightedl.domain.groups.numbered import NumberedBatches
from flightedl.domain.groups.plan import Order, Round
from flightedl.errors import DataError, UsageError

from .loop_bench import waiting


class Data:
    def __init__(self) -> None:
        self.read: list[int] = []
        self.done: list[int] = []
        self.error_at = -2
        batches = NumberedBatches(10, epochs=2, order=Order(1), batch_size=4)
        declared = SimpleNamespace(record_count=10)
        self.dataset = NumberedDataset(declared, batches, self._read, self.done.append, waiting, str)  # type: ignore[arg-type]

    def _read(self, step: Round) -> pa.RecordBatch:
        self.read.append(step.epoch * 3 + step.number if step.pieces else -1)
        if self.read[-1] == self.error_at:
            raise DataError("the file is gone")
        return pa.record_batch({"n": list(range(step.records, step.records + step.record_count))})


@pytest.fixture
def data() -> Iterator[Data]:
    made = Data()
    yield made
    made.dataset.close()


def test_batches_are_read_by_number_and_are_empty_beyond_the_last_one(data: Data) -> None:
    rows = [data.dataset.batch(number)["n"].to_pylist() for number in range(8)]
    assert data.dataset.batch_count == 6
    assert rows == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] * 2 + [[], []]
    assert data.done == [4, 4, 2, 4, 4, 2, 0]


def test_the_next_batch_at_the_same_distance_is_read_ahead(data: Data) -> None:
    for number in (0, 2, 4):
        data.dataset.batch(number)
    data.dataset.close()
    assert [number for number in data.read if number in {0, 2, 4}] == [0, 2, 4]
    assert set(data.read) <= {0, 1, 2, 4, -1}


def test_a_number_may_be_requested_again(data: Data) -> None:
    first = data.dataset.batch(3)
    assert data.dataset.current == (4, 1)
    assert data.dataset.batch(3) == first
    assert data.dataset.batch(0)["n"].to_pylist() == [0, 1, 2, 3]


def test_a_read_error_is_raised_with_its_batch_until_the_file_is_back(data: Data) -> None:
    data.error_at = 1
    data.dataset.batch(0)
    with pytest.raises(DataError, match="gone"):
        data.dataset.batch(1)
    data.error_at = -2
    assert data.dataset.batch(1)["n"].to_pylist() == [4, 5, 6, 7]


@pytest.mark.parametrize("number", [-1, 1.5, None, "1"])
def test_anything_else_is_refused(data: Data, number: object) -> None:
    with pytest.raises(UsageError, match="whole number from 0 on"):
        data.dataset.batch(number)  # type: ignore[arg-type]
