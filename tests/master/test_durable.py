"""Group commit: durable before answered, fenced, and safe after a write of unknown outcome."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.coordination.keeper import HeldKey
from flightedl.errors import NotReadyError, UsageError
from flightedl.master.durable import DurableState
from flightedl.ports import Delete, ModifiedAt, Put
from tests.support.contracts.coordinator import eventually
from tests.support.faulty_coordinator import FaultKind
from tests.support.memory import MemoryCoordinator


class Counter:
    """A state that is one number, written by a durable writer under a lock of an in-memory coordinator."""

    def __init__(self) -> None:
        self.clock = SystemClock()
        self.coordinator = MemoryCoordinator(self.clock)
        held = HeldKey.claim(self.coordinator, self.clock, "lock", b"", 30.0)
        assert held is not None
        self.held = held
        self.value = 0
        self.reasons: list[str] = []
        self.durable = DurableState(held, self.coordinator, self.clock, self._snapshot, self.reasons.append, {})

    def _snapshot(self) -> tuple[int, dict[str, bytes]]:
        return self.value, {"state": str(self.value).encode()}

    def stored(self) -> bytes | None:
        entry = self.coordinator.get("state")
        return None if entry is None else entry.value


@pytest.fixture
def counter() -> Iterator[Counter]:
    made = Counter()
    yield made
    made.durable.close()
    made.held.release()


def test_awaited_state_is_stored(counter: Counter) -> None:
    counter.value = 3
    counter.durable.wait(3, 5.0)
    assert counter.stored() == b"3"


def test_many_waiters_share_few_writes(counter: Counter) -> None:
    counter.value = 64
    waiters = [threading.Thread(target=counter.durable.wait, args=(n, 5.0)) for n in range(1, 65)]
    for waiter in waiters:
        waiter.start()
    for waiter in waiters:
        waiter.join()
    assert counter.durable.write_count == 1
    assert counter.stored() == b"64"


def test_waiters_that_shared_a_write_share_the_next_one(counter: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
    """They return one after the other, but within the time for which the writer waits for them."""
    # Long enough even on a busy machine.
    monkeypatch.setattr("flightedl.master.durable._GATHER_S", 0.1)
    # Twice a crowd: a waiter that is late must not make the rest too few to be waited for.
    count, rounds = 16, 20
    lock, together = threading.Lock(), threading.Barrier(count)

    def ask() -> None:
        # One that begins before the others could have finished all its rounds alone.
        together.wait()
        for _ in range(rounds):
            with lock:
                counter.value += 1
                revision = counter.value
            counter.durable.wait(revision, 5.0)

    askers = [threading.Thread(target=ask) for _ in range(count)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert counter.stored() == str(count * rounds).encode()
    assert counter.durable.write_count < count * rounds / 2


def test_a_single_waiter_is_answered_after_a_crowd_that_does_not_return(counter: Counter) -> None:
    for first in range(1, 200, 20):
        counter.value = first + 16
        crowd = [threading.Thread(target=counter.durable.wait, args=(first + n, 5.0)) for n in range(17)]
        for waiter in crowd:
            waiter.start()
        for waiter in crowd:
            waiter.join()
        for revision in (first + 17, first + 18):
            counter.value = revision
            counter.durable.wait(revision, 5.0)


def test_a_change_after_the_snapshot_is_not_durable_with_it(counter: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that arrives while an older state is being written waits for its own state."""
    transact, is_blocked = counter.coordinator.transact, threading.Event()
    second = threading.Thread(target=counter.durable.wait, args=(2, 10.0))
    writes: list[object] = []

    def write(*arguments: Any) -> object:
        writes.append(arguments)
        if len(writes) == 1:
            counter.value = 2
            second.start()
            eventually(lambda: counter.durable._wanted == 2)
        else:
            is_blocked.wait(10.0)
        return transact(*arguments)

    monkeypatch.setattr(counter.coordinator, "transact", write)
    counter.value = 1
    counter.durable.wait(1, 5.0)
    assert counter.stored() == b"1"
    with pytest.raises(NotReadyError, match="cannot save its state"):
        counter.durable.wait(2, 0.2)
    assert len(counter.durable._waiters) == 1, "a request that was given up is kept"
    assert second.is_alive()
    is_blocked.set()
    second.join()
    assert counter.stored() == b"2"


def test_a_single_waiter_is_never_delayed(counter: Counter) -> None:
    for revision in range(1, 101):
        counter.value = revision
        counter.durable.wait(revision, 5.0)
    assert counter.durable.write_count == 100


def test_a_deposed_master_writes_nothing_and_steps_down(counter: Counter) -> None:
    counter.coordinator.transact([], [Delete("lock")])
    counter.value = 1
    with pytest.raises(NotReadyError, match="stepping down"):
        counter.durable.wait(1, 5.0)
    assert counter.stored() is None
    assert counter.reasons


def test_bytes_of_another_writer_depose_the_master(counter: Counter) -> None:
    counter.coordinator.transact([], [Put("state", b"not mine")])
    counter.value = 1
    with pytest.raises(NotReadyError):
        counter.durable.wait(1, 5.0)
    assert counter.stored() == b"not mine"
    assert counter.reasons == ["another process wrote its state"]


@pytest.mark.parametrize("fault", ["unavailable", "lost_request", "lost_reply"])
def test_a_write_that_fails_in_any_way_is_retried(counter: Counter, fault: FaultKind) -> None:
    counter.value = 1
    counter.coordinator.fail_next(fault)
    counter.durable.wait(1, 5.0)
    assert counter.stored() == b"1"
    counter.value = 2
    counter.durable.wait(2, 5.0)
    assert counter.stored() == b"2"
    assert not counter.reasons


def test_a_late_write_of_unknown_outcome_cannot_undo_a_later_one(counter: Counter) -> None:
    """The lost transaction compares with a revision that the next one changes."""
    counter.value = 1
    counter.durable.wait(1, 5.0)
    before = counter.coordinator.get("state")
    assert before is not None
    counter.value = 2
    counter.durable.wait(2, 5.0)
    late = counter.coordinator.transact([ModifiedAt("state", before.mod_revision)], [Put("state", b"1")])
    assert not late.committed
    assert counter.stored() == b"2"


@pytest.mark.parametrize("error", [ZeroDivisionError("nobody thought of it"), UsageError("etcd does not take this")])
def test_an_unexpected_error_makes_the_master_step_down(
    counter: Counter, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(counter.held, "write", fail)
    counter.value = 1
    with pytest.raises(NotReadyError, match="stepping down"):
        counter.durable.wait(1, 5.0)
    assert counter.reasons == [f"its state cannot be written: {error}"]
    with pytest.raises(NotReadyError, match="stepping down"):
        counter.durable.wait(1, 5.0)


def test_a_state_that_cannot_be_encoded_makes_the_master_step_down(counter: Counter) -> None:
    counter.value = 1
    counter.durable._snapshot = None  # type: ignore[assignment]
    with pytest.raises(NotReadyError, match="stepping down"):
        counter.durable.wait(1, 5.0)
    assert len(counter.reasons) == 1
