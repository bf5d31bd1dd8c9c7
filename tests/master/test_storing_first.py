"""State is stored before it is announced, lost work is repeated, and a departed trainer holds no tasks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from flightedl.coordination.records import TrainerRecord
from flightedl.domain.master.events import LeasesSeen, TimePassed
from flightedl.errors import NotReadyError, UnregisteredError
from flightedl.master.state import _Slot
from flightedl.messages.control import ViewReply
from flightedl.messages.tasks import FailedTask, FinishedTask, TasksTicket
from tests.support.contracts.coordinator import eventually

from .job_of_twins import DATASET, KEYS, TASKS, Job, Master, PserverTwin, until_ready

MakeJob = Callable[..., Job]


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds for which a request waits for etcd."""
    monkeypatch.setattr("flightedl.master.state._DURABLE_S", 0.1)


def begun(job: Job, *, epochs: int = 1) -> tuple[Master, list[PserverTwin]]:
    """A declared job with all its pservers."""
    pservers = [job.start_pserver(index) for index in range(job.pserver_count)]
    master = job.start_master()
    master.declare(msgspec.structs.replace(DATASET, epochs=epochs))
    for pserver in pservers:
        eventually(lambda pserver=pserver: master.is_settled(pserver))
    return master, pservers


def holds(master: Master, trainer: str) -> bool:
    with master.state.lock:
        return bool(master.state.core.work.queue.holds(trainer))


def stored(job: Job, key: str) -> bytes:
    entry = job.coordinator.get(key)
    return b"" if entry is None else entry.value


# --- stored before it is announced ---


def test_an_assignment_is_stored_before_it_is_sent(make_job: MakeJob) -> None:
    job = make_job()
    master, _ = begun(job)
    a = job.start_trainer("trainer-a")
    master.work("trainer-a", a, want=0)
    job.master_coordinator.disconnect()
    for _ in range(2):
        with pytest.raises(NotReadyError, match="cannot save its state"):
            master.ask("trainer-a", a, want=1)
    assert b"trainer-a" not in stored(job, KEYS.task_queues)
    job.master_coordinator.reconnect()
    given = master.take("trainer-a", a)
    assert b"trainer-a" in stored(job, KEYS.task_queues)
    successor = job.start_master()
    assert [each.attempt for each in successor.work("trainer-a", a, want=1).assignments] == [given.attempt]


def test_a_report_is_stored_before_it_is_answered(make_job: MakeJob) -> None:
    job = make_job()
    master, (pserver,) = begun(job)
    a = job.start_trainer("a")
    given = master.take("a", a)
    report = FinishedTask(
        epoch=given.epoch, position=given.position, attempt=given.attempt, pservers=[pserver.generation]
    )
    before = stored(job, KEYS.task_queues)
    job.master_coordinator.disconnect()
    with pytest.raises(NotReadyError, match="cannot save its state"):
        master.ask("a", a, want=0, finished=[report])
    assert stored(job, KEYS.task_queues) == before
    job.master_coordinator.reconnect()
    assert not master.report("a", a, given, by=[pserver.generation]).lost
    assert stored(job, KEYS.task_queues) != before


def begun_without_tasks_left(job: Job) -> Master:
    """Return a master that has assigned all tasks to trainers "a", "c" and so on."""
    master, _ = begun(job)
    names = iter("acdefghij")
    while master.work(name := next(names), job.start_trainer(name), want=TASKS).assignments:
        pass
    return master


def test_an_assignment_that_was_awaited_is_stored_before_it_is_sent(make_job: MakeJob) -> None:
    job = make_job()
    master = begun_without_tasks_left(job)
    b = job.start_trainer("trainer-b")
    master.work("trainer-b", b, want=0)
    ticket = TasksTicket(trainer="trainer-b", generation=b, want=1, wait_s=20.0)
    with ThreadPoolExecutor(1) as executor:
        awaited = executor.submit(master.service.tasks.exchange, ticket, threading.Event())
        eventually(lambda: master.state.core._waiting)
        job.master_coordinator.disconnect()
        job.end_trainer("a")
        with pytest.raises(NotReadyError, match="cannot save its state"):
            awaited.result()
    assert holds(master, "trainer-b")
    assert b"trainer-b" not in stored(job, KEYS.task_queues)


def test_the_membership_is_stored_before_a_pserver_gets_it(make_job: MakeJob) -> None:
    job = make_job()
    master, (pserver,) = begun(job)
    known: list[bool] = []
    answer = pserver._view

    def watched(body: bytes) -> ViewReply:
        reply = answer(body)
        if pserver.views[-1].members:
            known.append(b"trainer-a" in stored(job, KEYS.membership))
        return reply

    pserver._view = watched  # type: ignore[method-assign]
    a = job.start_trainer("trainer-a")
    master.take("trainer-a", a)
    job.master_coordinator.disconnect()
    tries = count_calls(master, "wait_durable")
    with pytest.raises(NotReadyError, match="cannot save its state"):
        master.join("trainer-a", a)
    eventually(lambda: len(tries) > 3)
    assert not known
    job.master_coordinator.reconnect()
    master.join_at_last("trainer-a", a)
    assert known
    assert all(known)


def count_calls(master: Master, name: str) -> list[object]:
    """Incremented by each call of a method of the master's state."""
    calls: list[object] = []
    method = getattr(master.state, name)

    def counted(*arguments: object) -> object:
        calls.append(arguments)
        return method(*arguments)

    setattr(master.state, name, counted)
    return calls


def test_the_dataset_is_stored_together_with_the_tasks_that_it_adds(make_job: MakeJob) -> None:
    """A successor that finds tasks without their files could not read them."""
    master, _ = begun(make_job())
    state = master.state
    with ThreadPoolExecutor(1) as executor:

        def replace_dataset() -> None:
            stored = executor.submit(state._snapshot)
            with pytest.raises(TimeoutError):
                stored.result(0.1)

        state.apply(TimePassed(), then=replace_dataset)


def test_an_answer_is_complete_before_its_request_continues(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    incomplete: list[Any] = []

    class Answered(threading.Event):
        def __init__(self, slot: Any) -> None:
            super().__init__()
            self._slot = slot

        def set(self) -> None:
            incomplete.extend([self._slot] if self._slot.reply is None else [])
            super().set()

    class Slot(_Slot):
        def __init__(self) -> None:
            super().__init__()
            self.is_answered = Answered(self)

    monkeypatch.setattr("flightedl.master.state._Slot", Slot)
    job = make_job()
    master, _ = begun(job)
    master.take("a", job.start_trainer("a"))
    assert not incomplete


def test_a_request_that_waits_in_vain_is_answered_at_its_time_limit(make_job: MakeJob) -> None:
    job = make_job()
    master = begun_without_tasks_left(job)
    b = job.start_trainer("b")
    master.work("b", b, want=0)
    ticket = TasksTicket(trainer="b", generation=b, want=1, wait_s=0.05)
    reply = until_ready(lambda: master.service.tasks.exchange(ticket, threading.Event())[0])
    assert not reply.assignments


# --- lost work is repeated ---


def test_reopened_tasks_of_a_lost_pserver_are_stored(make_job: MakeJob) -> None:
    job = make_job()
    master, pservers = begun(job)
    a = job.start_trainer("a")
    master.do_all("a", a, pservers)
    assert master.state.core.work.queue.is_done
    job.end_pserver(0)
    back = job.start_pserver(0, {0: {1, 2}}, is_ready=False)
    eventually(lambda: back.views)
    back.is_ready = True
    eventually(lambda: master.is_settled(back))
    eventually(lambda: b'"runs"' in stored(job, KEYS.task_queues))
    back.silent.add("applied")
    successor = job.start_master()
    assert successor.is_settled(back), "both in one transaction"
    assert not successor.state.core.work.queue.is_done
    assert {each.task for each in successor.do_all("a", a, [back])} == {0, 3}


def test_lost_tasks_of_earlier_epochs_are_repeated_first(make_job: MakeJob) -> None:
    job = make_job()
    master, pservers = begun(job, epochs=3)
    a = job.start_trainer("a")
    for _ in range(2 * TASKS + 1):
        given = master.take("a", a)
        pservers[0].done.setdefault(given.epoch, set()).add(given.task)
        master.report("a", a, given, by=[pservers[0].generation])
    job.end_pserver(0)
    back = job.start_pserver(0, {0: {0, 1, 3}, 1: {2}})
    eventually(lambda: master.is_settled(back))
    again = [(each.epoch, each.task) for each in master.do_all("a", a, [back])]
    assert sorted(again[:4]) == [(0, 2), (1, 0), (1, 1), (1, 3)]
    assert sorted(again[4:]) == [(2, task) for task in range(TASKS)]


def test_finished_tasks_lost_with_a_pserver_are_assigned_to_others(make_job: MakeJob) -> None:
    job = make_job(2)
    master, pservers = begun(job)
    a, b = job.start_trainer("a"), job.start_trainer("b")
    given = master.take("a", a)
    before = [pserver.generation for pserver in pservers]
    job.end_pserver(1)
    back = job.start_pserver(1)
    eventually(lambda: master.is_settled(back))
    (lost,) = master.report("a", a, given, by=before).lost
    assert (lost.epoch, lost.position, lost.attempt) == (given.epoch, given.position, given.attempt)
    assert not holds(master, "a")
    done = master.do_all("b", b, [pservers[0], back])
    assert sorted(each.task for each in done) == list(range(TASKS))
    assert not master.work("a", a, want=1).assignments


# --- gone trainers hold nothing ---


def test_a_trainer_that_died_without_a_master_loses_its_tasks(make_job: MakeJob) -> None:
    job = make_job()
    master, pservers = begun(job)
    a = job.start_trainer("a")
    master.take("a", a)
    job.end_master()
    job.end_trainer("a")
    b = job.start_trainer("b")
    successor = job.start_master()
    assert not holds(successor, "a")
    done = successor.do_all("b", b, pservers)
    assert sorted(each.task for each in done) == list(range(TASKS))


def test_a_trainer_that_registers_again_at_once_loses_its_tasks(make_job: MakeJob) -> None:
    """The directory may report both changes together; the name exists before and after."""
    job = make_job()
    master, pservers = begun(job)
    a, b = job.start_trainer("a"), job.start_trainer("b")
    master.take("a", a)
    state = master.state
    with state.lock:
        # The directory's thread stops at the first change, and sees the others together.
        nudge = job.start_trainer("nudge")
        eventually(lambda: master.directory.revision >= nudge)
        job.end_trainer("a")
        again = job.start_trainer("a")
    eventually(lambda: state.core.trainers.get("a") == again)
    assert not holds(master, "a")
    assert state.core.work.queue.waiting.runs == [(0, 0, 1, 0)], "it is alive, so its tasks are not to blame"
    done = master.do_all("b", b, pservers)
    assert sorted(each.task for each in done) == list(range(TASKS))


def test_a_trainer_that_registers_while_leases_are_read_does_not_count_as_gone(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request is answered with "try again", not with "register again"."""
    job = make_job()
    master, _ = begun(job)
    late: list[int] = []
    seen: list[LeasesSeen] = []
    apply, trainers = master.state.apply, master.directory.trainers

    def watched(event: object, *more: object) -> None:
        if isinstance(event, LeasesSeen):
            seen.append(event)
        apply(event, *more)

    def read() -> dict[str, TrainerRecord]:
        found = trainers()
        if not late:
            late.append(job.start_trainer("late"))
            eventually(lambda: master.directory.revision >= late[0])
            # The directory's thread could read the newer leases now, and must not do so before this thread is done.
            threading.Event().wait(0.1)
        return found

    monkeypatch.setattr(master.state, "apply", watched)
    monkeypatch.setattr(master.directory, "trainers", read)
    master.service.read_directory()
    assert "late" not in seen[0].trainers
    assert seen[0].revision < late[0]
    eventually(lambda: "late" in master.state.core.trainers)


def test_errors_that_a_departed_trainer_reports_do_not_count(make_job: MakeJob) -> None:
    job = make_job()
    master, _ = begun(job)
    a = job.start_trainer("trainer-a")
    given = master.take("trainer-a", a)
    report = FailedTask(
        epoch=0, position=given.position, attempt=given.attempt, error="odd", batch=0, place="train.py:7"
    )
    with pytest.raises(UnregisteredError):
        master.ask("trainer-a", a - 1, want=0, failed=[report])
    progress, now = master.state.progress, master.state.clock.now
    assert not progress.raised(now())
    master.work("trainer-a", a, want=0, failed=[report])
    assert [each.error for each in progress.raised(now())] == ["odd"]
