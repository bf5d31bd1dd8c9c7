"""A resumed job returns the batches that were set aside to the queue, once, at their own epoch."""

from __future__ import annotations

from flightedl.domain.master.core import MasterCore
from flightedl.domain.master.effects import Note
from flightedl.domain.master.events import TimePassed
from flightedl.domain.master.state import CoreSettings, StoredState
from flightedl.domain.queue.tasks import TaskQueue
from flightedl.domain.queue.values import FailedSelector, QueueSettings, TaskGiven

TASKS = QueueSettings(4, lambda _: 1, epochs=3, attempts_limit=1, confirmations=0)


def finished_queue() -> TaskQueue:
    """Return a queue that is done, with one task set aside in each epoch, and another one dropped."""
    queue = TaskQueue(TASKS)
    while isinstance(answer := queue.request("a", 0.0), TaskGiven):
        given = answer.assignment
        place = given.epoch, given.position, given.attempt, 0.0
        if given.task == 2 or (given.epoch, given.task) == (1, 3):
            queue.fail("a", *place, error="gone", fault="store")
        else:
            queue.finish("a", *place)
    queue.drop_failed(FailedSelector(epoch=1, task=3))
    assert queue.is_done
    return queue


def started(queue: TaskQueue, *, is_resumed: bool) -> tuple[MasterCore, list[str]]:
    stored = StoredState(queue=queue.encode(), is_resumed=is_resumed)
    core = MasterCore(CoreSettings(generation=2, pserver_count=0), 0.0, stored, TASKS)
    notes = [each.text % each.values for each in core.apply(TimePassed(), 0.0) if isinstance(each, Note)]
    return core, [text for text in notes if "set aside" in text]


def test_a_resumed_job_that_was_done_runs_just_the_batches_that_were_set_aside() -> None:
    core, notes = started(finished_queue(), is_resumed=True)
    assert core.work is not None
    queue = core.work.queue
    assert notes == ["batches that were set aside are retried batches=3; ranges that are no longer known: 0"]
    assert not core.is_over
    done = []
    while isinstance(answer := queue.request("a", 0.0), TaskGiven):
        given = answer.assignment
        done.append((given.epoch, given.task))
        queue.finish("a", given.epoch, given.position, given.attempt, 0.0)
    assert done == [(0, 2), (1, 2), (2, 2)]
    assert (queue.counts().failed_batches, queue.counts().dropped_batches) == (0, 1)
    assert core.is_over


def test_another_master_of_the_same_run_does_not_return_them() -> None:
    core, notes = started(finished_queue(), is_resumed=False)
    assert (core.is_over, notes) == (True, [])


def test_a_resumed_job_names_the_ranges_that_are_no_longer_known() -> None:
    queue = finished_queue()
    queue.failed.forgotten = 5
    _, notes = started(queue, is_resumed=True)
    assert notes == ["batches that were set aside are retried batches=3; ranges that are no longer known: 5"]
