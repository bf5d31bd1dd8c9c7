"""16-bit gradients and parameters: rounding, limits, and the pserver's master copy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from flightedl.client.arguments import declared_arrays
from flightedl.client.model.kept import _PIECE, ErrorFeedback
from flightedl.domain.consistency.modes import Async, Sync
from flightedl.domain.model.optimizers import SGD
from flightedl.domain.model.sharding import Block
from flightedl.errors import GradientError, UsageError
from flightedl.kernels.compiled import half_kernels
from flightedl.kernels.half_precision import largest, too_large

from .pserver_bench import Cluster

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
KINDS = sorted(DTYPES)
SHAPES = {"w": (300, 1000), "a": (7,), "b": (), "big": (600_000,)}


@pytest.mark.parametrize("kind", KINDS)
def test_the_limits_are_where_rounding_reaches_infinity(kind: str) -> None:
    edge = np.float32(too_large(kind))
    with np.errstate(over="ignore"):
        assert np.isinf(edge.astype(DTYPES[kind]))
        assert np.nextafter(edge, np.float32(0)).astype(DTYPES[kind]) == np.float32(largest(kind))


@pytest.mark.parametrize("size", [4, 3_000_000])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_out_of_range_for_16_bits_are_rejected_before_sending(kind: str, size: int) -> None:
    with Cluster({"a": (2,), "big": (size,)}, Async(), wire=kind) as cluster:
        trainer = cluster.trainer()
        trainer.begin(0)
        gradient = np.zeros(size, np.float32)
        gradient[-1] = -too_large(kind)
        with pytest.raises(GradientError, match=rf"'big' is beyond .* in epoch 1, .* {kind}"):
            trainer.parameters.step({"a": np.ones(2, np.float32), "big": gradient})
        gradient[-1] = np.nan
        with pytest.raises(GradientError, match="NaN or infinity"):
            trainer.parameters.step({"a": np.ones(2, np.float32), "big": gradient})
        assert cluster.shards[0].meter.messages == 0
        gradient[-1] = -largest(kind)
        trainer.step(0, {"a": np.ones(2, np.float32), "big": gradient})
        assert trainer.parameters["big"][-1] == np.float32(largest(kind))


def test_a_sum_out_of_range_for_16_bits_is_rejected() -> None:
    with Cluster({"a": (2,)}, Async(push_every=2, reduce="sum"), wire="float16") as cluster:
        trainer = cluster.trainer()
        first = trainer.begin(0)
        trainer.step(0, {"a": np.full(2, 40_000, np.float32)})
        second = trainer.begin(1)
        with pytest.raises(GradientError, match="beyond 65504 in the sum of 2 batches"):
            trainer.parameters.step({"a": np.full(2, 40_000, np.float32)})
        assert (first.must_repeat, second.must_repeat) == (True, True)
        assert cluster.shards[0].meter.messages == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", [Async(), Sync(), Async(push_every=2)], ids=str)
def test_parameters_of_16_bits_have_a_float32_master_copy(kind: str, mode: object) -> None:
    dtype = DTYPES[kind]
    gradients = {name: np.full(shape, -1, dtype) for name, shape in SHAPES.items()}
    with Cluster(SHAPES, mode, pservers=2, dtype=kind, optimizer=SGD(lr=2**-12)) as cluster:
        trainer = cluster.trainer()
        for batch in range(40):
            trainer.begin(batch)
            trainer.step(batch, gradients)
        updates = 20 if mode == Async(push_every=2) else 40
        for name, shape in SHAPES.items():
            values = trainer.parameters[name]
            assert (values.dtype, values.shape) == (np.dtype(dtype), shape)
            assert (values == np.float32(updates * 2**-12).astype(dtype)).all(), name
        for shard in cluster.shards:
            for block in shard.blocks():
                assert block.values.dtype == np.float32
                assert set(block.values.tolist()) == {updates * 2**-12}


def test_a_master_copy_keeps_digits_that_16_bits_would_lose() -> None:
    with Cluster({"a": (4,)}, Async(), dtype="bfloat16", optimizer=SGD(lr=1.0)) as cluster:
        trainer = cluster.trainer()
        for batch, value in enumerate([1.0] + [2**-10] * 32):
            trainer.begin(batch)
            trainer.step(batch, {"a": np.full(4, -value, ml_dtypes.bfloat16)})
        assert (trainer.parameters["a"] == ml_dtypes.bfloat16(1.03125)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_16_bit_parameters_are_checked_and_clipped(kind: str) -> None:
    with Cluster({"a": (4,), "b": (1,)}, Async(), dtype=kind) as cluster:
        trainer = cluster.trainer(clip_norm=1.0)
        trainer.begin(0)
        bad = np.zeros(4, DTYPES[kind])
        bad[2] = np.inf
        with pytest.raises(GradientError, match="NaN or infinity"):
            trainer.parameters.step({"a": bad})
        with pytest.raises(GradientError, match=f"beyond .* the largest value of {kind}"):
            trainer.parameters.step({"a": np.full(4, 3.4e38, np.float32)})
        trainer.begin(0)
        trainer.step(0, {"a": np.array([-3, 0, 0, 0], np.float32), "b": np.array([-4], DTYPES[kind])})
        assert float(trainer.parameters["a"][0]) == pytest.approx(0.6, rel=0.01)
        assert float(trainer.parameters["b"][0]) == pytest.approx(0.8, rel=0.01)


def test_arrays_are_declared_with_their_own_or_an_explicit_dtype() -> None:
    initial = {"a": np.ones(2, np.float16), "b": np.ones(2, ml_dtypes.bfloat16), "c": np.ones((2, 2)), "d": [1.0]}
    found = declared_arrays(initial, {"c": "bfloat16", "d": "float32"})
    assert [array.dtype.name for array in found.values()] == ["float16", "bfloat16", "bfloat16", "float32"]
    with pytest.raises(UsageError, match="'x', but there is no such parameter"):
        declared_arrays(initial, {"x": "float32"})
    with pytest.raises(UsageError, match="'e' has dtype 'int64': make it one of float32"):
        declared_arrays({"e": np.ones(2, np.int64)}, {})


class TestErrorFeedback:
    """Rounding errors are added to a later push."""

    def test_the_sent_values_add_up_to_the_exact_gradients(self) -> None:
        chance = np.random.default_rng(1)
        feedback = ErrorFeedback(half_kernels("bfloat16"), lambda _: [Block(0, 0, 0, 1000, 0)])
        exact, sent = np.zeros(1000, np.float64), np.zeros(1000, np.float64)
        for _ in range(50):
            gradient = chance.normal(size=1000).astype(np.float32)
            bits = feedback.encode({"w": gradient})["w"]
            feedback.settle({0})
            exact += gradient
            sent += bits.view(ml_dtypes.bfloat16).astype(np.float64)
        assert np.abs(exact - sent).max() < 2**-8 * 4

    def test_a_block_that_did_not_answer_keeps_its_residual(self) -> None:
        blocks = [Block(0, 0, 0, 4, 0), Block(1, 0, 4, 8, 0)]
        feedback = ErrorFeedback(half_kernels("float16"), lambda _: blocks)
        small = np.full(8, 1 + 3 * 2**-12, np.float32)
        first = feedback.encode({"w": small})["w"]
        feedback.settle({0})
        again = feedback.encode({"w": small})["w"]
        assert (again[4:] == first[4:]).all()
        assert (again[:4] != first[:4]).all()

    def test_late_blocks_take_their_residual_from_the_same_push(self) -> None:
        blocks = [Block(0, 0, 0, 4, 0), Block(1, 0, 4, 8, 0)]
        moved, stayed = (ErrorFeedback(half_kernels("float16"), lambda _: blocks) for _ in range(2))
        small = np.full(8, 1 + 3 * 2**-12, np.float32)
        for feedback in (moved, stayed):
            feedback.encode({"w": small})
        moved.settle({0}, is_over=False)
        moved.settle({0, 1})
        stayed.settle({0, 1})
        assert (moved.encode({"w": small})["w"] == stayed.encode({"w": small})["w"]).all()

    def test_the_errors_of_a_large_gradient_are_added_where_they_arose(self) -> None:
        """Large gradients are rounded in pieces."""
        size = 2 * _PIECE + 100
        feedback = ErrorFeedback(half_kernels("bfloat16"), lambda _: [Block(0, 0, 0, size, 0)])
        gradient = np.random.default_rng(3).normal(size=size).astype(np.float32)
        sent = np.zeros(size, np.float64)
        for _ in range(8):
            sent += feedback.encode({"w": gradient})["w"].view(ml_dtypes.bfloat16)
            feedback.settle({0})
        assert np.abs(8 * gradient.astype(np.float64) - sent).max() < 2**-6

    def test_a_push_leaves_the_residuals_of_other_parameters_alone(self) -> None:
        small = np.full(4, 1 + 3 * 2**-12, np.float32)

        def after(*pushes: str) -> bytes:
            """Return what is sent for ``a`` after these pushes, of which only those in upper case are answered."""
            feedback = ErrorFeedback(half_kernels("float16"), lambda name: [Block(ord(name), 0, 0, 4, 0)])
            for name in pushes:
                feedback.encode({name.lower(): small})
                if name.isupper():
                    feedback.settle({ord("a"), ord("b")})
            return feedback.encode({"a": small})["a"].tobytes()

        assert after("a", "B") == after("B") == after()
        assert after("A", "B") == after("A") != after()

    def test_a_gradient_that_cannot_be_encoded_changes_nothing(self) -> None:
        small = np.full(4, 1 + 3 * 2**-12, np.float32)
        failed, stayed = (ErrorFeedback(half_kernels("float16"), lambda _: [Block(0, 0, 0, 4, 0)]) for _ in range(2))
        for feedback in (failed, stayed):
            feedback.encode({"w": small})
        with pytest.raises(GradientError, match="beyond"):
            failed.encode({"w": np.full(4, 1e9, np.float32)})
        for feedback in (failed, stayed):
            feedback.settle({0})
        assert (failed.encode({"w": small})["w"] == stayed.encode({"w": small})["w"]).all()

    def test_a_retry_sends_the_same_bytes_and_changes_the_residual_once(self) -> None:
        with Cluster({"a": (4,)}, Async(), wire="bfloat16") as cluster:
            trainer = cluster.trainer(error_feedback=True)
            for batch in (0, 0, 1):
                trainer.begin(batch)
                trainer.step(batch, {"a": np.full(4, -(1 + 3 * 2**-9), np.float32)})
            # Batch 0 was sent twice. The second copy changed nothing on the pserver.
            assert (trainer.parameters["a"] == 2 * (1 + 2**-7)).all()

    def test_feedback_preserves_a_signal_that_is_small_against_the_noise(self) -> None:
        """SGD must learn the mean of batches that differ from each other far more than from the target."""
        chance = np.random.default_rng(2)
        target, noise = (chance.normal(scale=scale, size=256).astype(np.float32) for scale in (1.0, 300.0))

        def distance(*, feedback: bool) -> float:
            with Cluster({"w": (256,)}, Async(), wire="bfloat16", optimizer=SGD(lr=0.05)) as cluster:
                trainer = cluster.trainer(error_feedback=feedback)
                last = mean = np.zeros(256)
                for batch in range(100):
                    trainer.begin(batch)
                    values = np.concatenate([block.values for block in cluster.shards[0].blocks()])
                    trainer.step(batch, {"w": values - target + (noise if batch % 2 else -noise)})
                    mean, last = (values + last) / 2, values.copy()
                return float(np.abs(mean - target).mean())

        without, with_feedback = distance(feedback=False), distance(feedback=True)
        assert with_feedback < without / 2, (with_feedback, without)
