"""The scheduler finds the classic races, repeats them, and reports what waits for ever."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from .scheduler import (
    Condition,
    Event,
    Lock,
    Run,
    ScheduleError,
    SimpleQueue,
    Thread,
    VirtualClock,
    explore,
    first_failure,
    replay,
)

HERE = sys.modules[__name__]


class Counter:
    """A number that threads increment, with or without a lock."""

    def __init__(self) -> None:
        self.value = 0
        self.lock = Lock()

    def increment(self) -> None:
        self.value += 1

    def increment_alone(self) -> None:
        with self.lock:
            self.value += 1


def losing(run: Run) -> None:
    counter = Counter()
    run.threads(counter.increment, counter.increment)
    assert counter.value == 2


def counting(run: Run) -> None:
    counter = Counter()
    run.threads(counter.increment_alone, counter.increment_alone, counter.increment_alone)
    assert counter.value == 3


def locking_crosswise(run: Run) -> None:
    first, second = Lock(), Lock()

    def both(one: Lock, other: Lock) -> None:
        with one, other:
            pass

    run.threads(lambda: both(first, second), lambda: both(second, first))


def missing_a_wake_up(run: Run) -> None:
    condition, done = Condition(), [False]

    def wait() -> None:
        if not done[0]:
            run.point()
            with condition:
                condition.wait(9.0)

    def finish() -> None:
        done[0] = True
        with condition:
            condition.notify_all()

    run.threads(wait, finish)
    assert run.now == 0.0, "lost"


def test_a_lost_update_is_found_and_repeated() -> None:
    found = first_failure(losing, [HERE], deviations=1)
    assert found.error is not None
    assert "Counter.increment" in str(found.error)
    for _ in range(3):
        with pytest.raises(ScheduleError, match="assert 1 == 2"):
            replay(losing, [HERE], found.error.schedule)
    replay(losing, [HERE], ())


def test_all_schedules_of_a_correct_program_succeed() -> None:
    found = explore(counting, [HERE], deviations=3)
    assert found.is_complete
    assert found.schedules > 100


def test_an_incomplete_exploration_says_so() -> None:
    assert not explore(counting, [HERE], deviations=3, limit=10).is_complete


@pytest.mark.parametrize(
    ("program", "message"), [(locking_crosswise, "wait for ever: main, 0, 1"), (missing_a_wake_up, "lost")]
)
def test_threads_that_wait_for_nothing_are_found(program: Any, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        explore(program, [HERE])


def test_time_passes_only_while_all_threads_wait() -> None:
    def program(run: Run) -> None:
        clock, event, items = VirtualClock(), Event(), SimpleQueue()

        def wait() -> None:
            assert not event.wait(1.0)
            assert clock.now() == 1.0
            items.put("late")

        def receive() -> None:
            assert items.get(timeout=2.0) == "late"
            assert clock.now() == 1.0

        started = Thread(target=wait)
        started.start()
        run.threads(receive)
        started.join()

    assert explore(program, [HERE]).is_complete


def test_with_early_timeouts_a_time_limit_may_pass_while_others_could_run() -> None:
    def program(run: Run) -> None:
        event = Event()

        def wait() -> None:
            assert event.wait(1.0)

        run.threads(wait, event.set)

    assert explore(program, [HERE]).is_complete
    with pytest.raises(ScheduleError):
        explore(program, [HERE], early_timeouts=True)
