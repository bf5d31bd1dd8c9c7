"""Single steps of the supervisor with processes that only the test ends or freezes, on a clock that it advances."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from flightedl.launch import supervisor as supervisors
from flightedl.launch.policy import Limits, Role, Slot
from flightedl.launch.run import name_of
from flightedl.launch.supervisor import Supervisor
from flightedl.messages.status import ServerStatus, StatusReply
from tests.support.clock import FakeClock

MASTER, PSERVER = Slot(Role.MASTER, 0), Slot(Role.PSERVER, 0)
FIRST, SECOND = Slot(Role.TRAINER, 0), Slot(Role.TRAINER, 1)
ALL = (MASTER, PSERVER, FIRST, SECOND)
LIMITS = Limits(frozen_s=3.0)


class Child:
    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.code: int | None = None
        self.is_frozen = False

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.code = -9

    def tail(self, _count: int) -> tuple[str, ...]:
        return ()


class Job:
    """A supervisor whose steps the test makes. It stands in for the children, too."""

    def __init__(self, *slots: Slot, is_group: bool = False, **more: Any) -> None:
        self.clock = FakeClock()
        self.started: list[Child] = []
        self.forgotten: list[int] = []
        self.ends: list[int] = []
        #: Grace times of stopped processes, by pid.
        self.stopped: dict[int, float] = {}
        children: Any = self
        self.supervisor = Supervisor(
            children,
            dict.fromkeys(slots or ALL, self.start),  # type: ignore[arg-type]
            self.clock,
            LIMITS,
            on_end=self.ends.append,
            is_group=is_group,
            **more,
        )
        for slot, place in self.supervisor._places.items():
            self.supervisor._fill(slot, place)

    def start(self, _count: int) -> Child:
        self.started.append(Child(len(self.started)))
        return self.started[-1]

    def forget(self, child: Child) -> None:
        assert child.code is not None
        self.forgotten.append(child.pid)

    def stop(self, children: Sequence[Child], grace_s: float, _is_hurried: Callable[[], bool] = lambda: False) -> None:
        for child in children:
            self.stopped[child.pid] = grace_s
            child.kill()

    def step(self, seconds: float = 0.05) -> None:
        self.clock.advance(seconds)
        self.supervisor._step()

    def child(self, slot: Slot) -> Child | None:
        found: Any = self.supervisor.child(slot)
        return found

    def running(self, slot: Slot) -> Child:
        found = self.child(slot)
        assert found is not None
        return found


def test_a_process_that_has_ended_is_forgotten_and_reported_before_its_successor_starts() -> None:
    job = Job()
    ended = job.running(FIRST)
    ended.code = -9
    job.step()
    assert job.child(FIRST) is None
    assert job.forgotten == job.ends == [ended.pid]
    job.step()
    assert job.running(FIRST) is job.started[-1]
    assert job.ends == [ended.pid]


def test_a_process_that_has_ended_is_named_after_its_pserver_too() -> None:
    server = ServerStatus(index=0, address="h:1", generation=7, state="serving", process="pserver-3")
    status, events = StatusReply(job="demo", state="training", pservers=[server]), list[str]()
    slots = (Slot(Role.PSERVER, 3), Slot(Role.PSERVER, 1), FIRST)
    job = Job(*slots, name_of=lambda slot: name_of(slot, status), on_event=events.append)
    for slot in slots:
        job.running(slot).code = -9
    job.step()
    names = [event.split(" (pid")[0] for event in events]
    assert names == ["pserver-0 (process pserver-3)", "pserver-1", "trainer-0"]
    assert name_of(slots[0], None) == "pserver-3"


def test_only_time_in_which_the_supervisor_looks_counts_as_frozen() -> None:
    job = Job()
    frozen = job.running(PSERVER)
    frozen.is_frozen = True
    job.step(100.0)
    assert frozen.code is None, "the launcher itself was frozen"
    job.step(1.0)
    frozen.is_frozen = False
    job.step(1.0)
    frozen.is_frozen = True
    for _ in range(2):
        job.step(1.0)
    assert frozen.code is None, "a process that has continued counts as frozen since before"
    job.step(1.0)
    assert frozen.code == -9
    job.step()
    job.step()
    successor = job.running(PSERVER)
    assert successor is not frozen
    successor.is_frozen = True
    job.step(1.0)
    assert successor.code is None, "a new process counts as frozen since before its start"


@pytest.mark.parametrize("code", [0, -9])
def test_a_surplus_pserver_is_not_replaced_if_it_has_left_and_otherwise_it_is(code: int) -> None:
    other = Slot(Role.PSERVER, 1)
    job = Job(MASTER, PSERVER, other, FIRST)
    job.supervisor.resize_pservers(1, lambda _: job.start)  # type: ignore[arg-type,return-value]
    job.running(other).code = code
    job.step()
    job.step()
    slots = [view.slot for view in job.supervisor.processes()]
    assert (other in slots) == (code != 0), "blocks of a pserver that was killed are lost"
    if code == 0:
        job.running(PSERVER).code = 0
        job.step()
        job.step()
        assert job.running(PSERVER), "more pservers left than were surplus"


def test_all_ranks_end_and_start_together() -> None:
    job = Job(MASTER, FIRST, SECOND, is_group=True)
    ended, other = job.running(FIRST), job.running(SECOND)
    ended.code = -9
    job.step()
    assert job.ends == [ended.pid, other.pid], "the lease of a rank that was killed is awaited"
    assert job.stopped == {other.pid: supervisors._TOGETHER_S}
    assert other.code == -9
    job.step()
    assert {job.running(FIRST).pid, job.running(SECOND).pid} == {3, 4}
    assert job.running(MASTER).pid == 0


def test_a_rank_that_has_finished_starts_again_with_the_others() -> None:
    job = Job(MASTER, FIRST, SECOND, is_group=True)
    job.running(FIRST).code = 0
    job.step()
    job.step()
    assert job.child(FIRST) is None
    job.running(SECOND).code = -9
    job.step()
    job.step()
    assert job.running(FIRST)
    assert job.running(SECOND)
    assert job.supervisor.outcome() is None


def test_only_servers_get_time_for_a_last_checkpoint() -> None:
    job = Job()
    job.supervisor.stop(drain_s=60.0)
    grace_s = {slot: job.stopped[pid] for pid, slot in enumerate(ALL)}
    assert grace_s[MASTER] == grace_s[PSERVER] > 60.0
    assert grace_s[FIRST] == grace_s[SECOND] < 5.0
    assert list(job.stopped) == [2, 3, 0, 1], "trainers are stopped first"
    assert job.ends == [2, 3]
