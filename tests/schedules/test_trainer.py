"""Every order in which a trainer's threads fetch tasks, report progress and do work in the background."""

from __future__ import annotations

from typing import Any

import pytest

from flightedl.client import progress
from flightedl.client.data import feed
from flightedl.client.data.feed import TaskFeed
from flightedl.client.progress import ProgressReporter
from flightedl.domain.trainer.feed import Ask
from flightedl.errors import FlightedlError, UnavailableError
from flightedl.messages.base import decode, encode
from flightedl.messages.tasks import Assignment, LogReply, LogRequest, ReturnedTask, TasksReply
from flightedl.process import background
from flightedl.process.background import Background
from tests.support.planting import Planted, bug, drops, rewrites, swaps

from .scheduler import Run, VirtualClock, explore, finds

ANSWERED = "self._feed.answered(ask, reply, self._clock.now())"
FEED, FLUSH = "client.data.feed:TaskFeed", "client.progress:ProgressReporter._flush"


class Master:
    """A master that assigns three tasks, each once, and loses the reply to request number ``loses``."""

    def __init__(self, loses: int = 0) -> None:
        self.loses = loses
        self.todo = [
            Assignment(
                epoch=0, position=n, task=n, attempt=100 + n, first_batch=0, end_batch=2, batch_count=2, seed=None
            )
            for n in range(3)
        ]
        self.held: set[int] = set()
        self.finished: list[int] = []
        self.requests = 0

    def fetch(self, ask: Ask) -> TasksReply:
        reports = ask.reports
        self.requests += 1
        for report in reports.finished:
            if report.attempt in self.held:
                self.held.remove(report.attempt)
                self.finished.append(report.attempt)
        for returned in reports.returned:
            self.held.discard(returned.attempt)
        if self.requests == self.loses:
            raise UnavailableError("the reply was lost")
        given, self.todo = self.todo[: ask.want], self.todo[ask.want :]
        self.held |= {each.attempt for each in given}
        lost = [ReturnedTask(epoch=0, position=0, attempt=a) for a in ask.holding if a not in self.held]
        is_done = not self.todo and not self.held
        outcome = "given" if given else "epochs_done" if is_done else "none_now"
        return TasksReply(assignments=given, outcome=outcome, lost=lost, retry_after_s=0.01)


def feeding(run: Run) -> None:
    """Every task is handed out once and reported once, and no thread sleeps while it could continue."""
    master = Master(loses=2)
    clock: Any = VirtualClock()
    tasks = TaskFeed(master.fetch, lambda: None, clock)
    worked: list[int] = []

    def work() -> None:
        while not tasks.is_done:
            task = tasks.next(5.0)
            if task is not None:
                worked.append(task.assignment.attempt)
                tasks.finished(task, [])

    run.threads(work)
    tasks.close(5.0)
    assert worked == master.finished == [100, 101, 102]
    assert run.now < 0.5, "a wake-up was lost"


def closing(run: Run) -> None:
    """A feed that is closed while a task is finished reports or returns what it holds, and ends."""
    master = Master()
    clock: Any = VirtualClock()
    tasks = TaskFeed(master.fetch, lambda: None, clock)
    task = tasks.next(5.0)
    assert task is not None
    run.threads(lambda: tasks.finished(task, []), lambda: tasks.close(5.0))
    assert not tasks._thread.is_alive()
    assert master.held <= {101, 102}
    assert run.now == 0.0, "a wake-up was lost"


def reporting(run: Run) -> None:
    """The reports add up to all that was counted, even if one of them is lost."""
    sent: list[LogRequest] = []

    def send(body: bytes) -> bytes:
        run.point()
        if not failed and not is_over:
            failed.append(True)
            raise UnavailableError("no master")
        sent.append(decode(body, LogRequest))
        run.point()
        return encode(LogReply())

    failed: list[bool] = []
    is_over: list[bool] = []
    reporter = ProgressReporter(send, lambda: ("t", 1), lambda: None, VirtualClock().now)

    def train() -> None:
        for number in range(2):
            reporter.metrics({"loss": float(number)}, 1.0)
            reporter.batch(10)
            reporter.skipped(1)
        is_over.append(True)

    run.threads(train)
    reporter.close()
    assert sum(each.records for each in sent) == 20
    assert sum(each.batches for each in sent) == 2
    assert sum(each.skipped_records for each in sent) == 2
    weights = [each.metrics.get("loss", (0.0, 0.0)) for each in sent]
    assert (sum(total for total, _ in weights), sum(weight for _, weight in weights)) == (1.0, 2.0)


def working(run: Run) -> None:
    """The end is reported before a waiter returns, and every waiter gets the result."""
    ends: list[int | FlightedlError] = []
    work = Background("work", lambda: 7, ends.append)

    def wait() -> None:
        assert work.result(5.0) == 7
        assert ends == [7], "a waiter returned before the end was reported"
        assert work.error is None

    run.threads(wait, wait)
    assert run.now == 0.0


@pytest.fixture(autouse=True)
def cheap_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress.machine, "host_facts", dict)


PROGRAMS: dict[str, tuple[Any, Any]] = {
    "feeding": (feeding, feed),
    "closing": (closing, feed),
    "reporting": (reporting, progress),
    "working": (working, background),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_background_work_loses_nothing(name: str) -> None:
    program, module = PROGRAMS[name]
    assert explore(program, [module], early_timeouts=program is reporting).is_complete


@pytest.mark.parametrize(
    ("name", "flaw"),
    [
        (
            "feeding",
            bug(
                "a new task wakes nobody",
                drops(
                    f"{FEED}._run",
                    f"{ANSWERED}\n                    self._changed.notify_all()",
                ),
            ),
        ),
        ("closing", bug("the end wakes nobody", drops(f"{FEED}.close", "self._changed.notify_all()"))),
        ("feeding", bug("a finished task wakes nobody", drops(f"{FEED}.finished", "self._changed.notify_all()"))),
        (
            "reporting",
            bug(
                "what was counted during a report counts as reported",
                swaps(FLUSH, "self._sent = totals", "self._sent = replace(self._totals)"),
            ),
        ),
        (
            "reporting",
            bug(
                "metrics of a lost report are lost",
                swaps(FLUSH, "in metrics.items():", "in dict[str, tuple[float, float]]().items():"),
            ),
        ),
        (
            "reporting",
            bug(
                "metrics are taken without the lock",
                rewrites(
                    FLUSH,
                    "with self._lock:\n            metrics, self._metrics = self._metrics, {}",
                    """
                    metrics = dict(self._metrics)
                    self._metrics = {}
                    """,
                ),
            ),
        ),
        (
            "working",
            bug(
                "waiters are woken before the end is reported",
                rewrites(
                    "process.background:Background._run",
                    "report(self._outcome)",
                    "self._has_ended.set()\nreport(self._outcome)",
                ),
            ),
        ),
    ],
    ids=lambda value: getattr(value, "what", value),
)
def test_lost_work_is_found(name: str, flaw: Planted) -> None:
    program, module = PROGRAMS[name]
    finds(flaw, program, [module], early_timeouts=program is reporting)
