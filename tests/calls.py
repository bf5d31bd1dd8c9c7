"""Calls as a server's handlers receive them, without a client."""

from __future__ import annotations

import threading

from flightedl.adapters.clock import SystemClock
from flightedl.rpc.call import Call
from flightedl.rpc.identity import Caller

_CLOCK = SystemClock()


def call_of(verb: str, caller: Caller | None = None, *, is_cancelled: bool = False) -> Call:
    """Return a call without a role that may last for a minute."""
    return Call(
        verb=verb,
        caller=caller or Caller(),
        role=None,
        peer="",
        headers={},
        deadline=_CLOCK.now() + 60.0,
        clock=_CLOCK,
        closing=threading.Event(),
        cancelled=lambda: is_cancelled,
    )
