"""Commands retry a request until the master agrees or their timeout ends."""

from __future__ import annotations

import pytest

from flightedl.errors import DeadlineError, FlightedlError, NotFoundError, NotReadyError
from flightedl.launch.status import answered_within
from flightedl.messages.tasks import ModeReply
from flightedl.testing.clock import FakeClock

WAITING = ModeReply(mode={}, is_agreed=False, waiting_for="pserver 1")
AGREED = ModeReply(mode={}, is_agreed=True)


class Asked:
    """Master whose calls last until their timeouts, with planned answers, the last of which it repeats."""

    def __init__(self, *answers: ModeReply | FlightedlError) -> None:
        self.clock = FakeClock(jumps=True)
        self._answers = list(answers)
        self.given_s: list[float] = []

    def ask(self, left_s: float) -> ModeReply:
        self.given_s.append(left_s)
        self.clock.advance(min(left_s, 10.0))
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, FlightedlError):
            raise answer
        return answer

    def within(self, timeout_s: float) -> ModeReply:
        return answered_within(timeout_s, self.clock, self.ask, lambda reply: reply.is_agreed)


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
