"""Every order in which a trainer's threads find that its lease has ended, and register it again or leave the job."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from flightedl.client import registration as registrations
from flightedl.client.registration import Registration
from flightedl.coordination.keys import JobKeys
from flightedl.errors import FencedError, NotReadyError
from flightedl.ports import Put
from tests.support.memory import MemoryCoordinator
from tests.support.planting import Planted, bug, drops, swaps

from .scheduler import Run, VirtualClock, explore, finds

KEYS = JobKeys("demo")
TTL_S = 60.0
CLASS = "client.registration:Registration"


class Trainer:
    """A trainer whose lease has just ended. It may not know that yet."""

    def __init__(self, *, knows: bool = True) -> None:
        clock: Any = VirtualClock()
        self.coordinator = MemoryCoordinator(clock)
        self.registration = Registration(self.coordinator, clock, KEYS, TTL_S)
        self.first = self.registration.generation
        self.coordinator.end_lease(self.registration.held.lease_id)
        if knows:
            self.registration.held.has_lost()

    @property
    def leases(self) -> int:
        return len(self.coordinator._store.leases)

    def require_registered(self) -> None:
        entry = self.coordinator.get(KEYS.trainer(self.registration.trainer))
        assert entry is not None
        assert self.registration.generation == entry.create_revision > self.first
        assert self.leases == 1, "a trainer has two leases"


def renewing(run: Run) -> None:
    """Threads that find the lease lost register once, and exactly one of them learns of the new generation."""
    trainer = Trainer()
    news: list[bool] = []
    generations: list[int] = []
    registration = trainer.registration
    run.threads(
        lambda: news.append(registration.renewed()),
        lambda: generations.append(registration.under_lease(lambda held: held.generation)),
        lambda: news.append(registration.renewed()),
    )
    trainer.require_registered()
    assert generations == [registration.generation]
    assert sum([*news, registration.renewed()]) == 1, "a new registration was reported twice or never"
    registration.close()
    assert not trainer.leases


def noticing(run: Run) -> None:
    """A write under a lease that has ended unnoticed is repeated under the next one."""
    trainer = Trainer(knows=False)
    registration = trainer.registration

    def write() -> None:
        is_done = False
        while not is_done:
            with contextlib.suppress(NotReadyError):
                registration.under_lease(lambda held: trainer.coordinator.transact([], [held.attached("name", b"")]))
                is_done = True

    run.threads(write, write)
    trainer.require_registered()
    entry = trainer.coordinator.get("name")
    assert entry is not None
    assert entry.lease_id == registration.held.lease_id
    registration.close()
    assert not trainer.leases


def leaving(run: Run) -> None:
    """A late thread does not register a trainer again after it has left the job."""
    trainer = Trainer()

    def write() -> None:
        with contextlib.suppress(FencedError, NotReadyError):
            trainer.registration.under_lease(lambda held: trainer.coordinator.transact([], [Put("x", b"")]))

    run.threads(write, trainer.registration.close, write)
    assert not trainer.leases, "a trainer is registered although it has left"
    with pytest.raises(FencedError, match="has left"):
        trainer.registration.renewed()


@pytest.mark.parametrize("program", [renewing, noticing, leaving])
def test_a_trainer_is_registered_once(program: Any) -> None:
    assert explore(program, [registrations], deviations=1).is_complete


@pytest.mark.parametrize(
    ("program", "flaw"),
    [
        (renewing, bug("two threads register", swaps(f"{CLASS}.under_lease", "self._lock", "_nothing"))),
        (renewing, bug("the former lease stays", drops(f"{CLASS}._renew", "self._held = self._claim()"))),
        (noticing, bug("a lost lease is not noticed", drops(f"{CLASS}.under_lease", "held.has_lost()"))),
        (leaving, bug("a trainer comes back", drops(f"{CLASS}.close", "self._is_closed = True"))),
        (leaving, bug("the lease stays", drops(f"{CLASS}.close", "self._held.release()"))),
    ],
    ids=lambda value: getattr(value, "what", ""),
)
def test_a_trainer_that_is_registered_twice_is_found(
    program: Any, flaw: Planted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registrations, "_nothing", contextlib.nullcontext(), raising=False)
    finds(flaw, program, [registrations], deviations=1)
