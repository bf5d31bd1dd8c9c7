"""Waiting: silent, then one line when the reason changes, then an error."""

from __future__ import annotations

import pytest

from flightedl.client.waiting import Waiting
from flightedl.errors import UnavailableError
from flightedl.testing.clock import FakeClock


def test_it_says_what_it_waits_for_after_a_while_and_only_once(capsys: pytest.CaptureFixture[str]) -> None:
    clock, told = FakeClock(), list[str]()
    waiting = Waiting(clock, say_after_s=5.0, give_up_s=100.0, tell=told.append)
    waiting.because("a pserver")
    assert capsys.readouterr().err == ""
    clock.advance(6.0)
    waiting.because("a pserver")
    waiting.because("a pserver")
    waiting.because("the master")
    waiting.over()
    assert capsys.readouterr().err.splitlines() == [
        "flightedl: waiting (6 s): a pserver",
        "flightedl: waiting (6 s): the master",
    ]
    assert told == ["a pserver", "the master", ""]


def test_it_gives_up_with_the_last_reason() -> None:
    clock = FakeClock()
    waiting = Waiting(clock, say_after_s=500.0, give_up_s=10.0, tell=lambda _: None)
    waiting.because("one")
    clock.advance(10.0)
    with pytest.raises(UnavailableError, match=r"gave up after 10 s .*: two"):
        waiting.because("two")


def test_a_wait_that_is_in_order_never_gives_up() -> None:
    clock = FakeClock()
    waiting = Waiting(clock, say_after_s=500.0, give_up_s=10.0, tell=lambda _: None)
    for _ in range(10):
        clock.advance(9.0)
        waiting.patiently("the others")
    waiting.because("trouble begins")
    clock.advance(9.0)
    waiting.because("trouble")
