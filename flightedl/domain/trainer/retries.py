"""Which errors of a call are worth another attempt."""

from __future__ import annotations

from flightedl.errors import FlightedlError, OutcomeUnknownError, ReplacedError, UnregisteredError


def is_transient(error: FlightedlError) -> bool:
    """Whether an attempt that looks up server and registration again is worth repeating.

    It is when nothing answered, when the outcome is unknown, and when only the addressee or the trainer's registration
    was an old one. Any other FencedError is final: the attempt stands for something that is over, so its sender has to
    look at the world again.
    """
    return error.retryable or isinstance(error, OutcomeUnknownError | ReplacedError | UnregisteredError)
