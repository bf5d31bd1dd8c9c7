from __future__ import annotations

import pytest

from flightedl.domain.consistency.modes import Async, Bounded, Sync
from flightedl.domain.consistency.rounds import BlockRounds
from flightedl.domain.consistency.rounds_values import Accumulate, Apply, Arrived, NotMember, Pull, Repeated, Stale
from flightedl.domain.exactly_once.batches import Batch
from flightedl.errors import MessageError

A, B, C = 11, 12, 13


def admit(rounds: BlockRounds, member: int, first_round: int) -> bool:
    can_admit = rounds.can_admit(first_round)
    if can_admit:
        rounds.change({member: first_round}, ())
    return can_admit


def remove(rounds: BlockRounds, member: int) -> None:
    rounds.change({}, (member,))


@pytest.fixture
def make():
    made = []

    def build(mode=None, members=(A, B), version=0):
        rounds = BlockRounds(mode or Sync(), version)
        rounds.change(dict.fromkeys(members, version), ())
        made.append(rounds)
        return rounds

    yield build
    for rounds in made:
        rounds.check()


def push(rounds, member, base=None, weight=1.0, *, applied=False, batch=0, step=0):
    base = rounds.version if base is None else base
    return rounds.arrive(member, base, weight, already_applied=applied, batch=Batch(0, 0, batch), step=step)


# sync


def test_a_round_closes_when_all_members_have_arrived(make):
    rounds = make()
    assert push(rounds, A, weight=2.0) == Accumulate(is_first=True)
    assert not rounds.closable()
    assert rounds.waits_for() == [B]
    assert push(rounds, B, weight=3.0) == Accumulate(is_first=False)
    assert rounds.closable()
    closing = rounds.close()
    assert (closing.round, closing.total_weight, closing.contributors) == (0, 5.0, {A: 2.0, B: 3.0})
    assert closing.arrived == {A, B}
    assert closing.has_update
    assert rounds.version == 1
    assert not rounds.closable()
    assert push(rounds, B) == Accumulate(is_first=True)


def test_members_are_awaited_in_an_open_round_and_before_a_member_joins(make):
    rounds = make()
    assert rounds.holds_up() == []
    push(rounds, A)
    assert rounds.holds_up() == [B]
    push(rounds, B)
    rounds.close()
    assert rounds.holds_up() == []
    admit(rounds, C, rounds.version + 1)
    assert rounds.holds_up() == [A, B]


def test_nothing_is_awaited_without_members():
    assert BlockRounds(Bounded(staleness=1)).holds_up() == []


def test_a_member_that_lags_too_far_is_awaited(make):
    rounds = make(Bounded(staleness=1))
    push(rounds, A, step=1)
    assert rounds.holds_up() == []
    push(rounds, A, step=2, batch=1)
    assert rounds.holds_up() == [B]
    assert make(Async()).holds_up() == []


def test_a_retry_in_the_same_round_changes_nothing(make):
    rounds = make()
    push(rounds, A)
    assert push(rounds, A, applied=True) == Repeated()
    assert rounds.total_weight == 1.0
    assert not rounds.closable()


def test_a_retry_after_the_round_closed_does_not_arrive_in_the_next(make):
    rounds = make(members=[A])
    push(rounds, A)
    rounds.close()
    assert push(rounds, A, base=0, applied=True) == Repeated()
    assert rounds.waits_for() == [A]


def test_a_batch_already_pushed_by_another_arrives_with_weight_zero(make):
    rounds = make()
    push(rounds, A)
    assert push(rounds, B, applied=True) == Arrived()
    assert rounds.close().contributors == {A: 1.0}


def test_a_round_of_arrivals_without_gradients_closes_without_an_update(make):
    rounds = make()
    assert push(rounds, A, weight=0) == Arrived()
    assert push(rounds, B, applied=True) == Arrived()
    closing = rounds.close()
    assert not closing.has_update
    assert rounds.version == 1


def test_an_old_base_is_stale_and_does_not_arrive(make):
    rounds = make(version=5)
    assert push(rounds, A, base=4) == Stale(5)
    assert rounds.waits_for() == [A, B]
    assert rounds.held == ()


def test_a_base_from_the_future_is_an_error_that_changes_nothing(make):
    rounds = make()
    with pytest.raises(MessageError, match="future"):
        push(rounds, A, base=1)
    assert rounds.waits_for() == [A, B]


def test_unknown_senders_are_refused_even_with_an_applied_batch(make):
    rounds = make()
    assert push(rounds, C) == NotMember()
    assert push(rounds, C, applied=True) == NotMember()


def test_a_member_does_not_contribute_before_its_first_round(make):
    rounds = make(members=[A])
    assert admit(rounds, B, 2)
    assert push(rounds, B) == Stale(2)
    assert rounds.pull(B, 0) is Pull.WAIT
    for _ in range(2):
        push(rounds, A)
        rounds.close()
    assert rounds.pull(B, 0) is Pull.READY
    push(rounds, A)
    assert not rounds.closable()
    assert push(rounds, B) == Accumulate(is_first=False)
    assert rounds.closable()


def test_a_second_batch_of_one_member_is_added(make):
    rounds = make()
    push(rounds, A, batch=1)
    assert push(rounds, A, batch=2) == Accumulate(is_first=False)
    assert not rounds.closable()
    assert [held for held, _ in rounds.held] == [Batch(0, 0, 1), Batch(0, 0, 2)]
    push(rounds, B, batch=3)
    assert rounds.close().contributors == {A: 2.0, B: 1.0}


def test_rounds_do_not_wait_for_a_member_that_left_but_keep_its_gradient(make):
    rounds = make()
    push(rounds, A, weight=4.0)
    remove(rounds, A)
    assert not rounds.closable()
    push(rounds, B)
    assert rounds.close().contributors == {A: 4.0, B: 1.0}


def test_a_leave_can_close_the_round(make):
    rounds = make()
    push(rounds, A)
    remove(rounds, B)
    assert rounds.closable()


def test_an_empty_view_does_not_leave_the_last_gradients_in_the_accumulator(make):
    rounds = make()
    push(rounds, A)
    rounds.change({}, [A, B])
    assert rounds.closable()
    assert rounds.close().has_update
    assert not rounds.closable()


def test_an_empty_view_alone_closes_nothing(make):
    rounds = make()
    push(rounds, A, weight=0)
    rounds.change({}, [A, B])
    assert not rounds.closable()


def test_a_member_that_returns_with_its_id_has_still_arrived(make):
    rounds = make()
    push(rounds, A)
    remove(rounds, A)
    assert admit(rounds, A, 0)
    assert rounds.waits_for() == [B]


def test_lagging_blocks_catch_up_in_one_step_when_no_member_is_due(make):
    rounds = make(version=3)
    push(rounds, A)
    rounds.change({21: 1_000_000, 22: 1_000_005}, [A, B])
    assert rounds.closable()
    assert rounds.close().has_update
    assert rounds.version == 4
    assert rounds.closable()
    closing = rounds.close()
    assert not closing.has_update
    assert rounds.version == 1_000_000
    assert not rounds.closable()
    assert rounds.waits_for() == [21]


def test_a_member_cannot_start_in_a_closed_round(make):
    rounds = make(version=3)
    assert not admit(rounds, C, 2)
    with pytest.raises(MessageError, match="cannot start at round 2"):
        rounds.change({C: 2}, [A])
    assert rounds.members == {A: 3, B: 3}


def test_a_pull_with_an_ended_membership_never_waits(make):
    rounds = make()
    push(rounds, A)
    assert rounds.pull(A, 1) is Pull.WAIT
    rounds.change({C: 0}, [A])
    assert rounds.pull(A, 1) is Pull.NOT_MEMBER
    assert rounds.pull(0, 0) is Pull.READY
    assert rounds.pull(0, 1) is Pull.WAIT


# backup


def test_with_backup_a_late_gradient_joins_the_next_round(make):
    rounds = make(Sync(backup=1), members=[A, B, C])
    push(rounds, A)
    assert not rounds.closable()
    push(rounds, B)
    assert rounds.closable()
    rounds.close()
    assert push(rounds, C, base=0, weight=3.0, batch=7) == Accumulate(is_first=True, is_late=True)
    assert set(rounds.waits_for()) == {A, B, C}
    push(rounds, A)
    assert not rounds.closable()
    push(rounds, C)
    closing = rounds.close()
    assert (closing.total_weight, closing.contributors) == (5.0, {A: 1.0, C: 4.0})


def test_backup_never_closes_a_round_without_arrivals(make):
    rounds = make(Sync(backup=2), members=[A, B])
    assert not rounds.closable()
    push(rounds, A)
    assert rounds.closable()


def test_a_late_batch_from_before_the_membership_is_stale(make):
    rounds = make(Sync(backup=1), version=5)
    assert push(rounds, A, base=4) == Stale(5)


# async and bounded


def test_async_applies_on_arrival_and_counts(make):
    rounds = make(Async(), version=7)
    assert push(rounds, A, base=5) == Apply(staleness=2)
    assert rounds.version == 8
    assert push(rounds, A, base=5, applied=True) == Repeated()
    assert rounds.version == 8
    assert push(rounds, A, weight=0) == Arrived()
    assert rounds.version == 9, "a push without a gradient counts, as it does in the other blocks"
    assert push(rounds, A, weight=0, applied=True) == Repeated()
    assert push(rounds, C) == NotMember()
    assert rounds.version == 9
    assert push(rounds, B, base=9) == Apply(staleness=0)
    assert not rounds.closable()
    assert admit(rounds, C, 0)


@pytest.mark.parametrize("mode", [Async(), Bounded(staleness=1)], ids=["async", "bounded"])
@pytest.mark.parametrize("weight", [1, 0])
def test_a_base_that_the_block_has_not_reached_is_stale_and_changes_nothing(make, mode, weight):
    rounds = make(mode, version=7)
    assert push(rounds, A, base=8, weight=weight, step=5) == Stale(7)
    assert (rounds.version, rounds.position) == (7, 7)
    assert push(rounds, A, base=8, applied=True) == Repeated()
    assert push(rounds, A, base=7, step=1) == Apply(0)


def test_bounded_holds_a_member_that_is_too_far_ahead(make):
    rounds = make(Bounded(staleness=1))
    assert push(rounds, A, step=1, batch=1) == Apply(0)
    assert rounds.pull(A, 0) is Pull.READY
    push(rounds, A, step=2, batch=2)
    assert rounds.pull(A, 0) is Pull.WAIT
    assert rounds.pull(B, 0) is Pull.READY
    assert rounds.position == 0
    push(rounds, B, step=1, batch=3)
    assert rounds.pull(A, 0) is Pull.READY
    assert rounds.position == 1


def test_bounded_clocks_are_not_moved_by_repeated_messages(make):
    rounds = make(Bounded(staleness=0))
    push(rounds, A, step=1, batch=1)
    push(rounds, A, step=2, batch=2)
    assert push(rounds, A, step=1, batch=1, applied=True) == Repeated()
    assert push(rounds, B, step=2, batch=2, applied=True) == Arrived()
    assert rounds.may_proceed(A)
    assert rounds.may_proceed(B)


def test_bounded_a_leave_releases_the_others_and_new_members_start_at_the_agreed_round(make):
    rounds = make(Bounded(staleness=0))
    push(rounds, A, step=5)
    assert rounds.pull(A, 0) is Pull.WAIT
    remove(rounds, B)
    assert rounds.pull(A, 0) is Pull.READY
    assert admit(rounds, C, 5)
    assert rounds.may_proceed(A)
    assert rounds.may_proceed(C)


# changing the mode


def test_sync_changes_to_async_when_the_agreed_round_opens(make):
    rounds = make(members=[A])
    rounds.switch(Async(), 2)
    for version in range(2):
        assert isinstance(rounds.mode, Sync)
        push(rounds, A, batch=version)
        rounds.close()
    assert rounds.mode == Async()
    assert push(rounds, A, batch=9) == Apply(0)


def test_sync_changes_to_bounded_with_equal_clocks(make):
    rounds = make(members=[A])
    admit(rounds, B, 1)
    rounds.switch(Bounded(staleness=0), 3)
    push(rounds, A)
    rounds.close()
    for version in range(2):
        push(rounds, A, batch=version)
        push(rounds, B, batch=version + 5)
        rounds.close()
    assert rounds.may_proceed(A)
    assert rounds.may_proceed(B)
    assert rounds.position == 3


def test_catching_up_stops_at_the_change_of_the_mode(make):
    rounds = make(members=[A])
    rounds.switch(Async(), 4)
    rounds.change({C: 9}, [A])
    rounds.close()
    assert (rounds.version, rounds.mode) == (4, Async())


def test_async_changes_to_sync_at_one_version_for_all_blocks(make):
    rounds = make(Async(), members=[A, B])
    push(rounds, A)
    with pytest.raises(MessageError, match="cannot change"):
        rounds.switch(Sync(), 0)
    rounds.switch(Sync(), 50)
    assert rounds.version == 50
    assert push(rounds, A, base=1) == Stale(50)
    push(rounds, A, base=50)
    assert rounds.waits_for() == [B]


def test_a_begun_round_keeps_its_mode(make):
    rounds = make()
    push(rounds, A)
    with pytest.raises(MessageError, match="has begun"):
        rounds.switch(Async(), 0)


def test_the_mode_may_change_at_the_open_round_until_a_member_arrives(make):
    rounds = make(version=3)
    assert [rounds.can_switch(version) for version in (2, 3, 4)] == [False, True, True]
    push(rounds, A, weight=0.0)
    assert [rounds.can_switch(version) for version in (2, 3, 4)] == [False, False, True]
    with pytest.raises(MessageError, match="has begun"):
        rounds.switch(Async(), 3)
    fresh = make(version=3)
    fresh.switch(Async(), 3)
    assert (fresh.mode, fresh.version) == (Async(), 3)


def test_present_values_may_be_pulled_at_once(make):
    rounds = make(version=3)
    assert [rounds.pull(A, version) for version in (2, 3, 4)] == [Pull.READY, Pull.READY, Pull.WAIT]


def test_the_optimizer_may_run_when_the_last_missing_member_arrives(make):
    rounds = make(members=(A, B))
    assert not rounds.may_update(A, 0), "B is missing, too"
    push(rounds, B)
    assert rounds.may_update(A, 0)
    assert not rounds.may_update(A, 1), "the open round is 0"
    assert not rounds.may_update(B, 0), "it has already arrived"
    assert not rounds.may_update(C, 0), "an unknown sender"
    admit(rounds, C, 1)
    assert not rounds.may_update(C, 0), "it starts later"
    assert make(Sync(backup=1), members=(A, B)).may_update(A, 0)
    assert make(Async()).may_update(A, 0)


def test_a_copy_is_independent(make):
    rounds = make()
    push(rounds, A)
    copy = rounds.copy()
    push(copy, B, weight=2.0)
    remove(copy, A)
    copy.close()
    assert (rounds.version, rounds.total_weight, rounds.waits_for()) == (0, 1.0, [B])
    assert (copy.version, copy.waits_for()) == (1, [B])
    copy.check()


def test_a_round_is_at_its_edge_until_a_member_arrives_or_contributes(make):
    rounds = make()
    assert rounds.is_at_edge
    assert push(rounds, A, applied=True) == Arrived()
    assert not rounds.is_at_edge

    late = make(Sync(backup=1), members=(A, B, C))
    push(late, A)
    push(late, B, batch=1)
    late.close()
    assert late.is_at_edge
    assert push(late, C, base=0, batch=2) == Accumulate(is_first=True, is_late=True)
    assert not late.is_at_edge


def test_blocks_are_alike_at_the_start_of_the_same_round_with_the_same_members(make):
    one, other = make(), make()
    assert one.is_like(other)
    assert not one.is_like(make(members=(A, C)))
    assert not one.is_like(make(version=1))
    push(other, A)
    assert not one.is_like(other)
    assert not other.is_like(one)
    push(one, A)
    assert not one.is_like(other), "the round is open"
