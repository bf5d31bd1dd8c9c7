"""A simulated loop notices when a trainer gives up tasks that were not taken from it."""

from __future__ import annotations

from collections import deque
from itertools import count

import pytest

from flightedl.domain.trainer.feed import AssignedTask, Feed
from flightedl.domain.trainer.readings import HandOut, ReadFailure
from flightedl.errors import DataError
from tests.simulation.cores.cluster import Cluster
from tests.simulation.cores.loop import Loop
from tests.simulation.cores.trainer import Trainer
from tests.simulation.cores.world import Violation


@pytest.fixture
def loop() -> Loop:
    """A loop that works on a batch and has not begun the other task that it holds."""
    for seed in count():
        cluster = Cluster(seed, fault_scale=0.0)
        while cluster.world.step():
            for trainer in cluster.processes:
                found = trainer.loop if isinstance(trainer, Trainer) else None
                if found and found.at and len(found.feed.held) == 2 and found.feed.is_held(found.at.task):
                    return found
    raise AssertionError


def deny(loop: Loop) -> AssignedTask:
    """The loop's task was taken away; return the other one."""
    at = loop.at
    assert at is not None
    other = next(task for task in loop.feed.held if task != at.task)
    loop._items = deque([ReadFailure(other, other.assignment.first_batch, DataError("it cannot be decoded"))])
    loop.feed._lose({at.task.assignment.attempt}, loop.world.now)
    loop._open(HandOut(at.task, at.batch, is_again=True))
    return other


def test_the_next_task_may_fail_at_once(loop: Loop) -> None:
    other = deny(loop)
    assert [report.attempt for report in loop.feed.reports.failed] == [other.assignment.attempt]


def test_giving_up_another_task_is_found(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Feed, "hand_back", lambda self, task, now: self.close())
    with pytest.raises(Violation, match="gives up"):
        deny(loop)
