from __future__ import annotations

import pytest

from flightedl.domain.consistency.membership import Membership
from flightedl.domain.consistency.membership_values import Admitted, Persist, SendView
from flightedl.domain.consistency.modes import Async, Bounded, Sync
from flightedl.domain.consistency.views import PserverView
from flightedl.domain.recovery.store_history import LIFE_REVISIONS
from flightedl.errors import CorruptError, FencedError, JobFailedError, MessageError
from flightedl.messages.control import ViewMember, ViewRequest


def sends(effects):
    return {effect.index: effect.view for effect in effects if isinstance(effect, SendView)}


def admitted(effects):
    return [effect.trainer for effect in effects if isinstance(effect, Admitted)]


def answer(membership, index, refused=(), highest=0):
    """Let the pserver answer the views in flight to it."""
    pserver = membership._pservers[index]
    return membership.answered(index, pserver.generation, pserver.sending, refused, highest)


def test_a_job_may_be_resumed_hundreds_of_times():
    made = Membership(500 * LIFE_REVISIONS + 5, 1)
    made.pserver_up(0, 100, 0)
    made.join("a", 50)
    made.check()
    with pytest.raises(JobFailedError, match="resumed too often"):
        Membership(512 * LIFE_REVISIONS, 1)


def test_generations_of_masters_begin_at_0():
    assert Membership(0, 1).view.master_generation == 0
    with pytest.raises(JobFailedError):
        Membership(-1, 1)


@pytest.fixture
def membership():
    made = Membership(7, 2)
    for index in range(2):
        assert list(sends(made.pserver_up(index, 100 + index, 0))) == [index]
        assert answer(made, index) == []
    yield made
    made.check()


def join(membership, trainer, generation=50, highest=0):
    effects = membership.join(trainer, generation)
    for index in range(2):
        effects = effects + answer(membership, index, highest=highest)
    assert admitted(effects) == [trainer]
    return membership.member_id_of(trainer)


def test_a_trainer_is_admitted_only_when_all_pservers_wait_for_it(membership):
    effects = membership.join("a", 50)
    assert effects[0] == Persist()
    views = sends(effects)
    assert set(views) == {0, 1}
    (member,) = views[0].members
    assert (member.trainer, member.generation, member.first_round) == ("a", 50, 0)
    assert membership.join("a", 50) == []
    assert answer(membership, 0) == []
    assert membership.member_id_of("a") is None
    assert membership.waiting_for("a") == "the answer of pserver 1 to round 0"
    assert answer(membership, 1) == [Persist(), Admitted("a", member.member)]
    assert membership.member_id_of("a") == member.member
    assert membership.waiting_for("a") == ""


def test_a_refused_join_is_proposed_under_a_new_id_at_a_later_round(membership):
    first = sends(membership.join("a", 50))[0].members[0]
    answer(membership, 0, highest=0)
    rounds = []
    for open_round in (5, 8, 20):
        effects = answer(membership, 1, refused=[membership.members[0].member_id], highest=open_round)
        (member,) = sends(effects)[1].members
        rounds.append(member.first_round)
        assert member.member != first.member
        answer(membership, 0)
    assert rounds == [6, 10, 24]
    assert admitted(answer(membership, 1)) == ["a"]
    assert membership.members[0].refusals == 0


def join_after(membership, trainer, late_by):
    """Join while a round is closed, and ``late_by`` more while each view is in flight; return the tried margins."""
    open_round = max(pserver.highest_open_round for pserver in membership._pservers.values()) + 1
    membership.join(trainer, 50)
    margins = []
    while membership.member_id_of(trainer) is None:
        (member,) = [each for each in membership.members if each.trainer == trainer]
        is_late = member.first_round < open_round
        margins.append(member.first_round - open_round + late_by)
        assert len(margins) < 9
        for index in range(2):
            answer(membership, index, refused=[member.member_id] if is_late else (), highest=open_round)
        open_round += late_by
    return margins[1:]


def test_a_sufficient_margin_is_tried_first_and_then_a_smaller_one(membership):
    assert join_after(membership, "a", late_by=3) == [1, 2, 4]
    assert join_after(membership, "b", late_by=3) == [2, 4]
    assert join_after(membership, "c", late_by=0) == [2]
    assert join_after(membership, "d", late_by=0) == [1]


def test_one_join_with_many_refusals_does_not_delay_the_next_one_for_long(membership):
    assert join_after(membership, "a", late_by=20) == [1, 2, 4, 8, 16, 32]
    assert join_after(membership, "b", late_by=0) == [2]


def test_a_new_member_starts_at_the_round_that_members_report(membership):
    join(membership, "a", highest=4)
    membership.note_round("a", 9)
    membership.note_round("a", 7)
    membership.note_round("nobody", 30)
    effects = membership.join("b", 51, margin=2)
    assert sends(effects)[0].members[1].first_round == 11
    membership.note_round("b", 40)
    membership.note_round("a", 10**9)
    effects = answer(membership, 0, highest=4) + answer(membership, 1, highest=4) + membership.join("c", 52)
    assert sends(effects)[0].members[2].first_round == 4 + 256, "no member is believed to be further ahead"


def test_reported_rounds_are_ignored_after_a_pserver_has_lost_its_own(membership):
    join(membership, "a", highest=4)
    membership.note_round("a", 9)
    effects = membership.pserver_up(0, 200, 0)
    (member,) = sends(effects)[0].members
    assert member.first_round == 4


def test_versions_are_not_rounds_in_other_modes():
    made = Membership(7, 1, mode=Bounded(2))
    made.pserver_up(0, 100, 0)
    answer(made, 0)
    made.join("a", 50)
    answer(made, 0)
    made.note_round("a", 9)
    assert sends(made.join("b", 51))[0].members[1].first_round == 0


def test_simultaneous_joins_share_one_view(membership):
    membership.join("a", 50)
    assert sends(membership.join("b", 51)) == {}
    view = sends(answer(membership, 0))[0]
    assert [member.trainer for member in view.members] == ["a", "b"]
    assert admitted(answer(membership, 0)) == []
    assert admitted(answer(membership, 1)) == ["a"]
    assert admitted(answer(membership, 1)) == ["b"]


def test_a_leave_needs_no_agreement(membership):
    join(membership, "a")
    membership.pserver_down(1)
    effects = membership.leave("a")
    assert effects[0] == Persist()
    assert sends(effects)[0].members == []
    assert membership.member_id_of("a") is None
    assert membership.leave("a") == []


def test_the_leave_of_an_old_registration_is_ignored(membership):
    join(membership, "a", 50)
    old = membership.member_id_of("a")
    new = join(membership, "a", 60)
    assert new != old
    assert membership.leave("a", 50) == []
    with pytest.raises(FencedError, match="registered again"):
        membership.join("a", 50)
    assert membership.member_id_of("a") == new


def test_an_unanswered_view_is_replaced_by_the_newest_one(membership):
    view = sends(membership.join("a", 50))[0]
    membership.join("b", 51)
    again = sends(membership.send_failed(0, 100, view.serial))[0]
    assert again.serial > view.serial
    # The first answer was only late.
    membership.answered(0, 100, view.serial, [], 0)
    assert membership.send_failed(0, 100, view.serial) == []
    answer(membership, 1)
    assert membership.member_id_of("a") is not None
    assert membership.member_id_of("b") is None


def test_answers_of_another_generation_are_ignored(membership):
    view = sends(membership.join("a", 50))[0]
    answer(membership, 1)
    membership.pserver_up(0, 200, 0)
    assert membership.answered(0, 100, view.serial, [], 99) == []
    assert membership.member_id_of("a") is None
    with pytest.raises(FencedError, match="replaced"):
        membership.pserver_up(0, 100, 0)


def test_answers_to_future_views_or_of_unknown_pservers_are_ignored(membership):
    view = sends(membership.join("a", 50))[0]
    assert membership.answered(0, 100, view.serial + 1, [], 99) == []
    assert membership.answered(9, 100, view.serial, [], 99) == []
    assert membership.send_failed(9, 100, view.serial) == []
    answer(membership, 1)
    assert membership.member_id_of("a") is None
    assert sends(membership.join("b", 51)) == {1: membership.view}, "pserver 0 has not answered yet"
    assert membership.view.members[1].first_round == 0


def test_it_is_quiet_while_all_are_up_and_have_the_newest_view(membership):
    assert membership.is_quiet
    membership.join("a", 50)
    assert not membership.is_quiet
    answer(membership, 0)
    assert not membership.is_quiet
    answer(membership, 1)
    assert membership.is_quiet
    assert membership.pserver_down(9) == []
    assert membership.pserver_down(1) == []
    assert not membership.is_quiet


def test_a_mode_that_all_pservers_have_adopted_remains_agreed(membership):
    assert membership.late_to_switch == []
    membership.pserver_up(1, 201, 0)
    assert membership.late_to_switch == []


def test_an_excess_pserver_is_forgotten_with_its_rounds():
    larger = Membership(7, 3)
    for index, highest in enumerate((4, 5, 60)):
        larger.pserver_up(index, 100 + index, highest)
    smaller = Membership.restore(larger.encode(), 8, 2)
    smaller.join("a", 50)
    assert [member.first_round for member in smaller.members] == [5]


def test_a_join_waits_for_a_pserver_that_is_down(membership):
    membership.pserver_down(1)
    membership.join("a", 50)
    answer(membership, 0)
    assert membership.member_id_of("a") is None
    membership.pserver_up(1, 101, 3)
    assert admitted(answer(membership, 1, highest=3)) == ["a"]


def test_a_restarted_pserver_makes_all_members_start_again_at_one_round(membership):
    old = {join(membership, "a"), join(membership, "b", 51)}
    answer_highest = 40
    membership.answered(0, 100, membership.view.serial, [], answer_highest)
    effects = membership.pserver_up(1, 201, 12)
    assert Persist() in effects
    view = sends(effects)[1]
    assert {member.first_round for member in view.members} == {40}
    assert not old & {member.member for member in view.members}
    assert membership.member_id_of("a") is None
    answer(membership, 0, highest=40)
    assert sorted(admitted(answer(membership, 1, highest=40))) == ["a", "b"]


def test_a_restarted_pserver_gets_the_view_unchanged_in_async_mode():
    membership = Membership(7, 1, mode=Async())
    membership.pserver_up(0, 100, 0)
    answer(membership, 0)
    membership.join("a", 50)
    answer(membership, 0)
    member_id = membership.member_id_of("a")
    view = sends(membership.pserver_up(0, 101, 0))[0]
    assert [member.member for member in view.members] == [member_id]
    assert membership.member_id_of("a") == member_id
    membership.check()


def test_member_ids_are_never_reused_by_later_masters():
    seen = set()
    stored = None
    for generation in (3, 4, 9):
        membership = Membership(generation, 1) if stored is None else Membership.restore(stored, generation, 1)
        for _ in range(3):
            membership.join("a", membership.members[0].generation + 1 if membership.members else 1)
            seen.add(membership.members[0].member_id)
            membership.rejoin()
            seen.add(membership.members[0].member_id)
        stored = membership.encode()
    assert len(seen) == 18


def test_a_new_master_continues_with_the_stored_members(membership):
    member_id = join(membership, "a", highest=4)
    membership.join("b", 51)
    restored = Membership.restore(membership.encode(), 8, 2)
    restored.check()
    assert restored.member_id_of("a") == member_id
    assert restored.member_id_of("b") is None
    for index in range(2):
        view = sends(restored.pserver_up(index, 100 + index, 4))[index]
        assert (view.master_generation, view.serial) == (8, 1)
        assert [member.trainer for member in view.members] == ["a", "b"]
    answer(restored, 0, highest=4)
    assert admitted(answer(restored, 1, highest=4)) == ["b"]
    assert restored.member_id_of("a") == member_id


def test_a_stored_member_that_a_pserver_cannot_admit_is_proposed_again(membership):
    member_id = join(membership, "a")
    restored = Membership.restore(membership.encode(), 8, 2)
    for index in range(2):
        restored.pserver_up(index, 100 + index, 9)
    answer(restored, 0, refused=[member_id], highest=9)
    assert restored.member_id_of("a") is None
    assert restored.members[0].first_round == 10
    restored.check()


def test_a_pserver_that_restarted_while_there_was_no_master_is_noticed(membership):
    member_id = join(membership, "a")
    restored = Membership.restore(membership.encode(), 8, 2)
    restored.pserver_up(0, 100, 9)
    restored.pserver_up(1, 999, 2)
    assert restored.member_id_of("a") is None
    assert restored.members[0].member_id != member_id
    assert restored.members[0].first_round == 9
    restored.check()


def test_a_deposed_master_cannot_restore(membership):
    with pytest.raises(FencedError):
        Membership.restore(membership.encode(), 7, 2)
    with pytest.raises(CorruptError):
        Membership.restore(b"nonsense", 8, 2)
    with pytest.raises(JobFailedError, match="too large"):
        Membership(1 << 60, 2)


# the pserver's side


def member_of(member, first_round, trainer="a", generation=30):
    return ViewMember(trainer=trainer, generation=generation, member=member, first_round=first_round)


def view_of(master, serial, members=(), mode=None, switch_round=0):
    mode = None if mode is None else mode.to_json()
    sent = {"master_generation": master, "serial": serial, "mode": mode, "switch_round": switch_round}
    return ViewRequest(plan_hash="p", members=list(members), **sent)


def view(serial, *members, master=1):
    return view_of(master, serial, [member_of(m, first, f"t{m}", 5) for m, first in members])


def test_views_change_no_mode_if_they_must_not_or_if_it_is_the_same():
    new, same = view_of(1, 1, (), Async()), view_of(1, 1, (), Sync())
    fixed, free = PserverView(), PserverView(Sync())
    assert fixed.begins_in(new) is None
    assert free.begins_in(same) is None
    assert fixed.consider(new, lambda _: True).switch is None
    assert free.consider(same, lambda _: True).switch is None
    assert free.begins_in(new) is None, "it is no longer the first view"
    assert PserverView(Sync()).begins_in(new) == Async()


def test_a_pserver_admits_possible_members_and_names_the_others():
    pserver = PserverView()
    verdict = pserver.consider(view(1, (11, 3), (12, 2)), lambda first: first >= 3)
    assert [member.member for member in verdict.admit] == [11]
    assert verdict.refused == (12,)
    assert not verdict.accepted
    assert [(m.member, m.trainer, m.generation) for m in pserver.members] == [(11, "t11", 5)]


def test_known_members_are_kept_at_any_round():
    pserver = PserverView()
    pserver.consider(view(1, (11, 0)), lambda first: True)
    verdict = pserver.consider(view(2, (11, 0), (12, 9)), lambda first: first >= 9)
    assert verdict.accepted
    assert [member.member for member in verdict.admit] == [12]
    verdict = pserver.consider(view(3, (12, 9)), lambda first: False)
    assert verdict.accepted
    assert verdict.remove == (11,)


def test_a_repeated_view_gets_the_same_answer_and_an_older_one_none():
    pserver = PserverView()
    pserver.consider(view(4, (11, 0)), lambda first: False)
    verdict = pserver.consider(view(4, (11, 0)), lambda first: True)
    assert (verdict.refused, verdict.admit, verdict.is_outdated) == ((11,), (), False)
    assert pserver.consider(view(3), lambda first: True).is_outdated
    assert pserver.consider(view(1, master=2), lambda first: True).accepted
    assert pserver.consider(view(9), lambda first: True).is_outdated
    assert pserver.number == (2, 1)


def test_an_inconsistent_view_changes_nothing():
    pserver = PserverView()
    pserver.consider(view(1, (11, 0)), lambda first: True)
    with pytest.raises(MessageError, match="twice"):
        pserver.consider(view(2, (12, 0), (12, 0)), lambda first: True)
    with pytest.raises(MessageError, match="differs from"):
        pserver.consider(view(2, (11, 1)), lambda first: True)
    assert pserver.number == (1, 1)
    assert [member.member for member in pserver.members] == [11]


class TestModes:
    """The mode is part of the view."""

    @staticmethod
    def agreed(membership: Membership, count: int, highest: int = 0) -> None:
        for index in range(count):
            membership.answered(index, 20 + index, membership.view.serial, (), highest)

    @pytest.fixture
    def membership(self) -> Membership:
        membership = Membership(7, 2)
        for index in range(2):
            membership.pserver_up(index, 20 + index, 0)
        membership.join("a", 30)
        self.agreed(membership, 2, highest=5)
        return membership

    def test_all_members_start_again_at_one_round(self, membership: Membership) -> None:
        before = membership.member_id_of("a")
        assert membership.late_to_switch == []
        assert membership.switch(Sync()) == []
        effects = membership.switch(Async())
        assert isinstance(effects[0], Persist)
        view = membership.view
        assert (view.mode, view.switch_round) == (Async().to_json(), 5)
        assert [member.first_round for member in view.members] == [5]
        assert membership.member_id_of("a") is None
        assert membership.late_to_switch == [0, 1]
        self.agreed(membership, 2)
        assert membership.member_id_of("a") not in {None, before}
        assert membership.late_to_switch == []

    def test_a_pserver_that_is_ahead_moves_the_round_for_all(self, membership: Membership) -> None:
        membership.switch(Async())
        refused = [member.member for member in membership.view.members]
        membership.answered(0, 20, membership.view.serial, refused, 9, refuses_mode=True)
        assert membership.view.switch_round == 10
        assert [member.first_round for member in membership.view.members] == [10]
        serial = membership.view.serial
        # The other's answer to the previous round changes nothing.
        membership.answered(1, 21, serial - 1, (), 9, refuses_mode=True)
        assert membership.view.serial == serial
        self.agreed(membership, 2)
        membership.check()
        assert membership.late_to_switch == []

    def test_a_successor_keeps_the_mode_and_its_round(self, membership: Membership) -> None:
        membership.switch(Bounded(2))
        successor = Membership.restore(membership.encode(), 8, 2)
        assert (successor.mode, successor.view.switch_round) == (Bounded(2), 5)
        assert successor.late_to_switch == [0, 1]

    def test_a_member_that_joins_during_the_change_does_not_start_before_it(self, membership: Membership) -> None:
        membership.switch(Async())
        refused = [member.member for member in membership.view.members]
        membership.answered(0, 20, membership.view.serial, refused, 9, refuses_mode=True)
        membership.join("b", 31)
        assert all(member.first_round >= membership.switch_round for member in membership.view.members)

    def test_a_pserver_removes_all_members_even_if_it_refuses(self) -> None:
        view = PserverView(Sync())
        first = member_of(1, 0)
        view.consider(view_of(7, 1, (first,), Sync()), lambda _: True)
        change = view_of(7, 2, (member_of(2, 4),), Async(), 4)
        verdict = view.consider(change, lambda _: True, lambda at: at > 4)
        assert (verdict.refuses_mode, verdict.refused, verdict.remove, verdict.switch) == (True, (2,), (1,), None)
        assert view.consider(change, lambda _: True, lambda at: at > 4).refuses_mode
        later = view_of(7, 3, (member_of(3, 6),), Async(), 6)
        verdict = view.consider(later, lambda _: True, lambda at: at > 4)
        assert (verdict.switch, verdict.switch_round, verdict.accepted) == (Async(), 6, True)
        again = view_of(7, 4, later.members, Async(), 6)
        assert view.consider(again, lambda _: True, lambda _: False).switch is None

    def test_the_first_view_of_a_process_determines_its_mode(self) -> None:
        view = PserverView(Sync())
        first = view_of(7, 3, (), Async(), 6)
        assert view.begins_in(first) == Async()
        assert view.consider(first, lambda _: True, lambda _: False).switch is None
        assert view.begins_in(view_of(7, 4, (), Sync(), 9)) is None


def test_trainers_that_join_together_start_at_one_round_in_one_view():
    membership = Membership(1, 1)
    membership.pserver_up(0, 5, 7)
    membership.join_together({"a": 1, "b": 2, "c": 3})
    assert {member.first_round for member in membership.members} == {7}
    assert len({member.serial for member in membership.members}) == 1
    assert membership.join_together({"a": 1, "b": 2}) == []
    membership.check()
