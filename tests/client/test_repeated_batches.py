"""Repeated batches, whose push failed, was late or was rejected; and their weights."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from flightedl.domain.consistency.modes import Async, Bounded, Mode, Sync
from flightedl.domain.model.optimizers import Adam
from flightedl.errors import BegunAnewError, GradientError, NotReadyError, UnavailableError

from .loop_bench import Loop, gradients, value_of
from .pserver_bench import Cluster, missing_batches

#: "a" is on the first of two pservers, "b" on the second.
SHAPES = {"a": (4000,), "b": (4000,)}
AWAY = NotReadyError("nobody holds index 1")


class TestAFailedStep:
    """A script that catches the error of a step and continues."""

    @pytest.mark.parametrize("mode", [Async(), Sync(reduce="sum"), Bounded(staleness=1), Async(push_every=3)])
    def test_its_batch_is_repeated_in_all_blocks(self, mode: Mode) -> None:
        yielded, failed = [], []
        with Cluster(SHAPES, mode, pservers=2) as cluster, Loop(cluster, 6, give_up_s=0.05) as loop:
            for number in loop:
                yielded.append(number)
                if yielded == [0, 1, 2]:
                    present, cluster.present[1] = cluster.present[1], AWAY
                try:
                    loop.parameters.step(gradients(cluster))
                except UnavailableError:
                    failed.append(number)
                    cluster.present[1] = present
                    # The batch was in some blocks only, and has reached no others.
                    assert value_of(cluster, "a") > value_of(cluster, "b")
            assert failed == [2]
            is_sum = mode == Async(push_every=3)
            assert yielded == ([0, 1, 2, 0, 1, 2, 3, 4, 5] if is_sum else [0, 1, 2, 2, 3, 4, 5])
            assert value_of(cluster, "a") == value_of(cluster, "b") == (2 if is_sum else 6)
            assert [report.attempt for report in loop.master.finished] == [100]

    @pytest.mark.parametrize("mode", [Async(), Async(push_every=2), Sync()])
    def test_a_permanent_error_ends_the_loop_and_returns_the_task(self, mode: Mode) -> None:
        yielded = []

        def train() -> None:
            for number in loop:
                yielded.append(number)
                if number == 3:
                    cluster.present[1] = BegunAnewError("the model begins anew")
                with contextlib.suppress(Exception):
                    loop.parameters.step(gradients(cluster))

        with Cluster(SHAPES, mode, pservers=2) as cluster, Loop(cluster, 6) as loop:
            with pytest.raises(BegunAnewError, match="begins anew"):
                train()
            assert yielded == [0, 1, 2, 3]
            assert loop.master.finished == []
            assert [report.attempt for report in loop.master.returned] == [100]

    @pytest.mark.parametrize(
        "mode",
        [
            Sync(reduce="sum"),
            Bounded(staleness=1),
            Async(),
            Async(push_every=3, reduce="sum"),
            Sync(push_every=3, reduce="sum"),
        ],
    )
    @pytest.mark.parametrize("at", range(4))
    def test_its_batch_is_repeated_if_nothing_was_sent(self, mode: Mode, at: int) -> None:
        yielded = []
        with Cluster(SHAPES, mode, pservers=2) as cluster, Loop(cluster, 4) as loop:
            for number in loop:
                yielded.append(number)
                is_bad = number == at and yielded.count(at) == 1
                with contextlib.suppress(GradientError):
                    loop.parameters.step(gradients(cluster, np.nan if is_bad else -1.0))
            assert yielded == sorted([*range(4), at])
            assert (value_of(cluster, "a"), value_of(cluster, "b")) == (4, 4)
            assert [report.attempt for report in loop.master.finished] == [100]

    @pytest.mark.parametrize("mode", [Sync(reduce="sum"), Async()])
    def test_its_batch_is_repeated_for_the_remaining_blocks_after_a_partial_push(self, mode: Mode) -> None:
        yielded = []
        with Cluster(SHAPES, mode, pservers=2) as cluster, Loop(cluster, 3) as loop:
            for number in loop:
                yielded.append(number)
                sound = gradients(cluster)
                with contextlib.suppress(GradientError):
                    loop.parameters.push({"a": sound["a"]})
                    loop.parameters.step({"b": sound["b"] * (np.nan if yielded == [0, 1] else 1)})
            assert yielded == [0, 1, 1, 2]
            assert (value_of(cluster, "a"), value_of(cluster, "b")) == (3, 3)

    def test_another_step_in_the_same_iteration_repairs_it(self) -> None:
        yielded = []
        with Cluster(SHAPES, Sync(reduce="sum"), pservers=2) as cluster, Loop(cluster, 3) as loop:
            for number in loop:
                yielded.append(number)
                try:
                    loop.parameters.step(gradients(cluster, np.nan if number == 1 else -1.0))
                except GradientError:
                    loop.parameters.step({})
            assert yielded == [0, 1, 2]
            assert (value_of(cluster, "a"), value_of(cluster, "b")) == (2, 2)
            assert [report.attempt for report in loop.master.finished] == [100]

    @pytest.mark.parametrize("mode", [Sync(reduce="sum"), Async(), Async(push_every=2, reduce="sum")])
    def test_repeated_failures_are_reported_with_the_batch_and_the_line(self, mode: Mode) -> None:
        yielded = []
        with Cluster(SHAPES, mode, pservers=2) as cluster, Loop(cluster, 3, tasks=2) as loop:
            for number in loop:
                yielded.append(number)
                is_bad = number == 1 and yielded.count(0) == 1
                with contextlib.suppress(GradientError):
                    loop.parameters.step(gradients(cluster, np.nan if is_bad else -1.0))
            assert yielded == [0, 1, 1, 1, 0, 1, 2]
            (failed,) = loop.master.failed
            assert (failed.attempt, failed.batch) == (100, 1)
            assert "'a' has NaN or infinity in epoch 1, task 0, batch 1" in failed.error
            assert failed.place.startswith("GradientError at test_repeated_batches.py:")
            assert [report.attempt for report in loop.master.finished] == [101]

    @pytest.mark.parametrize("mode", [Async(push_every=2, reduce="sum"), Async(push_every=8, reduce="sum")])
    def test_a_batch_out_of_range_even_alone_is_reported(self, mode: Mode) -> None:
        yielded = []
        with Cluster(SHAPES, mode, wire="float16") as cluster, Loop(cluster, 2, records=lambda n: 2 - n) as loop:
            for number in loop:
                yielded.append(number)
                loop.parameters.push(gradients(cluster, -40_000.0))
                if number == 0:
                    # Its gradient exceeds float16 even without others.
                    loop.parameters._sums._sums["a"] *= 2
            assert yielded == [0, 1, 0, 0, 0]
            (failed,) = loop.master.failed
            assert (failed.batch, loop.master.finished) == (0, [])


class TestRepeatedSums:
    """``Async(push_every=n)``: each batch keeps the weight that it had in its sum."""

    def test_after_a_lost_membership_it_is_repeated_as_one_mean(self) -> None:
        mode = Async(push_every=4)
        with (
            Cluster(SHAPES, mode, pservers=2) as cluster,
            Loop(cluster, 4, records=lambda number: 10 * (number + 1)) as loop,
        ):
            yielded = []
            for number in loop:
                yielded.append(number)
                if yielded == [0, 1, 2, 3]:
                    loop.end_membership()
                loop.parameters.step(gradients(cluster, -1.0 - number))
            assert yielded == [0, 1, 2, 3, 0, 1, 2, 3]
            assert value_of(cluster, "a") == value_of(cluster, "b") == pytest.approx(3.0)
            assert {shard.version_range() for shard in cluster.shards} == {(1, 1)}

    def test_it_is_one_update_for_an_optimizer_that_counts_updates(self) -> None:
        with (
            Cluster(SHAPES, Async(push_every=8), pservers=2, optimizer=Adam(lr=1.0)) as cluster,
            Loop(cluster, 8) as loop,
        ):
            yielded = []
            for number in loop:
                yielded.append(number)
                if len(yielded) == 8:
                    loop.end_membership()
                loop.parameters.step(gradients(cluster))
            assert len(yielded) == 16
            assert value_of(cluster, "a") == value_of(cluster, "b") == pytest.approx(1.0, rel=1e-5)

    def test_a_sum_that_failed_half_way_is_repeated_unchanged(self) -> None:
        with Cluster(SHAPES, Async(push_every=3), pservers=2) as cluster, Loop(cluster, 3, give_up_s=0.05) as loop:
            present = cluster.present[1]
            for turn, number in enumerate(loop):
                cluster.present[1] = AWAY if turn == 2 else present
                with contextlib.suppress(UnavailableError):
                    loop.parameters.step(gradients(cluster, -1.0 - number))
            assert value_of(cluster, "a") == value_of(cluster, "b") == pytest.approx(2.0)
            assert {shard.version_range() for shard in cluster.shards} == {(1, 1)}

    def test_batches_keep_their_weights_if_a_block_rejects_one_of_them(self) -> None:
        with Cluster(SHAPES, Async(push_every=4), pservers=2, members=2) as cluster, Loop(cluster, 4) as loop:
            other = cluster.trainer(2)
            other.parameters.steps.change_mode(Async())
            other.begin(1, of=4)
            other.parameters.push({"a": gradients(cluster, -100.0)["a"]})
            yielded = []
            for number in loop:
                yielded.append(number)
                loop.parameters.step(gradients(cluster, -1.0 - number))
            assert yielded == [0, 1, 2, 3, 0, 2, 3]
            assert value_of(cluster, "b") == pytest.approx(2.5)
            # Batches 1, 3 and 4 of four are one update; the other trainer pushed the second batch.
            assert value_of(cluster, "a") == pytest.approx(100 + 8 / 4)
            assert cluster.shards[0].version_range() == (2, 2)

    @pytest.mark.parametrize("lacking", range(4))
    def test_a_block_may_lack_any_one_batch_of_the_sum(self, lacking: int) -> None:
        with Cluster(SHAPES, Async(push_every=4), pservers=2, members=2) as cluster, Loop(cluster, 6) as loop:
            other = cluster.trainer(2)
            other.parameters.steps.change_mode(Async())
            for number in {0, 1, 2, 3} - {lacking}:
                other.begin(number, of=6)
                other.parameters.push({"a": gradients(cluster, -100.0)["a"]})
            yielded = []
            for number in loop:
                yielded.append(number)
                loop.parameters.step(gradients(cluster))
            assert yielded == [0, 1, 2, 3, lacking, 4, 5]
            assert value_of(cluster, "b") == 2
            assert value_of(cluster, "a") == pytest.approx(300 + 1 / 4 + 1)

    def test_batches_that_different_blocks_lack_are_pushed_separately(self) -> None:
        with Cluster(SHAPES, Async(push_every=4), pservers=2, members=2) as cluster, Loop(cluster, 4) as loop:
            other = cluster.trainer(2)
            other.parameters.steps.change_mode(Async())
            for name, numbers in {"a": [1, 3], "b": [0, 3]}.items():
                for number in numbers:
                    other.begin(number, of=4)
                    other.parameters.push({name: gradients(cluster, -100.0)[name]})
            yielded = []
            for number in loop:
                yielded.append(number)
                loop.parameters.step(gradients(cluster))
            assert yielded == [0, 1, 2, 3, 0, 1, 2]
            assert value_of(cluster, "a") == value_of(cluster, "b") == pytest.approx(200 + 2 / 4)
            assert [report.attempt for report in loop.master.finished] == [100]

    def test_the_rest_of_a_lost_task_is_repeated_before_the_task_is_reported(self) -> None:
        with Cluster(SHAPES, Async(push_every=4, reduce="sum"), pservers=2) as cluster, Loop(cluster, 6, 2) as loop:
            yielded = []
            for number in loop:
                yielded.append(number)
                if len(yielded) == 6:
                    loop.end_membership()
                loop.parameters.step(gradients(cluster))
            assert yielded == [0, 1, 2, 3, 4, 5, 4, 5, 0, 1, 2, 3, 4, 5]
            assert value_of(cluster, "a") == value_of(cluster, "b") == 12
            assert [report.attempt for report in loop.master.finished] == [100, 101]

    def test_batches_whose_sum_is_out_of_range_are_repeated_one_by_one(self) -> None:
        with Cluster(SHAPES, Async(push_every=2, reduce="sum"), wire="float16") as cluster, Loop(cluster, 2) as loop:
            yielded = []
            for number in loop:
                yielded.append(number)
                with contextlib.suppress(GradientError):
                    loop.parameters.step(gradients(cluster, -40_000.0))
            assert yielded == [0, 1, 0, 1]
            assert value_of(cluster, "a") == pytest.approx(80_000, rel=1e-3)


class TestLateBatches:
    """Their gradients count nowhere, so the loop yields them again."""

    @pytest.mark.parametrize("mode", [Async(), Sync(reduce="sum"), Bounded(staleness=1)])
    def test_a_batch_whose_membership_ended_is_repeated(self, mode: Mode) -> None:
        with Cluster(SHAPES, mode, pservers=2) as cluster, Loop(cluster, 4) as loop:
            yielded = []
            for number in loop:
                yielded.append(number)
                if yielded == [0, 1]:
                    loop.end_membership()
                loop.parameters.step(gradients(cluster))
            assert yielded == [0, 1, 1, 2, 3]
            assert value_of(cluster, "a") == value_of(cluster, "b") == 4
            assert [report.attempt for report in loop.master.finished] == [100]

    def test_a_batch_whose_round_closed_without_it_is_repeated(self) -> None:
        with Cluster(SHAPES, Sync(reduce="sum"), pservers=2) as cluster, Loop(cluster, 4) as loop:
            yielded = []
            for number in loop:
                yielded.append(number)
                if yielded == [0, 1, 2]:
                    versions = loop.parameters.steps.versions
                    versions.update({block: version - 1 for block, version in versions.items()})
                loop.parameters.step(gradients(cluster))
            assert yielded == [0, 1, 2, 2, 3]
            assert value_of(cluster, "a") == value_of(cluster, "b") == 4

    def test_a_late_batch_of_a_revoked_task_is_not_repeated(self) -> None:
        with Cluster(SHAPES, Async(), pservers=2) as cluster, Loop(cluster, 4) as loop:
            yielded = []
            for number in loop:
                yielded.append(number)
                if number == 1:
                    loop.end_membership()
                    loop.take_away()
                loop.parameters.step(gradients(cluster))
            assert yielded == [0, 1]
            assert value_of(cluster, "a") == value_of(cluster, "b") == 1
            assert loop.master.finished == []


class TestBlocksWithoutAGradient:
    """The step itself announces the batch to them, because rounds of other trainers wait for it."""

    @pytest.mark.parametrize("mode", [Sync(), Sync(backup=1), Async(), Async(push_every=1, pull_every=2)])
    def test_a_step_announces_the_batch_to_them(self, mode: Mode) -> None:
        with Cluster(SHAPES, mode, pservers=2) as cluster, Loop(cluster, 2) as loop:
            for number in loop:
                loop.parameters.step({"a": gradients(cluster)["a"]})
                for shard in cluster.shards:
                    assert missing_batches(shard.applied(), 0, 0, 2) == [1][number:]

    def test_the_step_that_pushes_a_sum_announces_its_batches_to_them(self) -> None:
        with Cluster(SHAPES, Async(push_every=2), pservers=2) as cluster, Loop(cluster, 4) as loop:
            for number in loop:
                loop.parameters.step({"a": gradients(cluster)["a"]})
                for shard in cluster.shards:
                    assert missing_batches(shard.applied(), 0, 0, 4) == [[0, 1, 2, 3], [2, 3], [2, 3], []][number]


class TestReportedProcesses:
    """A report of finished work names each pserver's oldest process that has applied a batch of it."""

    @pytest.mark.parametrize("mode", [Async(), Async(push_every=2)])
    def test_the_earlier_process_applied_some_batches_of_the_task(self, mode: Mode) -> None:
        with Cluster(SHAPES, mode, pservers=2) as cluster, Loop(cluster, 4, 2) as loop:
            for begun, _ in enumerate(loop):
                if begun == 2:
                    cluster.replace(1, generation=7)
                loop.parameters.step(gradients(cluster))
            assert [list(report.pservers) for report in loop.master.finished] == [[1, 1], [1, 7]]

    def test_the_earlier_process_applied_some_blocks_of_the_batch(self) -> None:
        shapes = {**SHAPES, "c": (4000,), "d": (4000,)}
        with Cluster(shapes, Async(), pservers=2) as cluster, Loop(cluster, 1) as loop:
            for _ in loop:
                ones = gradients(cluster)
                loop.parameters.push({name: ones[name] for name in "ac"})
                cluster.replace(1, generation=7)
                loop.parameters.step({name: ones[name] for name in "bd"})
                assert len(missing_batches(cluster.shards[1].applied(), 0, 0, 1)) == 1
            (report,) = loop.master.finished
            assert list(report.pservers) == [1, 1]

    @pytest.mark.parametrize("mode", [Async(), Async(push_every=2)])
    def test_the_earlier_process_answers_after_the_directory_names_the_new_one(
        self, mode: Mode, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with Cluster(SHAPES, mode, pservers=2) as cluster, Loop(cluster, 2) as loop:
            look = cluster.pserver
            left = [1]

            def pserver(index: int) -> object:
                found = look(index)
                if index in left:
                    left.remove(index)
                    cluster.replace(index, generation=7)
                return found

            first_pushed = 1 if mode == Async(push_every=2) else 0
            for number in loop:
                if number == first_pushed:
                    monkeypatch.setattr(cluster, "pserver", pserver)
                loop.parameters.step(gradients(cluster))
            (report,) = loop.master.finished
            assert list(report.pservers) == [1, 1]
