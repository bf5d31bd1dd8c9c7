"""Tasks that a trainer holds, requests and reports: each rule, without a thread or a clock."""

from __future__ import annotations

import math

import pytest
from msgspec import structs

from flightedl.domain.trainer.feed import Ask, AssignedTask, Feed, Over, Reports, Rest, WaitForEvent
from flightedl.errors import FencedError, JobFailedError, NotReadyError, UnregisteredError
from flightedl.messages.tasks import MOMENT_S, Assignment, ReturnedTask, TasksReply


def assignment(attempt: int, batches: int = 2) -> Assignment:
    return Assignment(
        epoch=0,
        position=attempt,
        task=attempt,
        attempt=attempt,
        first_batch=0,
        end_batch=batches,
        batch_count=batches,
        seed=None,
    )


def reply(*attempts: int, outcome: str = "", lost: tuple[int, ...] = (), retry_after_s: float = 0.0) -> TasksReply:
    return TasksReply(
        assignments=[assignment(attempt) for attempt in attempts],
        outcome=outcome or ("given" if attempts else "none_now"),
        retry_after_s=retry_after_s,
        lost=[ReturnedTask(epoch=0, position=0, attempt=attempt) for attempt in lost],
    )


def asks(feed: Feed, now: float = 0.0) -> Ask:
    step = feed.next_step(now)
    feed.check()
    assert isinstance(step, Ask)
    return step


def told(feed: Feed, answer: TasksReply, now: float = 0.0) -> None:
    feed.answered(asks(feed, now), answer, now)
    feed.check()


def begun(feed: Feed) -> AssignedTask:
    task = feed.begin()
    feed.check()
    assert task is not None
    return task


def attempts(feed: Feed) -> list[int]:
    return [task.assignment.attempt for task in feed.held]


def returned(feed: Feed) -> list[int]:
    return [report.attempt for report in feed.reports.returned]


def test_it_requests_two_tasks_and_waits_only_while_it_has_none() -> None:
    feed = Feed()
    first = asks(feed)
    assert (first.want, first.wait_s, first.holding) == (2, 2.0, ())
    feed.answered(first, reply(1), 0.0)
    second = asks(feed)
    assert (second.want, second.wait_s, second.holding) == (1, 0.0, (1,))


def test_the_report_of_its_last_task_may_wait_for_a_moment_and_then_longer() -> None:
    feed = Feed()
    told(feed, reply(1))
    feed.finished(begun(feed), [], 1.0)
    last = asks(feed, 1.0)
    assert (last.wait_s, len(last.reports.finished)) == (MOMENT_S, 1)
    feed.answered(last, reply(retry_after_s=1.0), 1.0 + MOMENT_S)
    assert asks(feed, 1.0 + MOMENT_S).wait_s == 2.0, "at once, because the master has delayed the reply"


def test_a_master_that_does_not_hold_a_call_is_asked_again_at_its_time() -> None:
    feed = Feed()
    feed.answered(asks(feed), reply(retry_after_s=0.5), 0.1)
    assert feed.next_step(0.1) == WaitForEvent(0.6)


def test_a_trainer_that_got_too_few_tasks_asks_again_with_its_next_report() -> None:
    feed = Feed(5.0)
    told(feed, reply(1, 2))
    feed.finished(begun(feed), [], 1.0)
    ask = asks(feed, 1.0)
    assert ask.want == 7
    feed.answered(ask, reply(3, retry_after_s=1.0), 1.0)
    assert feed.next_step(1.0) == WaitForEvent(2.0)
    feed.finished(begun(feed), [], 1.5)
    assert len(asks(feed, 1.5).reports.finished) == 1


def ahead(*tasks: int) -> TasksReply:
    promised = [structs.replace(assignment(task), attempt=0, epoch=1) for task in tasks]
    return structs.replace(reply(retry_after_s=1.0), ahead=promised)


def test_promised_tasks_may_be_read_once_and_are_never_started() -> None:
    feed = Feed()
    told(feed, reply(1))
    task = begun(feed)
    assert not feed.has_news
    feed.answered(asks(feed, 1.0), ahead(7, 8), 1.0)
    assert feed.has_news
    assert feed.begin() is None
    assert attempts(feed) == [1]
    read = [feed.begin_ahead(), feed.begin_ahead(), feed.begin_ahead()]
    assert [None if each is None else each.task for each in read] == [7, 8, None]
    feed.finished(task, [], 2.0)
    feed.answered(asks(feed, 2.0), ahead(7, 8), 2.0)
    assert feed.begin_ahead() is None, "the same promise again"
    assert not feed.has_news


def test_assigned_tasks_precede_promised_ones() -> None:
    feed = Feed()
    told(feed, ahead(7))
    feed.answered(asks(feed, 3.0), reply(2), 3.0)
    assert feed.begin_ahead() is None
    assert begun(feed).assignment.attempt == 2
    assert feed.begin_ahead() is not None


def test_a_leaving_trainer_reads_nothing_ahead() -> None:
    feed = Feed()
    told(feed, ahead(7))
    feed.close()
    assert feed.begin_ahead() is None


def test_a_request_names_the_current_registration() -> None:
    feed = Feed()
    told(feed, reply(1, 2))
    feed.finished(begun(feed), [7], 1.0)
    ticket = asks(feed).ticket("t", 9, "e")
    assert (ticket.trainer, ticket.generation, ticket.evaluation) == ("t", 9, "e")
    assert [report.attempt for report in ticket.finished] == [1]
    assert (ticket.holding, ticket.want, ticket.wait_s) == ([2], 1, 0.0)


def test_at_most_two_tasks_are_in_progress_at_once() -> None:
    feed = Feed(1000.0)
    told(feed, reply(1, 2))
    feed.finished(begun(feed), [], 1.0)
    told(feed, reply(3, 4, 5), 1.0)
    second, _ = begun(feed), begun(feed)
    assert not feed.has_news
    assert feed.begin() is None
    feed.finished(second, [], 2.0)
    assert feed.has_news
    assert begun(feed).assignment.attempt == 4


def test_it_holds_enough_tasks_to_survive_the_absence_of_the_master() -> None:
    feed = Feed(3.5)
    told(feed, reply(1, 2))
    feed.finished(begun(feed), [], 0.5)
    assert asks(feed, 0.5).want == 10, "7 of 0.5 s each, and half as many more, of which one is held"


def test_a_report_is_kept_until_it_is_answered() -> None:
    feed = Feed()
    told(feed, reply(1, 2))
    feed.finished(begun(feed), [7], 1.0, {"loss": (1.0, 2.0)})
    lost = asks(feed, 1.0)
    feed.ask_failed(NotReadyError("no master"), 1.0)
    assert feed.trouble == "no master"
    assert feed.next_step(1.1) == WaitForEvent(1.2)
    again = asks(feed, 1.2)
    assert again.reports == lost.reports
    feed.answered(again, reply(), 1.2)
    assert (feed.trouble, feed.reports) == ("", Reports())


def test_reports_during_a_request_go_with_the_next_one() -> None:
    feed = Feed()
    told(feed, reply(1, 2))
    first, second = begun(feed), begun(feed)
    feed.finished(first, [], 1.0)
    ask = asks(feed, 1.0)
    feed.failed(second, "broken", 1, 1.0, "a.py:3")
    feed.answered(ask, reply(), 1.0)
    (failed,) = asks(feed, 1.0).reports.failed
    assert (failed.attempt, failed.error, failed.batch, failed.place) == (2, "broken", 1, "a.py:3")
    assert asks(feed, 1.0).reports.finished == ()


@pytest.mark.parametrize("error", [UnregisteredError("again"), NotReadyError("wait")])
def test_it_asks_again_after_temporary_errors(error: Exception) -> None:
    feed = Feed()
    asks(feed)
    feed.ask_failed(error, 0.0)
    assert feed.error is None
    assert isinstance(feed.next_step(0.2), Ask)


@pytest.mark.parametrize("error", [JobFailedError("over"), FencedError("no"), ZeroDivisionError("a bug")])
def test_it_ends_with_a_permanent_error_when_all_tasks_are_started(error: Exception) -> None:
    feed = Feed()
    told(feed, reply(1))
    asks(feed)
    feed.ask_failed(error, 0.0)
    assert feed.error is None
    assert feed.next_step(0.0) == Over()
    begun(feed)
    assert feed.error is error
    assert feed.has_news


def test_revoked_tasks_are_neither_started_nor_reported() -> None:
    feed = Feed()
    told(feed, reply(1, 2))
    first = begun(feed)
    feed.hand_back(first, 0.0)
    told(feed, reply(lost=(2,)))
    assert attempts(feed) == []
    assert feed.begin() is None
    feed.finished(first, [], 1.0)
    assert feed.reports == Reports()


def test_a_repeated_attempt_is_another_reading() -> None:
    feed = Feed()
    told(feed, reply(1))
    first = begun(feed)
    told(feed, reply(1))
    second = begun(feed)
    assert not feed.is_held(first)
    assert feed.is_held(second)
    feed.finished(first, [1], 1.0)
    feed.failed(first, "no", None, 1.0)
    feed.hand_back(first, 1.0)
    assert not feed.reports
    feed.finished(second, [2], 1.0)
    assert [report.pservers for report in feed.reports.finished] == [[2]]


def test_a_task_returned_since_the_request_is_not_held_again() -> None:
    """After etcd went back, a new master may use an attempt's number a second time."""
    feed = Feed()
    told(feed, reply(1, 2))
    ask = Ask(feed.reports, (1, 2), 1, 0.0, 0)
    feed.hand_back(begun(feed), 1.0)
    feed.answered(ask, reply(1, 3), 1.0)
    feed.check()
    assert attempts(feed) == [2, 3]
    assert returned(feed) == [1]


def test_a_repeated_task_that_was_not_started_is_started_once() -> None:
    feed = Feed()
    told(feed, reply(1))
    told(feed, reply(1))
    begun(feed)
    assert feed.begin() is None


def test_a_task_returned_before_its_start_is_not_started() -> None:
    feed = Feed()
    told(feed, reply(1, 2))
    feed.hand_back(feed.held[0], 0.0)
    assert begun(feed).assignment.attempt == 2


def test_other_tasks_are_held_when_one_is_returned() -> None:
    feed = Feed()
    told(feed, reply(1, 2, 3))
    feed.hand_back(begun(feed), 0.0)
    assert (attempts(feed), returned(feed)) == ([2, 3], [1])
    assert begun(feed).assignment.attempt == 2


def test_another_registration_holds_no_tasks_of_the_previous_one() -> None:
    feed = Feed()
    told(feed, reply(1))
    ask = asks(feed)
    feed.registered_again()
    assert (attempts(feed), returned(feed)) == ([], [1])
    feed.answered(ask, reply(2), 0.0)
    assert (attempts(feed), returned(feed)) == ([], [1, 2])
    told(feed, reply(3))
    assert attempts(feed) == [3]


def test_a_loop_that_is_left_keeps_its_task_for_a_second() -> None:
    feed = Feed()
    told(feed, reply(1, 2))
    kept = begun(feed)
    feed.retire(kept, 5.0)
    assert (attempts(feed), returned(feed)) == ([1], [2])
    told(feed, reply(), 5.0)
    assert feed.next_step(5.0) == WaitForEvent(6.0)
    assert [report.attempt for report in asks(feed, 6.0).reports.returned] == [1]
    told(feed, reply(), 6.0)
    assert feed.next_step(6.0) == Over()


def test_a_loop_that_is_left_may_still_report_its_task() -> None:
    feed = Feed()
    told(feed, reply(1))
    kept = begun(feed)
    feed.retire(kept, 0.0)
    feed.failed(kept, "broken", 0, 0.5)
    assert [report.attempt for report in asks(feed, 0.5).reports.failed] == [1]
    told(feed, reply(), 0.5)
    assert feed.next_step(0.5) == Over()


def test_tasks_that_arrive_after_closing_are_returned() -> None:
    feed = Feed()
    ask = asks(feed)
    feed.close()
    assert feed.has_news
    feed.answered(ask, reply(1, 2), 0.0)
    assert (attempts(feed), returned(feed)) == ([], [1, 2])
    last = asks(feed)
    assert last.want == 0
    feed.ask_failed(NotReadyError("no master"), 0.0)
    assert feed.next_step(0.0) == Over(), "a feed that closes tries only once"


def test_nothing_is_requested_when_the_job_is_done() -> None:
    feed = Feed()
    told(feed, reply(1))
    told(feed, reply(outcome="epochs_done"))
    assert feed.is_done
    assert feed.held == ()
    assert feed.has_news
    assert isinstance(feed.next_step(0.0), WaitForEvent)


def test_it_waits_for_the_time_given_by_the_master() -> None:
    feed = Feed()
    told(feed, reply(retry_after_s=0.5), 1.0)
    assert feed.next_step(1.4) == WaitForEvent(1.5)
    assert isinstance(feed.next_step(1.5), Ask)


def test_the_connection_to_the_master_is_released_once_after_a_silence() -> None:
    feed = Feed()
    told(feed, reply(1, 2), 1.0)
    assert feed.next_step(1.0) == WaitForEvent(2.0)
    assert feed.next_step(2.0) == Rest()
    assert feed.next_step(2.0) == WaitForEvent(math.inf)


def test_a_feed_without_a_reply_has_no_news_and_is_not_done() -> None:
    feed = Feed()
    assert not feed.has_news
    assert not feed.is_done


def test_a_report_does_not_wait_for_the_time_to_ask_again() -> None:
    feed = Feed()
    told(feed, reply(1))
    told(feed, reply(retry_after_s=5.0))
    assert isinstance(feed.next_step(1.0), Rest | WaitForEvent)
    feed.finished(begun(feed), [], 1.0)
    assert [report.attempt for report in asks(feed, 1.0).reports.finished] == [1]


def test_the_pace_counts_from_the_assignment() -> None:
    feed = Feed(3.5)
    told(feed, reply(1, 2), 100.0)
    feed.finished(begun(feed), [], 100.5)
    assert asks(feed, 100.5).want == 10


@pytest.mark.parametrize(("lost", "want"), [(2, 63), (3, 11)])
def test_the_pace_counts_from_the_time_at_which_a_task_became_the_oldest(lost: int, want: int) -> None:
    """Of two tasks, one is revoked after 10 s, and the other one is finished 2 s later."""
    feed = Feed(42.0)
    told(feed, reply(1, 2, 3))
    feed.finished(begun(feed), [], 0.0)
    feed.answered(asks(feed), reply(lost=(lost,)), 10.0)
    feed.finished(begun(feed), [], 12.0)
    assert asks(feed, 12.0).want == want, "1.5 times the number that lasts for 42 s, of 1 or 6 s each"


def test_done_batches_are_reported_at_once_and_then_not_too_often() -> None:
    feed = Feed()
    told(feed, reply(1, 2))
    task = begun(feed)
    assert feed.batch_done(task, 0)
    ask = asks(feed, 1.0)
    assert (ask.done, ask.want) == (((1, ((0, 1),)),), 0)
    assert feed.batch_done(task, 1), "while the request is in flight"
    assert not feed.batch_done(task, 1)
    feed.answered(ask, reply(retry_after_s=1.0), 1.01)
    assert feed.next_step(1.01) == WaitForEvent(1.2), "whenever it may ask for tasks"
    assert feed.reported_at == 1.0
    assert asks(feed, 1.2).done == ((1, ((0, 2),)),)
    (ticket,) = Ask(Reports(), (), 0, 0.0, 0, ask.done).ticket("a", 1).done
    assert (ticket.attempt, ticket.stretches) == (1, [(0, 1)])


def test_done_batches_that_the_master_has_not_confirmed_are_reported_again() -> None:
    feed = Feed()
    told(feed, reply(1, 2))
    feed.batch_done(begun(feed), 0)
    assert asks(feed, 1.0).done
    feed.ask_failed(NotReadyError(""), 1.0)
    assert feed.next_step(1.1) == WaitForEvent(1.2)
    assert asks(feed, 1.2).done
    assert feed.reported_at == -math.inf


def test_a_slow_master_gets_fewer_reports_of_done_batches() -> None:
    feed = Feed()
    told(feed, reply(1))
    task = begun(feed)
    feed.batch_done(task, 0)
    feed.answered(asks(feed, 1.0), reply(2), 1.125)
    feed.batch_done(task, 1)
    assert feed.next_step(1.125) == WaitForEvent(1.625)
    feed.answered(asks(feed, 1.625), reply(), 9.0)
    feed.batch_done(task, 2)
    assert feed.next_step(9.0) == WaitForEvent(10.0), "and releases the connection to the master"
    assert isinstance(feed.next_step(10.0), Rest)
    assert feed.next_step(10.1) == WaitForEvent(11.0)
    assert not feed.batch_done(task, 2)
    assert feed.batch_done(task, 2, is_urgent=True)
    assert asks(feed, 10.2).done


def test_done_batches_are_reported_together_with_returned_tasks() -> None:
    feed = Feed()
    told(feed, reply(1, 2))
    feed.batch_done(begun(feed), 0)
    feed.close()
    ask = asks(feed, 1.0)
    assert (len(ask.reports.returned), ask.done) == (2, ((1, ((0, 1),)),))
    feed.answered(ask, reply(), 1.0)
    feed.check()
    assert isinstance(feed.next_step(1.0), Over)


def test_done_batches_of_a_task_of_another_trainer_are_not_reported() -> None:
    feed = Feed()
    told(feed, reply(1, 2))
    one, two = begun(feed), begun(feed)
    feed.batch_done(one, 0)
    feed.answered(asks(feed, 1.0), reply(lost=(1,)), 1.0)
    feed.check()
    assert not feed.batch_done(one, 1)
    feed.batch_done(two, 0)
    feed.registered_again()
    assert asks(feed, 2.0).done == ()
