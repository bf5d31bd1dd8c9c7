from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flightedl.errors import EXIT_UNKNOWN
from flightedl.launch.policy import (
    Account,
    AllFinished,
    GiveUp,
    Limits,
    RestartPolicy,
    Role,
    Slot,
    SlotFinished,
    StartAgain,
    StartTogether,
    describe_exit,
)

MASTER = Slot(Role.MASTER, 0)
PSERVER = Slot(Role.PSERVER, 1)
FIRST, SECOND = Slot(Role.TRAINER, 0), Slot(Role.TRAINER, 1)


def policy(*slots: Slot, limits: Limits | None = None) -> RestartPolicy:
    return RestartPolicy(slots or (MASTER, PSERVER, FIRST, SECOND), limits or Limits())


def test_the_job_is_done_when_the_last_trainer_finished() -> None:
    decide = policy()
    assert decide.ended(FIRST, 0, 5.0) == (SlotFinished(FIRST),)
    assert not decide.is_all_finished
    assert decide.ended(SECOND, 0, 6.0) == (SlotFinished(SECOND), AllFinished())
    assert decide.is_all_finished


def test_a_trainer_without_some_of_the_data_has_finished() -> None:
    decide = policy()
    assert decide.ended(FIRST, 4, 5.0) == (SlotFinished(FIRST),)
    assert decide.ended(SECOND, 0, 6.0) == (SlotFinished(SECOND), AllFinished(4))


def test_a_trainer_whose_exit_status_is_unknown_has_not_finished() -> None:
    decide = policy()
    assert decide.ended(FIRST, EXIT_UNKNOWN, 5.0) == (StartAgain(FIRST, 0.0, "its exit status could not be read"),)
    assert not decide.is_finished(FIRST)


def test_a_finished_slot_cannot_end_again() -> None:
    decide = policy()
    decide.ended(FIRST, 0, 5.0)
    with pytest.raises(ValueError, match="has finished"):
        decide.ended(FIRST, 0, 5.0)


def test_a_cluster_without_trainers_never_finishes() -> None:
    decide = policy(MASTER, PSERVER)
    assert not decide.is_all_finished
    assert isinstance(decide.ended(MASTER, 0, 5.0)[0], StartAgain)


def test_a_killed_trainer_is_replaced_at_once() -> None:
    assert policy().ended(FIRST, -9, 3.0) == (StartAgain(FIRST, 0.0, "killed by SIGKILL"),)


def test_a_trainer_that_requests_a_restart_is_restarted() -> None:
    assert policy().ended(FIRST, 75, 3.0) == (StartAgain(FIRST, 0.0, "exit code 75"),)
    assert policy().ended(FIRST, 143, 3.0) == (StartAgain(FIRST, 0.0, "terminated by SIGTERM"),)


def test_ten_kills_of_trainers_spread_over_a_job_do_not_end_it() -> None:
    decide = policy()
    for number in range(10):
        (decision,) = decide.ended((FIRST, SECOND)[number % 2], -9, 2.0)
        assert isinstance(decision, StartAgain)


def test_delays_double_up_to_a_maximum() -> None:
    decide = policy(limits=Limits(trainer_short_runs=100))
    delays = [decide.ended(FIRST, -11, 1.0)[0] for _ in range(8)]
    assert [d.after_s for d in delays if isinstance(d, StartAgain)] == [0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 5.0, 5.0]


def test_a_process_killed_from_outside_restarts_after_a_short_delay() -> None:
    decide = policy()
    delays = [decide.ended(PSERVER, -9, 1.0)[0] for _ in range(8)]
    assert [d.after_s for d in delays if isinstance(d, StartAgain)] == [0.0, *[0.25] * 7]


def test_a_slot_is_given_up_after_too_many_short_runs() -> None:
    decide = policy()
    ends = [decide.ended(PSERVER, -11, 0.1)[0] for _ in range(4)]
    assert [type(end) for end in ends] == [StartAgain, StartAgain, StartAgain, GiveUp]
    assert ends[-1] == GiveUp(PSERVER, "pserver-1 ended 4 times in a row, the last time: killed by SIGSEGV", 1)


def test_a_long_run_resets_the_count() -> None:
    decide = policy()
    for _ in range(20):
        assert isinstance(decide.ended(PSERVER, -9, 0.1)[0], StartAgain)
        assert decide.ended(PSERVER, -9, 60.0)[0] == StartAgain(PSERVER, 0.0, "killed by SIGKILL")


def test_restarts_after_long_runs_are_limited() -> None:
    decide = policy(limits=Limits(restarts_limit=3))
    ends = [decide.ended(MASTER, -9, 60.0)[0] for _ in range(4)]
    assert [type(end) for end in ends] == [StartAgain, StartAgain, StartAgain, GiveUp]


def test_a_crashed_script_is_retried_once() -> None:
    decide = policy()
    first = decide.ended(FIRST, 1, 1.0)
    assert first == (StartAgain(FIRST, 0.0, "the script crashed (exit code 1); it is retried once"),)
    assert decide.ended(FIRST, 1, 1.0) == (GiveUp(FIRST, "the script crashed in trainer-0 again (exit code 1)", 1),)


def test_a_crash_in_every_trainer_ends_the_job() -> None:
    decide = policy()
    decide.ended(FIRST, 1, 1.0)
    assert decide.ended(SECOND, 1, 1.0) == (
        GiveUp(SECOND, "the script crashed in trainer-1 too, so in every trainer (exit code 1)", 1),
    )


def test_a_crash_after_another_trainer_finished_is_retried_once() -> None:
    decide = policy()
    decide.ended(FIRST, 0, 1.0)
    assert isinstance(decide.ended(SECOND, 1, 1.0)[0], StartAgain)


def test_a_single_trainer_is_started_twice() -> None:
    decide = policy(MASTER, FIRST)
    assert isinstance(decide.ended(FIRST, 1, 1.0)[0], StartAgain)
    assert isinstance(decide.ended(FIRST, 1, 1.0)[0], GiveUp)


@pytest.mark.parametrize("slot", [MASTER, PSERVER, FIRST])
@pytest.mark.parametrize("code", [2, 3])
def test_a_permanent_failure_ends_the_job_at_once(slot: Slot, code: int) -> None:
    assert policy().ended(slot, code, 1.0) == (GiveUp(slot, f"{slot} ended: exit code {code}", code),)


def test_exits_are_described() -> None:
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-15) == "killed by SIGTERM"
    assert describe_exit(-99) == "killed by signal 99"


def test_slots_have_names() -> None:
    assert [str(slot) for slot in (Slot(Role.ETCD, 0), MASTER, PSERVER, FIRST)] == [
        "etcd",
        "master",
        "pserver-1",
        "trainer-0",
    ]


ENDS = st.tuples(
    st.sampled_from([MASTER, PSERVER, FIRST, SECOND]), st.sampled_from([-9, -15, 0, 1, 75, 143]), st.floats(0, 99)
)


@given(st.lists(ENDS, max_size=400))
@settings(max_examples=50)
def test_every_sequence_of_exits_ends_the_job(ends: list[tuple[Slot, int, float]]) -> None:
    decide = policy(limits=Limits(restarts_limit=20))
    restarts: dict[Slot, int] = {}
    finished: set[Slot] = set()
    for slot, code, ran_s in ends:
        if slot in finished:
            continue
        for decision in decide.ended(slot, code, ran_s):
            match decision:
                case GiveUp() | AllFinished():
                    return
                case StartAgain(after_s=after_s):
                    restarts[slot] = restarts.get(slot, 0) + 1
                    assert 0 <= after_s <= Limits().longest_delay_s
                    assert restarts[slot] <= 20
                case SlotFinished():
                    assert slot.role is Role.TRAINER
                    finished.add(slot)


def test_crashes_at_work_are_retried_while_work_is_assigned() -> None:
    decide = policy()
    for attempts in range(1, 30):
        (decision,) = decide.ended(FIRST, 1, 1.0, Account(has_trained=True, is_done=False, attempts=attempts))
        assert decision == StartAgain(FIRST, 0.0, "the script crashed (exit code 1); its work is retried")


def test_crashes_without_new_work_end_the_job() -> None:
    decide = policy()
    ends = [decide.ended(FIRST, 1, 1.0, Account(has_trained=True, is_done=False, attempts=7))[0] for _ in range(5)]
    assert [type(each) for each in ends] == [*[StartAgain] * 4, GiveUp]


def test_a_script_that_never_trained_ends_the_job_soon() -> None:
    decide = policy()
    ends = [decide.ended(FIRST, 1, 1.0, Account(has_trained=False, is_done=False, attempts=n))[0] for n in range(2)]
    assert [type(each) for each in ends] == [StartAgain, GiveUp]


def test_a_trainer_killed_repeatedly_by_its_work_is_replaced() -> None:
    decide = policy()
    for attempts in range(1, 40):
        assert decide.ended(FIRST, -11, 1.0, Account(has_trained=True, is_done=False, attempts=attempts)) == (
            StartAgain(FIRST, 0.0, "killed by SIGSEGV"),
        )


def test_a_crash_at_the_last_piece_of_work_does_not_end_the_job() -> None:
    decide = policy()
    for attempts in range(1, 5):
        decide.ended(SECOND, 1, 1.0, Account(has_trained=True, is_done=False, attempts=attempts))
    after = Account(has_trained=True, is_done=True, attempts=5)
    assert isinstance(decide.ended(FIRST, 1, 1.0, after)[0], StartAgain)
    assert isinstance(decide.ended(FIRST, 1, 1.0, after)[0], GiveUp)


def test_the_last_status_is_used_while_the_master_does_not_answer() -> None:
    """With poison on a busy machine, crashes must not count as crashes of a script that never worked."""
    decide = policy()
    for attempts in range(1, 20, 2):
        known = Account(has_trained=True, is_done=False, attempts=attempts)
        assert isinstance(decide.ended(FIRST, 1, 1.0, known)[0], StartAgain)
        assert isinstance(decide.ended(SECOND, 1, 1.0)[0], StartAgain)
        assert isinstance(decide.ended(FIRST, 1, 1.0)[0], StartAgain)


def test_a_server_killed_from_outside_is_restarted_more_often_than_one_that_fails() -> None:
    decide = policy()
    for _ in range(Limits().ended_short_runs - 1):
        (decision,) = decide.ended(PSERVER, -9, 2.0)
        assert isinstance(decision, StartAgain)
        assert decision.after_s <= Limits().first_delay_s
    decide = policy()
    for _ in range(Limits().server_short_runs - 1):
        assert isinstance(decide.ended(PSERVER, 1, 2.0)[0], StartAgain)
    assert isinstance(decide.ended(PSERVER, 1, 2.0)[0], GiveUp)


def crash_at(decide: RestartPolicy, slot: Slot, attempts: int, **more: Any) -> StartAgain | GiveUp:
    account = Account(has_trained=True, is_done=False, attempts=attempts, **more)
    (decision,) = decide.ended(slot, 1, 1.0, account)
    assert isinstance(decision, StartAgain | GiveUp)
    return decision


def test_one_error_at_different_batches_is_a_bug_of_the_script_and_retried_once() -> None:
    decide = policy(MASTER, FIRST)
    assert isinstance(crash_at(decide, FIRST, 1, raised_once=1, error="KeyError: 1"), StartAgain)
    assert crash_at(decide, FIRST, 2, raised_once=2, error="KeyError: 2") == GiveUp(
        FIRST,
        "the script raised the same error at 2 different batches, and at none of them twice: KeyError: 2",
        1,
    )


def test_each_trainer_may_crash_at_a_different_bad_record() -> None:
    decide = policy()
    assert isinstance(crash_at(decide, FIRST, 1, raised_once=1), StartAgain)
    assert isinstance(crash_at(decide, SECOND, 2, raised_once=2), StartAgain)
    assert isinstance(crash_at(decide, FIRST, 3, raised_once=1), StartAgain)
    assert isinstance(crash_at(decide, FIRST, 4, raised_once=3), GiveUp)


def test_crashes_are_limited_unless_they_isolate_bad_records() -> None:
    decide = policy(limits=Limits(crashes_without_failed=6))
    for attempts in range(1, 26):
        assert isinstance(crash_at(decide, FIRST, attempts, failed=attempts // 5), StartAgain)
    ends = [crash_at(decide, FIRST, attempts, failed=5) for attempts in range(26, 31)]
    assert [type(each) for each in ends] == [*[StartAgain] * 4, GiveUp]
    assert isinstance(ends[-1], GiveUp)
    assert "at no batch in particular" in ends[-1].reason


def group_policy() -> RestartPolicy:
    return RestartPolicy((MASTER, FIRST, SECOND), Limits(), is_group=True)


def test_all_ranks_of_a_group_restart_when_one_dies() -> None:
    decide = group_policy()
    assert decide.ended(FIRST, 0, 5.0) == (SlotFinished(FIRST),)
    assert decide.ended(SECOND, -9, 5.0) == (StartTogether(SECOND, 0.0, "killed by SIGKILL"),)
    assert not decide.is_finished(FIRST), "it restarts, too"
    assert decide.ended(FIRST, 0, 5.0) == (SlotFinished(FIRST),)
    assert decide.ended(SECOND, 0, 5.0) == (SlotFinished(SECOND), AllFinished())


def test_a_server_of_a_group_restarts_alone() -> None:
    assert group_policy().ended(MASTER, -9, 5.0) == (StartAgain(MASTER, 0.0, "killed by SIGKILL"),)


def test_a_group_that_makes_progress_is_always_restarted() -> None:
    decide = group_policy()
    for start in range(60):
        (decision,) = decide.ended(SECOND, -9, 5.0, Account(True, False, start + 1))
        assert isinstance(decision, StartTogether)


def test_a_rank_whose_script_must_be_changed_ends_the_job() -> None:
    assert isinstance(group_policy().ended(FIRST, 2, 5.0)[0], GiveUp)


def test_the_same_error_everywhere_is_blamed_on_the_script_and_not_on_records() -> None:
    decide = group_policy()
    assert isinstance(decide.ended(FIRST, 1, 5.0, Account(True, False, 5, 2, 2, "odd"))[0], StartTogether)
    (decision,) = decide.ended(FIRST, 1, 5.0, Account(True, False, 9, 3, 3, "odd"))
    assert isinstance(decision, GiveUp)
    assert "odd" in decision.reason


def crash_in_doubt(decide: RestartPolicy, slot: Slot, attempts: int, **more: Any) -> tuple[Any, ...]:
    account = Account(more.pop("has_trained", True), is_done=False, attempts=attempts, **more)
    return decide.ended(slot, 1, 1.0, account)


@pytest.mark.parametrize("has_trained", [False, True])
def test_a_trainer_in_doubt_is_restarted_while_another_has_not_crashed(has_trained: bool) -> None:
    decide = policy()
    for attempts in range(30):
        more = {
            "has_trained": has_trained,
            "raised_once": attempts,
            "raised_by": 1,
            "in_doubt": frozenset({"trainer-0"}),
        }
        (decision,) = crash_in_doubt(decide, FIRST, attempts, **more)
        assert isinstance(decision, StartAgain), decision
    (decision,) = crash_in_doubt(decide, SECOND, 31, raised_once=31, raised_by=2, in_doubt=frozenset({"trainer-1"}))
    assert isinstance(decision, GiveUp), "now every trainer has raised it"


def test_a_trainer_that_has_to_end_is_not_restarted_and_the_others_go_on() -> None:
    decide = policy()
    (decision,) = crash_in_doubt(decide, FIRST, 9, given_up=frozenset({"trainer-0"}))
    assert isinstance(decision, SlotFinished)
    assert "other trainers go on" in decision.reason
    assert decide.ended(SECOND, 0, 5.0) == (SlotFinished(SECOND), AllFinished())


def test_the_job_is_given_up_when_all_trainers_had_to_end() -> None:
    decide = policy()
    both = frozenset({"trainer-0", "trainer-1"})
    assert isinstance(crash_in_doubt(decide, FIRST, 9, given_up=both)[0], SlotFinished)
    assert isinstance(crash_in_doubt(decide, SECOND, 9, given_up=both)[0], GiveUp)


@pytest.mark.parametrize("slot", [MASTER, PSERVER])
def test_servers_that_leave_politely_count_as_ended_from_outside(slot: Slot) -> None:
    decide = policy()
    for _ in range(Limits().ended_short_runs - 1):
        (decision,) = decide.ended(slot, 0, 2.0)
        assert isinstance(decision, StartAgain)
        assert decision.after_s <= Limits().first_delay_s
    assert isinstance(decide.ended(slot, 0, 2.0)[0], GiveUp)
