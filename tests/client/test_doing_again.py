"""Batches that are done again: whose push failed, came too late, or was refused; and what they count."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from flightedl.domain.consistency.modes import Async, Bounded, Mode, Sync
from flightedl.domain.model.optimizers import Adam
from flightedl.errors import BegunAnewError, GradientError, NotReadyError, UnavailableError

from .loop_bench import Loop, gradients, value_of
from .pserver_bench import Cluster, missing_batches

#: "a" lies on the first of two pservers, "b" on the second.
SHAPES = {"a": (4000,), "b": (4000,)}
AWAY = NotReadyError("nobody holds index 1")


class TestAFailedStep:
    """A script that catches the error of a step, and goes on."""

    @pytest.mark.parametrize("mode", [Async(), Sync(reduce="sum"), Bounded(staleness=1), Async(push_every=3)])
    def test_its_batch_is_done_again_as_a_whole(self, mode: Mode) -> None:
        handed, failed = [], []
        with Cluster(SHAPES, mode, pservers=2) as cluster, Loop(cluster, 6, give_up_s=0.05) as loop:
            for number in loop:
                handed.append(number)
                if handed == [0, 1, 2]:
                    present, cluster.present[1] = cluster.present[1], AWAY
                try:
                    loop.parameters.step(gradients(cluster))
                except UnavailableError:
                    failed.append(number)
                    cluster.present[1] = present
                    # It was in some blocks only, and has arrived nowhere else.
                    assert value_of(cluster, "a") > value_of(cluster, "b")
            assert failed == [2]
            is_sum = mode == Async(push_every=3)
            assert handed == ([0, 1, 2, 0, 1, 2, 3, 4, 5] if is_sum else [0, 1, 2, 2, 3, 4, 5])
            assert value_of(cluster, "a") == value_of(cluster, "b") == (2 if is_sum else 6)
            assert [report.attempt for report in loop.master.finished] == [100]

    @pytest.mark.parametrize("mode", [Async(), Async(push_every=2), Sync()])
    def test_what_trying_again_cannot_help_ends_the_loop_and_undoes_the_task(self, mode: Mode) -> None:
        handed = []

        def train() -> None:
            for number in loop:
                handed.append(number)
                if number == 3:
                    cluster.present[1] = BegunAnewError("the model begins anew")
                with contextlib.suppress(Exception):
                    loop.parameters.step(gradients(cluster))

        with Cluster(SHAPES, mode, pservers=2) as cluster, Loop(cluster, 6) as loop:
            with pytest.raises(BegunAnewError, match="begins anew"):
                train()
            assert handed == [0, 1, 2, 3]
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
    def test_of_which_nothing_was_sent_its_batch_comes_again(self, mode: Mode, at: int) -> None:
        handed = []
        with Cluster(SHAPES, mode, pservers=2) as cluster, Loop(cluster, 4) as loop:
            for number in loop:
                handed.append(number)
                is_bad = number == at and handed.count(at) == 1
                with contextlib.suppress(GradientError):
                    loop.parameters.step(gradients(cluster, np.nan if is_bad else -1.0))
            assert handed == sorted([*range(4), at])
            assert (value_of(cluster, "a"), value_of(cluster, "b")) == (4, 4)
            assert [report.attempt for report in loop.master.finished] == [100]

    @pytest.mark.parametrize("mode", [Sync(reduce="sum"), Async()])
    def test_after_a_part_of_it_was_pushed_its_batch_comes_again_for_the_rest(self, mode: Mode) -> None:
        handed = []
        with Cluster(SHAPES, mode, pservers=2) as cluster, Loop(cluster, 3) as loop:
            for number in loop:
                handed.append(number)
                sound = gradients(cluster)
                with contextlib.suppress(GradientError):
                    loop.parameters.push({"a": sound["a"]})
                    loop.parameters.step({"b": sound["b"] * (np.nan if handed == [0, 1] else 1)})
            assert handed == [0, 1, 1, 2]
            assert (value_of(cluster, "a"), value_of(cluster, "b")) == (3, 3)

    def test_is_made_good_by_another_step_in_the_same_turn(self) -> None:
        handed = []
        with Cluster(SHAPES, Sync(reduce="sum"), pservers=2) as cluster, Loop(cluster, 3) as loop:
            for number in loop:
                handed.append(number)
                try:
                    loop.parameters.step(gradients(cluster, np.nan if number == 1 else -1.0))
                except GradientError:
                    loop.parameters.step({})
            assert handed == [0, 1, 2]
            assert (value_of(cluster, "a"), value_of(cluster, "b")) == (2, 2)
            assert [report.attempt for report in loop.master.finished] == [100]

    @pytest.mark.parametrize("mode", [Sync(reduce="sum"), Async(), Async(push_every=2, reduce="sum")])
    def test_that_fails_again_and_again_is_reported_with_its_batch_and_the_line(self, mode: Mode) -> None:
        handed = []
        with Cluster(SHAPES, mode, pservers=2) as cluster, Loop(cluster, 3, tasks=2) as loop:
            for number in loop:
                handed.append(number)
                is_bad = number == 1 and handed.count(0) == 1
                with contextlib.suppress(GradientError):
                    loop.parameters.step(gradients(cluster, np.nan if is_bad else -1.0))
            assert handed == [0, 1, 1, 1, 0, 1, 2]
            (failed,) = loop.master.failed
            assert (failed.attempt, failed.batch) == (100, 1)
            assert "'a' has NaN or infinity in epoch 1, task 0, batch 1" in failed.error
            assert failed.place.startswith("GradientError at test_doing_again.py:")
            assert [report.attempt for report in loop.master.finished] == [101]

    @pytest.mark.parametrize("mode", [Async(push_every=2, reduce="sum"), Async(push_every=8, reduce="sum")])
    def test_a_batch_that_cannot_be_said_even_alone_is_reported(self, mode: Mode) -> None:
        handed = []
        with Cluster(SHAPES, mode, wire="float16") as cluster, Loop(cluster, 2, records=lambda n: 2 - n) as loop:
            for number in loop:
                handed.append(number)
                loop.parameters.push(gradients(cluster, -40_000.0))
                if number == 0:
                    # Its gradient is beyond float16 in any sum, also alone.
                    loop.parameters._sums._sums["a"] *= 2
            assert handed == [0, 1, 0, 0, 0]
            (failed,) = loop.master.failed
            assert (failed.batch, loop.master.finished) == (0, [])


class TestWhatASumCountsThatIsDoneAgain:
    """``Async(push_every=n)``: the weight of each batch stays what it was in its sum."""

    def test_after_a_lost_membership_it_is_one_mean_again(self) -> None:
        mode = Async(push_every=4)
        with (
            Cluster(SHAPES, mode, pservers=2) as cluster,
            Loop(cluster, 4, records=lambda number: 10 * (number + 1)) as loop,
        ):
            handed = []
            for number in loop:
                handed.append(number)
                if handed == [0, 1, 2, 3]:
                    loop.end_membership()
                loop.parameters.step(gradients(cluster, -1.0 - number))
            assert handed == [0, 1, 2, 3, 0, 1, 2, 3]
            assert value_of(cluster, "a") == value_of(cluster, "b") == pytest.approx(3.0)
            assert {shard.version_range() for shard in cluster.shards} == {(1, 1)}

    def test_it_is_one_update_for_an_optimizer_that_counts_them(self) -> None:
        with (
            Cluster(SHAPES, Async(push_every=8), pservers=2, optimizer=Adam(lr=1.0)) as cluster,
            Loop(cluster, 8) as loop,
        ):
            handed = []
            for number in loop:
                handed.append(number)
                if len(handed) == 8:
                    loop.end_membership()
                loop.parameters.step(gradients(cluster))
            assert len(handed) == 16
            assert value_of(cluster, "a") == value_of(cluster, "b") == pytest.approx(1.0, rel=1e-5)

    def test_a_sum_that_failed_half_way_is_the_same_sum_again(self) -> None:
        with Cluster(SHAPES, Async(push_every=3), pservers=2) as cluster, Loop(cluster, 3, give_up_s=0.05) as loop:
            present = cluster.present[1]
            for handed, number in enumerate(loop):
                cluster.present[1] = AWAY if handed == 2 else present
                with contextlib.suppress(UnavailableError):
                    loop.parameters.step(gradients(cluster, -1.0 - number))
            assert value_of(cluster, "a") == value_of(cluster, "b") == pytest.approx(2.0)
            assert {shard.version_range() for shard in cluster.shards} == {(1, 1)}

    def test_where_a_block_refuses_it_the_others_count_what_they_would_have(self) -> None:
        with Cluster(SHAPES, Async(push_every=4), pservers=2, members=2) as cluster, Loop(cluster, 4) as loop:
            other = cluster.trainer(2)
            other.parameters.steps.change_mode(Async())
            other.begin(1, of=4)
            other.parameters.push({"a": gradients(cluster, -100.0)["a"]})
            handed = []
            for number in loop:
                handed.append(number)
                loop.parameters.step(gradients(cluster, -1.0 - number))
            assert handed == [0, 1, 2, 3, 0, 2, 3]
            assert value_of(cluster, "b") == pytest.approx(2.5)
            # 1, 3 and 4 of four, in one update; the second is what the other trainer said.
            assert value_of(cluster, "a") == pytest.approx(100 + 8 / 4)
            assert cluster.shards[0].version_range() == (2, 2)

    @pytest.mark.parametrize("lacking", range(4))
    def test_any_one_batch_of_it_may_be_the_one_that_a_block_lacks(self, lacking: int) -> None:
        with Cluster(SHAPES, Async(push_every=4), pservers=2, members=2) as cluster, Loop(cluster, 6) as loop:
            other = cluster.trainer(2)
            other.parameters.steps.change_mode(Async())
            for number in {0, 1, 2, 3} - {lacking}:
                other.begin(number, of=6)
                other.parameters.push({"a": gradients(cluster, -100.0)["a"]})
            handed = []
            for number in loop:
                handed.append(number)
                loop.parameters.step(gradients(cluster))
            assert handed == [0, 1, 2, 3, lacking, 4, 5]
            assert value_of(cluster, "b") == 2
            assert value_of(cluster, "a") == pytest.approx(300 + 1 / 4 + 1)

    def test_what_different_blocks_lack_is_pushed_apart(self) -> None:
        with Cluster(SHAPES, Async(push_every=4), pservers=2, members=2) as cluster, Loop(cluster, 4) as loop:
            other = cluster.trainer(2)
            other.parameters.steps.change_mode(Async())
            for name, numbers in {"a": [1, 3], "b": [0, 3]}.items():
                for number in numbers:
                    other.begin(number, of=4)
                    other.parameters.push({name: gradients(cluster, -100.0)[name]})
            handed = []
            for number in loop:
                handed.append(number)
                loop.parameters.step(gradients(cluster))
            assert handed == [0, 1, 2, 3, 0, 1, 2]
            assert value_of(cluster, "a") == value_of(cluster, "b") == pytest.approx(200 + 2 / 4)
            assert [report.attempt for report in loop.master.finished] == [100]

    def test_the_rest_of_a_piece_that_was_lost_is_done_again_before_it_is_reported(self) -> None:
        with Cluster(SHAPES, Async(push_every=4, reduce="sum"), pservers=2) as cluster, Loop(cluster, 6, 2) as loop:
            handed = []
            for number in loop:
                handed.append(number)
                if len(handed) == 6:
                    loop.end_membership()
                loop.parameters.step(gradients(cluster))
            assert handed == [0, 1, 2, 3, 4, 5, 4, 5, 0, 1, 2, 3, 4, 5]
            assert value_of(cluster, "a") == value_of(cluster, "b") == 12
            assert [report.attempt for report in loop.master.finished] == [100, 101]

    def test_batches_whose_sum_cannot_be_said_are_done_again_each_for_itself(self) -> None:
        with Cluster(SHAPES, Async(push_every=2, reduce="sum"), wire="float16") as cluster, Loop(cluster, 2) as loop:
            handed = []
            for number in loop:
                handed.append(number)
                with contextlib.suppress(GradientError):
                    loop.parameters.step(gradients(cluster, -40_000.0))
            assert handed == [0, 1, 0, 1]
            assert value_of(cluster, "a") == pytest.approx(80_000, rel=1e-3)


class TestLateBatches:
    """Their gradient counts nowhere, so the loop gets them again."""

    @pytest.mark.parametrize("mode", [Async(), Sync(reduce="sum"), Bounded(staleness=1)])
    def test_one_whose_membership_ended(self, mode: Mode) -> None:
        with Cluster(SHAPES, mode, pservers=2) as cluster, Loop(cluster, 4) as loop:
            handed = []
            for number in loop:
                handed.append(number)
                if handed == [0, 1]:
                    loop.end_membership()
                loop.parameters.step(gradients(cluster))
            assert handed == [0, 1, 1, 2, 3]
            assert value_of(cluster, "a") == value_of(cluster, "b") == 4
            assert [report.attempt for report in loop.master.finished] == [100]

    def test_one_whose_round_has_closed_without_it(self) -> None:
        with Cluster(SHAPES, Sync(reduce="sum"), pservers=2) as cluster, Loop(cluster, 4) as loop:
            handed = []
            for number in loop:
                handed.append(number)
                if handed == [0, 1, 2]:
                    versions = loop.parameters.steps.versions
                    versions.update({block: version - 1 for block, version in versions.items()})
                loop.parameters.step(gradients(cluster))
            assert handed == [0, 1, 2, 2, 3]
            assert value_of(cluster, "a") == value_of(cluster, "b") == 4

    def test_it_is_not_done_again_when_its_piece_was_taken_away(self) -> None:
        with Cluster(SHAPES, Async(), pservers=2) as cluster, Loop(cluster, 4) as loop:
            handed = []
            for number in loop:
                handed.append(number)
                if number == 1:
                    loop.end_membership()
                    loop.take_away()
                loop.parameters.step(gradients(cluster))
            assert handed == [0, 1]
            assert value_of(cluster, "a") == value_of(cluster, "b") == 1
            assert loop.master.finished == []


class TestBlocksWithoutAGradient:
    """They hear of the batch with the step itself: the others' rounds wait for it."""

    @pytest.mark.parametrize("mode", [Sync(), Sync(backup=1), Async(), Async(push_every=1, pull_every=2)])
    def test_a_step_tells_them(self, mode: Mode) -> None:
        with Cluster(SHAPES, mode, pservers=2) as cluster, Loop(cluster, 2) as loop:
            for number in loop:
                loop.parameters.step({"a": gradients(cluster)["a"]})
                for shard in cluster.shards:
                    assert missing_batches(shard.applied(), 0, 0, 2) == [1][number:]

    def test_the_step_that_pushes_a_sum_tells_them(self) -> None:
        with Cluster(SHAPES, Async(push_every=2), pservers=2) as cluster, Loop(cluster, 4) as loop:
            for number in loop:
                loop.parameters.step({"a": gradients(cluster)["a"]})
                for shard in cluster.shards:
                    assert missing_batches(shard.applied(), 0, 0, 4) == [[0, 1, 2, 3], [2, 3], [2, 3], []][number]


class TestWhoHasABatch:
    """A report of finished work names the oldest process of each pserver that has a batch of it."""

    @pytest.mark.parametrize("mode", [Async(), Async(push_every=2)])
    def test_the_process_before_took_some_batches_of_the_piece(self, mode: Mode) -> None:
        with Cluster(SHAPES, mode, pservers=2) as cluster, Loop(cluster, 4, 2) as loop:
            for begun, _ in enumerate(loop):
                if begun == 2:
                    cluster.replace(1, generation=7)
                loop.parameters.step(gradients(cluster))
            assert [list(report.pservers) for report in loop.master.finished] == [[1, 1], [1, 7]]

    def test_the_process_before_took_some_blocks_of_the_batch(self) -> None:
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
    def test_the_process_before_answers_while_the_directory_has_the_new_one(
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
