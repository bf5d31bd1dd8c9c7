"""Start and end of a trainer's membership."""

from __future__ import annotations

from flightedl.domain.consistency.modes import Async, Sync
from flightedl.domain.trainer.membership import Begun, Denied, Joined, NotYet, TrainerMembership
from flightedl.messages.tasks import JoinReply, TasksReply


def tasks_reply(member: int) -> TasksReply:
    return TasksReply(assignments=[], outcome="none_now", member=member)


def member_of(number: int = 7) -> TrainerMembership:
    membership = TrainerMembership()
    membership.has_model(Sync())
    assert membership.join_answered(JoinReply(member=number, mode=Sync().to_json())) == Joined(number, None)
    return membership


def test_without_a_model_no_membership_is_needed() -> None:
    assert TrainerMembership().begin_batch(0) == Begun(0, 1)


def test_with_a_model_only_members_start_batches() -> None:
    membership = TrainerMembership()
    membership.has_model(Sync())
    assert membership.begin_batch(0) is None


def test_steps_count_the_batches_of_a_membership() -> None:
    membership = member_of()
    assert [membership.begin_batch(0), membership.begin_batch(0)] == [Begun(7, 1), Begun(7, 2)]
    membership.lost()
    assert membership.begin_batch(0) is None
    membership.join_answered(JoinReply(member=8))
    assert membership.begin_batch(0) == Begun(8, 1)


def test_it_joins_with_its_current_task() -> None:
    request = TrainerMembership().join_request("t", 3, 9)
    assert (request.trainer, request.generation, request.attempt) == ("t", 3, 9)


def test_answers_to_a_join_admit_retry_or_fail() -> None:
    membership = TrainerMembership()
    membership.has_model(Sync())
    assert membership.join_answered(JoinReply(member=0, waiting_for="pserver 1")) == NotYet("pserver 1")
    unsaid = membership.join_answered(JoinReply(member=0))
    assert isinstance(unsaid, NotYet)
    assert unsaid.waiting_for
    assert membership.join_answered(JoinReply(member=0, holds_work=False, waiting_for="?")) == Denied()
    assert membership.member == 0


def test_a_membership_begins_in_the_current_mode() -> None:
    membership = member_of()
    mode = Async(push_every=3)
    assert membership.join_answered(JoinReply(member=8, mode=mode.to_json())) == Joined(8, mode)
    assert membership.join_answered(JoinReply(member=9, mode=mode.to_json())) == Joined(9, None)
    assert membership.join_answered(JoinReply(member=10)) == Joined(10, None), "as before"


def test_only_joining_changes_the_membership() -> None:
    membership = member_of(7)
    membership.tasks_answered(7, tasks_reply(7))
    assert membership.member == 7
    membership.tasks_answered(7, tasks_reply(8))
    assert membership.member == 0


def test_an_answer_from_before_the_membership_does_not_end_it() -> None:
    membership = member_of(7)
    membership.tasks_answered(0, tasks_reply(0))
    membership.tasks_answered(6, tasks_reply(0))
    assert membership.member == 7


def test_the_epoch_is_that_of_the_newest_batch_until_all_are_done() -> None:
    membership = member_of()
    membership.begin_batch(0)
    assert membership.epoch == 0
    membership.all_done()
    assert membership.epoch > 1 << 60
