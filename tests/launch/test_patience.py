"""Commands retry a request until the master agrees or their timeout ends."""

from __future__ import annotations

import pytest

from flightedl.errors import (
    DeadlineError,
    FlightedlError,
    NotFoundError,
    NotReadyError,
    OutcomeUnknownError,
    UnavailableError,
)
from flightedl.launch.status import answered_within
from flightedl.messages.tasks import ModeReply
from tests.support.clock import FakeClock

WAITING = ModeReply(mode={}, is_agreed=False, waiting_for="pserver 1")
AGREED = ModeReply(mode={}, is_agreed=True)


class Asked:
    """Master whose calls last until their timeouts, with planned answers, the last of which it repeats."""

    def __init__(self, *answers: ModeReply | FlightedlError, lasts_s: float = 10.0) -> None:
        self.clock = FakeClock(jumps=True)
        self._answers = list(answers)
        self.given_s: list[float] = []
        self._lasts_s = lasts_s

    def ask(self, left_s: float) -> ModeReply:
        self.given_s.append(left_s)
        self.clock.advance(min(left_s, self._lasts_s))
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, FlightedlError):
            raise answer
        return answer

    def within(self, timeout_s: float, *, is_reached: bool = True) -> ModeReply:
        return answered_within(
            timeout_s, self.clock, self.ask, lambda reply: reply.is_agreed, is_reached=lambda: is_reached
        )


def test_a_master_that_never_answers_is_called_only_until_the_timeout() -> None:
    asked = Asked(DeadlineError("the master did not answer"))
    start = asked.clock.now()
    with pytest.raises(FlightedlError, match=r"no answer within 25 s; the last attempt: the master did not answer"):
        asked.within(25.0)
    assert asked.clock.now() - start == pytest.approx(25.0, abs=0.6)
    assert asked.given_s[-1] < 5.0, "the last attempt gets the remaining time"


def test_the_timeout_error_contains_the_last_answer() -> None:
    assert Asked(WAITING, NotReadyError("etcd cannot be written")).within(25.0) == WAITING


def test_waiting_ends_with_a_sufficient_answer() -> None:
    asked = Asked(NotReadyError("no master"), WAITING, AGREED)
    assert asked.within(60.0) == AGREED
    assert len(asked.given_s) == 3


def test_a_timeout_of_zero_asks_once() -> None:
    asked = Asked(WAITING)
    assert asked.within(0.0) == WAITING
    assert asked.given_s == [0.5]


def test_a_permanent_error_is_raised_at_once() -> None:
    asked = Asked(NotFoundError("no job of this name runs"))
    with pytest.raises(NotFoundError):
        asked.within(60.0)
    assert len(asked.given_s) == 1


def test_an_etcd_that_was_never_reached_is_given_up_after_two_seconds() -> None:
    asked = Asked(UnavailableError("etcd cannot be reached"), lasts_s=0.4)
    start = asked.clock.now()
    with pytest.raises(UnavailableError, match=r"^etcd cannot be reached"):
        asked.within(3600.0, is_reached=False)
    assert 2.0 <= asked.clock.now() - start < 3.0


def test_the_request_is_repeated_while_another_master_takes_over(capsys: pytest.CaptureFixture[str]) -> None:
    """The master dies in the middle of the change, its key expires, and its successor registers 12 s later."""
    gone = [OutcomeUnknownError("the call broke off"), *[NotFoundError("it has no master")] * 12]
    assert Asked(WAITING, *gone, AGREED, lasts_s=1.0).within(60.0) == AGREED
    said = capsys.readouterr().err
    assert said.startswith("no answer for 10 s, trying again: it has no master\n")
    assert said.count("\n") == 1


def test_a_job_that_has_ended_is_not_awaited() -> None:
    asked = Asked(WAITING, NotFoundError("it has no master"), lasts_s=1.0)
    start = asked.clock.now()
    with pytest.raises(NotFoundError):
        asked.within(3600.0)
    assert 30 <= asked.clock.now() - start < 35
