"""Elements by index: return values of ``get``, and their conversion to columns."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from flightedl.client.data.elements import ByIndex
from flightedl.errors import DataError
from flightedl.torch.batches import tensor_of_column

Pair = namedtuple("Pair", ["x", "label"])  # noqa: PYI024 - as users write it


class Images(Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((2, 3), float(index)), index % 10


def of(
    get: Callable[[Any], Any], *indices: int, batched: bool = False, columns: tuple[str, ...] = ()
) -> pa.RecordBatch:
    return ByIndex(get, batched, columns, 0)(pa.record_batch({"index": pa.array(indices, pa.int64())}))


def test_a_pytorch_dataset_yields_tensors() -> None:
    batch = of(Images().__getitem__, 3, 17, columns=("pixels", "label"))
    assert batch["label"].to_pylist() == [3, 7]
    pixels = tensor_of_column("pixels", batch["pixels"])
    assert torch.equal(pixels, torch.stack([Images()[3][0], Images()[17][0]]))


def test_boolean_tensors_keep_their_shape() -> None:
    batch = of(lambda i: (torch.tensor([[i > 3, False]]),), 4, 2, columns=("on",))
    assert torch.equal(tensor_of_column("on", batch["on"]), torch.tensor([[[True, False]], [[False, False]]]))


@pytest.mark.parametrize(
    ("get", "expected"),
    [
        (lambda i: {"n": i, "word": f"w{i}"}, {"n": [4, 2], "word": ["w4", "w2"]}),
        (lambda i: (i, bytes([i])), {"0": [4, 2], "1": [b"\4", b"\2"]}),
        (lambda i: Pair(i, -i), {"0": [4, 2], "1": [-4, -2]}),
        (lambda i: i / 2, {"0": [2.0, 1.0]}),
        (np.float32, {"0": [4.0, 2.0]}),
        (torch.tensor, {"0": [4, 2]}),
        (lambda i: ([i] * i,), {"0": [[4] * 4, [2] * 2]}),
        (lambda i: {"x": np.arange(i, i + 2)}, {"x": [[4, 5], [2, 3]]}),
        (lambda i: {"on": torch.tensor([i > 3, False])}, {"on": [[True, False], [False, False]]}),
    ],
)
def test_an_element_is_a_dict_a_tuple_or_one_value(get: Callable[[int], Any], expected: dict[str, Any]) -> None:
    assert of(get, 4, 2).to_pydict() == expected


@pytest.mark.parametrize(
    "get",
    [
        lambda indices: [{"n": i} for i in indices],
        lambda indices: {"n": indices},
        lambda indices: {"n": torch.tensor(indices)},
        lambda indices: pa.record_batch({"n": indices}),
        lambda indices: pa.table({"n": indices}),
    ],
)
def test_a_function_of_many_indices_returns_elements_or_columns(get: Callable[[list[int]], Any]) -> None:
    assert of(get, 4, 2, batched=True).to_pydict() == {"n": [4, 2]}


def test_columns_cut_from_a_tensor_are_tensors() -> None:
    whole = TensorDataset(torch.arange(20.0).reshape(10, 2))
    batch = of(lambda indices: {"x": whole[indices][0]}, 4, 2, batched=True)
    assert torch.equal(tensor_of_column("x", batch["x"]), torch.tensor([[8.0, 9.0], [4.0, 5.0]]))


def test_a_batch_without_indices_has_the_columns_of_the_first_element() -> None:
    asked: list[int] = []

    def get(index: int) -> dict[str, int]:
        asked.append(index)
        return {"n": index}

    by_index = ByIndex(get, is_batched=False, columns=(), first=5)
    none = pa.record_batch({"index": pa.array([], pa.int64())})
    for _ in range(2):
        assert by_index(none).schema.names == ["n"]
        assert by_index(none).num_rows == 0
    assert asked == [5]


@pytest.mark.parametrize(
    ("get", "text", "more"),
    [
        (lambda i: {"n": i} if i == 4 else {"m": i}, "the element at index 2 has the columns m, and others n", {}),
        (
            np.zeros,
            r"column '0' has values that do not form one \(ndarray of shape \(2,\), ndarray",
            {},
        ),
        (lambda i: i if i == 4 else "two", r"column '0' has values that do not form one \(int, str\)", {}),
        (lambda i: object(), "column '0' has values that do not form one", {}),
        (lambda i: (i, i), "an element has 2 parts, and columns= names 1", {"columns": ("x",)}),
        (lambda i: {"n": i}, "leave out columns=", {"columns": ("x",)}),
        (lambda i: {}, "an element has no parts", {}),
        (lambda indices: {"n": [1]}, "it returned 1 elements for 2 indices", {"batched": True}),
        (lambda indices: [1], "it returned 1 elements for 2 indices", {"batched": True}),
    ],
)
def test_elements_that_do_not_form_columns_raise_one_sentence(
    get: Callable[[Any], Any], text: str, more: dict[str, Any]
) -> None:
    with pytest.raises(DataError, match=text):
        of(get, 4, 2, **more)


@pytest.mark.parametrize(("batched", "note"), [(False, "at index 4"), (True, "at the indices 4, 2")])
def test_an_error_has_a_note_that_names_the_index(batched: bool, note: str) -> None:
    with pytest.raises(KeyError) as raised:
        of(lambda _: {}[0], 4, 2, batched=batched)
    assert raised.value.__notes__ == [note]
