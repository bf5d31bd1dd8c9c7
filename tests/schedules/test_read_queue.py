"""Every order in which the reader's thread and the user's thread use the queue between them."""

from __future__ import annotations

import pytest

from flightedl.client.data import read_queue
from flightedl.client.data.read_queue import ReadQueue
from tests.support.planting import Planted, bug, drops, swaps

from .scheduler import Run, explore, finds

PUT, GET = "client.data.read_queue:ReadQueue.put", "client.data.read_queue:ReadQueue.get"


def program(run: Run) -> None:
    """All items arrive in order, and no thread waits until its time limit although it could continue."""
    queue: ReadQueue[int] = ReadQueue(100)
    taken: list[int] = []

    def read() -> None:
        for number in range(4):
            assert queue.put(number, 1.0, own_bytes=60)

    def use() -> None:
        while len(taken) < 4:
            taken.append(queue.get(1.0))

    run.threads(read, use)
    assert taken == [0, 1, 2, 3]
    assert run.now == 0.0, "a wake-up was lost"


def test_no_item_and_no_wake_up_is_lost() -> None:
    assert explore(program, [read_queue]).is_complete


@pytest.mark.parametrize(
    "flaw",
    [
        bug(
            "the reader waits without looking again after it has said that it waits",
            swaps(
                PUT,
                "self._changed.wait_for(lambda: self._has_room(self._wait_until or 0), timeout_s)",
                "self._changed.wait(timeout_s)",
            ),
        ),
        bug(
            "the user's thread waits without looking again under the lock",
            swaps(GET, "self._changed.wait_for(lambda: items, timeout_s)", "self._changed.wait(timeout_s)"),
        ),
        bug("the user's thread does not say that it waits", drops(GET, "self._is_waited_for = True")),
    ],
    ids=lambda flaw: flaw.what,
)
def test_a_lost_wake_up_is_found(flaw: Planted) -> None:
    finds(flaw, program, [read_queue])
