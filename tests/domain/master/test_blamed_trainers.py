"""Failures that trainers report in tickets: the queue learns the trainers' names, and what was at fault."""

from __future__ import annotations

import pytest

from flightedl.domain.master.effects import Outbox
from flightedl.domain.master.work import Work
from flightedl.domain.queue.tasks import TaskQueue
from flightedl.domain.queue.values import QueueSettings
from flightedl.errors import JobFailedError
from flightedl.messages.tasks import Assignment, FailedTask, TasksTicket

SETTINGS = QueueSettings(50, lambda _: 1, attempts_limit=5)


def ticket(witness: str, given: list[Assignment], fault: str) -> TasksTicket:
    failed = [
        FailedTask(
            epoch=a.epoch, position=a.position, attempt=a.attempt, error="odd", batch=0, place="a.py:1", fault=fault
        )
        for a in given
    ]
    return TasksTicket(trainer=f"{witness}-1", generation=1, witness=witness, failed=failed, want=1)


def fails(work: Work, witness: str, fault: str, times: int, now: float = 0.0) -> None:
    given: list[Assignment] = []
    for _ in range(times + 1):
        request = ticket(witness, given, fault)
        work.apply_reports(request, now)
        given, _, _ = work.hand_out(request, now, 2)


def test_a_trainer_that_only_fails_gets_no_work_and_is_told_why() -> None:
    work = Work(TaskQueue(SETTINGS), Outbox())
    work.hand_out(ticket("trainer-1", [], ""), 0.0, 2)
    fails(work, "trainer-0", "store", 5)
    assert not work.queue.holds("trainer-0-1")
    assert work.queue.blame.waits_for("trainer-0-1").endswith("this trainer has failed 5 times in a row: odd")
    assert work.queue.blame.in_doubt == {"trainer-0": "odd"}
    assert work.queue.blame.waits_for() == ""


def test_the_same_error_of_the_script_in_all_trainers_ends_the_job() -> None:
    work = Work(TaskQueue(SETTINGS), Outbox())
    fails(work, "trainer-1", "code", 1)
    with pytest.raises(JobFailedError, match=r"the script raised the same error .* in every trainer: odd \(a.py:1\)"):
        fails(work, "trainer-0", "code", 5)


def test_a_new_master_learns_the_name_from_a_report() -> None:
    queue = TaskQueue(SETTINGS)
    given, _, _ = Work(queue, Outbox()).hand_out(ticket("trainer-0", [], ""), 0.0, 1)
    work = Work(TaskQueue.decode(queue.encode(), SETTINGS), Outbox())
    work.apply_reports(ticket("trainer-0", given, "machine"), 0.0)
    assert work.queue.blame.in_doubt == {"trainer-0": "odd"}
