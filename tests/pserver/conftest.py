"""Checks, in every test of pservers, that methods are called under the lock that they require."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .guards import install


@pytest.fixture(autouse=True)
def required_locks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    guards = install(monkeypatch)
    yield
    assert not guards.violations, "\n".join(dict.fromkeys(guards.violations))
