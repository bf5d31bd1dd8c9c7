"""16-bit floats on the wire."""

from __future__ import annotations

import numpy as np
import pytest

from flightedl.errors import UsageError
from flightedl.kernels.compiled import half_kernels
from flightedl.kernels.half_precision import check_kind, float32_of, item_bytes, shortened

VALUES = np.concatenate(
    [
        np.random.default_rng(0).standard_normal(1000).astype(np.float32),
        np.array([0.0, -0.0, 1.0, -1.0, 1e-30, 3e38, 1.00390625, 1.01171875, 65504.0], np.float32),
    ]
)


def test_trainers_and_pservers_round_to_the_same_bits() -> None:
    compiled = np.empty(VALUES.size, np.uint16)
    half_kernels("bfloat16").to_half(VALUES, compiled)
    assert shortened(VALUES, "bfloat16").tolist() == compiled.tolist()


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_representable_values_are_converted_exactly(kind: str) -> None:
    fitting = np.array([0, -0.5, 1, 1.5, -3, 96, 256], np.float32)
    assert float32_of(shortened(fitting, kind), kind).tolist() == fitting.tolist()


def test_ties_go_to_even() -> None:
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8], np.float32)
    assert float32_of(shortened(ties, "bfloat16"), "bfloat16").tolist() == [1.0, 1 + 4 * 2**-8]


def test_unaligned_bytes_are_widened_the_same_way() -> None:
    bits = shortened(VALUES, "bfloat16")
    moved = memoryview(b"x" + bits.tobytes())[1:]
    unaligned, theirs = np.frombuffer(moved, np.uint16), np.empty_like(VALUES)
    half_kernels("bfloat16").to_float32(unaligned, theirs)
    assert float32_of(unaligned, "bfloat16").tobytes() == theirs.tobytes()


def test_only_float32_is_shortened_and_only_to_known_types() -> None:
    assert (item_bytes("bfloat16", "float32"), item_bytes("bfloat16", "float64"), item_bytes("", "float32")) == (
        2,
        8,
        4,
    )
    with pytest.raises(UsageError, match="int8"):
        check_kind("int8")
