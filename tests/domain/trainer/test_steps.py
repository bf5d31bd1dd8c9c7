"""Each call by the user's code sends the right messages and pulls."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flightedl.domain.consistency.modes import Async, Bounded, Mode, Sync
from flightedl.domain.exactly_once.accumulation import SumAgain
from flightedl.domain.trainer.batches import Batch, BatchState, CurrentBatch
from flightedl.domain.trainer.steps import Done, Effect, FindPlacement, Next, PrepareSum, Steps, carried_out
from flightedl.domain.trainer.transfers import Answer, Call, KeepWaiting, Over, Pull, Push, Transfer
from flightedl.errors import BegunAnewError, FlightedlError, GradientError, StalePlacementError, UnavailableError
from flightedl.messages.parameters import Outcome

BLOCKS = range(4)


class Bench:
    """One trainer's steps, with pservers that give the prescribed answers."""

    def __init__(self, mode: Mode, member: int = 7) -> None:
        self.member = member
        self.steps = Steps([BLOCKS[:2], BLOCKS[2:]], mode)
        #: Actions, in order.
        self.log: list[str] = []
        self.answer: Callable[[int], int] = lambda _block: Outcome.ACCEPTED
        self.failing: BaseException | None = None
        #: Batch number -> the newest state that was reported to the loop.
        self.told: dict[int, BatchState] = {}
        self.lost_count = 0

    def batch(self, number: int, records: int = 1, again: SumAgain | None = None) -> CurrentBatch:
        """Open a batch."""
        batch = Batch(0, 1, 1, number, 9, records, again=again)
        self.run(self.steps.open_batch(batch, self.member, number + 1))
        assert self.steps.current is not None
        return self.steps.current

    def again(self, current: CurrentBatch) -> CurrentBatch:
        """Open a batch again."""
        return self.batch(current.number, current.record_count, current.again)

    def close(self) -> None:
        self.run(self.steps.close_batch())

    def run(self, step: Next) -> None:
        done = carried_out(self.steps, step, self._carry_out)
        self.note(done)
        if done.error is not None:
            raise done.error

    def note(self, done: Done) -> None:
        self.told.update({state.number: state for state in done.batches})
        self.lost_count += done.is_member_lost

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, PrepareSum):
            self.log.append(f"take {1 + len(effect.batch.others)} {dict(effect.divisors)}")
            if isinstance(self.failing, GradientError):
                raise self.failing
            return
        assert isinstance(effect, Transfer)
        for index, call in enumerate(effect.calls):
            self._ask(effect, index, call)

    def _ask(self, transfer: Transfer, index: int, call: Call | None) -> None:
        while call is not None:
            if isinstance(call, Push):
                self.log.append(f"push {call.blocks}")
                if self.failing is not None and index == 1:
                    raise self.failing
                answers = [self._answered(block) for block in call.blocks]
            else:
                self.log.append(f"pull {call.wanted}")
                held = self.steps.versions
                answers = [
                    Answer(block, block + 1, Outcome.NONE, max(version, held[block]))
                    for block, version in call.wanted.items()
                ]
            verdict = self.steps.handle_answers(transfer.serial, index, 1, answers)
            call = verdict.call if isinstance(verdict, KeepWaiting) else None

    def _answered(self, block: int) -> Answer:
        outcome = self.answer(block)
        having = (2).to_bytes(1, "little") if outcome == Outcome.PARTLY_APPLIED else b""
        return Answer(block, block + 1, outcome, None, having)

    def said(self) -> list[str]:
        log, self.log = self.log, []
        return log


def told(steps: Steps, transfer: Transfer, index: int, *blocks: int, error: FlightedlError | None = None) -> None:
    """Let a pserver answer for these blocks, with new values, and end the conversation."""
    versions = [steps.versions[block] + 1 for block in blocks]
    answers = [Answer(block, block + 1, Outcome.ACCEPTED, at) for block, at in zip(blocks, versions, strict=True)]
    assert steps.handle_answers(transfer.serial, index, 1, answers, error) == Over()


def told_of_buckets(steps: Steps, transfer: Transfer, index: int, block: int, buckets: range) -> None:
    """Let a pserver answer for a block and all its buckets, with new values."""
    answers = [Answer(each.start, each.stop, Outcome.ACCEPTED, 1) for each in (range(block, block + 1), buckets)]
    assert steps.handle_answers(transfer.serial, index, 1, answers) == Over()


class TestAChangedPlacement:
    """Blocks that have moved to another pserver."""

    STALE = StalePlacementError("block 1 is not on this pserver")

    @pytest.fixture
    def bench(self) -> Bench:
        bench = Bench(Sync())
        bench.batch(0)
        return bench

    @staticmethod
    def stale(bench: Bench) -> Next:
        """A step for which the first pserver lacks block 1."""
        transfer = bench.steps.step()
        assert isinstance(transfer, Transfer)
        told(bench.steps, transfer, 1, 2, 3)
        told(bench.steps, transfer, 0, 0, error=TestAChangedPlacement.STALE)
        assert bench.steps.is_misplaced
        return bench.steps.answered()

    def test_sends_the_rest_of_a_step_to_the_new_owners(self, bench: Bench) -> None:
        assert self.stale(bench) == FindPlacement(self.STALE)
        bench.steps.place([[0], [1, 2, 3]])
        rest = bench.steps.answered()
        assert isinstance(rest, Transfer)
        assert rest.calls == (None, Push([1], {1: 0}))
        assert rest.member == bench.member
        told(bench.steps, rest, 1, 1)
        assert bench.steps.answered() == Done()
        assert bench.steps.current is not None
        assert bench.steps.current.answered == dict.fromkeys(BLOCKS, 0)

    def test_repeats_requests_while_no_other_placement_is_known(self, bench: Bench) -> None:
        for _ in range(3):
            assert self.stale(bench) == FindPlacement(self.STALE)
            again = bench.steps.answered()
            assert isinstance(again, Transfer)
            assert again.calls == (Push([1], {1: 0}), None)
            bench.steps.drop()
            bench.batch(0)
            bench.steps.versions.update(dict.fromkeys(BLOCKS, 0))

    def test_ends_the_step_if_it_cannot_be_found_and_the_batch_is_repeated(self, bench: Bench) -> None:
        current = bench.steps.current
        self.stale(bench)
        gone = UnavailableError("gave up")
        assert bench.steps.failed(gone) == Done(gone)
        assert current is not None
        assert current.must_repeat

    def test_ignores_answers_to_earlier_requests(self, bench: Bench) -> None:
        first = bench.steps.step()
        assert isinstance(first, Transfer)
        told(bench.steps, first, 0, error=self.STALE)
        told(bench.steps, first, 1, 2, 3)
        bench.steps.answered()
        bench.steps.place([[], [0, 1, 2, 3]])
        rest = bench.steps.answered()
        assert isinstance(rest, Transfer)
        assert rest.calls == (None, Push([0, 1], {0: 0, 1: 0}))
        told(bench.steps, first, 0, 0, 1)
        assert bench.steps.current is not None
        assert bench.steps.current.answered.keys() == {2, 3}

    def test_pushes_blocks_that_moved_before_it_waits_for_a_round(self, bench: Bench) -> None:
        transfer = bench.steps.step()
        assert isinstance(transfer, Transfer)
        without_values = [Answer(block, block + 1, Outcome.ACCEPTED) for block in (2, 3)]
        waits = bench.steps.handle_answers(transfer.serial, 1, 1, without_values)
        assert isinstance(waits, KeepWaiting)
        told(bench.steps, transfer, 0, error=self.STALE)
        assert bench.steps.handle_answers(transfer.serial, 1, 1, []) == Over()
        assert bench.steps.answered() == FindPlacement(self.STALE)
        bench.steps.place([[], [0, 1, 2, 3]])
        rest = bench.steps.answered()
        assert isinstance(rest, Transfer)
        assert rest.calls == (None, Push([0, 1], {0: 0, 1: 0}))
        verdict = bench.steps.handle_answers(
            rest.serial, 1, 1, [Answer(block, block + 1, Outcome.ACCEPTED, 1) for block in (0, 1)]
        )
        assert isinstance(verdict, KeepWaiting)
        assert verdict.call == Pull({2: 1, 3: 1})

    def test_does_not_move_blocks_during_a_conversation(self, bench: Bench) -> None:
        bench.steps.step()
        with pytest.raises(AssertionError, match="a transfer is in progress"):
            bench.steps.place([[], [0, 1, 2, 3]])

    def test_pushes_buckets_again_at_the_version_of_the_batch_if_owners_differ(self) -> None:
        buckets = [range(10, 20), range(20, 30), range(30, 40)]
        steps = Steps([[0, 10], [1, 20], [2, 30]], Sync(), buckets)
        steps.open_batch(Batch(0, 1, 1, 0, 9, 1), 7, 1)
        transfer = steps.step()
        assert isinstance(transfer, Transfer)
        told_of_buckets(steps, transfer, 1, 1, buckets[1])
        told_of_buckets(steps, transfer, 2, 2, buckets[2])
        told(steps, transfer, 0, 0, error=self.STALE)
        assert steps.answered() == FindPlacement(self.STALE)
        steps.place([[0, 10], [1, 15], [2, 30]], [range(10, 15), range(15, 30), range(30, 40)])
        rest = steps.answered()
        assert isinstance(rest, Transfer)
        assert rest.calls == (Push([10], {10: 0}), Push([15], {15: 0}), None)
        assert steps.versions == {0: 1, 1: 1, 2: 1, 10: 0, 15: 0, 30: 1}

    def test_keeps_the_answers_of_an_open_batch_and_pulls_from_the_new_owners(self, bench: Bench) -> None:
        transfer = bench.steps.push([0])
        assert isinstance(transfer, Transfer)
        told(bench.steps, transfer, 0, 0)
        bench.steps.answered()
        bench.steps.place([[2, 3], [0, 1]])
        rest = bench.steps.step()
        assert isinstance(rest, Transfer)
        assert rest.calls == (Push([2, 3], {2: 0, 3: 0}), Push([1], {1: 0}))
        read = bench.steps.pull([0, 3], as_reader=True)
        assert isinstance(read, Transfer)
        assert read.calls == (Pull({3: 0}), Pull({0: 0}))


class TestAStep:
    def test_pushes_to_all_blocks_and_waits_for_the_round(self) -> None:
        bench = Bench(Sync())
        current = bench.batch(0)
        bench.run(bench.steps.step())
        assert bench.said() == ["push [0, 1]", "pull {0: 1, 1: 1}", "push [2, 3]", "pull {2: 1, 3: 1}"]
        bench.close()
        assert bench.said() == []
        assert current.answered == dict.fromkeys(BLOCKS, 0)

    def test_waits_for_the_round_of_its_sum(self) -> None:
        bench = Bench(Sync(push_every=2))
        for number in range(4):
            bench.batch(number)
            bench.run(bench.steps.step())
            bench.close()
            after = 1 + number // 2
            assert bench.said() == (
                [
                    "take 2 {}",
                    "push [0, 1]",
                    f"pull {{0: {after}, 1: {after}}}",
                    "push [2, 3]",
                    f"pull {{2: {after}, 3: {after}}}",
                ]
                if number % 2
                else []
            )

    def test_pushes_the_rest_of_a_sum_to_a_round_at_the_end_of_a_task(self) -> None:
        bench = Bench(Sync(push_every=3))
        current = bench.batch(0)
        bench.run(bench.steps.step())
        bench.close()
        bench.run(bench.steps.push_sum())
        assert bench.said() == ["take 1 {}", "push [0, 1]", "pull {0: 1, 1: 1}", "push [2, 3]", "pull {2: 1, 3: 1}"]
        assert not current.waits

    def test_arrives_at_blocks_without_a_gradient(self) -> None:
        bench = Bench(Sync())
        bench.batch(0)
        bench.run(bench.steps.push([0, 2]))
        assert bench.said() == ["push [0]", "push [2]"]
        bench.run(bench.steps.step())
        assert bench.said() == ["push [1]", "pull {1: 1}", "push [3]", "pull {3: 1}"]
        bench.close()
        assert bench.said() == ["pull {0: 1}", "pull {2: 1}"]

    def test_pulls_only_when_due(self) -> None:
        bench = Bench(Async(pull_every=2))
        for number in range(3):
            bench.batch(number)
            bench.run(bench.steps.step())
            bench.close()
            assert sum(line.startswith("pull") for line in bench.said()) == (2 if number == 1 else 0)

    def test_with_backup_has_one_base_for_all_blocks(self) -> None:
        bench = Bench(Sync(backup=1))
        bench.steps.versions.update({0: 3, 1: 3, 2: 4, 3: 4})
        current = bench.batch(0)
        bench.run(bench.steps.step())
        assert current.answered == dict.fromkeys(BLOCKS, 3)

    def test_without_backup_has_the_base_of_each_block(self) -> None:
        bench = Bench(Sync())
        bench.steps.versions.update({0: 3, 1: 3, 2: 4, 3: 4})
        current = bench.batch(0)
        bench.run(bench.steps.step())
        assert current.answered == {0: 3, 1: 3, 2: 4, 3: 4}


class TestABatchThatIsClosed:
    @pytest.mark.parametrize("mode", [Async(), Async(push_every=2)])
    def test_pulls_if_every_step_pulls(self, mode: Mode) -> None:
        bench = Bench(mode)
        bench.batch(0)
        bench.close()
        assert [line for line in bench.said() if "push" not in line] == ["pull {0: 0, 1: 0}", "pull {2: 0, 3: 0}"]

    @pytest.mark.parametrize("mode", [Async(pull_every=2), Async(push_every=2, pull_every=2)])
    def test_pulls_nothing_if_not_every_step_pulls(self, mode: Mode) -> None:
        bench = Bench(mode)
        bench.batch(0)
        bench.close()
        assert not any("pull" in line for line in bench.said())

    def test_does_not_wait_for_a_round_if_its_rest_was_late(self) -> None:
        bench = Bench(Sync())
        current = bench.batch(0)
        bench.run(bench.steps.push([0, 1]))
        bench.answer = lambda _: Outcome.STALE
        bench.said()
        bench.close()
        assert current.must_repeat
        assert bench.said() == ["push [2, 3]"]

    def test_arrives_at_blocks_without_a_push(self) -> None:
        bench = Bench(Sync())
        bench.batch(0)
        bench.close()
        assert [line for line in bench.said() if line.startswith("push")] == ["push [0, 1]", "push [2, 3]"]

    def test_arrives_nowhere_if_it_is_repeated(self) -> None:
        bench = Bench(Sync())
        current = bench.batch(0)
        bench.answer = lambda block: Outcome.STALE if block == 3 else Outcome.ACCEPTED
        bench.run(bench.steps.step())
        assert current.must_repeat
        assert bench.lost_count == 1
        bench.said()
        bench.run(bench.steps.step())
        bench.run(bench.steps.push([0]))
        bench.close()
        assert bench.said() == []


class TestAPushThatFails:
    @pytest.mark.parametrize("error", [UnavailableError("gave up"), KeyboardInterrupt(), SystemExit(143)])
    def test_is_repeated(self, error: BaseException) -> None:
        bench = Bench(Async())
        current, bench.failing = bench.batch(0), error
        with pytest.raises(type(error)):
            bench.run(bench.steps.step())
        assert current.must_repeat
        bench.close()
        assert bench.said() == ["push [0, 1]", "pull {0: 0, 1: 0}", "push [2, 3]"]

    def test_ends_the_loop_after_a_permanent_error(self) -> None:
        bench = Bench(Async())
        _current, bench.failing = bench.batch(0), BegunAnewError("again")
        with pytest.raises(FlightedlError):
            bench.run(bench.steps.step())
        with pytest.raises(BegunAnewError):
            bench.close()

    def test_takes_its_sum_with_it(self) -> None:
        bench = Bench(Async(push_every=2))
        batches = [bench.batch(0)]
        bench.run(bench.steps.step())
        bench.close()
        batches.append(bench.batch(1))
        bench.failing = UnavailableError("gave up")
        with pytest.raises(UnavailableError):
            bench.run(bench.steps.step())
        assert bench.told[0].must_repeat
        assert [current.must_repeat for current in batches] == [True, True]
        assert batches[0].again is batches[1].again

    def test_is_not_repeated_for_a_failed_pull_if_all_blocks_have_the_batch(self) -> None:
        bench = Bench(Async())
        current = bench.batch(0)
        transfer = bench.steps.step()
        assert isinstance(transfer, Transfer)
        for index, blocks in enumerate((BLOCKS[:2], BLOCKS[2:])):
            bench.steps.handle_answers(transfer.serial, index, 1, [Answer(blocks.start, blocks.stop, Outcome.ACCEPTED)])
        error = UnavailableError("gave up")
        assert bench.steps.failed(error) == Done(error=error)
        assert not current.must_repeat


class TestARejectedGradient:
    @pytest.mark.parametrize("mode", [Sync(), Bounded(0), Async(), Sync(push_every=2), Async(push_every=2)])
    def test_undoes_its_batch_which_arrives_nowhere(self, mode: Mode) -> None:
        bench = Bench(mode)
        current = bench.batch(0)
        bench.steps.rejected(GradientError("it has NaN"))
        assert (current.is_undone, current.must_repeat) == (True, False), "the script may still step"
        bench.close()
        assert (bench.told[0].must_repeat, bench.told[0].rejection is not None) == (True, True)
        assert not any("push" in line for line in bench.said())
        assert bench.lost_count == 0

    def test_pulls_current_values_in_modes_without_waiting(self) -> None:
        for mode, log in (Async(), ["pull {0: 0, 1: 0}", "pull {2: 0, 3: 0}"]), (Sync(), []):
            bench = Bench(mode)
            bench.batch(0)
            bench.steps.rejected(GradientError("it has NaN"))
            bench.close()
            assert bench.said() == log

    @pytest.mark.parametrize("mode", [Sync(), Async(), Async(push_every=2)])
    def test_does_not_count_if_the_script_steps_again(self, mode: Mode) -> None:
        bench = Bench(mode)
        current = bench.batch(0)
        bench.steps.rejected(GradientError("it has NaN"))
        bench.run(bench.steps.step())
        bench.close()
        assert (current.is_undone, bench.told[0].rejection) == (False, None)

    @pytest.mark.parametrize("mode", [Sync(), Async(push_every=1), Async(push_every=2), Sync(push_every=2)])
    def test_does_not_undo_a_complete_batch(self, mode: Mode) -> None:
        bench = Bench(mode)
        for number in range(2):
            current = bench.batch(number)
            bench.run(bench.steps.step())
            bench.steps.rejected(GradientError("a second step of it has NaN"))
            assert not current.is_undone
            bench.close()

    def test_leaves_the_sum_of_other_batches_unchanged(self) -> None:
        bench = Bench(Async(push_every=2))
        first = bench.batch(0)
        bench.run(bench.steps.step())
        bench.close()
        second = bench.batch(1)
        bench.steps.rejected(GradientError("it has NaN"))
        bench.close()
        assert (first.waits, first.must_repeat) == (True, False)
        bench.again(second)
        bench.said()
        bench.run(bench.steps.step())
        assert "take 2 {}" in bench.said()

    def test_takes_a_sum_with_a_part_of_its_batch_with_it(self) -> None:
        bench = Bench(Async(push_every=3))
        first = bench.batch(0)
        bench.run(bench.steps.step())
        bench.close()
        second = bench.batch(1)
        bench.steps.add(["w"])
        bench.steps.rejected(GradientError("another parameter has NaN"))
        bench.close()
        assert (first.must_repeat, second.must_repeat) == (True, True)
        bench.steps.sums.check()


class TestAPull:
    def test_reads_the_current_values_after_a_late_push(self) -> None:
        bench = Bench(Sync())
        bench.batch(0)
        bench.run(bench.steps.push([0, 1]))
        bench.answer = lambda _: Outcome.STALE
        bench.said()
        bench.run(bench.steps.pull([0]))
        assert bench.said() == ["push [2, 3]", "pull {0: 0}"]

    def test_returns_the_values_of_the_round_of_its_batch(self) -> None:
        bench = Bench(Sync())
        bench.batch(0)
        bench.run(bench.steps.push([0]))
        bench.said()
        bench.run(bench.steps.pull([0, 3]))
        assert bench.said() == ["push [1]", "push [2, 3]", "pull {0: 1}", "pull {3: 1}"]

    @pytest.mark.parametrize(("mode", "rest"), [(Sync(), [1]), (Bounded(0), [1]), (Async(), [])])
    def test_between_two_pushes_arrives_if_others_may_wait(self, mode: Mode, rest: list[int]) -> None:
        bench = Bench(mode)
        bench.batch(0)
        bench.run(bench.steps.push([0, 2, 3]))
        bench.said()
        bench.run(bench.steps.pull([0]))
        assert bench.said() == [*(f"push {[block]}" for block in rest), f"pull {{0: {mode.version_after(0)}}}"]

    def test_before_the_push_reads_the_current_values(self) -> None:
        bench = Bench(Sync())
        bench.batch(0)
        bench.run(bench.steps.pull([0]))
        assert bench.said() == ["pull {0: 0}"]

    def test_outside_of_a_batch_is_read_only(self) -> None:
        bench = Bench(Async())
        transfer = bench.steps.pull([0], 4)
        assert isinstance(transfer, Transfer)
        assert (transfer.member, transfer.batch) == (0, None)
        assert transfer.calls == (Pull({0: 4}), None)

    def test_read_only_belongs_to_no_batch(self) -> None:
        bench = Bench(Sync())
        bench.batch(0)
        bench.run(bench.steps.step())
        transfer = bench.steps.pull([0], as_reader=True)
        assert isinstance(transfer, Transfer)
        assert (transfer.batch, transfer.calls[0]) == (None, Pull({0: 0}))

    def test_does_not_undo_a_batch_that_waits_in_a_sum(self) -> None:
        bench = Bench(Async(push_every=3))
        current = bench.batch(0)
        bench.run(bench.steps.step())
        transfer = bench.steps.pull([0])
        assert isinstance(transfer, Transfer)
        assert bench.steps.handle_answers(transfer.serial, 0, 1, [Answer(0, 1, Outcome.NOT_MEMBER)]) == Over()
        assert bench.steps.answered() == Done(is_member_lost=True)
        assert (current.waits, current.must_repeat) == (True, False)


class TestSums:
    def test_wait_until_they_are_full(self) -> None:
        bench = Bench(Async(push_every=2))
        batches = []
        for number in range(2):
            batches.append(bench.batch(number, records=number + 1))
            bench.steps.add(["w"])
            bench.run(bench.steps.step())
            bench.close()
        pull = ["pull {0: 0, 1: 0}", "pull {2: 0, 3: 0}"]
        assert bench.said() == [
            *pull,
            "take 2 {'w': 3}",
            "push [0, 1]",
            "pull {0: 0, 1: 0}",
            "push [2, 3]",
            "pull {2: 0, 3: 0}",
        ]
        assert not any(current.waits or current.must_repeat for current in batches)
        assert batches[0].generations == {0: 1, 1: 1}

    def test_complete_a_batch_without_a_step_when_it_is_closed(self) -> None:
        bench = Bench(Async(push_every=2))
        current = bench.batch(0)
        bench.close()
        assert current.waits
        assert bench.told[0].waits
        bench.steps.check()

    def test_repeat_batches_that_a_block_lacks(self) -> None:
        bench = Bench(Async(push_every=2))
        bench.answer = lambda block: Outcome.PARTLY_APPLIED if block == 2 else Outcome.ACCEPTED
        batches = []
        for number in range(2):
            batches.append(bench.batch(number))
            bench.run(bench.steps.step())
        assert [current.must_repeat for current in batches] == [True, False]

    def test_push_the_rest_at_the_end(self) -> None:
        bench = Bench(Async(push_every=3))
        bench.run(bench.steps.push_sum())
        assert bench.said() == []
        bench.batch(0)
        bench.run(bench.steps.step())
        bench.said()
        bench.run(bench.steps.push_sum())
        assert bench.said() == ["take 1 {}", "push [0, 1]", "push [2, 3]"]

    def test_that_cannot_be_pushed_are_repeated_batch_by_batch(self) -> None:
        bench = Bench(Async(push_every=2))
        batches = [bench.batch(0)]
        bench.run(bench.steps.step())
        batches.append(bench.batch(1))
        bench.failing = GradientError("too large")
        with pytest.raises(GradientError):
            bench.run(bench.steps.step())
        assert [current.again.batch_count for current in batches if current.again] == [1, 1]

    @pytest.mark.parametrize("count", [1, 2])
    def test_that_cannot_be_pushed_at_the_end_of_a_task_do_not_end_the_loop(self, count: int) -> None:
        bench = Bench(Async(push_every=3))
        for number in range(count):
            bench.batch(number)
            bench.run(bench.steps.step())
            bench.close()
        bench.failing = GradientError("too large")
        bench.run(bench.steps.push_sum())
        assert all(bench.told[number].must_repeat for number in range(count))
        rejections = [bench.told[number].rejection for number in range(count)]
        assert rejections == ([bench.failing] if count == 1 else [None, None])

    @pytest.mark.parametrize("mode", [Async(), Sync(), Async(push_every=2)])
    def test_are_repeated_when_the_mode_changes(self, mode: Mode) -> None:
        bench = Bench(Async(push_every=3))
        current = bench.batch(0)
        bench.run(bench.steps.step())
        bench.steps.change_mode(mode)
        assert (current.waits, current.must_repeat) == (False, True)
        assert (bench.steps.sums is None) == (mode != Async(push_every=2))

    def test_are_repeated_completely_if_one_batch_is_repeated(self) -> None:
        bench = Bench(Async(push_every=3))
        first = bench.batch(0)
        bench.run(bench.steps.step())
        bench.close()
        second = bench.batch(1)
        bench.steps.add(["w"])
        second.must_repeat = True
        bench.close()
        assert first.must_repeat

    def test_push_the_rest_of_a_repeated_sum_before_another_batch(self) -> None:
        bench = Bench(Async(push_every=2))
        bench.answer = lambda _: Outcome.STALE
        for number in range(2):
            second = bench.batch(number)
            bench.steps.add(["w"])
            bench.run(bench.steps.step())
            bench.close()
        assert all(bench.told[number].must_repeat for number in range(2))
        # The first one is repeated in a mode without sums, and the second one in the former mode.
        bench.steps.change_mode(Async())
        bench.steps.change_mode(Async(push_every=2))
        bench.answer = lambda _: Outcome.ACCEPTED
        bench.again(second)
        bench.steps.add(["w"])
        bench.run(bench.steps.step())
        bench.close()
        bench.said()
        bench.batch(2)
        assert "take 1 {'w': 2}" in bench.said()
        bench.steps.add(["w"])


class TestABatch:
    def test_names_its_location_if_that_is_known(self) -> None:
        current = CurrentBatch.of(Batch(0, 1, 1, 4, 9, 1))
        assert str(current) == "epoch 1, task 1, batch 4"
        current.place = lambda: "records 8 and 9 of a.csv"
        assert str(current) == "epoch 1, task 1, batch 4 (records 8 and 9 of a.csv)"


class TestABatchThatIsOpened:
    def test_sends_nothing_if_its_trainer_is_a_member(self) -> None:
        bench = Bench(Sync())
        bench.batch(0)
        assert bench.said() == []

    def test_begins_a_membership_with_current_values_and_its_mode(self) -> None:
        bench = Bench(Async(push_every=2), member=9)
        waiting = bench.batch(0)
        bench.run(bench.steps.step())
        bench.close()
        bench.said()
        bench.run(bench.steps.joined(9, Sync()))
        assert bench.said() == ["pull {0: 0, 1: 0}", "pull {2: 0, 3: 0}"]
        assert waiting.must_repeat
        assert bench.told[0].must_repeat
        assert bench.steps.sums is None

    def test_continues_in_its_mode(self) -> None:
        bench = Bench(Async(push_every=2))
        bench.batch(0)
        bench.run(bench.steps.step())
        bench.close()
        bench.run(bench.steps.joined(9))
        assert bench.told[0].waits

    def test_has_its_own_membership_after_a_loop_that_was_left(self) -> None:
        bench = Bench(Async(push_every=2))
        waiting = bench.batch(0)
        bench.run(bench.steps.step())
        bench.note(bench.steps.abandon_batch())
        assert waiting.must_repeat
        assert bench.lost_count == 1
        assert bench.steps.current is None


class TestADroppedTransfer:
    def test_handles_no_more_answers(self) -> None:
        bench = Bench(Async())
        current = bench.batch(0)
        old = bench.steps.step()
        assert isinstance(old, Transfer)
        bench.steps.give_up_transfer()
        assert bench.steps.handle_answers(old.serial, 0, 1, [Answer(0, 2, Outcome.ACCEPTED)]) == Over()
        assert not current.answered
        new = bench.steps.pull([0])
        assert isinstance(new, Transfer)
        assert current.must_repeat, "the open batch counts as interrupted"
        assert bench.steps.handle_answers(old.serial, 0, 1, [Answer(0, 2, Outcome.ACCEPTED)]) == Over()
        assert not current.answered
