import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numba
import numpy as np
import pytest
from numba.core import caching
from numpy.typing import NDArray

from flightedl.domain.model.optimizers import (
    LAMB,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    AdamW,
    Delta,
    Ftrl,
    Momentum,
    Optimizer,
    RMSprop,
)
from flightedl.domain.model.schedules import Cosine, LinearWarmup, StepDecay
from flightedl.errors import UsageError
from flightedl.kernels.blocks import accumulate
from flightedl.kernels.compiled import (
    block_kernels,
    half_kernels,
    kernel_for,
    machine_code,
)
from tests.support.reference_updates import initial_slots, update

SIZE = 1003
OPTIMIZERS = [
    SGD(LinearWarmup(3, Cosine(0.1, 10)), weight_decay=0.1, clip_value=0.2),
    Delta(clip_value=0.2),
    Momentum(0.1, weight_decay=0.1),
    Momentum(0.1, nesterov=True, clip_value=0.2),
    Adagrad(),
    Adadelta(),
    RMSprop(),
    RMSprop(centered=True, momentum=0.9),
    Adam(weight_decay=0.1),
    Adam(amsgrad=True),
    AdamW(),
    Ftrl(0.1, l1=0.01, l2=0.1, beta=1.0),
    Ftrl(LinearWarmup(2, 0.1), initial_accumulator=0.0),
    LAMB(0.1),
]


def received(array: NDArray) -> NDArray:
    """Return the same elements as received from the network: read-only, at an odd address."""
    data = b"abc" + array.tobytes()
    view = np.frombuffer(data, array.dtype, array.size, 3)
    view = view if not view.flags.aligned else np.frombuffer(b"a" + data, array.dtype, array.size, 4)
    assert not view.flags.aligned
    assert not view.flags.writeable
    return view


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: type(optimizer).__name__)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_kernel_matches_the_reference_bit_for_bit(optimizer: Optimizer, dtype: str) -> None:
    random = np.random.default_rng(5)
    kernel = kernel_for(optimizer, dtype)
    expected = random.normal(size=SIZE).astype(dtype)
    values = expected.copy()
    expected_slots, slots = initial_slots(optimizer, SIZE, dtype), initial_slots(optimizer, SIZE, dtype)
    for version in range(6):
        gradient = random.normal(size=SIZE).astype(dtype) * (version != 3)
        update(optimizer, expected, gradient, expected_slots, 2 * version, version, 0.3, 0.5)
        given = received(gradient) if version % 2 else gradient
        kernel(values, given, slots, 2 * version, version, 0.3, 0.5)
    # LAMB sums its norms in another order.
    tolerance = 0 if not isinstance(optimizer, LAMB) else 1e-6
    assert np.isfinite(values).all()
    for actual, reference in zip((values, *slots), (expected, *expected_slots), strict=True):
        np.testing.assert_allclose(actual, reference, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_weighted_sum_matches_numpy(dtype: str) -> None:
    random = np.random.default_rng(6)
    kernels = block_kernels(dtype)
    first, second = (random.normal(size=SIZE).astype(dtype) for _ in range(2))
    total = np.full(SIZE, np.nan, dtype)
    kernels.accumulate_first(total, received(first), 3)
    np.testing.assert_array_equal(total, np.dtype(dtype).type(3) * first)
    kernels.accumulate(total, second, 0.1)
    np.testing.assert_array_equal(total, np.dtype(dtype).type(3) * first + np.dtype(dtype).type(0.1) * second)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_found_at_any_position(dtype: str, wrong: float) -> None:
    all_finite = block_kernels(dtype).all_finite
    gradient = np.full(131, np.finfo(dtype).max, dtype)
    assert all_finite(gradient)
    assert all_finite(received(-gradient))
    assert all_finite(gradient[:0])
    for place in range(gradient.size):
        broken = gradient.copy()
        broken[place] = wrong
        assert not all_finite(received(broken))


def test_bfloat16_rounds_to_nearest_even() -> None:
    bits = np.array(
        [0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0xFF800000, 0x7F800001, 0x80000000],
        np.uint32,
    )
    out = np.empty(bits.size, np.uint16)
    half_kernels("bfloat16").to_half(received(bits.view(np.float32)), out)
    assert [f"{x:04x}" for x in out] == ["3f80", "3f80", "3f82", "3f81", "3f80", "7f80", "ff80", "7fc0", "8000"]


def test_every_bfloat16_survives_float32() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    wide, back = np.empty(bits.size, np.float32), np.empty(bits.size, np.uint16)
    half_kernels("bfloat16").to_float32(received(bits), wide)
    half_kernels("bfloat16").to_half(wide, back)
    number = ~np.isnan(wide)
    np.testing.assert_array_equal(back[number], bits[number])
    assert number.sum() == (1 << 16) - 2 * 127
    assert np.isnan(wide[back == 0x7FC0]).all()


def test_float16_is_converted_as_numpy_does() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    wide, back = np.empty(bits.size, np.float32), np.empty(bits.size, np.uint16)
    half_kernels("float16").to_float32(received(bits), wide)
    number = ~np.isnan(wide)
    assert number.sum() == (1 << 16) - 2 * 1023
    np.testing.assert_array_equal(wide[number], bits.view(np.float16).astype(np.float32)[number])
    half_kernels("float16").to_half(wide, back)
    np.testing.assert_array_equal(back[number], bits[number])


def test_float16_rounds_to_nearest_even() -> None:
    chance = np.random.default_rng(3)
    # From below the smallest to beyond the largest value, and exact ties of both kinds.
    any_bits = chance.integers(0x32000000, 0x48000000, 200_000, dtype=np.uint32)
    ties = chance.integers(0x33000000 >> 12, 0x48000000 >> 12, 200_000, dtype=np.uint32) << 12
    values = np.concatenate([any_bits, ties]).view(np.float32)
    values = np.concatenate([values, -values, np.array([0, -0.0, np.inf, -np.inf], np.float32)])
    out = np.empty(values.size, np.uint16)
    half_kernels("float16").to_half(received(values), out)
    with np.errstate(over="ignore", under="ignore"):
        np.testing.assert_array_equal(out, values.astype(np.float16).view(np.uint16))


def test_an_average_without_gradients_ends_at_zero_not_at_the_slow_subnormals() -> None:
    smallest = np.finfo(np.float32).smallest_subnormal
    values, gradient = np.ones(SIZE, np.float32), np.zeros(SIZE, np.float32)
    velocity = np.full(SIZE, 100 * smallest, np.float32)
    kernel_for(Momentum(0.1), "float32")(values, received(gradient), (velocity,), 0, 0)
    assert not velocity.any()
    assert values.tolist() == [1] * SIZE
    assert block_kernels("float32").all_finite(np.full(SIZE, smallest))
    assert smallest * np.float32(3) > 0, "the thread's own arithmetic is unchanged"


def test_blocks_update_in_many_threads() -> None:
    optimizer = Adam(0.1)
    kernel = kernel_for(optimizer, "float32")
    gradient = np.random.default_rng(7).normal(size=5000).astype(np.float32)

    def work(_: int) -> NDArray:
        values = np.zeros(5000, np.float32)
        slots = initial_slots(optimizer, 5000, "float32")
        for version in range(30):
            kernel(values, gradient, slots, version, version)
        return values

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, range(8)))
    for result in results:
        np.testing.assert_array_equal(result, results[0])


def test_the_version_determines_the_rate_and_the_number_of_updates_the_bias_correction() -> None:
    optimizer = Adam(StepDecay(0.1, 0.5, every=10), eps=0.0)
    values = np.zeros(4, np.float64)
    kernel_for(optimizer, "float64")(values, np.full(4, 3.0), initial_slots(optimizer, 4, "float64"), 25, 0)
    # The first update of Adam moves by the rate, whatever the gradient.
    np.testing.assert_allclose(values, -0.1 * 0.5**2)


def test_cached_machine_code_is_loaded_without_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    signature = numba.void(numba.float32[::1], numba.float32[::1], numba.float32)
    machine_code.__wrapped__(accumulate, signature)

    def refresh(_context: object) -> None:
        raise AssertionError("what it takes to compile is loaded")

    monkeypatch.setattr("numba.core.base.BaseContext.refresh", refresh)
    total = np.zeros(3, np.float32)
    machine_code.__wrapped__(accumulate, signature)(total, np.ones(3, np.float32), 2)
    assert total.tolist() == [2, 2, 2]


def test_a_torn_cache_file_is_recompiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    number = numba.types.float32
    own = numba.types.Array(number, 1, "C")
    signature = numba.types.void(own, own, number)
    for torn in (False, True):
        for path in tmp_path.rglob("*.nb?") if torn else ():
            path.write_bytes(path.read_bytes()[:100])
        total = np.zeros(3, np.float32)
        machine_code.__wrapped__(accumulate, signature)(total, np.ones(3, np.float32), 2)
        assert total.tolist() == [2, 2, 2]
        assert list(tmp_path.rglob("*.nbi"))


@pytest.fixture
def temporary_directory_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let neither the package nor the home directory be writable. Return the place of the cache."""
    classes = [caching.UserProvidedCacheLocator]
    monkeypatch.setattr(caching.CompileResultCacheImpl, "_locator_classes", classes)
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"flightedl-kernels-{os.geteuid()}"


def add_up() -> None:
    number = numba.types.float32
    own = numba.types.Array(number, 1, "C")
    total = np.zeros(3, np.float32)
    machine_code.__wrapped__(accumulate, numba.types.void(own, own, number))(total, np.ones(3, np.float32), 2)
    assert total.tolist() == [2, 2, 2]


def test_machine_code_is_cached_even_if_only_the_temporary_directory_is_writable(
    temporary_directory_only: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_up()
    assert list(temporary_directory_only.rglob("*.nbi"))
    assert temporary_directory_only.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr("numba.core.base.BaseContext.refresh", lambda _: pytest.fail("it is compiled again"))
    add_up()


@pytest.mark.parametrize("is_link", [False, True])
def test_machine_code_is_never_read_from_a_directory_that_others_may_write(
    temporary_directory_only: Path, tmp_path: Path, is_link: bool
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if is_link:
        temporary_directory_only.symlink_to(elsewhere)
    else:
        temporary_directory_only.mkdir()
        temporary_directory_only.chmod(0o777)
    add_up()
    assert not list(tmp_path.rglob("*.nbi"))


def test_mismatched_arrays_are_rejected_before_anything_changes() -> None:
    kernel = kernel_for(Momentum(0.1), "float32")
    values, slots = np.ones(8, np.float32), initial_slots(Momentum(0.1), 8, "float32")
    short = np.ones(7, np.float32)
    for arguments in ((short, slots), (values, ()), (values, (short,)), (values, (*slots, *slots))):
        with pytest.raises(ValueError, match="must"):
            kernel(values, *arguments, 0, 0)
    with pytest.raises(TypeError):
        kernel(values, np.ones(8), slots, 0, 0)
    locked = np.ones(8, np.float32)
    locked.flags.writeable = False
    with pytest.raises(TypeError):
        kernel(locked, values, slots, 0, 0)
    assert values.tolist() == [1] * 8
    assert slots[0].tolist() == [0] * 8


def test_other_types_have_no_kernel() -> None:
    with pytest.raises(UsageError, match="no kernel for SGD on float16"):
        kernel_for(SGD(0.1), "float16")
