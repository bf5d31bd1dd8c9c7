"""When values were lost before any checkpoint: who goes back, and when trainers may elect again."""

from __future__ import annotations

from flightedl.domain.recovery.reinitialization import LostValues, Reinitialize, RestartServers, next_step

PRESENT = {0: 10, 1: 20, 2: 30}


def test_nothing_is_done_while_nobody_lacks_anything():
    assert next_step(3, PRESENT, {}, PRESENT, may_be_saved=False) is None


def test_who_still_has_values_is_sent_back():
    step = next_step(3, PRESENT, {1: LostValues(20, 5)}, {0: 10, 2: 30, 1: 11}, may_be_saved=False)
    assert step == RestartServers({0: 10, 2: 30})


def test_a_pserver_beyond_the_jobs_count_is_not_sent_back():
    step = next_step(2, PRESENT, {1: LostValues(20, 5)}, {0: 10, 2: 30}, may_be_saved=False)
    assert step == RestartServers({0: 10})


def test_who_has_not_said_yet_what_it_has_is_waited_for():
    lacking = {0: LostValues(10, 5), 1: LostValues(20, 5)}
    assert next_step(3, PRESENT, lacking, {2: 29}, may_be_saved=False) is None


def test_the_election_ends_when_all_lack_its_values():
    lacking = {index: LostValues(generation, 5) for index, generation in PRESENT.items()}
    assert next_step(3, PRESENT, lacking, {0: 1, 1: 2, 2: 3}, may_be_saved=False) == Reinitialize(5, PRESENT)


def test_a_checkpoint_that_is_there_or_may_come_is_waited_for():
    lacking = {index: LostValues(generation, 5) for index, generation in PRESENT.items()}
    assert next_step(3, PRESENT, lacking, {}, may_be_saved=True) is None


def test_words_of_past_processes_and_of_past_elections_do_not_count():
    past_process = {0: LostValues(9, 5), 1: LostValues(20, 5), 2: LostValues(30, 5)}
    assert next_step(3, PRESENT, past_process, {}, may_be_saved=False) is None
    past_election = {0: LostValues(10, 4), 1: LostValues(20, 5), 2: LostValues(30, 5)}
    assert next_step(3, PRESENT, past_election, {}, may_be_saved=False) is None
    assert next_step(3, PRESENT, past_election, {0: 10}, may_be_saved=False) == RestartServers({0: 10})


def test_a_late_word_of_who_has_values_by_now_begins_nothing():
    lacking = {index: LostValues(generation, 5) for index, generation in PRESENT.items()}
    assert next_step(3, PRESENT, lacking, PRESENT, may_be_saved=False) is None
