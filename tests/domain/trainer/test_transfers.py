"""What answers and failures mean for a push or pull."""

from __future__ import annotations

import pytest

from flightedl.domain.consistency.modes import Async, Mode, Sync
from flightedl.domain.exactly_once.accumulation import having_bits
from flightedl.domain.trainer.batches import CurrentBatch
from flightedl.domain.trainer.transfers import AskAgain, KeepWaiting, Over, Pull, Push, Refused, Transfer
from flightedl.errors import (
    BegunAnewError,
    DeadlineError,
    FencedError,
    FlightedlError,
    NotReadyError,
    OutcomeUnknownError,
    ReplacedError,
)
from flightedl.messages.parameters import BatchIdentity, Outcome

from .test_feed import assignment

SHARDS = [frozenset({0, 1, 2}), frozenset({3, 4})]


def pushed(
    blocks: tuple[int, ...] = (0, 1, 2, 3, 4),
    *,
    mode: Mode | None = None,
    pull: bool = True,
    further: int = 0,
    base: int | None = None,
) -> Transfer:
    current = CurrentBatch(assignment(1, 8), 0, 1, member=7)
    current.base_version = base
    current.further = tuple(BatchIdentity(epoch=0, task=1, batch=n + 1, batch_count=8) for n in range(further))
    versions = {0: 5, 1: 5, 2: 6, 3: 5, 4: 5}
    return Transfer(SHARDS, versions, mode or Async(), current, 7, blocks, pull_after_push=pull)


def pulled(wanted: dict[int, int]) -> Transfer:
    return Transfer(SHARDS, dict.fromkeys(range(5), 0), Sync(), None, 7, pulls=wanted)


def test_each_pserver_is_sent_its_own_blocks_with_the_versions_that_are_held() -> None:
    transfer = pushed((4, 2, 0))
    assert transfer.current is not None
    first, second = transfer.shards
    call = first.next_call(11)
    assert isinstance(call, Push)
    assert (call.current, call.blocks, call.bases[0], call.bases[2]) == (transfer.current, [0, 2], 5, 6)
    call = second.next_call(12)
    assert isinstance(call, Push)
    assert call.blocks == [4]


def test_with_one_base_for_all_that_is_what_is_sent() -> None:
    call = pushed(base=3).shards[0].next_call(11)
    assert isinstance(call, Push)
    assert [call.bases[block] for block in call.blocks] == [3, 3, 3]


def test_a_pserver_that_has_no_part_in_it_is_not_asked() -> None:
    transfer = pushed((3, 4))
    assert [shard.is_over for shard in transfer.shards] == [True, False]


def test_a_block_that_has_the_batch_is_settled_and_its_values_come_with_the_answer_or_are_pulled() -> None:
    transfer = pushed((0, 1, 2))
    shard, current = transfer.shards[0], transfer.current
    assert current is not None
    shard.next_call(11)
    shard.answered(range(2), Outcome.ACCEPTED, 6)
    shard.answered(range(2, 3), Outcome.ALREADY_APPLIED)
    assert current.answered == {0: 5, 1: 5, 2: 6}
    assert current.generations == {0: 11}
    assert transfer.versions[0] == 6
    assert shard.ended() == KeepWaiting("pserver 0: the other trainers' gradients of this round")
    assert shard.next_call(11) == Pull({2: 0})
    shard.answered(range(2, 3), Outcome.NONE, 9)
    assert shard.ended() == Over()
    assert transfer.versions[2] == 9
    assert current.answered[2] == 6, "the version that it was computed at"


def test_in_synchronous_mode_the_round_of_the_batch_is_waited_for() -> None:
    shard = pushed((0, 1, 2), mode=Sync()).shards[0]
    shard.next_call(11)
    shard.answered(range(3), Outcome.ACCEPTED)
    assert shard.next_call(11) == Pull({0: 6, 1: 6, 2: 7})


def test_where_no_values_are_wanted_none_are_pulled() -> None:
    shard = pushed((0, 1, 2), pull=False).shards[0]
    shard.next_call(11)
    shard.answered(range(3), Outcome.ACCEPTED)
    assert shard.ended() == Over()


@pytest.mark.parametrize("outcome", [Outcome.STALE, Outcome.NOT_MEMBER])
def test_a_batch_that_came_too_late_is_done_again(outcome: Outcome) -> None:
    transfer = pushed()
    shard, current = transfer.shards[0], transfer.current
    shard.next_call(11)
    shard.answered(range(1), outcome)
    assert shard.ended() == Over(), "the rest is of no use"
    assert transfer.must_repeat
    assert current is not None
    assert not current.answered
    assert not transfer.is_over, "the other pserver has not answered"


def test_a_pull_of_somebody_who_is_no_member_says_so() -> None:
    transfer = pulled({0: 3, 4: 3})
    transfer.shards[0].next_call(11)
    transfer.shards[0].answered(range(1), Outcome.NOT_MEMBER)
    assert transfer.must_repeat
    assert transfer.shards[0].is_over


def test_a_block_that_has_a_part_of_a_sum_says_which_batches_it_lacks() -> None:
    transfer = pushed((0, 1, 2), further=3)
    shard, current = transfer.shards[0], transfer.current
    assert current is not None
    shard.next_call(11)
    shard.answered(range(2), Outcome.PARTLY_APPLIED, having=having_bits([False, True, True, False]))
    shard.answered(range(2, 3), Outcome.ACCEPTED, 6)
    assert shard.ended() == Over()
    assert transfer.refusals == {(0, 3)}
    assert current.answered == {2: 6}
    assert current.generations == {0: 11}, "it has a part of it"


def test_in_synchronous_mode_a_block_that_refuses_a_sum_is_met_again_in_the_next_round() -> None:
    transfer = pushed((0, 1), further=1, mode=Sync(push_every=2))
    shard = transfer.shards[0]
    shard.next_call(11)
    shard.answered(range(1), Outcome.ACCEPTED, 6)
    shard.answered(range(1, 2), Outcome.PARTLY_APPLIED, having=having_bits([True, False]))
    assert shard.next_call(11) == Pull({1: 6})
    shard.answered(range(1, 2), Outcome.NONE, 6)
    assert shard.ended() == Over()
    assert transfer.versions[1] == 6


@pytest.mark.parametrize(
    "error",
    [NotReadyError("away"), DeadlineError("late"), OutcomeUnknownError("cut"), ReplacedError("another one")],
)
def test_what_may_not_have_arrived_is_sent_again_to_whoever_is_there(error: FlightedlError) -> None:
    transfer = pushed((0, 1, 2))
    shard, current = transfer.shards[0], transfer.current
    assert current is not None
    shard.next_call(11)
    shard.answered(range(1), Outcome.ACCEPTED, 6)
    assert shard.failed(error) == AskAgain(error)
    call = shard.next_call(12)
    assert isinstance(call, Push)
    assert call.blocks == [1, 2], "what was answered before counts"
    shard.answered(range(1, 3), Outcome.ALREADY_APPLIED, 6)
    assert current.generations == {0: 11}, "the process before took some"


@pytest.mark.parametrize("error", [BegunAnewError("again"), FencedError("over")])
def test_what_trying_again_cannot_help_is_raised(error: FlightedlError) -> None:
    assert pushed().shards[0].failed(error) == Refused(error)


def test_a_failure_after_the_last_answer_changes_nothing() -> None:
    shard = pushed((0, 1, 2)).shards[0]
    shard.next_call(11)
    shard.answered(range(3), Outcome.ACCEPTED, 6)
    assert shard.failed(OutcomeUnknownError("cut")) == Over()


def test_what_is_given_up_is_asked_no_more() -> None:
    transfer = pushed()
    transfer.give_up()
    assert transfer.is_over
    assert transfer.shards[0].failed(NotReadyError("away")) == Over()
