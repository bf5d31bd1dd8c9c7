"""An in-memory etcd on the real clock, with leases short enough to end within a test."""

from __future__ import annotations

import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.coordination.keys import JobKeys
from flightedl.testing.memory import MemoryCoordinator


@pytest.fixture
def clock() -> SystemClock:
    return SystemClock()


@pytest.fixture
def coordinator(clock: SystemClock) -> MemoryCoordinator:
    return MemoryCoordinator(clock)


@pytest.fixture
def keys() -> JobKeys:
    return JobKeys("demo")
