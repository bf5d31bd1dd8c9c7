"""Batches that the user marks as done."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pytest

from flightedl.client.data import dataset as module
from flightedl.client.data import feed as feed_module
from flightedl.client.data.dataset import Dataset
from flightedl.client.data.feed import TaskFeed
from flightedl.client.data.losses import LostData
from flightedl.domain.queue.values import TaskGiven
from flightedl.domain.trainer.acknowledged import Done
from flightedl.domain.trainer.batches import Batch
from flightedl.domain.trainer.feed import AssignedTask
from flightedl.errors import UnavailableError, UsageError

from .loop_bench import _DECLARED, CLOCK, Master, waiting
from .test_dataset import Master as QueueMaster


class Listener:
    """Listener that records which batches were opened, and which are done."""

    def __init__(self) -> None:
        self.opened: list[int] = []
        self.closed: list[int] = []

    def open_batch(self, batch: Batch, _: Callable[[], str]) -> bool:
        self.opened.append(batch.number)
        return True

    def close_batch(self) -> tuple[()]:
        return ()

    def abandon_batch(self) -> None: ...

    def batch_done(self, batch: Batch, *, is_counted: bool) -> None:
        self.closed.append(batch.number)

    lost = LostData()

    def loop_over(self) -> None: ...


def read(task: AssignedTask) -> list[pa.RecordBatch]:
    numbers = range(task.assignment.first_batch, task.assignment.end_batch)
    return [pa.record_batch({"number": [number]}) for number in numbers]


def data_of(master: Master | QueueMaster, listener: Listener, *, explicit_done: bool = True, **more: object) -> Dataset:
    return Dataset(
        _DECLARED,
        lambda: TaskFeed(master.fetch, lambda: None, CLOCK),
        read,
        listener,
        waiting,
        5.0,
        lambda: None,
        explicit_done=explicit_done,
        **more,
    )


def test_batches_marked_done_at_once_need_only_one_loop() -> None:
    master, listener = Master(3, 2), Listener()
    data = data_of(master, listener)
    for batch in data:
        assert len(listener.opened) == len(listener.closed) + 1
        data.done(batch)
    assert data.is_over
    assert listener.closed == [0, 1] * 3
    assert len(master.finished) == 3


def test_a_loop_that_reads_ahead_ends_without_more_batches_and_can_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SLICE_S", 0.02)
    master, listener = Master(3, 2), Listener()
    data = data_of(master, listener)
    rounds = []
    while not data.is_over:
        batches = list(data)
        assert len(batches) == len(data._acknowledged.not_done)
        rounds.append(len(batches))
        for _ in batches:
            data.done()
    # The feed holds two tasks at a time.
    assert sum(rounds) == 6
    assert max(rounds) == 4
    assert len(master.finished) == 3
    assert master.returned == []


def test_a_new_loop_follows_one_that_ended_with_a_transient_error() -> None:
    master, listener = QueueMaster(2, 2, is_deduplicated=False), Listener()
    open_batch, errors = listener.open_batch, [UnavailableError("etcd cannot be reached")]

    def fail_once(batch: Batch, place: Callable[[], str]) -> bool:
        if errors:
            raise errors.pop()
        return open_batch(batch, place)

    listener.open_batch = fail_once  # type: ignore[method-assign]
    data = data_of(master, listener)
    with pytest.raises(UnavailableError):
        list(data)
    for batch in data:
        data.done(batch)
    assert data.is_over
    assert len(listener.closed) == 4


def test_batches_that_were_never_done_are_returned() -> None:
    master, listener = Master(1, 2), Listener()
    data = data_of(master, listener)
    first = next(iter(data))
    data.done(first)
    data.close()
    assert (len(master.finished), len(master.returned)) == (0, 1)
    with pytest.raises(UsageError, match="none of those that the loop gave"):
        data.done(first)


def test_revoked_batches_are_marked_done_in_order_without_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SLICE_S", 0.02)
    master, listener = Master(3, 2), Listener()
    data = data_of(master, listener)
    first = list(data)
    assert len(first) == 4
    with data._feed._changed:
        data._feed._feed._lose({100}, CLOCK.now())
        data._feed._changed.notify_all()
    later = list(data)
    outcomes = [data.done() for _ in (*first, *later)]
    assert outcomes[:4] == [Done.TAKEN, Done.TAKEN, Done.COUNTED, Done.COUNTED]
    assert set(outcomes[4:]) == {Done.COUNTED}
    assert list(data) == []
    assert data.is_over
    assert sorted(each.attempt for each in master.finished) == [101, 102]


def test_an_expired_lease_revokes_a_batch_before_it_is_done() -> None:
    registrations = iter((False, True))
    data = data_of(Master(2, 1), Listener(), require_lease=lambda: next(registrations) and data.registered_again())
    first = next(iter(data))
    assert data.done(first) is Done.TAKEN
    data.close()


def test_a_batch_of_an_expired_lease_is_not_yielded() -> None:
    master = Master(1, 2)
    registrations = iter((False, True, False))
    data = data_of(master, Listener(), require_lease=lambda: next(registrations) and data.registered_again())
    assert [batch["number"][0].as_py() for batch in data] == [0]
    assert len(master.returned) == 1


def test_only_the_unfinished_part_of_a_stuck_trainers_task_is_revoked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The master revokes by timeout: the trainer's lease is alive, and the trainer is not notified."""
    monkeypatch.setattr(feed_module, "_CONFIRM_AFTER_S", 0.0)
    master = QueueMaster(1, 3, is_deduplicated=False, stuck_after_s=60.0)
    data = data_of(master, Listener())
    batches = iter(data)
    assert data.done(next(batches)) is Done.COUNTED
    second = next(batches)
    with master.changed:
        master.now = 61.0
        master.queue.tick(master.now)
        answer = master.queue.request("b", master.now)
    assert isinstance(answer, TaskGiven)
    assert (answer.assignment.first_batch, answer.assignment.end_batch) == (1, 3)
    assert data.done(second) is Done.TAKEN
    data.close()


def test_a_loop_that_is_left_returns_its_unfinished_batches() -> None:
    """Without a model, a batch is done when the next one is requested."""
    master, listener = QueueMaster(1, 4, is_deduplicated=False), Listener()
    data = data_of(master, listener, explicit_done=False)
    for batch in data:
        if batch["number"][0].as_py() == 2:
            break
    data.close()
    assert master.queue.batches(0, 0).todo == ((2, 4),)


def test_done_requires_explicit_done() -> None:
    data = data_of(Master(1, 1), Listener(), explicit_done=False)
    with pytest.raises(UsageError, match="declare explicit_done=True"):
        data.done()
