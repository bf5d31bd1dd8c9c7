from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.config import child_environment
from flightedl.errors import UnavailableError, UsageError
from flightedl.launch.policy import Limits, Role, Slot
from flightedl.launch.processes import Child, Children
from flightedl.launch.supervisor import _STOP_RANKS, Outcome, Starter, Supervisor, relevant_lines

Until = Callable[[Callable[[], object]], None]
ETCD, MASTER = Slot(Role.ETCD, 0), Slot(Role.MASTER, 0)
FIRST, SECOND = Slot(Role.TRAINER, 0), Slot(Role.TRAINER, 1)
SLEEP = "import time; print('ready'); time.sleep(60)"


class Job:
    """A supervisor of small Python programs, one per slot. The fixture stops it at the end of the test."""

    def __init__(self, children: Children) -> None:
        self.children = children
        self.events: list[str] = []
        self.supervisor: Supervisor | None = None

    def start(self, *, limits: Limits | None = None, **programs: str) -> Supervisor:
        slots = {str(slot): slot for slot in (ETCD, MASTER, FIRST, SECOND)}
        starters: dict[Slot, Starter] = {
            slots[name.replace("_", "-")]: self.starter(name, program) for name, program in programs.items()
        }
        self.supervisor = Supervisor(self.children, starters, SystemClock(), limits, self.events.append)
        self.supervisor.start()
        return self.supervisor

    def starter(self, name: str, program: str) -> Starter:
        def start(count: int) -> Child:
            environment = child_environment(COUNT=str(count))
            return self.children.start(name, [sys.executable, "-c", program], environment)

        return start


@pytest.fixture
def job(children: Children) -> Iterator[Job]:
    made = Job(children)
    yield made
    if made.supervisor is not None:
        made.supervisor.stop()


def test_the_job_is_done_when_all_trainers_are_done(job: Job) -> None:
    supervisor = job.start(master=SLEEP, trainer_0="", trainer_1="")
    assert supervisor.outcome(10.0) == Outcome(0)
    finished = {view.slot: view.is_finished for view in supervisor.processes()}
    assert finished == {MASTER: False, FIRST: True, SECOND: True}


def test_a_killed_process_is_replaced(job: Job, until: Until) -> None:
    supervisor = job.start(master=SLEEP, trainer_0=SLEEP)
    for slot in (MASTER, FIRST):
        child = supervisor.child(slot)
        assert child is not None
        child.send(signal.SIGKILL)
        until(lambda: (new := supervisor.child(slot)) is not None and new.pid != child.pid)  # noqa: B023
    assert [view.starts for view in supervisor.processes()] == [2, 2]
    assert supervisor.outcome() is None
    assert len(job.events) == 4
    assert "killed by SIGKILL; a new one is started" in job.events[0]


def test_a_crash_of_the_script_shows_its_traceback_and_the_trainer(job: Job) -> None:
    supervisor = job.start(master=SLEEP, trainer_0="print('one'); 1 / 0")
    outcome = supervisor.outcome(10.0)
    assert outcome is not None
    assert (outcome.exit_code, outcome.slot) == (1, FIRST)
    assert outcome.reason == "the script crashed in trainer-0 again (exit code 1)"
    assert outcome.last_lines[0] == "Traceback (most recent call last):"
    assert outcome.last_lines[-1] == "ZeroDivisionError: division by zero"


def test_a_second_attempt_may_succeed(job: Job) -> None:
    supervisor = job.start(trainer_0="import os, sys; sys.exit(os.environ['COUNT'] == '1')")
    assert supervisor.outcome(10.0) == Outcome(0)


def test_a_server_that_keeps_exiting_ends_the_job(job: Job) -> None:
    limits = Limits(server_short_runs=3, first_delay_s=0.05)
    supervisor = job.start(limits=limits, master="print('no room'); raise SystemExit(1)", trainer_0=SLEEP)
    outcome = supervisor.outcome(10.0)
    assert outcome is not None
    assert (outcome.exit_code, outcome.slot, outcome.last_lines) == (1, MASTER, ("no room",))


def test_a_server_that_reports_a_permanent_failure_ends_the_job(job: Job) -> None:
    supervisor = job.start(master="print('the model is lost'); raise SystemExit(3)", trainer_0=SLEEP)
    outcome = supervisor.outcome(10.0)
    assert outcome is not None
    assert (outcome.exit_code, outcome.last_lines) == (3, ("the model is lost",))


def fails_to_start(job: Job, failures: list[Exception], program: str) -> Starter:
    """Return a starter whose first process ends at once, followed by these failures, and then by the program."""
    first, later = job.starter("etcd", ""), job.starter("etcd", program)

    def start(count: int) -> Child:
        if count > 1 and failures:
            raise failures.pop()
        return first(count) if count == 1 else later(count)

    return start


def test_a_restart_that_fails_temporarily_is_retried(job: Job, until: Until) -> None:
    failures = [UnavailableError("etcd does not start"), OSError("no memory"), UnavailableError("etcd does not start")]
    limits = Limits(first_delay_s=0.01)
    starter = fails_to_start(job, failures, SLEEP)
    job.supervisor = Supervisor(job.children, {ETCD: starter}, SystemClock(), limits, job.events.append)
    job.supervisor.start()
    until(lambda: job.supervisor is not None and job.supervisor.child(ETCD) is not None and not failures)
    assert job.supervisor.outcome() is None
    assert "etcd: it cannot be started: no memory; a new one is started in 0.0 s" in job.events


def test_a_restart_that_fails_permanently_ends_the_job(job: Job) -> None:
    failures: list[Exception] = [UnavailableError("no room")] * 100
    limits = Limits(first_delay_s=0.001, longest_delay_s=0.001, ended_short_runs=3)
    starter = fails_to_start(job, failures, SLEEP)
    job.supervisor = Supervisor(job.children, {ETCD: starter}, SystemClock(), limits)
    job.supervisor.start()
    outcome = job.supervisor.outcome(10.0)
    assert outcome is not None
    assert outcome.exit_code == 1
    assert outcome.reason.startswith("etcd could not be started 3 times in a row, the last time: it cannot be started")


def test_a_missing_program_is_a_usage_error(job: Job) -> None:
    starter = fails_to_start(job, [UsageError("cannot run etcd: there is no such program")], SLEEP)
    job.supervisor = Supervisor(job.children, {ETCD: starter}, SystemClock())
    job.supervisor.start()
    assert job.supervisor.outcome(10.0) == Outcome(2, "cannot run etcd: there is no such program")


def test_processes_stop_in_order_of_rank(job: Job, until: Until, tmp_path: Path) -> None:
    order = tmp_path / "order"
    program = f"""
import signal, sys, time
def stop(*_):
    with open({str(order)!r}, "a") as file:
        file.write(sys.argv[0] + NAME + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("ready")
time.sleep(60)
"""
    named = {name: f"NAME={name!r}\n{program}" for name in ("etcd", "master", "trainer_0")}
    supervisor = job.start(**named)
    found = [supervisor.child(slot) for slot in (ETCD, MASTER, FIRST)]
    until(lambda: all(child is not None and child.tail() for child in found))
    supervisor.stop()
    supervisor.stop()
    assert [line.removeprefix("-c") for line in order.read_text().splitlines()] == ["trainer_0", "master", "etcd"]
    assert [view.pid for view in supervisor.processes()] == [None, None, None]
    assert job.events == []


def test_a_process_that_is_frozen_for_too_long_is_replaced(job: Job, until: Until) -> None:
    supervisor = job.start(limits=Limits(frozen_s=0.3), master=SLEEP, trainer_0=SLEEP)
    for slot in (MASTER, FIRST):
        child = supervisor.child(slot)
        assert child is not None
        until(child.tail)
        child.send(signal.SIGSTOP)
        until(lambda: (new := supervisor.child(slot)) is not None and new.pid != child.pid)  # noqa: B023
    assert [view.starts for view in supervisor.processes()] == [2, 2]
    assert "was stopped by a signal 0 s ago: killed" in job.events[0]
    assert "killed by SIGKILL; a new one is started" in job.events[1]


def test_a_frozen_process_that_wakes_in_time_is_kept(job: Job, until: Until) -> None:
    supervisor = job.start(limits=Limits(frozen_s=60.0), master=SLEEP)
    child = supervisor.child(MASTER)
    assert child is not None
    until(child.tail)
    place = supervisor._places[MASTER]
    for _ in range(2):
        child.send(signal.SIGSTOP)
        until(lambda: place.frozen_s > 0.2)
        child.send(signal.SIGCONT)
        until(lambda: place.frozen_s == 0)
    assert (supervisor.child(MASTER), job.events) == (child, [])


def test_the_grace_times_leave_one_of_the_five_seconds_for_stopping() -> None:
    assert sum(grace_s for _, grace_s in _STOP_RANKS) <= 4.0


SLOW_TO_END = """
import signal, sys, time
def stop(*_):
    print("is told", flush=True)
    time.sleep(60)
signal.signal(signal.SIGTERM, stop)
print("ready")
time.sleep(60)
"""


def test_servers_get_time_for_a_last_checkpoint_until_a_second_signal(job: Job, until: Until) -> None:
    supervisor = job.start(etcd=SLEEP, master=SLOW_TO_END, trainer_0=SLEEP)
    master, trainer = supervisor.child(MASTER), supervisor.child(FIRST)
    assert master is not None
    assert trainer is not None
    until(lambda: master.tail() and trainer.tail())
    killed: list[int] = []
    supervisor._on_end = killed.append

    def is_hurried() -> bool:
        return "is told" in master.tail()

    clock = SystemClock()
    started_at = clock.now()
    supervisor.stop(600.0, is_hurried)
    assert clock.now() - started_at < 60.0
    assert killed == [trainer.pid], "rounds do not wait for a frozen trainer"


@pytest.mark.faults
def test_frozen_processes_are_stopped_after_their_grace_times(job: Job, until: Until) -> None:
    supervisor = job.start(etcd=SLEEP, master=SLEEP, trainer_0=SLEEP)
    for slot in (ETCD, MASTER, FIRST):
        child = supervisor.child(slot)
        assert child is not None
        child.send(signal.SIGSTOP)
        # A process that gets SIGTERM before it is frozen still ends.
        until(lambda: child.is_frozen)  # noqa: B023
    clock = SystemClock()
    started_at = clock.now()
    supervisor.stop()
    graces = {role: grace_s for roles, grace_s in _STOP_RANKS for role in roles}
    spent_s = sum(graces[slot.role] for slot in (ETCD, MASTER, FIRST))
    assert spent_s <= clock.now() - started_at < spent_s + 10.0


def test_children_survive_the_thread_that_started_the_supervisor(job: Job, until: Until) -> None:
    thread = threading.Thread(target=lambda: job.start(trainer_0=SLEEP))
    thread.start()
    thread.join()
    assert job.supervisor is not None
    child = job.supervisor.child(FIRST)
    assert child is not None
    until(child.tail)
    assert child.wait(0.2) is None


def test_the_relevant_lines_of_output_are_selected() -> None:
    assert relevant_lines([]) == ()
    assert relevant_lines([f"line {number}" for number in range(30)])[0] == "line 20"
    trace = ["Traceback (most recent call last):", "  File", "Error: x"]
    assert relevant_lines(["INFO begins", "flightedl master: no room"]) == ("flightedl master: no room",)
    assert relevant_lines(["before", *trace, "between", *trace, "after"]) == (*trace, "after")
