"""Batches of a sum, and their outcome."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from flightedl.domain.exactly_once.accumulation import SumAgain
from flightedl.domain.trainer.batches import Batch, CurrentBatch
from flightedl.domain.trainer.sums import BatchSums
from flightedl.errors import GradientError, UnavailableError, UsageError


def batches(count: int) -> list[CurrentBatch]:
    return [batch_of(number, of=count) for number in range(count)]


def batch_of(number: int, records: int = 1, of: int = 3, again: SumAgain | None = None) -> CurrentBatch:
    return CurrentBatch.of(Batch(0, 1, 1, number, of, records, again=again))


def opened_again(current: CurrentBatch) -> CurrentBatch:
    """Return the same batch as it is handed out the next time."""
    return CurrentBatch.of(replace(current.batch, again=current.again))


def added(sums: BatchSums, *members: CurrentBatch) -> None:
    for member in members:
        sums.complete(member)
        sums.check()


def test_a_full_sum_is_pushed_under_all_its_identities() -> None:
    sums, (first, second) = BatchSums(2), batches(2)
    added(sums, first)
    assert (sums.has_batches, sums.is_full, first.waits) == (True, False, True)
    added(sums, second)
    assert sums.is_full
    second.member, second.pushed = 7, replace(second.pushed, step=4)
    together = sums.take()[0]
    assert (together.number, together.pushed.others, together.member, together.pushed.step) == (
        0,
        (second.pushed.identity,),
        7,
        4,
    )
    assert sums.is_pushed(second)
    together.generations[0] = 5
    sums.settle(together, [])
    assert not sums.has_batches
    for member in (first, second):
        assert (member.waits, member.must_repeat, member.generations) == (False, False, {0: 5})


def test_batches_that_a_block_lacks_are_repeated_in_a_separate_sum() -> None:
    sums, members = BatchSums(3), batches(3)
    for member in members:
        assert sums.add(member, {"w"}) == 1
        sums.complete(member)
    sums.settle(sums.take()[0], [(0, 2)])
    assert [member.must_repeat for member in members] == [True, False, True]
    first, _, third = members
    assert first.again is third.again
    assert first.again is not None
    assert (first.again.first, first.again.batch_count, first.again.divisors) == (0, 2, {"w": 3})
    again = first.again
    added(sums, opened_again(first))
    assert sums.again == again
    added(sums, opened_again(third))
    assert sums.is_full, "it has its former number of batches"


def test_a_sum_is_repeated_as_one_when_the_membership_was_lost() -> None:
    sums, members = BatchSums(2), batches(2)
    added(sums, *members)
    together = sums.take()[0]
    together.must_repeat = True
    sums.settle(together, [])
    assert all(member.must_repeat and member.again is members[0].again for member in members)


def test_a_failed_push_is_repeated() -> None:
    sums, members = BatchSums(2), batches(2)
    added(sums, *members)
    sums.take()
    sums.push_failed(UnavailableError("gone"))
    assert all(member.must_repeat and member.failure is None for member in members)
    assert not sums.is_pushed(members[1])


def test_a_sum_that_cannot_be_pushed_is_split() -> None:
    sums, members = BatchSums(2), batches(2)
    added(sums, *members)
    sums.take()
    sums.split(GradientError("too large"))
    assert [member.again.batch_count for member in members if member.again] == [1, 1]
    assert [member.rejection for member in members] == [None, None], "the other one may have been too large"


def test_a_batch_that_cannot_be_pushed_alone_is_rejected() -> None:
    sums, (first, _) = BatchSums(1), batches(2)
    added(sums, first)
    sums.take()
    sums.split(error := GradientError("too large"))
    assert (first.must_repeat, first.rejection) == (True, error)


def test_the_complete_batches_of_a_dropped_sum_are_repeated_in_new_sums() -> None:
    sums, members = BatchSums(3), batches(2)
    added(sums, members[0])
    sums.begin(members[1])
    assert sums.is_at(members[1])
    sums.give_up()
    assert not sums.is_at(members[1])
    assert (members[0].must_repeat, members[0].waits, members[0].again) == (True, False, None)
    assert not members[1].must_repeat


def test_a_repeated_batch_is_not_the_last_pushed_one() -> None:
    for lacking, is_pushed in [((0, 1), False), ((0,), True)]:
        sums, (first, second) = BatchSums(2), batches(2)
        added(sums, first, second)
        sums.settle(sums.take()[0], [lacking])
        assert sums.is_pushed(second) == is_pushed


def test_waiting_and_repeated_batches_are_not_mixed() -> None:
    sums, again = BatchSums(2), batch_of(1, again=SumAgain(1, 1, {}))
    assert not sums.belongs_to_another_sum(again), "no batch waits"
    added(sums, batch_of(0))
    assert sums.belongs_to_another_sum(again)
    assert not sums.belongs_to_another_sum(batch_of(1))


def test_a_gradient_is_added_once() -> None:
    sums, (first, second) = BatchSums(2), batches(2)
    sums.add(first, {"w"})
    sums.add(first, {"v"})
    with pytest.raises(UsageError, match="'w' was already pushed"):
        sums.add(first, {"w"})
    sums.complete(first)
    with pytest.raises(UsageError, match="'u' was already pushed"):
        sums.add(first, {"u"})
    added(sums, second)
    sums.settle(sums.take()[0], [])
    with pytest.raises(UsageError, match="'u' was already pushed"):
        sums.add(second, {"u"})


@pytest.mark.parametrize(("keeps_shares", "divisor"), [(True, 8), (False, 5)])
def test_a_repeated_sum_is_divided_as_before_or_weighted_by_its_round(keeps_shares: bool, divisor: int) -> None:
    """A round weights a push by its current records, so the gradient is the mean over exactly these."""
    sums, (first, second) = BatchSums(2, keeps_shares=keeps_shares), (batch_of(0, 3), batch_of(1, 5))
    for member in (first, second):
        sums.add(member, {"w"})
        sums.complete(member)
    together, divisors = sums.take()
    assert (together.pushed.weight, divisors) == (8, {"w": 8})
    sums.settle(together, [(1,)])
    second = opened_again(second)
    sums.add(second, {"w"})
    sums.complete(second)
    together, divisors = sums.take()
    assert (together.pushed.weight, divisors) == (5, {"w": divisor})


@pytest.mark.parametrize(("kept_by_the_first", "divisor"), [(True, 8), (False, 5)])
def test_a_share_survives_a_change_of_the_mode_unless_rounds_closed_in_between(
    kept_by_the_first: bool, divisor: int
) -> None:
    before, (first, second) = BatchSums(2, keeps_shares=kept_by_the_first), (batch_of(0, 3), batch_of(1, 5))
    for member in (first, second):
        before.add(member, {"w"})
        before.complete(member)
    before.settle(before.take()[0], [(1,)])
    after = BatchSums(3, keeps_shares=True)
    second = opened_again(second)
    after.add(second, {"w"})
    after.complete(second)
    assert after.take()[1] == {"w": divisor}


def test_a_batch_without_a_gradient_has_no_weight_in_a_sum() -> None:
    sums, (first, second, third) = BatchSums(3), (batch_of(0, 3), batch_of(1, 5), batch_of(2, 7))
    sums.add(first, {"w"})
    sums.complete(first)
    sums.complete(second)
    sums.add(third, {})
    sums.complete(third)
    assert sums.take()[0].pushed.weight == 3
