"""What each call of the user's code sends and asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flightedl.domain.consistency.modes import Async, Bounded, Mode, Sync
from flightedl.domain.trainer.batches import CurrentBatch
from flightedl.domain.trainer.membership import TrainerMembership
from flightedl.domain.trainer.steps import AskToJoin, Done, Effect, Next, Steps, TakeSum, WaitToJoin, carried_out
from flightedl.domain.trainer.transfers import Pull, Push, Transfer
from flightedl.errors import BegunAnewError, FlightedlError, GradientError, UnavailableError
from flightedl.messages.parameters import Outcome
from flightedl.messages.tasks import JoinReply

from .test_feed import assignment

BLOCKS = range(4)


class Bench:
    """One trainer's steps, and pservers that answer as they are told."""

    def __init__(self, mode: Mode, member: int = 7) -> None:
        self.membership = TrainerMembership()
        self.membership.has_model(mode)
        self.membership.member = member
        self.steps = Steps([BLOCKS[:2], BLOCKS[2:]], self.membership, mode)
        #: What was done, in order.
        self.log: list[str] = []
        self.joins: list[JoinReply] = []
        self.answer: Callable[[int], int] = lambda _block: Outcome.ACCEPTED
        self.failing: BaseException | None = None

    def batch(self, number: int, records: int = 1) -> CurrentBatch:
        current = CurrentBatch(assignment(1, 9), number, records, member=self.membership.member)
        current.begin()
        return current

    def run(self, step: Next) -> bool:
        return carried_out(self.steps, step, self._carry_out)

    def _carry_out(self, effect: Effect) -> Any:
        if isinstance(effect, AskToJoin):
            self.log.append("join")
            return self.joins.pop(0)
        if isinstance(effect, WaitToJoin):
            self.log.append("wait")
        elif isinstance(effect, TakeSum):
            self.log.append(f"take {1 + len(effect.together.further)} {dict(effect.divisors)}")
            if isinstance(self.failing, GradientError):
                raise self.failing
        else:
            self._transfer(effect)
        return None

    def _transfer(self, transfer: Transfer) -> None:
        for shard in transfer.shards:
            while not shard.is_over:
                call = shard.next_call(1)
                if isinstance(call, Push):
                    self.log.append(f"push {list(call.blocks)}")
                    if self.failing is not None and shard.index == 1:
                        raise self.failing
                    for block in call.blocks:
                        self._answered(shard, block, call)
                else:
                    assert isinstance(call, Pull)
                    self.log.append(f"pull {dict(call.wanted)}")
                    for block, version in call.wanted.items():
                        shard.answered(range(block, block + 1), Outcome.NONE, max(version, transfer.versions[block]))

    def _answered(self, shard: Any, block: int, call: Push) -> None:
        outcome = self.answer(block)
        having = (2).to_bytes(1, "little") if outcome == Outcome.PARTLY_APPLIED else b""
        shard.answered(range(block, block + 1), outcome, having=having)

    def said(self) -> list[str]:
        log, self.log = self.log, []
        return log


class TestAStep:
    def test_pushes_to_all_blocks_and_waits_for_the_round(self) -> None:
        bench = Bench(Sync())
        current = bench.batch(0)
        bench.run(bench.steps.step(current))
        assert bench.said() == ["push [0, 1]", "pull {0: 1, 1: 1}", "push [2, 3]", "pull {2: 1, 3: 1}"]
        bench.run(bench.steps.close_batch(current))
        assert bench.said() == []
        assert current.answered == dict.fromkeys(BLOCKS, 0)

    def test_of_a_sum_waits_for_the_round_that_the_sum_is_in(self) -> None:
        bench = Bench(Sync(push_every=2))
        for number in range(4):
            current = bench.batch(number)
            bench.run(bench.steps.step(current))
            bench.run(bench.steps.close_batch(current))
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

    def test_brings_the_rest_of_a_sum_to_a_round_at_the_end_of_a_task(self) -> None:
        bench = Bench(Sync(push_every=3))
        current = bench.batch(0)
        bench.run(bench.steps.step(current))
        bench.run(bench.steps.close_batch(current))
        bench.run(bench.steps.push_sum())
        assert bench.said() == ["take 1 {}", "push [0, 1]", "pull {0: 1, 1: 1}", "push [2, 3]", "pull {2: 1, 3: 1}"]
        assert not current.waits

    def test_gives_its_arrival_to_what_was_not_pushed_yet(self) -> None:
        bench = Bench(Sync())
        current = bench.batch(0)
        bench.run(bench.steps.push(current, [0, 2]))
        assert bench.said() == ["push [0]", "push [2]"]
        bench.run(bench.steps.step(current))
        assert bench.said() == ["push [1]", "pull {1: 1}", "push [3]", "pull {3: 1}"]
        bench.run(bench.steps.close_batch(current))
        assert bench.said() == ["pull {0: 1}", "pull {2: 1}"]

    def test_pulls_only_where_that_is_due(self) -> None:
        bench = Bench(Async(pull_every=2))
        for number in range(3):
            current = bench.batch(number)
            bench.run(bench.steps.step(current))
            bench.run(bench.steps.close_batch(current))
            assert sum(line.startswith("pull") for line in bench.said()) == (2 if number == 1 else 0)

    def test_with_a_backup_has_one_base_for_all_blocks(self) -> None:
        bench = Bench(Sync(backup=1))
        bench.steps.versions.update({0: 3, 1: 3, 2: 4, 3: 4})
        current = bench.batch(0)
        bench.run(bench.steps.step(current))
        assert current.answered == dict.fromkeys(BLOCKS, 3)

    def test_without_backup_has_the_base_of_each_block(self) -> None:
        bench = Bench(Sync())
        bench.steps.versions.update({0: 3, 1: 3, 2: 4, 3: 4})
        current = bench.batch(0)
        bench.run(bench.steps.step(current))
        assert current.answered == {0: 3, 1: 3, 2: 4, 3: 4}


class TestABatchThatIsClosed:
    @pytest.mark.parametrize("mode", [Async(), Async(push_every=2)])
    def test_pulls_where_each_step_does(self, mode: Mode) -> None:
        bench = Bench(mode)
        bench.run(bench.steps.close_batch(bench.batch(0)))
        assert [line for line in bench.said() if "push" not in line] == ["pull {0: 0, 1: 0}", "pull {2: 0, 3: 0}"]

    @pytest.mark.parametrize("mode", [Async(pull_every=2), Async(push_every=2, pull_every=2)])
    def test_pulls_nothing_where_not_each_step_does(self, mode: Mode) -> None:
        bench = Bench(mode)
        bench.run(bench.steps.close_batch(bench.batch(0)))
        assert not any("pull" in line for line in bench.said())

    def test_waits_for_no_round_when_the_rest_of_it_came_too_late(self) -> None:
        bench = Bench(Sync())
        current = bench.batch(0)
        bench.run(bench.steps.push(current, [0, 1]))
        bench.answer = lambda _: Outcome.STALE
        bench.said()
        bench.run(bench.steps.close_batch(current))
        assert current.must_repeat
        assert bench.said() == ["push [2, 3]"]

    def test_arrives_where_it_was_not_pushed(self) -> None:
        bench = Bench(Sync())
        bench.run(bench.steps.close_batch(bench.batch(0)))
        assert [line for line in bench.said() if line.startswith("push")] == ["push [0, 1]", "push [2, 3]"]

    def test_arrives_nowhere_when_it_is_done_again(self) -> None:
        bench = Bench(Sync())
        current = bench.batch(0)
        bench.answer = lambda block: Outcome.STALE if block == 3 else Outcome.ACCEPTED
        bench.run(bench.steps.step(current))
        assert current.must_repeat
        assert bench.membership.member == 0
        bench.said()
        bench.run(bench.steps.step(current))
        bench.run(bench.steps.push(current, [0]))
        bench.run(bench.steps.close_batch(current))
        assert bench.said() == []


class TestAPushThatFails:
    @pytest.mark.parametrize("error", [UnavailableError("gave up"), KeyboardInterrupt()])
    def test_is_done_again(self, error: BaseException) -> None:
        bench = Bench(Async())
        current, bench.failing = bench.batch(0), error
        with pytest.raises(type(error)):
            bench.run(bench.steps.step(current))
        assert current.must_repeat
        bench.run(bench.steps.close_batch(current))
        assert bench.said() == ["push [0, 1]", "pull {0: 0, 1: 0}", "push [2, 3]"]

    def test_ends_the_loop_where_trying_again_cannot_help(self) -> None:
        bench = Bench(Async())
        current, bench.failing = bench.batch(0), BegunAnewError("again")
        with pytest.raises(FlightedlError):
            bench.run(bench.steps.step(current))
        with pytest.raises(BegunAnewError):
            bench.run(bench.steps.close_batch(current))

    def test_takes_its_sum_with_it(self) -> None:
        bench = Bench(Async(push_every=2))
        batches = [bench.batch(0), bench.batch(1)]
        bench.run(bench.steps.step(batches[0]))
        bench.failing = UnavailableError("gave up")
        with pytest.raises(UnavailableError):
            bench.run(bench.steps.step(batches[1]))
        assert [current.must_repeat for current in batches] == [True, True]
        assert batches[0].again is batches[1].again

    def test_is_not_done_again_for_a_pull_that_fails_when_all_blocks_have_it(self) -> None:
        bench = Bench(Async())
        current = bench.batch(0)
        transfer = bench.steps.step(current)
        assert isinstance(transfer, Transfer)
        for shard, blocks in zip(transfer.shards, (BLOCKS[:2], BLOCKS[2:]), strict=True):
            shard.next_call(1)
            shard.answered(blocks, Outcome.ACCEPTED)
        error = UnavailableError("gave up")
        assert bench.steps.failed(error) == Done(error=error)
        assert not current.must_repeat


class TestARejectedGradient:
    @pytest.mark.parametrize("mode", [Sync(), Bounded(0), Async(), Sync(push_every=2), Async(push_every=2)])
    def test_undoes_its_batch_which_arrives_nowhere(self, mode: Mode) -> None:
        bench = Bench(mode)
        current = bench.batch(0)
        bench.steps.rejected(current, GradientError("it has NaN"))
        assert (current.is_undone, current.must_repeat) == (True, False), "the script may still step"
        bench.run(bench.steps.close_batch(current))
        assert (current.must_repeat, current.rejection_count) == (True, 1)
        assert not any("push" in line for line in bench.said())
        assert bench.membership.member == 7

    def test_brings_fresh_values_where_nobody_waits(self) -> None:
        for mode, log in (Async(), ["pull {0: 0, 1: 0}", "pull {2: 0, 3: 0}"]), (Sync(), []):
            bench = Bench(mode)
            current = bench.batch(0)
            bench.steps.rejected(current, GradientError("it has NaN"))
            bench.run(bench.steps.close_batch(current))
            assert bench.said() == log

    @pytest.mark.parametrize("mode", [Sync(), Async(), Async(push_every=2)])
    def test_counts_for_nothing_when_the_script_steps_again(self, mode: Mode) -> None:
        bench = Bench(mode)
        current = bench.batch(0)
        bench.steps.rejected(current, GradientError("it has NaN"))
        bench.run(bench.steps.step(current))
        bench.run(bench.steps.close_batch(current))
        assert (current.is_undone, current.rejection_count) == (False, 0)

    @pytest.mark.parametrize("mode", [Sync(), Async(push_every=1), Async(push_every=2), Sync(push_every=2)])
    def test_does_not_undo_a_batch_that_is_complete(self, mode: Mode) -> None:
        bench = Bench(mode)
        for number in range(2):
            current = bench.batch(number)
            bench.run(bench.steps.step(current))
            bench.steps.rejected(current, GradientError("a second step of it has NaN"))
            assert not current.is_undone
            bench.run(bench.steps.close_batch(current))

    def test_leaves_the_sum_that_others_wait_in_as_it_is(self) -> None:
        bench = Bench(Async(push_every=2))
        first, second = bench.batch(0), bench.batch(1)
        bench.run(bench.steps.step(first))
        bench.steps.rejected(second, GradientError("it has NaN"))
        bench.run(bench.steps.close_batch(second))
        assert (first.waits, first.must_repeat) == (True, False)
        second.begin()
        bench.said()
        bench.run(bench.steps.step(second))
        assert "take 2 {}" in bench.said()

    def test_takes_a_sum_with_it_that_has_a_part_of_its_batch(self) -> None:
        bench = Bench(Async(push_every=3))
        first, second = bench.batch(0), bench.batch(1)
        bench.run(bench.steps.step(first))
        assert bench.steps.sums is not None
        bench.steps.sums.add(second, {"w"})
        bench.steps.rejected(second, GradientError("another parameter has NaN"))
        bench.run(bench.steps.close_batch(second))
        assert (first.must_repeat, second.must_repeat) == (True, True)
        bench.steps.sums.check()


class TestAPull:
    def test_after_a_push_that_came_too_late_reads_what_there_is(self) -> None:
        bench = Bench(Sync())
        current = bench.batch(0)
        bench.run(bench.steps.push(current, [0, 1]))
        bench.answer = lambda _: Outcome.STALE
        bench.said()
        bench.run(bench.steps.pull(current, [0]))
        assert bench.said() == ["push [2, 3]", "pull {0: 0}"]

    def test_brings_the_values_of_the_round_that_the_batch_is_in(self) -> None:
        bench = Bench(Sync())
        current = bench.batch(0)
        bench.run(bench.steps.push(current, [0]))
        bench.said()
        bench.run(bench.steps.pull(current, [0, 3]))
        assert bench.said() == ["push [1]", "push [2, 3]", "pull {0: 1}", "pull {3: 1}"]

    @pytest.mark.parametrize(("mode", "rest"), [(Sync(), [1]), (Bounded(0), [1]), (Async(), [])])
    def test_between_two_pushes_arrives_where_others_may_wait_for_it(self, mode: Mode, rest: list[int]) -> None:
        bench = Bench(mode)
        current = bench.batch(0)
        bench.run(bench.steps.push(current, [0, 2, 3]))
        bench.said()
        bench.run(bench.steps.pull(current, [0]))
        assert bench.said() == [*(f"push {[block]}" for block in rest), f"pull {{0: {mode.version_after(0)}}}"]

    def test_before_the_push_reads_what_there_is(self) -> None:
        bench = Bench(Sync())
        bench.run(bench.steps.pull(bench.batch(0), [0]))
        assert bench.said() == ["pull {0: 0}"]

    def test_outside_of_a_batch_is_a_reader(self) -> None:
        bench = Bench(Async())
        transfer = bench.steps.pull(None, [0], 4)
        assert isinstance(transfer, Transfer)
        assert (transfer.member, transfer.current) == (0, None)
        assert transfer.shards[0].next_call(1) == Pull({0: 4})

    def test_does_not_undo_a_batch_that_waits_in_a_sum(self) -> None:
        bench = Bench(Async(push_every=3))
        current = bench.batch(0)
        bench.run(bench.steps.step(current))
        transfer = bench.steps.pull(current, [0])
        assert isinstance(transfer, Transfer)
        transfer.shards[0].next_call(1)
        transfer.shards[0].answered(range(1), Outcome.NOT_MEMBER)
        assert bench.steps.answered() == Done()
        assert (current.waits, current.must_repeat, bench.membership.member) == (True, False, 0)


class TestSums:
    def test_wait_until_they_are_full(self) -> None:
        bench = Bench(Async(push_every=2))
        sums = bench.steps.sums
        assert sums is not None
        batches = [bench.batch(number, records=number + 1) for number in range(2)]
        for current in batches:
            sums.add(current, {"w"})
            bench.run(bench.steps.step(current))
            bench.run(bench.steps.close_batch(current))
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

    def test_a_batch_that_the_code_did_not_step_is_complete_when_it_is_closed(self) -> None:
        bench = Bench(Async(push_every=2))
        current = bench.batch(0)
        bench.run(bench.steps.close_batch(current))
        assert current.waits
        bench.run(bench.steps.close_batch(current))
        assert bench.steps.sums is not None
        bench.steps.sums.check()

    def test_what_a_block_lacks_is_done_again(self) -> None:
        bench = Bench(Async(push_every=2))
        batches = [bench.batch(0), bench.batch(1)]
        bench.answer = lambda block: Outcome.PARTLY_APPLIED if block == 2 else Outcome.ACCEPTED
        for current in batches:
            bench.run(bench.steps.step(current))
        assert [current.must_repeat for current in batches] == [True, False]

    def test_the_rest_is_pushed_at_the_end(self) -> None:
        bench = Bench(Async(push_every=3))
        bench.run(bench.steps.push_sum())
        assert bench.said() == []
        bench.run(bench.steps.step(bench.batch(0)))
        bench.said()
        bench.run(bench.steps.push_sum())
        assert bench.said() == ["take 1 {}", "push [0, 1]", "push [2, 3]"]

    def test_one_that_cannot_be_said_is_done_again_batch_by_batch(self) -> None:
        bench = Bench(Async(push_every=2))
        batches = [bench.batch(0), bench.batch(1)]
        bench.run(bench.steps.step(batches[0]))
        bench.failing = GradientError("too large")
        with pytest.raises(GradientError):
            bench.run(bench.steps.step(batches[1]))
        assert [current.again.batch_count for current in batches if current.again] == [1, 1]

    @pytest.mark.parametrize("count", [1, 2])
    def test_one_that_cannot_be_said_at_the_end_of_a_task_does_not_end_the_loop(self, count: int) -> None:
        bench = Bench(Async(push_every=3))
        batches = [bench.batch(number) for number in range(count)]
        for current in batches:
            bench.run(bench.steps.step(current))
        bench.failing = GradientError("too large")
        bench.run(bench.steps.push_sum())
        assert all(current.must_repeat for current in batches)
        assert [current.rejection_count for current in batches] == ([1] if count == 1 else [0, 0])

    @pytest.mark.parametrize("mode", [Async(), Sync(), Async(push_every=2)])
    def test_are_done_again_when_the_mode_changes(self, mode: Mode) -> None:
        bench = Bench(Async(push_every=3))
        current = bench.batch(0)
        bench.run(bench.steps.step(current))
        bench.steps.change_mode(mode)
        assert (current.waits, current.must_repeat) == (False, True)
        assert (bench.steps.sums is None) == (mode != Async(push_every=2))

    def test_a_batch_that_is_done_again_takes_what_waits_with_it(self) -> None:
        bench = Bench(Async(push_every=3))
        first, second = bench.batch(0), bench.batch(1)
        bench.run(bench.steps.step(first))
        assert bench.steps.sums is not None
        bench.steps.sums.add(second, {"w"})
        second.must_repeat = True
        bench.run(bench.steps.close_batch(second))
        assert first.must_repeat

    def test_the_rest_of_a_sum_that_is_done_again_is_pushed_before_another_batch(self) -> None:
        bench = Bench(Async(push_every=2))
        first, second = bench.batch(0), bench.batch(1)
        bench.answer = lambda _: Outcome.STALE
        for current in (first, second):
            bench.steps.sums.add(current, ["w"])
            bench.run(bench.steps.step(current))
            bench.run(bench.steps.close_batch(current))
        assert first.must_repeat
        assert second.must_repeat
        # The first one is done again in a mode that adds nothing up, and the second one when the old mode is back.
        bench.steps.change_mode(Async())
        bench.steps.change_mode(Async(push_every=2))
        bench.answer = lambda _: Outcome.ACCEPTED
        second.begin()
        bench.steps.sums.add(second, ["w"])
        bench.run(bench.steps.step(second))
        bench.said()
        third = bench.batch(2)
        bench.joins = [JoinReply(member=9, mode=Async(push_every=2).to_json())]
        bench.run(bench.steps.open_batch(third))
        assert "take 1 {'w': 2}" in bench.said()
        bench.steps.sums.add(third, ["w"])


class TestABatch:
    def test_says_where_it_lies_where_that_is_known(self) -> None:
        current = CurrentBatch(assignment(1, 9), 4, 1)
        assert str(current) == "epoch 1, task 1, batch 4"
        current.place = lambda: "records 8 and 9 of a.csv"
        assert str(current) == "epoch 1, task 1, batch 4 (records 8 and 9 of a.csv)"


class TestABatchThatIsOpened:
    def test_needs_nothing_of_a_member(self) -> None:
        bench = Bench(Sync())
        assert bench.run(bench.steps.open_batch(bench.batch(0)))
        assert bench.said() == []

    def test_begins_a_membership_with_fresh_values_and_its_mode(self) -> None:
        bench = Bench(Async(push_every=2), member=0)
        mode = Sync().to_json()
        bench.joins = [JoinReply(member=0, waiting_for="others"), JoinReply(member=9, mode=mode)]
        current = bench.batch(0)
        assert bench.run(bench.steps.open_batch(current))
        assert bench.said() == ["join", "wait", "join", "pull {0: 0, 1: 0}", "pull {2: 0, 3: 0}"]
        assert (current.member, current.step) == (9, 1)
        assert bench.steps.sums is None

    def test_is_not_opened_when_its_work_was_taken_away(self) -> None:
        bench = Bench(Sync(), member=0)
        bench.joins = [JoinReply(member=0, holds_work=False)]
        assert not bench.run(bench.steps.open_batch(bench.batch(0)))

    def test_is_under_a_membership_of_its_own_after_a_loop_that_was_left(self) -> None:
        bench = Bench(Async(push_every=2))
        waiting = bench.batch(0)
        bench.run(bench.steps.step(waiting))
        bench.steps.abandon_batch()
        assert waiting.must_repeat
        assert bench.membership.member == 0
