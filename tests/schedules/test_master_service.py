"""Every order in which a master's threads read the job's leases while they change."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from flightedl.coordination.keys import JobKeys
from flightedl.domain.master.events import LeasesSeen
from flightedl.master import service as services
from flightedl.master.service import MasterService
from tests.support.planting import Planted, bug, swaps

from .scheduler import Lock, Run, explore, finds, running

READ = "master.service:MasterService.read_directory"


class Directory:
    """A copy of a job's keys, in which another trainer registers with each revision."""

    def __init__(self) -> None:
        self.revision = 1

    def trainers(self) -> dict[str, Any]:
        running().point()
        return {f"t{number}": SimpleNamespace(generation=number) for number in range(1, self.revision + 1)}

    def pservers(self) -> dict[int, Any]:
        return {}

    def entry(self, _: str) -> None:
        return None


class Master:
    """A master's core, which remembers the leases that it has seen."""

    def __init__(self) -> None:
        self.directory = Directory()
        self.seen: list[LeasesSeen] = []
        self.gone: list[str] = []
        made = self.service = object.__new__(MasterService)
        made._looking = Lock()  # type: ignore[assignment]
        made._directory = self.directory  # type: ignore[assignment]
        made._keys = JobKeys("demo")
        made._links = SimpleNamespace(follow=lambda _: None)  # type: ignore[assignment]
        core = SimpleNamespace(trainers={})
        made._state = SimpleNamespace(  # type: ignore[assignment]
            lock=contextlib.nullcontext(),
            core=core,
            progress=SimpleNamespace(gone=self.gone.append),
            processes={},
            apply=self.apply,
        )

    def apply(self, event: object) -> None:
        running().point()
        if isinstance(event, LeasesSeen):
            self.seen.append(event)


def reading(run: Run) -> None:
    """The leases that the core sees never become older, and are at least as new as their revision."""
    master = Master()

    def register() -> None:
        master.directory.revision += 1
        master.service.read_directory()

    run.threads(master.service.read_directory, register, register)
    revisions = [event.revision for event in master.seen]
    assert revisions == sorted(revisions)
    counts = [len(event.trainers) for event in master.seen]
    assert counts == sorted(counts), "older leases replace newer ones"
    assert all(count >= revision for count, revision in zip(counts, revisions, strict=True))
    assert counts[-1] == 3


def test_leases_never_become_older() -> None:
    assert explore(reading, [services], deviations=2).is_complete


@pytest.mark.parametrize(
    "flaw",
    [
        bug("two threads read at once", swaps(READ, "self._looking", "_nothing")),
        bug(
            "the revision is read after the leases",
            swaps(
                READ,
                "LeasesSeen(trainers, pservers, revision)",
                "LeasesSeen(trainers, pservers, self._directory.revision)",
            ),
        ),
    ],
    ids=lambda flaw: flaw.what,
)
def test_older_leases_that_count_as_newer_are_found(flaw: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "_nothing", contextlib.nullcontext(), raising=False)
    finds(flaw, reading, [services], deviations=2)
