"""The clock by which leases expire."""

from __future__ import annotations

import time

import pytest

from flightedl.adapters import clock


def test_the_clock_advances_while_the_machine_is_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "CLOCK_BOOTTIME", 77, raising=False)
    monkeypatch.setattr(time, "clock_gettime", {77: 1234.5}.__getitem__)
    assert clock.suspend_aware_clock()() == 1234.5


def test_systems_without_a_boot_time_clock_use_the_monotonic_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> float:
        raise OSError("no such clock")

    with monkeypatch.context() as patch:
        patch.setattr(time, "clock_gettime", refuse)
        assert clock.suspend_aware_clock() is time.monotonic
    monkeypatch.delattr(time, "CLOCK_BOOTTIME", raising=False)
    assert clock.suspend_aware_clock() is time.monotonic


def test_the_clock_advances_with_real_time() -> None:
    now = clock.SystemClock().now
    before = now()
    time.sleep(0.01)
    assert 0.01 <= now() - before < 5
