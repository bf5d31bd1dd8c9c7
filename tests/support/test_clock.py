"""The clock that tests advance."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.clock import FakeClock
from tests.support.contracts.coordinator import eventually


def test_the_clock_does_not_move_until_advanced(fake_clock: FakeClock) -> None:
    start, wall = fake_clock.now(), fake_clock.wall_time()
    fake_clock.advance(2.5)
    assert fake_clock.now() - start == 2.5
    assert fake_clock.wall_time() - wall == 2.5
    with pytest.raises(ValueError, match="back"):
        fake_clock.advance(-1)


def test_a_sleeper_wakes_when_its_sleep_is_over(fake_clock: FakeClock) -> None:
    with ThreadPoolExecutor(1) as pool:
        sleeping = pool.submit(fake_clock.sleep, 10)
        eventually(lambda: fake_clock.sleepers == 1)
        fake_clock.advance(9)
        assert not sleeping.done()
        fake_clock.advance(1)
        sleeping.result(5)
    assert fake_clock.sleepers == 0


def test_a_jumping_clock_does_not_block() -> None:
    clock = FakeClock(0.0, jumps=True)
    clock.sleep(3)
    assert clock.now() == 3
