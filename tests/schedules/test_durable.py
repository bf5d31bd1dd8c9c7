"""Every order in which the master's state is read, written and waited for, also while the master ends."""

from __future__ import annotations

from typing import Any

import pytest

from flightedl.config import MasterSettings
from flightedl.coordination.keeper import HeldKey
from flightedl.coordination.keys import JobKeys
from flightedl.domain.master.events import Asked, LeasesSeen
from flightedl.domain.queue.values import QueueSettings
from flightedl.errors import NotReadyError
from flightedl.master import durable, state
from flightedl.master.durable import DurableState
from flightedl.master.evaluations import EvaluationDatasets
from flightedl.master.state import JobState
from flightedl.messages.tasks import StopRequest
from tests.support.memory import MemoryCoordinator
from tests.support.planting import Planted, bug, drops, rewrites, swaps

from .scheduler import Lock, Run, VirtualClock, explore, finds

WAIT, WRITE_ON = "master.durable:DurableState.wait", "master.durable:DurableState._write_on"
SNAPSHOT = "master.state:JobState._snapshot"
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


def snapshots(run: Run) -> None:
    """The values of the job's state belong to the revision that is returned with them."""
    clock: Any = VirtualClock()
    evaluations = EvaluationDatasets(lambda: pytest.fail("no evaluation was declared"), QueueSettings)
    chosen = MasterSettings(etcd="memory:1", job="demo")
    job = JobState(chosen, 1, 1, MemoryCoordinator(clock), JobKeys("demo"), clock, evaluations, keeps_checkpoints=False)
    job.apply(LeasesSeen({"t": 1}, {}, 1))
    before = job._snapshot()
    taken: list[tuple[int, dict[str, bytes]]] = []

    def change() -> None:
        job.apply(Asked(1, StopRequest(trainer="t", generation=1, reason="enough")))

    run.threads(change, lambda: taken.append(job._snapshot()))
    after = job._snapshot()
    assert after[0] > before[0]
    assert taken[0] in (before, after), "the values belong to another revision"


@pytest.mark.parametrize("program", [requests, ending, deposed])
def test_a_request_is_answered_once_its_state_is_stored(program: Any) -> None:
    assert explore(program, [durable], deviations=2 if program is ending else 1).is_complete


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
    finds(flaw, program, [durable], deviations=2 if program is ending else 1)


def test_a_snapshot_of_the_jobs_state_is_of_one_revision() -> None:
    assert explore(snapshots, [state]).is_complete


@pytest.mark.parametrize(
    "flaw",
    [
        bug(
            "the revision is read after the values, outside the lock",
            rewrites(
                SNAPSHOT,
                "return self.core.revision, values",
                """
                self.lock.release()
                try:
                    return self.core.revision, values
                finally:
                    self.lock.acquire()
                """,
            ),
        ),
        bug(
            "an event is applied without the lock",
            swaps("master.state:JobState.apply", "self.lock", "threading.RLock()"),
        ),
    ],
    ids=lambda value: value.what,
)
def test_a_snapshot_with_a_wrong_revision_is_found(flaw: Planted) -> None:
    finds(flaw, snapshots, [state])
