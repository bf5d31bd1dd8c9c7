"""A trainer's parameters with real pservers in this process."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from flightedl.domain.consistency.modes import Async, Bounded, Mode, Sync
from flightedl.domain.model.optimizers import Adam
from flightedl.errors import GradientError, UsageError

from .pserver_bench import Cluster, missing_batches

SHAPES = {"w": (300, 1000), "a": (7,), "b": (), "c": (3, 5), "big": (600_000,)}
ONES = {name: np.full(shape, -1, np.float32) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("pservers", [1, 2])
@pytest.mark.parametrize("mode", [Async(), Sync(reduce="sum"), Bounded(staleness=1), Sync(backup=1)])
def test_a_step_pushes_all_gradients_and_returns_the_new_values(mode: object, pservers: int) -> None:
    with Cluster(SHAPES, mode, pservers=pservers) as cluster:
        trainer = cluster.trainer()
        for batch in range(3):
            trainer.begin(batch)
            trainer.step(batch, ONES)
            for name, shape in SHAPES.items():
                values = trainer.parameters[name]
                assert values.shape == tuple(shape)
                assert (values == batch + 1).all(), name
        assert set(trainer.parameters.versions.values()) == {3}


def test_values_are_read_only() -> None:
    with Cluster(SHAPES, Async()) as cluster:
        trainer = cluster.trainer()
        with pytest.raises(ValueError, match="read-only"):
            trainer.parameters["w"][0] = 1


def test_omitted_parameters_only_count_the_batch() -> None:
    with Cluster(SHAPES, Sync(reduce="sum"), pservers=2) as cluster:
        trainer = cluster.trainer()
        trainer.begin(0)
        trainer.step(0, {"a": ONES["a"]})
        assert (trainer.parameters["a"] == 1).all()
        assert (trainer.parameters["w"] == 0).all()
        assert set(trainer.parameters.versions.values()) == {1}


def test_a_repeated_batch_counts_once_and_still_returns_values() -> None:
    with Cluster(SHAPES, Async()) as cluster:
        trainer = cluster.trainer()
        for _ in range(2):
            trainer.begin(0)
            trainer.step(0, ONES)
        assert (trainer.parameters["big"] == 1).all()


@pytest.mark.parametrize("place", [0, 599_999])
def test_a_gradient_that_is_not_finite_is_never_sent(place: int) -> None:
    with Cluster({"big": (3_000_000,), "a": (2,)}, Async()) as cluster:
        trainer = cluster.trainer()
        trainer.begin(0)
        bad = np.zeros(3_000_000, np.float32)
        bad[place * 5] = np.inf
        with pytest.raises(GradientError, match=r"'big' has NaN or infinity in epoch 1, task 0, batch 0"):
            trainer.parameters.step({"a": np.ones(2, np.float32), "big": bad})
        assert cluster.shards[0].meter.messages == 0


def test_one_of_many_tiny_gradients_that_is_not_finite_is_named_and_nothing_is_sent() -> None:
    shapes = {f"p{number}": (50,) for number in range(30)}
    with Cluster(shapes, Async()) as cluster:
        trainer = cluster.trainer()
        gradients = {name: np.ones(50, np.float32) for name in shapes}
        gradients["p17"][3] = np.inf
        trainer.begin(0)
        with pytest.raises(GradientError, match="'p17' has NaN or infinity"):
            trainer.parameters.step(gradients)
        assert cluster.shards[0].meter.messages == 0
        gradients["p17"][3] = 2.0
        trainer.step(0, gradients)
        assert trainer.parameters["p17"][3] == -2.0


def test_tiny_gradients_are_sent_one_by_one_if_some_are_missing() -> None:
    shapes = {f"p{number}": (50,) for number in range(30)}
    with Cluster(shapes, Async()) as cluster:
        trainer = cluster.trainer()
        trainer.begin(0)
        trainer.step(0, {f"p{number}": np.full(50, number, np.float32) for number in range(30) if number != 11})
        for number, name in enumerate(shapes):
            assert (trainer.parameters[name] == (0 if number == 11 else -number)).all()


def test_a_pull_refreshes_only_the_named_parameters() -> None:
    with Cluster(SHAPES, Async(), members=2) as cluster:
        one, other = cluster.trainer(1), cluster.trainer(2)
        one.begin(0)
        one.step(0, ONES)
        other.parameters.pull(["a", "c"])
        assert (other.parameters["a"] == 1).all()
        assert (other.parameters["w"] == 0).all()
        with pytest.raises(UsageError, match="'x'"):
            other.parameters.pull(["x"])


def test_a_pull_waits_for_the_requested_version() -> None:
    with Cluster({"a": (4,)}, Async(), members=2) as cluster:
        one, other = cluster.trainer(1), cluster.trainer(2)
        waiting = threading.Thread(target=lambda: other.parameters.pull(min_version=2))
        waiting.start()
        for batch in range(2):
            one.begin(batch)
            one.step(batch, {"a": ONES["a"][:4]})
        waiting.join(10)
        assert not waiting.is_alive()
        assert (other.parameters["a"] == 2).all()


def test_pull_every_skips_pulls_but_no_pushes() -> None:
    with Cluster({"a": (4,)}, Async(pull_every=3)) as cluster:
        trainer = cluster.trainer()
        seen = []
        for batch in range(6):
            trainer.begin(batch)
            trainer.step(batch, {"a": ONES["a"][:4]})
            seen.append(float(trainer.parameters["a"][0]))
        assert seen == [0, 0, 3, 3, 3, 6]


def test_the_global_norm_is_clipped_over_all_gradients() -> None:
    with Cluster({"a": (1,), "b": (1,)}, Async()) as cluster:
        trainer = cluster.trainer(clip_norm=1.0)
        trainer.begin(0)
        trainer.step(0, {"a": np.array([-3], np.float32), "b": np.array([-4], np.float32)})
        assert trainer.parameters["a"][0] == pytest.approx(0.6)
        assert trainer.parameters["b"][0] == pytest.approx(0.8)
        trainer.begin(1)
        trainer.step(1, {"a": np.array([-0.1], np.float32)})
        assert trainer.parameters["a"][0] == pytest.approx(0.7)


def test_with_a_backup_the_slowest_trainer_does_not_hold_up_the_round_and_still_counts() -> None:
    with Cluster(SHAPES, Sync(reduce="sum", backup=1), pservers=2, members=2) as cluster:
        fast, slow = cluster.trainer(1), cluster.trainer(2)
        slow.begin(50)
        for batch in range(3):
            fast.begin(batch)
            fast.step(batch, ONES)
        assert (fast.parameters["w"] == 3).all()
        slow.step(50, ONES)
        assert not slow.lost
        fast.begin(3)
        fast.step(3, ONES)
        assert (fast.parameters["w"] == 5).all()


@pytest.mark.parametrize("mode", [Async(), Bounded(staleness=1)], ids=["async", "bounded"])
def test_a_batch_computed_on_lost_values_is_repeated_on_present_ones(mode: Mode) -> None:
    with Cluster(SHAPES, mode) as cluster:
        trainer = cluster.trainer()
        # This happens if a pserver is restored from a checkpoint older than the values that this trainer pulled.
        versions = trainer.parameters.steps.versions
        versions.update(dict.fromkeys(versions, 5))
        current = trainer.begin(0)
        trainer.step(0, ONES)
        assert current.must_repeat
        assert trainer.lost
        assert cluster.shards[0].version_range() == (0, 0)
        trainer.parameters.refresh()
        again = trainer.begin(0)
        trainer.step(0, ONES)
        assert not again.must_repeat
        assert cluster.shards[0].version_range() == (1, 1)
        assert cluster.shards[0].meter.rows_by_outcome["accepted"] == cluster.shards[0].block_count


def test_bounded_limits_how_far_a_trainer_runs_ahead() -> None:
    with Cluster({"a": (4,)}, Bounded(staleness=1), members=2) as cluster:
        fast, slow = cluster.trainer(1), cluster.trainer(2)
        gradient = {"a": ONES["a"][:4]}
        fast.begin(0)
        fast.step(0, gradient)
        fast.begin(1)
        ahead = threading.Thread(target=lambda: fast.step(1, gradient))
        ahead.start()
        ahead.join(0.3)
        assert ahead.is_alive()
        slow.begin(90, step=1)
        slow.step(90, gradient)
        ahead.join(10)
        assert not ahead.is_alive()


def test_many_tiny_parameters_arrive_in_the_right_places() -> None:
    shapes = {f"p{i}": (i % 7 + 1,) for i in range(500)}
    with Cluster(shapes, Sync(reduce="sum"), optimizer=Adam(lr=1.0, overrides={"p1*": {"lr": 0.5}})) as cluster:
        trainer = cluster.trainer()
        trainer.begin(0)
        trainer.step(0, {name: np.full(shape, -1, np.float32) for name, shape in shapes.items()})
        for name in shapes:
            assert trainer.parameters[name] == pytest.approx(0.5 if name.startswith("p1") else 1.0, rel=1e-5), name


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
@pytest.mark.parametrize("mode", [Async(), Sync(reduce="sum")])
def test_short_floats_are_sent_and_full_ones_are_kept(mode: object, wire: str) -> None:
    with Cluster(SHAPES, mode, pservers=2, wire=wire) as cluster:
        trainer = cluster.trainer()
        for batch in range(2):
            trainer.begin(batch)
            trainer.step(batch, {name: np.full(shape, -0.3, np.float32) for name, shape in SHAPES.items()})
        precision = {"bfloat16": 2**-8, "float16": 2**-11}[wire]
        for name in SHAPES:
            assert np.allclose(trainer.parameters[name], 0.6, rtol=2 * precision), name
        once = {"bfloat16": 0.30078125, "float16": np.float32(np.float16(0.3))}[wire]
        assert all(set(block.values.tolist()) == {np.float32(once) * 2} for block in cluster.shards[0].blocks())


def _alike(shard_index: int, cluster: Cluster) -> set[float]:
    return {value for block in cluster.shards[shard_index].blocks() for value in block.values.tolist()}


class TestSums:
    """Several batches in one push."""

    def test_one_push_names_all_batches_and_carries_their_weighted_mean(self) -> None:
        with Cluster(SHAPES, Async(push_every=3), pservers=2) as cluster:
            trainer = cluster.trainer()
            for batch, records in enumerate((10, 20, 70)):
                trainer.begin(batch, records=records)
                trainer.step(batch, {name: value * (batch + 1) for name, value in ONES.items()})
                assert trainer.current is not None
                assert trainer.current.waits == (batch < 2)
            for name in SHAPES:
                assert trainer.parameters[name] == pytest.approx(0.1 + 2 * 0.2 + 3 * 0.7), name
            assert set(trainer.parameters.versions.values()) == {1}
            for shard in cluster.shards:
                assert missing_batches(shard.applied(), 0, 0, 100) == list(range(3, 100))

    def test_the_plain_sum_moves_sgd_like_single_pushes(self) -> None:
        with Cluster(SHAPES, Async(push_every=4, reduce="sum"), pservers=2) as cluster:
            trainer = cluster.trainer()
            seen = []
            for batch in range(10):
                trainer.begin(batch)
                trainer.step(batch, ONES)
                seen.append(float(trainer.parameters["b"]))
            trainer.parameters.run(trainer.parameters.steps.push_sum())
            assert seen == [0, 0, 0, 4, 4, 4, 4, 8, 8, 8]
            assert _alike(0, cluster) == _alike(1, cluster) == {10.0}

    def test_pushing_and_pulling_are_counted_apart(self) -> None:
        with Cluster({"a": (4,)}, Async(push_every=2, pull_every=3, reduce="sum")) as cluster:
            trainer = cluster.trainer()
            seen = []
            for batch in range(6):
                trainer.begin(batch)
                trainer.step(batch, {"a": ONES["a"][:4]})
                seen.append(float(trainer.parameters["a"][0]))
            assert seen == [0, 0, 2, 2, 2, 6]

    def test_a_block_that_has_some_of_the_batches_rejects_the_sum_and_names_them(self) -> None:
        with Cluster(SHAPES, Async(push_every=3, reduce="sum"), pservers=2, members=2) as cluster:
            one, other = cluster.trainer(1), cluster.trainer(2)
            # The other trainer has a copy of the task, and has pushed batch 1 to one parameter only.
            other.parameters.steps.change_mode(Async())
            other.begin(1)
            other.parameters.push({"big": ONES["big"]})
            currents = []
            for batch in range(3):
                currents.append(one.begin(batch))
                one.step(batch, ONES)
            assert [current.must_repeat for current in currents] == [True, False, True]
            assert not any(current.waits for current in currents)
            for current in currents:
                if current.must_repeat:
                    again = one.begin(current.number, again=current.again)
                    one.step(current.number, ONES)
                    currents[current.number] = again
            assert not any(current.must_repeat or current.waits for current in currents)
            assert _alike(0, cluster) == _alike(1, cluster) == {3.0}

    def test_a_repeated_sum_is_answered_without_being_applied(self) -> None:
        with Cluster(SHAPES, Async(push_every=2, reduce="sum"), pservers=2, members=2) as cluster:
            for trainer in (cluster.trainer(1), cluster.trainer(2)):
                for batch in range(2):
                    trainer.begin(batch)
                    trainer.step(batch, ONES)
                    assert trainer.current is not None
                    assert not trainer.current.must_repeat
            assert _alike(0, cluster) == _alike(1, cluster) == {2.0}
            assert set(cluster.shards[0].version_range()) == {1}

    def test_all_batches_of_a_sum_are_repeated_after_the_membership_ended(self) -> None:
        with Cluster(SHAPES, Async(push_every=2), pservers=2) as cluster:
            trainer = cluster.trainer()
            currents = [trainer.begin(0)]
            trainer.step(0, ONES)
            cluster.view(serial=2)
            currents.append(trainer.begin(1))
            trainer.step(1, ONES)
            assert [current.must_repeat for current in currents] == [True, True]
            assert trainer.lost
            assert _alike(0, cluster) == {0.0}

    def test_repeating_a_batch_repeats_its_sum(self) -> None:
        with Cluster(SHAPES, Async(push_every=3), pservers=1) as cluster:
            trainer = cluster.trainer()
            first = trainer.begin(0)
            trainer.step(0, ONES)
            second = trainer.begin(1)
            trainer.parameters.push({"a": ONES["a"]})
            cluster.view(serial=2)
            trainer.parameters.pull(["a"])
            assert second.must_repeat
            trainer.parameters.close_batch()
            assert first.must_repeat
            assert not first.waits

    def test_a_new_loop_gets_no_answers_for_batches_of_an_abandoned_loop(self) -> None:
        with Cluster(SHAPES, Async(push_every=3)) as cluster:
            trainer = cluster.trainer()
            trainer.begin(0)
            trainer.parameters.step(ONES)
            trainer.parameters.close_batch()
            trainer.begin(1)
            trainer.parameters.abandon_batch()
            assert trainer.lost
            trainer.begin(0)
            (state,) = trainer.parameters.close_batch()
            assert (state.number, state.waits, state.must_repeat) == (0, True, False)

    def test_a_batch_accepts_only_one_gradient(self) -> None:
        with Cluster(SHAPES, Async(push_every=3)) as cluster:
            trainer = cluster.trainer()
            trainer.begin(0)
            trainer.parameters.push({"a": ONES["a"]})
            with pytest.raises(UsageError, match="'a' was already pushed for this batch"):
                trainer.parameters.step(ONES)
            trainer.parameters.step({name: ONES[name] for name in SHAPES if name != "a"})
            with pytest.raises(UsageError, match="'w' was already pushed for this batch"):
                trainer.parameters.push({"w": ONES["w"]})

    def test_the_norm_of_a_sum_is_clipped(self) -> None:
        with Cluster({"a": (1,), "b": (1,)}, Async(push_every=2, reduce="sum")) as cluster:
            trainer = cluster.trainer(clip_norm=1.0)
            for batch, name in enumerate(("a", "b")):
                trainer.begin(batch)
                trainer.step(batch, {name: np.array([-3.0 - batch], np.float32)})
            assert trainer.parameters["a"][0] == pytest.approx(0.6)
            assert trainer.parameters["b"][0] == pytest.approx(0.8)

    def test_a_sum_does_not_outlive_its_mode(self) -> None:
        with Cluster(SHAPES, Async(push_every=3)) as cluster:
            trainer = cluster.trainer()
            waiting = trainer.begin(0)
            trainer.step(0, ONES)
            trainer.parameters.steps.change_mode(Sync())
            assert (waiting.waits, waiting.must_repeat) == (False, True)
            trainer.begin(1)
            trainer.parameters.push(ONES)
            # The batch is pushed alone, without the sum.
            assert _alike(0, cluster) == {1.0}
