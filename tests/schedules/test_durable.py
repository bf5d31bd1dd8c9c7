"""Every order in which requests wait for the master's state while a thread writes it, and while the master ends."""

from __future__ import annotations

from typing import Any

import pytest

from flightedl.coordination.keeper import HeldKey
from flightedl.errors import NotReadyError
from flightedl.master import durable
from flightedl.master.durable import DurableState
from flightedl.testing.memory_coordinator import MemoryCoordinator
from flightedl.testing.simulation.planted import Planted, bug, drops, swaps

from .scheduler import Lock, Run, VirtualClock, explore, finds

WAIT, WRITE_ON = "master.durable:DurableState.wait", "master.durable:DurableState._write_on"
LONG_S = 60.0


class Master:
    """A state that is one number, and requests that increment it."""

    def __init__(self) -> None:
        clock: Any = VirtualClock()
        self.coordinator = MemoryCoordinator(clock)
        held = HeldKey.claim(self.coordinator, clock, "lock", b"", LONG_S)
        assert held is not None
        self.held = held
        self.lock = Lock()
        self.value = 0
        self.reasons: list[str] = []
        self.durable = DurableState(held, self.coordinator, clock, self._snapshot, self.reasons.append, {})

    def _snapshot(self) -> tuple[int, dict[str, bytes]]:
        with self.lock:
            return self.value, {"state": str(self.value).encode()}

    def stored(self) -> int:
        entry = self.coordinator._store.entries.get("state")
        return 0 if entry is None else int(entry.value)

    def request(self) -> bool:
        """Return False if the master is stepping down."""
        with self.lock:
            self.value += 1
            own = self.value
        try:
            self.durable.wait(own, 5.0)
        except NotReadyError:
            return False
        assert self.stored() >= own, "a request was answered before its state was stored"
        return True


def requests(run: Run) -> None:
    """A request is answered when its state is stored, and not later than the write that stores it."""
    master = Master()
    answered: list[bool] = []
    run.threads(*[lambda: answered.append(master.request())] * 2)
    assert answered == [True, True]
    assert run.now == 0.0, "a wake-up was lost"
    assert master.reasons == []


def ending(run: Run) -> None:
    """A request that is not answered when the master ends fails at once."""
    master = Master()
    run.threads(master.request, master.durable.close)
    assert run.now == 0.0, "a request waited for a master that had ended"
    assert not master.request()


def deposed(run: Run) -> None:
    """A master whose lock another one holds answers no request, and says why it steps down."""
    master = Master()

    def depose() -> None:
        master.coordinator.end_lease(master.held.lease_id)

    run.threads(master.request, depose)
    master.request()
    assert not master.request()
    assert master.stored() <= 1
    assert master.reasons == ["another master holds the lock"]


@pytest.mark.parametrize("program", [requests, ending, deposed])
def test_a_request_is_answered_once_its_state_is_stored(program: Any) -> None:
    assert explore(program, [durable], deviations=1 if program is deposed else 2).is_complete


@pytest.mark.parametrize(
    ("program", "flaw"),
    [
        (
            requests,
            bug(
                "requests are answered whose state came after the snapshot",
                swaps(WRITE_ON, "self._durable = revision", "self._durable = revision = self._wanted"),
            ),
        ),
        (
            requests,
            bug(
                "the writer waits without looking for requests first",
                swaps(
                    WRITE_ON,
                    "self._changed.wait_for(lambda: self._wanted > self._durable or self._is_stopping)",
                    "self._changed.wait()",
                ),
            ),
        ),
        (
            requests,
            bug(
                "requests are not looked for under the lock",
                swaps(WRITE_ON, "self._waiters = [waiter for", "self._waiters = [] and [waiter for"),
            ),
        ),
        (
            ending,
            bug("a request waits after the writer has ended", swaps(WAIT, "if not self._is_stopping:", "if True:")),
        ),
        (
            ending,
            bug("requests are not woken at the end", drops("master.durable:DurableState._stop", "lock.release()")),
        ),
        (
            deposed,
            bug(
                "a write is not fenced",
                swaps("coordination.keeper:HeldKey.write", "[fence, *extra_conditions]", "[*extra_conditions]"),
            ),
        ),
    ],
    ids=lambda value: getattr(value, "what", ""),
)
def test_a_request_that_is_answered_too_early_or_too_late_is_found(program: Any, flaw: Planted) -> None:
    finds(flaw, program, [durable])
