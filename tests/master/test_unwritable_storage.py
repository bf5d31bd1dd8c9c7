"""A job whose checkpoints cannot be stored does not start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.config import Resume
from flightedl.coordination.keeper import HeldKey
from flightedl.coordination.keys import JobKeys
from flightedl.errors import UnavailableError, UsageError
from flightedl.master import resuming
from flightedl.ports import Put
from tests.support.memory import MemoryCoordinator, MemoryStorage

KEYS = JobKeys("demo")


@pytest.fixture
def coordinator() -> Iterator[MemoryCoordinator]:
    made = MemoryCoordinator(SystemClock())
    yield made
    made.close()


def begin(coordinator: MemoryCoordinator, storage: MemoryStorage) -> None:
    held = HeldKey.claim(coordinator, SystemClock(), KEYS.master_lock, b"", 20.0)
    assert held is not None
    try:
        resuming.begin(storage, coordinator, held, KEYS, 1, resume=Resume.NEVER)
    finally:
        held.release()


def test_a_working_store_is_left_unchanged(coordinator: MemoryCoordinator) -> None:
    storage = MemoryStorage()
    begin(coordinator, storage)
    assert storage.files == {}
    assert storage.plan.count("publish:done") == 1


@pytest.mark.parametrize("point", ["list", "publish:start", "publish:end", "read", "delete"])
def test_a_failing_store_is_reported_to_the_user(coordinator: MemoryCoordinator, point: str) -> None:
    storage = MemoryStorage()
    storage.plan.fail_at(point, error=UnavailableError("no space left on device"))
    with pytest.raises(UsageError, match=r"the job cannot start, because .* no space left on device. Repair it"):
        begin(coordinator, storage)


def test_a_started_job_continues_without_its_store(coordinator: MemoryCoordinator) -> None:
    coordinator.transact([], [Put(KEYS.job, b"{}")])
    storage = MemoryStorage()
    storage.plan.fail_at("list", error=UnavailableError("away"))
    begin(coordinator, storage)
    assert storage.plan.trace == ()
