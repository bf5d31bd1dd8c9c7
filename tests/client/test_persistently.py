"""Calls that are repeated until they succeed: which errors end them, and what the user sees until then."""

from __future__ import annotations

import pytest

from flightedl.client.connections import persistently
from flightedl.client.waiting import Waiting
from flightedl.errors import NotReadyError, UnavailableError, UsageError
from tests.support.clock import FakeClock


class Wait:
    """A wait that is reported at once, and gives up after ten seconds."""

    def __init__(self) -> None:
        self.reported: list[str] = []
        self.ended = 0
        self.clock = FakeClock(jumps=True)
        self.waiting = Waiting(self.clock, 0.0, 10.0, self.reported.append, self._end)

    def _end(self, _: Waiting) -> None:
        self.ended += 1


def test_a_call_is_repeated_while_its_errors_are_transient() -> None:
    wait, errors = Wait(), [NotReadyError("one"), UnavailableError("two"), UnavailableError("two")]

    def attempt() -> str:
        if errors:
            raise errors.pop(0)
        return "done"

    assert persistently(wait.waiting, attempt) == "done"
    assert wait.reported == ["one", "two", ""], "the reason stays although the call has succeeded"
    assert wait.ended == 1


def test_a_permanent_error_ends_the_call_and_the_wait() -> None:
    wait, errors = Wait(), [NotReadyError("one"), UsageError("a mistake"), NotReadyError("never asked")]

    def attempt() -> str:
        raise errors.pop(0)

    with pytest.raises(UsageError, match="a mistake"):
        persistently(wait.waiting, attempt)
    assert wait.reported == ["one", ""]
    assert wait.ended == 1
    assert len(errors) == 1


def test_a_call_that_fails_for_too_long_is_given_up_with_its_last_reason() -> None:
    wait = Wait()

    def attempt() -> str:
        raise UnavailableError("nobody answers")

    began = wait.clock.now()
    with pytest.raises(UnavailableError, match=r"gave up after .* nobody answers"):
        persistently(wait.waiting, attempt)
    assert 10.0 <= wait.clock.now() - began < 20.0
    assert wait.reported[-1] == ""
