"""Fixture: a warm process of the new simulation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .client import Simulation


@pytest.fixture(scope="session")
def simulation() -> Iterator[Simulation]:
    made = Simulation()
    yield made
    made.close()
