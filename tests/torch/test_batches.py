"""Conversion of Arrow batches to tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader

from flightedl.domain.consistency.modes import Sync
from flightedl.domain.trainer.feed import AssignedTask
from flightedl.errors import UsageError
from flightedl.messages.declarations import DatasetDeclaration
from flightedl.torch import IterableDataset, batches

from ..client.loop_bench import Loop, gradients, value_of
from ..client.pserver_bench import Cluster


def batch_of(**columns: Any) -> list[pa.RecordBatch]:
    return [pa.record_batch(columns)]


@pytest.mark.parametrize(
    "kind",
    [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.float16(), pa.float32(), pa.float64()],
    ids=str,
)
def test_tensors_share_the_memory_of_their_columns(kind: pa.DataType) -> None:
    column = pa.array(np.arange(5), pa.int64()).cast(pa.int32()).cast(kind)
    sliced = pa.record_batch({"x": column}).slice(1, 3)
    (x,) = batches([sliced], "x")
    assert x.tolist() == [1, 2, 3]
    assert x.numpy().dtype == column.to_numpy().dtype
    assert x.data_ptr() == sliced.column("x").to_numpy().ctypes.data


def test_a_loader_selects_one_or_several_or_all_columns() -> None:
    data = batch_of(x=[1.0, 2.0], y=[3, 4])
    assert [each.tolist() for each in batches(data, "y")] == [[3, 4]]
    ((y, x),) = batches(data, "y", "x")
    assert (y.tolist(), x.tolist()) == ([3, 4], [1.0, 2.0])
    (every,) = batches(data)
    assert {name: each.tolist() for name, each in every.items()} == {"x": [1.0, 2.0], "y": [3, 4]}


def test_lists_of_equal_length_become_dimensions() -> None:
    numbers = np.arange(24, dtype=np.float32)
    fixed = pa.FixedSizeListArray.from_arrays(pa.FixedSizeListArray.from_arrays(numbers, 2), 3)
    data = pa.record_batch(
        {
            "fixed": fixed,
            "lists": pa.array([[1, 2], [3, 4], [5, 6], [7, 8]]),
            "shaped": pa.FixedShapeTensorArray.from_numpy_ndarray(numbers.reshape(4, 2, 3)),
            "flag": pa.array([True, False, True, True]),
        }
    ).slice(1, 2)
    ((fixed_tensor, lists, shaped, flag),) = batches([data], "fixed", "lists", "shaped", "flag")
    assert fixed_tensor.tolist() == numbers.reshape(4, 3, 2)[1:3].tolist()
    assert lists.tolist() == [[3, 4], [5, 6]]
    assert shaped.tolist() == numbers.reshape(4, 2, 3)[1:3].tolist()
    assert flag.tolist() == [False, True]


def test_a_transform_may_return_anything() -> None:
    data = batch_of(name=["a", "bcd"])
    (found,) = batches(data, transform=lambda b: {"lengths": [torch.tensor([len(n.as_py()) for n in b["name"]]), None]})
    assert found["lengths"][0].tolist() == [1, 3]


def test_copied_tensors_are_writable() -> None:
    data = batch_of(x=[1.0, 2.0])
    (x,) = batches(data, "x", copy=True)
    x.mul_(2)
    assert data[0]["x"].to_pylist() == [1.0, 2.0]


def test_shared_tensors_are_read_only() -> None:
    loop = batches(batch_of(x=[1.0, 2.0]), "x")
    next(loop).mul_(2)
    with pytest.raises(UsageError, match=r"tensor of column 'x' was written to.*copy=True"):
        next(loop)


def test_tensors_go_to_a_device() -> None:
    (x,) = batches(batch_of(x=[1.0, 2.0]), "x", device="meta")
    assert x.device.type == "meta"


@pytest.mark.parametrize(
    ("column", "text"),
    [
        (["a", "b"], "column 'x' has type string, which is not numeric: omit it, or .*transform="),
        ([1, None], "column 'x' has 1 nulls in this batch.*filter="),
        ([[1], [2, 3]], "lists of 1 to 2 elements: pad them"),
        (pa.array([[1], None], pa.list_(pa.int64(), 1)), "column 'x' has 1 nulls"),
    ],
)
def test_columns_without_a_tensor_type_are_rejected(column: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        next(batches(batch_of(x=column), "x"))


@pytest.mark.parametrize(
    ("column", "filled"),
    [
        (pa.array([1, None, 3], pa.uint64()), [1, 7, 3]),
        ([None, 0.5], [7.0, 0.5]),
        ([None, None], [7, 7]),
        ([True, None], [True, True]),
        ([[1, None], [None, 2]], [[1, 7], [7, 2]]),
        (pa.array([[1, None], [None, 2]], pa.list_(pa.int8(), 2)), [[1, 7], [7, 2]]),
        ([1, 2], [1, 2]),
    ],
)
def test_nulls_are_replaced_by_a_number(column: Any, filled: list[Any]) -> None:
    column = pa.array(column) if isinstance(column, list) else column
    one = pa.record_batch({"I1": pa.concat_arrays([column, column]), "x": [1] * 2 * len(column)}).slice(len(column))
    (batch,) = batches([one], fill={"I1": 7, "I*": 9})
    assert batch["I1"].tolist() == filled
    assert batch["x"].tolist() == [1] * len(column)
    (x,) = batches([one], "I1", fill={"I*": 7})
    assert x.tolist() == filled


@pytest.mark.parametrize(
    ("column", "fill", "text"),
    [
        ([1, None], {"J*": 0}, "fill has 'J.*', which is none of the columns x"),
        ([1, None], {"x": 0.5}, "fill has 0.5 for column 'x', which is int64"),
        ([1, None], {"x": "a"}, "fill has 'a' for column 'x', which is int64"),
        ([[1], None], {"x": 0}, "fill has 0 for column 'x', which is list"),
        ([1, None], None, r"column 'x' has 1 nulls.*fill=\{'x': 0\} of fe.torch.batches"),
        ([1, None], {"y"}, "fill is {'y'}, but must be numbers by column"),
    ],
)
def test_a_number_that_does_not_fit_is_rejected(column: Any, fill: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        next(batches(batch_of(x=column), fill=fill))


def test_an_absent_column_is_rejected() -> None:
    with pytest.raises(UsageError, match="there is no column 'z'; the data has x"):
        next(batches(batch_of(x=[1]), "z"))


@pytest.mark.parametrize(("arguments", "more"), [(("x",), {"transform": len}), ((3,), {}), ((), {"transform": "x"})])
def test_wrong_arguments_are_rejected_at_once(arguments: Any, more: Any) -> None:
    with pytest.raises(UsageError, match=r"names of columns, or a transform .*function|must be a name"):
        batches([], *arguments, **more)


def test_a_data_loader_yields_the_current_batch() -> None:
    with Cluster({"w": (3,)}, Sync(reduce="sum")) as cluster, Loop(cluster, batches=3, records=lambda n: n + 1) as job:
        loader = DataLoader(IterableDataset(job.data, "number"), batch_size=None)
        for number, x in enumerate(loader):
            assert x.tolist() == [number] * (number + 1)
            assert job.current.number == number
            job.parameters.step(gradients(cluster))
        assert value_of(cluster, "w") == 3


class _Pairs(Loop):
    """A loop that yields each batch twice."""

    def _read(self, task: AssignedTask) -> Iterator[pa.RecordBatch]:
        return (pa.record_batch({"number": [number // 2]}) for number in range(task.assignment.batch_count))


def test_a_batch_of_two_steps_is_yielded_twice_and_each_step_counts_once() -> None:
    declared = DatasetDeclaration(urls=["data"], batch_size=1, steps_per_batch=2)
    with Cluster({"critic": (3,), "maker": (3,)}, Sync(reduce="sum")) as cluster, _Pairs(cluster, batches=6) as job:
        job.data._declared = msgspec.structs.replace(job.data._declared, declaration=declared)
        seen = []
        for number in batches(job.data, "number"):
            step = job.data.step_of_batch
            seen.append((number.item(), step))
            job.parameters.step({("critic", "maker")[step]: np.full(3, -1, np.float32)})
        assert seen == [(number, step) for number in range(3) for step in range(2)]
        assert (value_of(cluster, "critic"), value_of(cluster, "maker")) == (3, 3)
        with pytest.raises(UsageError, match="no batch is current"):
            _ = job.data.step_of_batch


@pytest.mark.parametrize("start", ["spawn", "fork"])
def test_worker_processes_of_a_data_loader_are_rejected(start: str) -> None:
    dataset = IterableDataset(batch_of(x=[1.0]), "x")
    loader = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context=start)
    if start == "spawn":
        with pytest.raises(UsageError, match=r"worker processes of a DataLoader cannot read.*num_workers=0"):
            iter(loader)
        return
    workers = iter(loader)
    with pytest.raises(
        UsageError, match=r"worker processes of a DataLoader cannot read.*do not survive a fork.*num_workers=0"
    ):
        next(workers)
    workers._shutdown_workers()
