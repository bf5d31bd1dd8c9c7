"""Work that a restored pserver lacks is repeated, or the job reports that this is impossible."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flightedl.domain.master.effects import Outbox
from flightedl.domain.master.pservers import Pservers
from flightedl.domain.queue.tasks import TaskQueue
from flightedl.domain.queue.values import QueueSettings, TaskGiven
from flightedl.domain.recovery.replay import AppliedSummary
from flightedl.errors import JobFailedError, NotFoundError
from flightedl.messages.control import AppliedReply
from tests.support.contracts.coordinator import eventually

from .job_of_twins import Job

NOTHING = AppliedReply(summary=AppliedSummary().encode(), checkpoint=3)


def do(queue: TaskQueue, count: int) -> list[tuple[int, int]]:
    """Do ``count`` tasks; return (epoch, task) of each."""
    done = []
    for _ in range(count):
        given = queue.request("t", 0.0)
        assert isinstance(given, TaskGiven)
        a = given.assignment
        queue.finish("t", a.epoch, a.position, a.attempt, 0.0)
        done.append((a.epoch, a.task))
    return done


def grown(epochs: int) -> tuple[TaskQueue, list[tuple[int, int]]]:
    """Let a task join each running epoch; return the queue and all done tasks."""
    queue = TaskQueue(QueueSettings(task_count=2, batch_counts=lambda _: 1, follow=True, epochs=None))
    done = []
    for size in range(3, 3 + epochs):
        done += do(queue, 1)
        queue.grow(size)
        done += do(queue, size - 1)
    return queue, done


def test_a_dataset_that_grew_in_many_epochs_is_repeated_completely() -> None:
    queue, done = grown(100)
    pservers = Pservers(1, "replay", None, Outbox())
    assert pservers.answered(0, 7, None, NOTHING, queue)
    assert do(queue, len(done)) == done


def test_a_pserver_that_lacks_forgotten_epochs_is_refused_until_another_process_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flightedl.domain.queue.order.REMEMBERED", 10)
    queue, _ = grown(100)
    before = queue.encode()
    pservers = Pservers(1, "replay", None, Outbox())
    for _ in range(2):
        assert not pservers.answered(0, 7, None, NOTHING, queue)
    assert "pserver 0 restarted from checkpoint 3" in pservers.refusal
    assert "the size of epoch 1 was forgotten" in pservers.refusal
    assert "--resume" in pservers.refusal
    assert not pservers.is_settled(0, 7)
    assert queue.encode() == before, "nothing is repeated in part"
    pservers.seen(0, 9)
    assert not pservers.refusal
    through = [(epoch, epoch + 1, epoch + 3) for epoch in range(100)]
    assert pservers.answered(0, 9, None, AppliedReply(summary=AppliedSummary(through=through).encode()), queue)
    assert pservers.is_settled(0, 9)
    assert queue.encode() == before


def test_a_job_with_an_irreparable_loss_fails(make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job()
    pserver = job.start_pserver(0)
    master = job.start_master()
    master.declare()
    a = job.start_trainer("a")
    master.do_all("a", a, [pserver])
    job.end_pserver(0)
    state = master.state
    eventually(lambda: not state.core.pservers.present)

    def forgotten(*_: object) -> None:
        raise NotFoundError("the size of epoch 0 was forgotten")

    monkeypatch.setattr("flightedl.domain.recovery.replay.tasks_to_reopen", forgotten)
    job.start_pserver(0)
    eventually(lambda: state.core.pservers.refusal)
    with pytest.raises(JobFailedError, match="pserver 0 restarted without a checkpoint"):
        master.ask("a", a)
    assert "cannot be repeated" in master.service.status().waiting_for
