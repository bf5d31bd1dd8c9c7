"""Retrying, in virtual time."""

from __future__ import annotations

import pytest

from flightedl.errors import (
    BusyError,
    DeadlineError,
    FencedError,
    FlightedlError,
    NotReadyError,
    OutcomeUnknownError,
    UnavailableError,
)
from flightedl.rpc.retrying import retrying
from flightedl.testing.clock import FakeClock


class Attempts:
    """Fails as it is told, each attempt taking some time, then succeeds."""

    def __init__(self, clock: FakeClock, *failures: FlightedlError, takes_s: float = 0.0) -> None:
        self.clock = clock
        self.failures = list(failures)
        self.takes_s = takes_s
        self.times: list[float] = []
        self.slices: list[float] = []

    def __call__(self, timeout_s: float) -> str:
        self.times.append(self.clock.now())
        self.slices.append(timeout_s)
        self.clock.advance(self.takes_s)
        if self.failures:
            raise self.failures.pop(0)
        return "done"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(0.0, jumps=True)


def test_pauses_double_up_to_a_second(clock: FakeClock) -> None:
    attempts = Attempts(clock, *[NotReadyError("starting")] * 8)
    assert retrying(attempts, what="reaching it", timeout_s=60.0, clock=clock) == "done"
    pauses = [later - earlier for earlier, later in zip(attempts.times, attempts.times[1:], strict=False)]
    assert pauses == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0])


def test_slices_are_short_and_end_with_the_deadline(clock: FakeClock) -> None:
    attempts = Attempts(clock, *[BusyError("full")] * 3, takes_s=2.0)
    with pytest.raises(UnavailableError, match=r"reaching it: gave up after 6\.\d s: full"):
        retrying(attempts, what="reaching it", timeout_s=6.2, clock=clock)
    assert attempts.slices == pytest.approx([5.0, 4.15, 2.05])


@pytest.mark.parametrize("error", [FencedError("old"), OutcomeUnknownError("broken"), DeadlineError("late")])
def test_what_cannot_be_repeated_is_raised_at_once(clock: FakeClock, error: FlightedlError) -> None:
    attempts = Attempts(clock, error)
    with pytest.raises(type(error)) as caught:
        retrying(attempts, what="reaching it", timeout_s=60.0, clock=clock)
    assert caught.value is error


def test_unknown_outcomes_are_repeated_where_the_request_is_idempotent(clock: FakeClock) -> None:
    attempts = Attempts(clock, OutcomeUnknownError("broken"), DeadlineError("late"))
    assert retrying(attempts, what="pushing", timeout_s=60.0, clock=clock, is_idempotent=True) == "done"


def test_giving_up_tells_whether_something_may_have_happened(clock: FakeClock) -> None:
    attempts = Attempts(clock, DeadlineError("late"), *[BusyError("full")] * 100)
    with pytest.raises(DeadlineError, match="gave up"):
        retrying(attempts, what="pushing", timeout_s=10.0, clock=clock, is_idempotent=True)
    assert clock.now() <= 10.0


def test_says_once_what_it_waits_for(clock: FakeClock) -> None:
    said: list[str] = []
    attempts = Attempts(clock, *[NotReadyError("pserver 1 is missing")] * 20)
    retrying(attempts, what="pulling", timeout_s=60.0, clock=clock, waiting=said.append, waiting_after_s=5.0)
    assert len(said) == 1
    assert said[0].startswith("pulling: waiting for")
    assert "pserver 1 is missing" in said[0]
