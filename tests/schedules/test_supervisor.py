"""Every order in which processes end, are restarted, and are stopped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from flightedl.launch import supervisor
from flightedl.launch.policy import Limits, Role, Slot
from flightedl.launch.supervisor import Outcome, Supervisor
from tests.support.planting import Planted, bug, drops, swaps

from .scheduler import Run, VirtualClock, explore, finds

MASTER, TRAINER = Slot(Role.MASTER, 0), Slot(Role.TRAINER, 0)


class Child:
    """A process that runs until a test or the supervisor ends it."""

    is_frozen = False

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.code

    def tail(self, _count: int) -> tuple[str, ...]:
        return ()


class Children:
    """All processes that were ever started."""

    def __init__(self) -> None:
        self.started: list[Child] = []

    def start(self, _count: int) -> Child:
        self.started.append(Child(len(self.started)))
        return self.started[-1]

    def forget(self, _child: Child) -> None:
        pass

    def stop(self, children: Sequence[Child], _grace_s: float, _is_hurried: Callable[[], bool] = lambda: False) -> None:
        for child in children:
            child.code = -9 if child.code is None else child.code

    @property
    def running(self) -> list[int]:
        return [child.pid for child in self.started if child.code is None]


class Job:
    """A supervised master and trainer."""

    def __init__(self) -> None:
        self.children = Children()
        self.ends: list[int] = []
        clock: Any = VirtualClock()
        children: Any = self.children
        starters: Any = {MASTER: self.children.start, TRAINER: self.children.start}
        self.supervisor = Supervisor(children, starters, clock, Limits(), on_end=self.ends.append)
        self.supervisor.start()


def stopping(run: Run) -> None:
    """No process is left when a job is stopped, even if one ends and is restarted at that moment."""
    job = Job()

    def kill() -> None:
        job.children.started[1].code = -9
        run.sleep(0.1)

    def stop() -> None:
        run.sleep(0.05)
        job.supervisor.stop()
        assert job.children.running == [], "a process is left"

    run.threads(kill, stop)
    assert job.children.running == []
    trainers = [child.pid for child in job.children.started[1:]]
    assert job.ends == trainers, "the end of a trainer is not reported, or twice"


def finishing(run: Run) -> None:
    """The first outcome stays, and whoever waits for it gets it."""
    job = Job()

    def finish() -> None:
        job.children.started[1].code = 0

    def give_up() -> None:
        run.sleep(0.05)
        job.supervisor.give_up(Outcome(2, "enough"))

    def wait() -> None:
        found = job.supervisor.outcome(5.0)
        assert found is not None
        run.sleep(1.0)
        assert job.supervisor.outcome() == found, "the outcome of a job changed"

    run.threads(finish, give_up, wait)
    assert run.now <= 1.2, "a waiter was not woken"
    assert len(job.children.started) == 2, "a trainer that has finished was started again"
    job.supervisor.stop()


@pytest.mark.parametrize("program", [stopping, finishing])
def test_a_stopped_job_leaves_nothing_and_has_one_outcome(program: Any) -> None:
    assert explore(program, [supervisor]).is_complete


@pytest.mark.parametrize(
    ("program", "flaw"),
    [
        (
            stopping,
            bug("the thread is not waited for", drops("launch.supervisor:Supervisor.stop", "self._thread.join()")),
        ),
        (
            stopping,
            bug(
                "ends of trainers are not reported",
                drops("launch.supervisor:Supervisor._look_at", "self._on_end(child.pid)"),
            ),
        ),
        (
            finishing,
            bug("a slot stays due", drops("launch.supervisor:Supervisor._fill", "place.due_at = None")),
        ),
        (
            finishing,
            bug(
                "a later outcome replaces the first",
                swaps("launch.supervisor:Supervisor.give_up", "self._outcome is None", "True"),
            ),
        ),
        (
            finishing,
            bug(
                "outcomes are compared without the lock",
                swaps("launch.supervisor:Supervisor.give_up", "with self._lock:", "if True:"),
            ),
        ),
        (finishing, bug("the end wakes nobody", drops("launch.supervisor:Supervisor.give_up", "self._ended.set()"))),
    ],
    ids=lambda value: getattr(value, "what", ""),
)
def test_a_process_that_is_left_is_found(program: Any, flaw: Planted) -> None:
    finds(flaw, program, [supervisor])
