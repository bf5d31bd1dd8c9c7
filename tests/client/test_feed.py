"""The feed of tasks: tasks that are held, reported, lost and returned."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.client.data.feed import TaskFeed
from flightedl.domain.queue.fair_share import HOLDING_FLOOR
from flightedl.domain.trainer.feed import Ask, AssignedTask, Reports
from flightedl.errors import JobFailedError, UnavailableError
from flightedl.messages.tasks import Assignment, FinishedTask, ReturnedTask, TasksReply


def task_of(number: int) -> Assignment:
    return Assignment(
        epoch=0,
        position=number,
        task=number,
        attempt=100 + number,
        first_batch=0,
        end_batch=2,
        batch_count=2,
        seed=None,
    )


class Queue:
    """In-memory master that assigns a number of tasks and records reports."""

    def __init__(self, count: int) -> None:
        self.todo = [task_of(n) for n in range(count)]
        self.finished: list[int] = []
        self.reports: list[FinishedTask] = []
        self.returned: list[int] = []
        self.failed: list[tuple[int, str]] = []
        self.lose: list[int] = []
        self.errors: list[Exception] = []
        self.rests = 0
        self.changed = threading.Condition()

    def fetch(self, ask: Ask) -> TasksReply:
        reports, holding, want = ask.reports, ask.holding, ask.want
        with self.changed:
            if self.errors:
                raise self.errors.pop(0)
            self.finished += [report.attempt for report in reports.finished]
            self.reports += reports.finished
            self.returned += [report.attempt for report in reports.returned]
            self.failed += [(report.attempt, report.error) for report in reports.failed]
            given, self.todo = self.todo[:want], self.todo[want:]
            lost = [ReturnedTask(epoch=0, position=0, attempt=attempt) for attempt in holding if attempt in self.lose]
            is_done = not self.todo and not given and not holding
            outcome = "given" if given else "epochs_done" if is_done else "none_now"
            self.changed.notify_all()
            return TasksReply(assignments=given, outcome=outcome, lost=lost, retry_after_s=0.01)

    def rest(self) -> None:
        with self.changed:
            self.rests += 1
            self.changed.notify_all()

    def until(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, 10.0)


@pytest.fixture
def feeds() -> Iterator[Callable[[Queue], TaskFeed]]:
    made: list[TaskFeed] = []

    def make(queue: Queue) -> TaskFeed:
        made.append(TaskFeed(queue.fetch, queue.rest, SystemClock()))
        return made[-1]

    yield make
    for feed in made:
        feed.close(5.0)


def attempts(feed: TaskFeed) -> set[int]:
    return {task.assignment.attempt for task in feed._feed.held}


def taken_from(feed: TaskFeed) -> AssignedTask:
    task = feed.next(5.0)
    assert task is not None
    return task


def test_the_feed_holds_the_current_task_and_the_next_one(feeds: Callable[[Queue], TaskFeed]) -> None:
    queue = Queue(5)
    feed = feeds(queue)
    first = taken_from(feed)
    assert len(queue.todo) == 5 - HOLDING_FLOOR
    feed.finished(first, [1, 2])
    queue.until(lambda: queue.finished == [100] and len(queue.todo) == 2)


def test_the_feed_delivers_all_tasks_and_then_is_done(feeds: Callable[[Queue], TaskFeed]) -> None:
    queue = Queue(4)
    feed = feeds(queue)
    seen = []
    while not feed.is_done:
        if (task := feed.next(0.5)) is not None:
            seen.append(task.assignment.task)
            feed.finished(task, [])
    assert seen == [0, 1, 2, 3]
    assert queue.finished == [100, 101, 102, 103]


def test_a_report_survives_an_unreachable_master(feeds: Callable[[Queue], TaskFeed]) -> None:
    queue = Queue(2)
    feed = feeds(queue)
    task = taken_from(feed)
    with queue.changed:
        queue.errors = [UnavailableError("gone"), UnavailableError("still gone")]
    feed.finished(task, [])
    queue.until(lambda: queue.finished == [100])


def test_a_permanent_error_reaches_the_caller(feeds: Callable[[Queue], TaskFeed]) -> None:
    queue = Queue(2)
    queue.errors = [JobFailedError("too much has failed")]
    feed = feeds(queue)
    with pytest.raises(JobFailedError, match="too much"):
        feed.next(5.0)


def test_the_feed_drops_tasks_that_the_master_revoked(feeds: Callable[[Queue], TaskFeed]) -> None:
    queue = Queue(2)
    queue.lose = [101]
    feed = feeds(queue)
    first, second = feed.next(5.0), feed.next(5.0)
    assert first is not None
    assert second is not None
    feed.finished(first, [])
    queue.until(lambda: queue.finished == [100])
    with feed._changed:
        assert feed._changed.wait_for(lambda: not feed._feed.is_held(second), 5.0)
    feed.finished(second, [])
    assert queue.finished == [100]


def test_closing_returns_all_held_tasks() -> None:
    queue = Queue(5)
    feed = TaskFeed(queue.fetch, queue.rest, SystemClock())
    assert feed.next(5.0) is not None
    queue.until(lambda: len(queue.todo) == 3)
    feed.close(5.0)
    assert sorted(queue.returned) == [100, 101]


def test_a_failure_is_reported_with_its_error(feeds: Callable[[Queue], TaskFeed]) -> None:
    queue = Queue(1)
    feed = feeds(queue)
    task = taken_from(feed)
    feed.failed(task, "cannot read", 1)
    queue.until(lambda: queue.failed == [(100, "cannot read")])


def test_a_loop_that_was_left_keeps_its_task_only_briefly(
    feeds: Callable[[Queue], TaskFeed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flightedl.domain.trainer.feed._KEPT_S", 0.2)
    master = Queue(2)
    feed = feeds(master)
    first = taken_from(feed)
    master.until(lambda: not master.todo)
    feed.retire(first)
    master.until(lambda: len(master.returned) == 2)
    assert master.returned == [101, 100]


def test_a_loop_left_by_an_exception_reports_its_task(feeds: Callable[[Queue], TaskFeed]) -> None:
    master = Queue(1)
    feed = feeds(master)
    first = taken_from(feed)
    feed.retire(first)
    feed.failed(first, "broken", 1)
    feed.close(5.0)
    assert (master.failed, master.returned) == ([(100, "broken")], [])


def test_an_idle_connection_to_the_master_is_released(
    feeds: Callable[[Queue], TaskFeed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flightedl.domain.trainer.feed._OPEN_S", 0.05)
    master = Queue(3)
    feed = feeds(master)
    first = taken_from(feed)
    master.until(lambda: master.rests > 0)
    before = master.rests
    feed.finished(first, [])
    master.until(lambda: master.finished == [100] and master.rests > before)
    before = master.rests
    feed.close(5.0)
    assert master.rests > before


class Ticks:
    """A clock that only tests advance."""

    def __init__(self) -> None:
        self.instant_s = 0.0

    def now(self) -> float:
        return self.instant_s


def test_the_feed_holds_enough_tasks_for_an_absence_of_the_master() -> None:
    """At 0.5 s per task, 3.5 s without a master require 7 tasks. The feed never holds fewer before a request."""
    master, clock = Queue(200), Ticks()
    feed = TaskFeed(master.fetch, master.rest, clock, 3.5)  # type: ignore[arg-type]
    try:
        for number in range(30):
            task = taken_from(feed)
            clock.instant_s += 0.5
            feed.finished(task, [])
            wanted = {100 + n for n in range(number + 1)}
            master.until(lambda wanted=wanted: wanted <= set(master.finished))
            with feed._changed:
                assert feed._changed.wait_for(lambda: not feed._feed.reports, 5.0)
                assert len(feed._feed.held) <= 11
                assert number < 3 or len(feed._feed.held) >= 7
    finally:
        feed.close(5.0)


def test_only_the_next_task_is_started_early() -> None:
    master, clock = Queue(20), Ticks()
    feed = TaskFeed(master.fetch, master.rest, clock, 1000.0)  # type: ignore[arg-type]
    try:
        first = taken_from(feed)
        feed.finished(first, [])
        master.until(lambda: not master.todo)
        second, third = feed.next(5.0), feed.next(5.0)
        assert second is not None
        assert third is not None
        assert feed.next(0.0) is None, "the second task is not reported"
        feed.finished(second, [])
        fourth = feed.next(0.0)
        assert fourth is not None
        assert fourth.assignment.attempt == 103
    finally:
        feed.close(5.0)
    assert sorted(master.returned) == list(range(102, 120)), "all held tasks, started or not"


def test_an_attempt_assigned_twice_is_read_again(feeds: Callable[[Queue], TaskFeed]) -> None:
    """The master assigns an attempt again if the trainer's list lacks it; the first reading does not count."""
    master = Queue(1)
    feed = feeds(master)
    first = taken_from(feed)
    with master.changed:
        master.todo = [task_of(0)]
    second = taken_from(feed)
    assert second.assignment.attempt == first.assignment.attempt
    assert not feed.is_held(first)
    assert feed.is_held(second)
    feed.finished(first, [1])
    feed.finished(second, [2])
    master.until(lambda: bool(master.reports))
    feed.close(5.0)
    assert [report.pservers for report in master.reports] == [[2]]


def test_only_abandoned_tasks_are_returned(feeds: Callable[[Queue], TaskFeed]) -> None:
    master = Queue(2)
    feed = feeds(master)
    first, second = taken_from(feed), taken_from(feed)
    feed.hand_back(first)
    master.until(lambda: master.returned == [100])
    assert not feed.is_held(first)
    assert feed.is_held(second)


def test_registering_again_returns_all_tasks_and_ignores_answers_in_flight() -> None:
    master = Queue(3)
    feed = TaskFeed(master.fetch, master.rest, SystemClock())
    try:
        first = taken_from(feed)
        master.until(lambda: len(master.todo) == 1)
        with master.changed:
            # The thread requests more tasks, and receives an answer from before the new registration.
            feed.finished(first, [])
            master.changed.wait(0.2)
            feed.registered_again()
        master.until(lambda: sorted(master.returned) == [101, 102])
        assert master.finished == [100]
        with feed._changed:
            assert not feed._feed.held
    finally:
        feed.close(5.0)


def test_reports_made_during_a_request_do_not_count_as_sent() -> None:
    reports = [ReturnedTask(epoch=0, position=number, attempt=number) for number in range(3)]
    sent = Reports(returned=(reports[0], reports[1]))
    now = Reports(returned=(reports[1], reports[2]))
    assert now.without(sent) == Reports(returned=(reports[2],))


def test_an_unexpected_error_reaches_the_caller(feeds: Callable[[Queue], TaskFeed]) -> None:
    master = Queue(1)
    master.errors = [ZeroDivisionError("a bug")]
    with pytest.raises(ZeroDivisionError, match="a bug"):
        feeds(master).next(5.0)


def test_revoked_tasks_are_not_started() -> None:
    master, clock = Queue(10), Ticks()
    feed = TaskFeed(master.fetch, master.rest, clock, 1000.0)  # type: ignore[arg-type]
    try:
        first = taken_from(feed)
        feed.finished(first, [])
        master.until(lambda: not master.todo)
        with master.changed:
            master.lose = [102, 103, 104]
        second = taken_from(feed)
        feed.finished(second, [])
        with feed._changed:
            assert feed._changed.wait_for(lambda: 104 not in attempts(feed), 5.0)
        third = taken_from(feed)
        assert third.assignment.attempt == 105
    finally:
        feed.close(5.0)
