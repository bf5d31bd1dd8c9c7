"""Checks of gradients, and copying of small ones in a single pass."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from flightedl.client.model.step_plan import _BIG_BYTES, Piece, StepPlans, converted
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import plan_shards, runs_of
from flightedl.errors import GradientError
from flightedl.kernels.half_precision import array_dtype

#: Three gradients that are sent together, and one that is split into blocks.
_SHAPES = {"a": (4, 3), "b": (5,), "c": (), "z": (1 << 21,)}
_SMALL = ("a", "b", "c")


@pytest.fixture
def plans() -> Iterator[StepPlans]:
    specs = [ParameterSpec(name, shape) for name, shape in _SHAPES.items()]
    plan = plan_shards(specs, 1)
    with ThreadPoolExecutor(1) as pool:
        yield StepPlans(plan, [runs_of(plan, 0)], dict.fromkeys(_SHAPES, np.dtype(np.float32)), "", None, pool)


def gradients(*names: str) -> dict[str, Any]:
    random = np.random.default_rng(0)
    return {name: random.standard_normal(_SHAPES[name], np.float32)[...] for name in names}


def flat(given: dict[str, Any], *names: str) -> list[float]:
    return np.concatenate([np.ravel(given[name]) for name in names]).tolist()


def test_small_gradients_are_copied_together_and_large_ones_are_not_copied(plans: StepPlans) -> None:
    given = gradients("z", *_SMALL)
    given["a"] = np.asfortranarray(given["a"])
    together, big = plans.sound(given, "batch 0").lines
    assert together.tolist() == flat(given, *_SMALL)
    assert np.shares_memory(big, given["z"])


def test_small_gradients_use_the_same_memory_in_every_step(plans: StepPlans) -> None:
    (before,) = plans.sound(gradients(*_SMALL), "batch 0").lines
    again = {name: np.asarray(2 * value) for name, value in gradients(*_SMALL).items()}
    (after,) = plans.sound(again, "batch 1").lines
    assert after.tolist() == flat(again, *_SMALL)
    assert before.ctypes.data == after.ctypes.data


def test_small_gradients_that_are_contiguous_in_one_memory_are_not_copied(plans: StepPlans) -> None:
    memory = np.arange(20, dtype=np.float32)
    given = {"a": memory[1:13].reshape(4, 3), "b": memory[13:18], "c": memory[18:19].reshape(())}
    (line,) = plans.sound(given, "batch 0").lines
    assert line.tolist() == memory[1:19].tolist()
    assert np.shares_memory(line, memory)
    with pytest.raises(ValueError, match="read-only"):
        line[0] = 1
    for other in (memory[14:19], memory[12:17], memory[13:18].copy(), memory[17:12:-1]):
        (line,) = plans.sound(given | {"b": other}, "batch 1").lines
        assert line.tolist() == flat(given | {"b": other}, *_SMALL)
        assert not np.shares_memory(line, memory)


def _plans_of_one(pool: ThreadPoolExecutor, dtype: type[np.generic]) -> StepPlans:
    plan = plan_shards([ParameterSpec("w", (13, 50), np.dtype(dtype).name)], 1)
    return StepPlans(plan, [runs_of(plan, 0)], {"w": np.dtype(dtype)}, "", None, pool)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_single_small_gradient_is_not_copied_and_is_checked_completely(dtype: type[np.generic]) -> None:
    with ThreadPoolExecutor(1) as pool:
        plans = _plans_of_one(pool, dtype)
        # The sum of squares of the largest values is infinite.
        largest = np.full((13, 50), np.finfo(dtype).max, dtype)
        for given in (largest, np.asfortranarray(np.arange(650, dtype=dtype).reshape(13, 50))):
            (line,) = plans.sound({"w": given}, "batch 0").lines
            assert line.tolist() == given.ravel().tolist()
            assert np.shares_memory(line, given) == given.flags.c_contiguous
        for place in ((0, 0), (12, 49)):
            for value in (np.nan, np.inf, -np.inf):
                given = np.zeros((13, 50), dtype)
                given[place] = value
                with pytest.raises(GradientError, match="gradient of 'w' has NaN or infinity in batch 0"):
                    plans.sound({"w": given}, "batch 0")
        with pytest.raises(GradientError, match="gradient of 'w' is int32"):
            plans.sound({"w": np.zeros((13, 50), np.int32)}, "batch 0")
        with pytest.raises(GradientError, match=r"gradient of 'w' has shape \(650,\)"):
            plans.sound({"w": np.zeros(650, dtype)}, "batch 0")


@pytest.mark.parametrize("names", [(), ("b",), ("a", "c"), ("z", "b")])
def test_gradients_around_a_missing_one_are_sent_separately(plans: StepPlans, names: tuple[str, ...]) -> None:
    given = gradients(*names)
    sent = plans.sound(given, "batch 0")
    assert [line.tolist() for line in sent.lines] == [flat(given, name) for name in sorted(names)]


def test_neighbors_are_sent_together_if_others_are_missing(plans: StepPlans) -> None:
    given = gradients("b", "c")
    sent = plans.sound(given, "batch 0")
    assert [line.tolist() for line in sent.lines] == [flat(given, "b", "c")]
    assert sent.plan.pieces[0][0] == [Piece(range(1), None, None), Piece(range(1, 3), 0, None)]
    assert {line for run in sent.plan.pieces[0][1:] for _, line, _ in run} == {None}, "the others carry no gradient"


def test_array_likes_are_converted_to_numpy_arrays(plans: StepPlans) -> None:
    given = gradients("a", "b") | {"c": np.float32(7)}
    assert [line.tolist() for line in plans.sound(given, "batch 0").lines] == [flat(given, *_SMALL)]


@pytest.mark.parametrize(
    ("name", "value", "wrong"),
    [
        ("b", np.zeros(6, np.float32), r"gradient of 'b' has shape \(6,\), the parameter \(5,\)"),
        ("a", np.zeros(12, np.float32), r"gradient of 'a' has shape \(12,\), the parameter \(4, 3\)"),
        ("b", np.zeros(5, int), "gradient of 'b' is int64 in batch 0, but must be one of float32, float64, float16, b"),
        ("b", np.zeros(5, complex), "gradient of 'b' is complex128 in batch 0, but must be one of float32, float64"),
        ("b", np.zeros(5, bool), "gradient of 'b' is bool in batch 0, but must be one of float32, float64, float16"),
        ("b", np.full(5, 1e39), r"'b' is beyond 3.40282e\+38 in batch 0, the largest value of float32; nothing of"),
        ("b", np.full(5, np.inf), "gradient of 'b' has NaN or infinity in batch 0"),
        ("a", np.full((4, 3), np.nan, np.float32), "gradient of 'a' has NaN or infinity in batch 0"),
        ("a", "text", r"gradient of 'a' has shape \(\)"),
        ("d", np.zeros(5, np.float32), "there is no parameter 'd'"),
    ],
)
def test_an_error_names_the_wrong_gradient_among_many(plans: StepPlans, name: str, value: object, wrong: str) -> None:
    with pytest.raises(GradientError, match=wrong):
        plans.sound(gradients(*_SMALL) | {name: value}, "batch 0")


@pytest.mark.parametrize("other", ["float64", "float16", "bfloat16", ">f4"])
def test_only_gradients_of_other_float_types_are_converted(plans: StepPlans, other: str) -> None:
    given = gradients("z", *_SMALL)
    given["a"] = given["a"].astype(array_dtype(other))
    together, big = plans.sound(given, "batch 0").lines
    assert np.shares_memory(big, given["z"])
    expected = given | {"a": given["a"].astype(np.float32)}
    assert together.dtype == np.float32
    assert together.tolist() == flat(expected, *_SMALL)


#: 1 + 2^-24 is half-way between two float32, 1 + 2^-8 between two bfloat16, 1 + 2^-11 between two float16.
@pytest.mark.parametrize(
    ("dtype", "given", "found"),
    [
        ("float32", [1 + 2**-24, 1 + 3 * 2**-24, 1e-50, -3.4028234e38], [1, 1 + 2**-22, 0, -3.4028234e38]),
        ("float16", [1 + 2**-11, 1 + 3 * 2**-11, 65519.0, 1e-9], [1, 1 + 2**-9, 65504, 0]),
        ("bfloat16", [1 + 2**-8, 1 + 3 * 2**-8, 3.39e38, 0.5], [1, 1 + 2**-6, 3.3895313892515355e38, 0.5]),
        ("float64", np.array([0.1, 3e38], np.float32), np.array([0.1, 3e38], np.float32).astype(np.float64)),
    ],
)
def test_a_narrower_type_rounds_to_nearest_even_and_a_wider_one_is_exact(dtype: str, given: Any, found: Any) -> None:
    made = converted(np.asarray(given), array_dtype(dtype), "'b'", "batch 0")
    assert made.dtype == array_dtype(dtype)
    assert made.astype(np.float64).tolist() == np.asarray(found, array_dtype(dtype)).astype(np.float64).tolist()


@pytest.mark.parametrize(("dtype", "value"), [("float16", 65520.0), ("bfloat16", 3.4e38), ("float32", -1e39)])
def test_values_beyond_a_narrower_type_are_rejected(dtype: str, value: float) -> None:
    with pytest.raises(GradientError, match=f"'b' is beyond .* the largest value of {dtype}"):
        converted(np.array([0.0, value]), array_dtype(dtype), "'b'", "batch 0")


def test_gradients_with_swapped_lengths_are_rejected(plans: StepPlans) -> None:
    given = gradients(*_SMALL)
    given["a"], given["b"] = np.zeros(5, np.float32), np.zeros((4, 3), np.float32)
    with pytest.raises(GradientError, match="gradient of 'a' has shape"):
        plans.sound(given, "batch 0")


def test_gradients_without_names_are_rejected(plans: StepPlans) -> None:
    with pytest.raises(GradientError, match="must be given by name"):
        plans.sound([np.zeros(5, np.float32)], "batch 0")  # type: ignore[arg-type]


@pytest.mark.parametrize("place", [0, _BIG_BYTES // 8 - 1, _BIG_BYTES // 8, _BIG_BYTES // 8 + 1, _BIG_BYTES // 4])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_two_threads_check_every_element_of_a_large_gradient(place: int, bad: float) -> None:
    size = _BIG_BYTES // 4 + 1
    plan = plan_shards([ParameterSpec("w", (size,))], 1)
    gradient = np.zeros(size, np.float32)
    with ThreadPoolExecutor(1) as pool:
        plans = StepPlans(plan, [runs_of(plan, 0)], {"w": np.dtype(np.float32)}, "", None, pool)
        plans.sound({"w": gradient}, "batch 0")
        gradient[place] = bad
        with pytest.raises(GradientError, match="'w' has NaN or infinity"):
            plans.sound({"w": gradient}, "batch 0")
