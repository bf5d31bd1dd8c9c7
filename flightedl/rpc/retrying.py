"""Repeats what may be repeated, until it works or a deadline passes.

*Retryable* errors mean that nothing happened; they are always repeated. An unknown outcome is repeated only when the
caller says that the request is idempotent: when its data carry an identity by which the server knows it again.

Each attempt gets a slice of at most ``slice_s``, because Python runs no signal handlers inside a call: Ctrl-C works
within a slice. Pauses double from 0.05 to 1 s, without jitter: attempts are few, and tests can say when they come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from flightedl.errors import DeadlineError, FlightedlError, OutcomeUnknownError, UnavailableError
from flightedl.ports import Clock

_Result = TypeVar("_Result")

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
#: The shortest time worth an attempt.
_SHORTEST_SLICE_S = 0.01


def retrying(
    attempt: Callable[[float], _Result],
    *,
    what: str,
    timeout_s: float,
    clock: Clock,
    is_idempotent: bool = False,
    slice_s: float = 5.0,
    waiting: Callable[[str], None] | None = None,
    waiting_after_s: float = 5.0,
) -> _Result:
    """Call ``attempt`` until it returns, raises what can't be repeated, or ``timeout_s`` passed.

    Args:
        attempt: Does the call; given the seconds that it may take.
        what: What is tried, to begin the sentence with: "reaching the master".
        timeout_s: For all attempts and pauses.
        clock: For the deadline and the pauses.
        is_idempotent: Whether an attempt with an unknown outcome may be repeated.
        slice_s: At most this long for one attempt.
        waiting: Told once, after ``waiting_after_s``, what it waits for and why.
        waiting_after_s: See there.

    Raises:
        UnavailableError: time is over, and no attempt did anything.
        DeadlineError: time is over, and an attempt may have been carried out.
        FlightedlError: whatever else ``attempt`` raised.
    """
    start = clock.now()
    pause_s = FIRST_PAUSE_S
    is_outcome_unknown = has_told = False
    while True:
        left_s = start + timeout_s - clock.now()
        try:
            return attempt(max(min(slice_s, left_s), _SHORTEST_SLICE_S))
        except FlightedlError as error:
            is_repeatable = error.retryable or (is_idempotent and isinstance(error, OutcomeUnknownError))
            if not is_repeatable:
                raise
            is_outcome_unknown = is_outcome_unknown or isinstance(error, OutcomeUnknownError)
            reason = error
        waited_s = clock.now() - start
        if waited_s + pause_s >= timeout_s:
            kind = DeadlineError if is_outcome_unknown else UnavailableError
            raise kind(f"{what}: gave up after {waited_s:.1f} s: {reason}") from None
        if waiting is not None and not has_told and waited_s >= waiting_after_s:
            has_told = True
            waiting(f"{what}: waiting for {waited_s:.0f} s: {reason}")
        clock.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
