"""Values lost before any checkpoint: which pservers restart, and when trainers may elect again."""

from __future__ import annotations

from flightedl.domain.recovery.reinitialization import LostValues, Reinitialize, RestartServers, next_step

PRESENT = {0: 10, 1: 20, 2: 30}


def test_nothing_is_done_while_no_pserver_lacks_values():
    assert next_step(range(3), PRESENT, {}, PRESENT, may_be_saved=False) is None


def test_pservers_with_values_are_restarted():
    step = next_step(range(3), PRESENT, {1: LostValues(20, 5)}, {0: 10, 2: 30, 1: 11}, may_be_saved=False)
    assert step == RestartServers({0: 10, 2: 30})


def test_an_excess_pserver_is_not_restarted():
    step = next_step(range(2), PRESENT, {1: LostValues(20, 5)}, {0: 10, 2: 30}, may_be_saved=False)
    assert step == RestartServers({0: 10})


def test_a_pserver_that_has_not_answered_yet_is_awaited():
    lacking = {0: LostValues(10, 5), 1: LostValues(20, 5)}
    assert next_step(range(3), PRESENT, lacking, {2: 29}, may_be_saved=False) is None


def test_the_election_ends_when_all_lack_its_values():
    lacking = {index: LostValues(generation, 5) for index, generation in PRESENT.items()}
    assert next_step(range(3), PRESENT, lacking, {0: 1, 1: 2, 2: 3}, may_be_saved=False) == Reinitialize(5, PRESENT)


def test_a_present_or_possible_checkpoint_is_awaited():
    lacking = {index: LostValues(generation, 5) for index, generation in PRESENT.items()}
    assert next_step(range(3), PRESENT, lacking, {}, may_be_saved=True) is None


def test_reports_of_past_processes_and_past_elections_do_not_count():
    past_process = {0: LostValues(9, 5), 1: LostValues(20, 5), 2: LostValues(30, 5)}
    assert next_step(range(3), PRESENT, past_process, {}, may_be_saved=False) is None
    past_election = {0: LostValues(10, 4), 1: LostValues(20, 5), 2: LostValues(30, 5)}
    assert next_step(range(3), PRESENT, past_election, {}, may_be_saved=False) is None
    assert next_step(range(3), PRESENT, past_election, {0: 10}, may_be_saved=False) == RestartServers({0: 10})


def test_a_late_report_of_a_pserver_that_has_values_is_ignored():
    lacking = {index: LostValues(generation, 5) for index, generation in PRESENT.items()}
    assert next_step(range(3), PRESENT, lacking, PRESENT, may_be_saved=False) is None


def test_a_pserver_without_blocks_is_neither_restarted_nor_awaited():
    lacking = {0: LostValues(10, 5)}
    assert next_step({0, 2}, PRESENT, lacking, {1: 20, 2: 30}, may_be_saved=False) == RestartServers({2: 30})
    lacking[2] = LostValues(30, 5)
    assert next_step({0, 2}, PRESENT, lacking, {1: 20}, may_be_saved=False) == Reinitialize(5, {0: 10, 2: 30})
