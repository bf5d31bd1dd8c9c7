"""Wrong arguments of the user's script raise one sentence before anything is sent."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flightedl.client.arguments import (
    by_name,
    dataset_declaration,
    declared_arrays,
    function_of,
    indexed_declaration,
    metrics_of,
    name_of,
    url_of,
)
from flightedl.client.model.step_plan import StepPlans
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import plan_for, runs_of
from flightedl.errors import GradientError, UsageError

GIVEN: dict[str, Any] = {"urls": "/data/a.csv", "batch_size": 256}


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"urls": None}, "urls is None, but must be a URL, path or pattern, or a list of them"),
        ({"urls": 5}, "urls is 5"),
        ({"urls": []}, "urls is []"),
        ({"urls": ""}, "urls is ''"),
        ({"urls": ["a", None]}, "urls is ['a', None]"),
        ({"urls": {"a": 1}}, "urls is {'a': 1}"),
        ({"batch_size": 256.0}, "batch_size is 256.0, but must be a whole number"),
        ({"batch_size": "256"}, "batch_size is '256', but must be a whole number"),
        ({"batch_size": None}, "batch_size is None"),
        ({"batch_size": True}, "batch_size is True"),
        ({"batch_size": 0}, "batch_size is 0, but must be at least 1"),
        ({"epochs": 2.0}, "epochs is 2.0, but must be a whole number or None"),
        ({"epochs": 0}, "epochs is 0, but must be at least 1"),
        ({"shuffle": "yes"}, "shuffle is 'yes', but must be True or False"),
        ({"seed": None}, "seed is None, but must be a whole number"),
        ({"seed": 2**64}, "seed is"),
        ({"columns": 5}, "columns is 5, but must be a column's name, or a list of names"),
        ({"columns": [1]}, "columns is [1]"),
        ({"filter": "c > 1"}, "filter is 'c > 1', but must be a list of (column, operator, value), such as"),
        ({"filter": ("c", ">", 1)}, "filter has 'c', but must be a list of"),
        ({"filter": [("c", ">")]}, "filter has ('c', '>'), but must be"),
        ({"filter": [("c", ">", float("nan"))]}, "filter compares with nan"),
        ({"filter": [("c", ">", object)]}, "filter compares with <class 'object'>"),
        ({"format": 5}, "format is 5, but must be text"),
        ({"records_per_task": 1.5}, "records_per_task is 1.5"),
        ({"records_per_task": -1}, "records_per_task is -1, but must be at least 0"),
        ({"on_corrupt": None}, "on_corrupt is None, but must be text"),
        ({"follow": "x"}, "follow is 'x', but must be True or False"),
    ],
    ids=str,
)
def test_a_wrong_argument_of_a_dataset_raises_one_sentence(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        dataset_declaration(**GIVEN | wrong)
    assert text in str(caught.value)


def test_unambiguous_values_of_another_type_are_accepted() -> None:
    declared = dataset_declaration(
        urls=[Path("/data/a.csv"), "s3://b/c"],
        batch_size=np.int64(8),
        columns="c0",
        filter=[
            ("c0", ">", np.float32(0.5)),
            ["when", "<", dt.date(2026, 1, 31)],
            ("c1", "in", {2, 1}),
            ("c2", "in", np.arange(2)),
        ],
    )
    assert declared.urls == ["/data/a.csv", "s3://b/c"]
    assert type(declared.batch_size) is int
    assert declared.columns == ["c0"]
    assert declared.filter == [
        ("c0", ">", 0.5),
        ("when", "<", "2026-01-31"),
        ("c1", "in", [1, 2]),
        ("c2", "in", [0, 1]),
    ]


def test_a_relative_path_starts_at_the_directory_of_the_script() -> None:
    assert url_of("url", "model.npz") == str(Path.cwd() / "model.npz")
    assert url_of("url", Path("/tmp") / "model.npz") == "/tmp/model.npz"


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: url_of("url", None), "url is None, but must be a path or URL"),
        (lambda: url_of("url", ["a"]), "url is ['a'], but must be a path or URL"),
        (lambda: name_of("the name", ""), "the name is '', but must be text that is not empty"),
        (lambda: name_of("the name", "\ud800"), r"the name is '\ud800', but must be text"),
        (lambda: metrics_of({"loss": 10**400}), "the metric 'loss' is 1000"),
        (lambda: name_of("the name", 5), "the name is 5"),
        (lambda: function_of("measure", None), "measure is None, but must be a function"),
        (lambda: by_name("parameters", np.zeros(3), '{"w": array}'), 'such as {"w": array}, not as an ndarray'),
        (lambda: metrics_of({"loss": "x"}), "the metric 'loss' is 'x', but must be a number"),
        (lambda: metrics_of({"loss": None}), "the metric 'loss' is None, but must be a number"),
        (lambda: metrics_of({"loss": np.zeros(3)}), "the metric 'loss' is array"),
        (lambda: metrics_of({5: 1.0}), "the name of a metric is 5"),
        (lambda: metrics_of(0.5, "the result of measure"), "the result of measure must be given by name"),
        (lambda: declared_arrays(np.zeros(3), {}), 'parameters must be given by name, such as {"w": array}'),  # type: ignore[arg-type]
        (lambda: declared_arrays(None, {}), "not as None"),  # type: ignore[arg-type]
        (lambda: declared_arrays({"w": [[1.0], [1.0, 2.0]]}, {}), "parameter 'w' is not an array: setting an array"),  # type: ignore[dict-item]
        (
            lambda: declared_arrays({"w": np.ma.masked_less([1.0], 0)}, {}),
            "parameter 'w' is not an array: it is masked",
        ),
        (lambda: declared_arrays({"w": "x"}, {}), "parameter 'w' has dtype 'str"),  # type: ignore[dict-item]
        (lambda: declared_arrays({"w": [0.0]}, ["float32"]), "dtypes must be given by name"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_argument_raises_one_sentence(call: Callable[[], object], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        call()
    assert text in str(caught.value)


def test_a_number_may_be_an_array_of_one_element() -> None:
    assert metrics_of({"a": np.ones((1, 1)), "b": np.float32(2), "c": 3}) == {"a": 1.0, "b": 2.0, "c": 3.0}


def test_a_dtype_may_be_a_numpy_type() -> None:
    assert declared_arrays({"w": [1]}, {"w": np.float32})["w"].dtype == np.float32


@pytest.mark.parametrize(
    ("gradients", "text"),
    [
        (None, "gradients must be given by name, such as {'w': array}, not as NoneType"),
        (np.zeros(3), "not as ndarray"),
        ({"w": [[1.0], [1.0, 2.0]]}, "the gradient of 'w' is not an array: setting an array"),
        ({"w": np.ma.masked_less(np.ones(3), 0)}, "the gradient of 'w' is not an array: it is masked"),
        ({"w": None}, "the gradient of 'w' has shape (), the parameter (3,)"),
    ],
    ids=str,
)
def test_wrong_gradients_raise_one_sentence(gradients: Any, text: str) -> None:
    plan = plan_for([ParameterSpec("w", (3,), "float64")], 1)
    with ThreadPoolExecutor(1) as pool:
        plans = StepPlans(plan, [runs_of(plan, 0)], {"w": np.dtype(np.float64)}, "", None, pool)
        with pytest.raises(GradientError) as caught:
            plans.sound(gradients, "batch 0")
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"n": 0}, "n is 0, but must be at least 1"),
        ({"n": "10"}, "n is '10', but must be a whole number"),
        ({"n": {0: 1, range(3): 2}}, "n has the indices 0, but must have ranges, such as"),
        ({"n": {range(0, 8, 2): 1, range(9): 1}}, "n has the indices range(0, 8, 2)"),
        ({"n": {range(4): 1, range(4, 4): 1}}, "n has the indices range(4, 4)"),
        ({"n": {range(4): 1, range(4, 9): 0}}, "the weights of a mixture are [1.0, 0.0]"),
        ({"n": {}}, "n has no indices"),
        ({"n": 2**62}, "n has the indices range(0, 4611686018427387904)"),
        ({"get": [1, 2]}, "get is [1, 2], but must be a function"),
        ({"columns": [1]}, "columns is [1]"),
        ({"batched": 1}, "batched is 1, but must be True or False"),
        ({"shuffle": 1}, "shuffle is 1, but must be True or False"),
        ({"stop": "last"}, "stop is 'last', but must be one of first, all, repeat"),
        ({"batch_size": 0}, "batch_size is 0, but must be at least 1"),
    ],
)
def test_a_wrong_argument_of_indexed_is_one_sentence(wrong: dict[str, Any], text: str) -> None:
    given = {"n": 10, "get": str, "columns": (), "batched": False, "shuffle": False, "stop": "first"} | wrong
    with pytest.raises(UsageError) as raised:
        indexed_declaration(**{"batch_size": 2, "seed": 0, "has_rounds": False} | given)
    assert str(raised.value).startswith(text)


def test_the_elements_of_a_mixture_are_ranges_of_indices_with_weights() -> None:
    more: dict[str, Any] = {
        "columns": "x",
        "batched": True,
        "shuffle": False,
        "stop": "all",
        "batch_size": 2,
        "seed": 3,
    }
    declared, by_index = indexed_declaration({range(5, 9): 2, range(2, 5): 1}, str, has_rounds=True, **more)
    assert declared.urls == ["indexed://5-9/shuffled", "indexed://2-5/shuffled"]
    assert (declared.mixture, declared.stop, declared.shuffle, declared.seed) == ([2.0, 1.0], "all", True, 3)
    assert (by_index.first, by_index.columns, by_index.is_batched) == (2, ("x",), True)


@pytest.mark.parametrize(
    ("n", "batch_size", "has_rounds", "expected"),
    [
        (100, 8, False, 8),
        (100, 8, True, 0),
        (1_000_000, 100, False, 1100),
        ({range(9): 1, range(9, 5000): 1}, 8, False, 24),
    ],
)
def test_tasks_of_indices_are_whole_batches_where_batches_never_span_two(
    n: Any, batch_size: int, has_rounds: bool, expected: int
) -> None:
    more: dict[str, Any] = {"columns": (), "batched": False, "shuffle": False, "stop": "first", "seed": 0}
    declared, _ = indexed_declaration(n, str, batch_size=batch_size, has_rounds=has_rounds, **more)
    assert declared.records_per_task == expected
