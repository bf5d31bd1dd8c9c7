"""Every order in which batches are given to reader processes, transformed, delivered and abandoned."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from flightedl.client.data import readers
from flightedl.client.data.readers import _Job, _Pool
from tests.support.planting import Planted, bug, drops, swaps

from .scheduler import Run, explore, finds, running

POOL = "client.data.readers:_Pool"


class Process:
    """A reader process that returns each batch unchanged. The first one dies with two batches in flight."""

    def __init__(self) -> None:
        self.is_mortal = not made
        self.is_closed = False
        self.is_hung_up = False
        self._sent: deque[object] = deque()
        made.append(self)

    def begin(self, _: object) -> None:
        running().point()

    def send(self, batch: object) -> None:
        running().point()
        self._require_alive()
        self._sent.append(batch)

    def receive(self) -> tuple[str, object]:
        running().point()
        if self.is_mortal and len(self._sent) == 2:
            self.hang_up()
        self._require_alive()
        assert self._sent, "a thread waits for a batch that it has not sent"
        return "", self._sent.popleft()

    def _require_alive(self) -> None:
        if self.is_hung_up:
            raise EOFError

    def hang_up(self) -> None:
        self.is_hung_up = True

    def close(self) -> str:
        assert not self.is_closed, "a process is closed twice"
        self.is_closed = True
        return ""


#: Processes of the current run.
made: list[Process] = []


@pytest.fixture(autouse=True)
def processes_without_a_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_Process", Process)


def pool_of(count: int) -> _Pool:
    made.clear()
    function: Any = None
    return _Pool(function, count)


def require_ended(pool: _Pool) -> None:
    assert not any(thread.is_alive() for thread in pool._threads)
    assert all(process.is_closed for process in made), "a process outlives its pool"


def put_five(pool: _Pool, delivered: list[int], most: int = 5) -> None:
    """Put five batches, whose numbers are added once they are delivered. At most ``most`` of them wait at any time."""
    for number in range(5):
        batch: Any = "batch"
        pool.put(_Job(batch, str, lambda _, number=number: delivered.append(number)))  # type: ignore[misc]
        assert len(pool._jobs) <= most


def delivering(run: Run) -> None:
    """Results are delivered once and in order, although a process dies, and at most four of each process wait."""
    pool = pool_of(2)
    delivered: list[object] = []
    waiting: list[int] = []

    def put() -> None:
        for number in range(5):
            waiting.append(len(pool._jobs))
            batch: Any = None if number == 2 else f"batch {number}"
            pool.put(_Job(batch, str, lambda result, number=number: delivered.append((number, result))))  # type: ignore[misc]
        run.block(lambda: len(delivered) == 5, None)

    run.threads(put)
    assert delivered == [(n, None if n == 2 else f"batch {n}") for n in range(5)]
    pool.close()
    require_ended(pool)


def crowding(run: Run) -> None:
    """A full pool accepts a batch as soon as one has been delivered, and never more than four for each process."""
    pool = pool_of(1)
    delivered: list[int] = []

    def put() -> None:
        put_five(pool, delivered, most=4)
        run.block(lambda: len(delivered) == 5, None)

    run.threads(put)
    assert delivered == [*range(5)]
    pool.close()
    require_ended(pool)


def closing(run: Run) -> None:
    """A pool that is closed while batches are put ends at once, with all of its processes and threads."""
    pool = pool_of(1)
    delivered: list[int] = []
    run.threads(lambda: put_five(pool, delivered), pool.close)
    require_ended(pool)
    assert delivered == [*range(len(delivered))]


@pytest.mark.parametrize("program", [delivering, crowding, closing])
def test_batches_are_delivered_in_order_until_the_end(program: Any) -> None:
    assert explore(program, [readers], deviations=1).is_complete


@pytest.mark.parametrize(
    ("program", "flaw"),
    [
        (
            delivering,
            bug(
                "two threads deliver at once", swaps(f"{POOL}._finish", "self._delivering", "contextlib.nullcontext()")
            ),
        ),
        (
            delivering,
            bug("a batch is lost", drops(f"{POOL}._after_death", "self._put_back(under_way)")),
        ),
        (crowding, bug("nobody says that there is room", drops(f"{POOL}._finish", "self._has_room.notify()"))),
        (closing, bug("a full pool is not told that it closes", drops(f"{POOL}.close", "self._has_room.notify_all()"))),
        (closing, bug("idle readers wait on", drops(f"{POOL}.close", "self._has_work.notify_all()"))),
        (closing, bug("threads run on", drops(f"{POOL}.close", "thread.join()"))),
    ],
    ids=lambda value: getattr(value, "what", ""),
)
def test_a_lost_batch_or_thread_is_found(program: Any, flaw: Planted) -> None:
    finds(flaw, program, [readers], deviations=1)
