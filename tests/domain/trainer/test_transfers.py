"""Consequences of answers and failures for a push or pull."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from flightedl.domain.consistency.modes import Async, Mode, Sync
from flightedl.domain.exactly_once.accumulation import applied_bits
from flightedl.domain.trainer.batches import Batch, CurrentBatch
from flightedl.domain.trainer.transfers import (
    Answer,
    AskAgain,
    Call,
    KeepWaiting,
    Over,
    Pull,
    Push,
    Refused,
    ShardTransfer,
    TransferState,
)
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

SHARDS = [frozenset({0, 1, 2}), frozenset({3, 4})]


def transfer_of(
    current: CurrentBatch | None,
    versions: dict[int, int],
    mode: Mode,
    pushes: Collection[int] = (),
    pulls: Mapping[int, int] | None = None,
    *,
    pull: bool = False,
) -> TransferState:
    shards = [
        ShardTransfer(set(blocks & set(pushes)), {block: at for block, at in (pulls or {}).items() if block in blocks})
        for blocks in SHARDS
    ]
    return TransferState(1, current, versions, mode, pull, shards, frozenset(pushes))


def pushed(
    blocks: tuple[int, ...] = (0, 1, 2, 3, 4),
    *,
    mode: Mode | None = None,
    pull: bool = True,
    other_count: int = 0,
    base: int | None = None,
) -> TransferState:
    current = CurrentBatch.of(Batch(0, 1, 1, 0, 8, 1), member=7)
    current.base_version = base
    others = tuple(BatchIdentity(epoch=0, task=1, batch=n + 1, batch_count=8) for n in range(other_count))
    current.pushed = replace(current.pushed, others=others)
    return transfer_of(current, {0: 5, 1: 5, 2: 6, 3: 5, 4: 5}, mode or Async(), blocks, pull=pull)


def pulled(wanted: dict[int, int]) -> TransferState:
    return transfer_of(None, dict.fromkeys(range(5), 0), Sync(), pulls=wanted)


def answer(blocks: range, outcome: Outcome, version: int | None = None, having: bytes = b"") -> Answer:
    return Answer(blocks.start, blocks.stop, outcome, version, having)


def call_of(transfer: TransferState, index: int = 0) -> Call | None:
    return transfer.call(transfer.shards[index])


def handle_answers(
    transfer: TransferState, *answers: Answer, generation: int = 11, error: BaseException | None = None
) -> Any:
    return transfer.handle(0, generation, answers, error)


def current_of(transfer: TransferState) -> CurrentBatch:
    assert transfer.current is not None
    return transfer.current


def test_each_pserver_gets_its_own_blocks_with_the_held_versions() -> None:
    transfer = pushed((4, 2, 0))
    assert call_of(transfer) == Push([0, 2], {0: 5, 2: 6})
    assert call_of(transfer, 1) == Push([4], {4: 5})


def test_a_common_base_is_sent_for_all_blocks() -> None:
    assert call_of(pushed(base=3)) == Push([0, 1, 2], dict.fromkeys(range(3), 3))


def test_a_pserver_without_blocks_is_not_asked() -> None:
    transfer = pushed((3, 4))
    assert [call_of(transfer, index) is None for index in range(2)] == [True, False]


def test_a_block_that_has_the_batch_is_settled_and_its_values_are_returned_or_pulled() -> None:
    transfer = pushed((0, 1, 2))
    current = current_of(transfer)
    verdict = handle_answers(
        transfer, answer(range(2), Outcome.ACCEPTED, 6), answer(range(2, 3), Outcome.ALREADY_APPLIED)
    )
    assert current.answered == {0: 5, 1: 5, 2: 6}
    assert current.generations == {0: 11}
    assert transfer.versions[0] == 6
    assert verdict == KeepWaiting("pserver 0: the other trainers' gradients of this round", Pull({2: 0}))
    assert handle_answers(transfer, answer(range(2, 3), Outcome.NONE, 9)) == Over()
    assert transfer.versions[2] == 9
    assert current.answered[2] == 6, "the version from which it was computed"


def test_in_synchronous_mode_a_batch_waits_for_its_round() -> None:
    transfer = pushed((0, 1, 2), mode=Sync())
    handle_answers(transfer, answer(range(3), Outcome.ACCEPTED))
    assert call_of(transfer) == Pull({0: 6, 1: 6, 2: 7})


def test_unwanted_values_are_not_pulled() -> None:
    assert handle_answers(pushed((0, 1, 2), pull=False), answer(range(3), Outcome.ACCEPTED)) == Over()


@pytest.mark.parametrize("outcome", [Outcome.STALE, Outcome.NOT_MEMBER])
def test_a_late_batch_is_repeated(outcome: Outcome) -> None:
    transfer = pushed()
    assert handle_answers(transfer, answer(range(1), outcome)) == Over(), "the rest is useless"
    assert transfer.must_repeat
    assert not current_of(transfer).answered
    assert call_of(transfer, 1) is not None, "the other pserver has not answered"


def test_a_pull_without_a_membership_reports_it() -> None:
    transfer = pulled({0: 3, 4: 3})
    assert handle_answers(transfer, answer(range(1), Outcome.NOT_MEMBER)) == Over()
    assert transfer.must_repeat


def test_a_block_with_a_part_of_a_sum_names_the_batches_it_lacks() -> None:
    transfer = pushed((0, 1, 2), other_count=3)
    current = current_of(transfer)
    having = applied_bits([False, True, True, False])
    partly = answer(range(2), Outcome.PARTLY_APPLIED, having=having)
    assert handle_answers(transfer, partly, answer(range(2, 3), Outcome.ACCEPTED, 6)) == Over()
    assert transfer.refusals == {(0, 3)}
    assert current.answered == {2: 6}
    assert current.generations == {0: 11}, "it has a part of it"


def test_in_synchronous_mode_the_rest_of_a_refused_sum_goes_to_the_next_round() -> None:
    transfer = pushed((0, 1), other_count=1, mode=Sync(push_every=2))
    partly = answer(range(1, 2), Outcome.PARTLY_APPLIED, having=applied_bits([True, False]))
    verdict = handle_answers(transfer, answer(range(1), Outcome.ACCEPTED, 6), partly)
    assert isinstance(verdict, KeepWaiting)
    assert verdict.call == Pull({1: 6})
    assert handle_answers(transfer, answer(range(1, 2), Outcome.NONE, 6)) == Over()
    assert transfer.versions[1] == 6


@pytest.mark.parametrize(
    "error",
    [NotReadyError("away"), DeadlineError("late"), OutcomeUnknownError("cut"), ReplacedError("another one")],
)
def test_unanswered_pushes_are_sent_again_to_the_current_process(error: FlightedlError) -> None:
    transfer = pushed((0, 1, 2))
    verdict = handle_answers(transfer, answer(range(1), Outcome.ACCEPTED, 6), error=error)
    assert verdict == AskAgain(error, Push([1, 2], {1: 5, 2: 6})), "earlier answers count"
    handle_answers(transfer, answer(range(1, 3), Outcome.ALREADY_APPLIED, 6), generation=12)
    assert current_of(transfer).generations == {0: 11}, "the former process applied some"


@pytest.mark.parametrize("error", [BegunAnewError("again"), FencedError("over"), KeyboardInterrupt(), OSError()])
def test_permanent_errors_are_raised(error: BaseException) -> None:
    assert handle_answers(pushed(), error=error) == Refused(error)


def test_a_failure_after_the_last_answer_changes_nothing() -> None:
    transfer = pushed((0, 1, 2))
    assert handle_answers(transfer, answer(range(3), Outcome.ACCEPTED, 6), error=OutcomeUnknownError("cut")) == Over()


def test_a_dropped_transfer_sends_nothing_more() -> None:
    transfer = pushed()
    transfer.is_given_up = True
    assert call_of(transfer) is None
    assert handle_answers(transfer, answer(range(3), Outcome.ACCEPTED, 6), error=NotReadyError("away")) == Over()
    assert not current_of(transfer).answered
