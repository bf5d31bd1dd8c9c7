"""In-memory etcd on a clock like the machine's, with leases short enough to expire within a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.coordination.keys import JobKeys
from tests.support.memory import MemoryCoordinator

from .process_clock import ProcessClock


@pytest.fixture
def clock() -> Iterator[ProcessClock]:
    made = ProcessClock()
    yield made
    made.close()


@pytest.fixture
def machine_clock() -> SystemClock:
    """Clock by which a real etcd expires leases."""
    return SystemClock()


@pytest.fixture
def coordinator(clock: ProcessClock) -> MemoryCoordinator:
    return MemoryCoordinator(clock)


@pytest.fixture
def keys() -> JobKeys:
    return JobKeys("demo")
