"""A waiting request from a trainer or a user: for tasks, membership, a change of mode, or a checkpoint.

The core reconsiders the request when something that the request may be waiting for has changed, and when the request's
timeout expires (``WaitEnded``).
"""

from __future__ import annotations

import msgspec

from flightedl.domain.master.events import Request
from flightedl.messages.tasks import ReturnedTask


class Waiting(msgspec.Struct, frozen=True):
    """A request that has not been answered yet."""

    call: int
    request: Request
    #: True if waiting for a checkpoint ends after the store has failed several times.
    may_give_up: bool = False
    #: Tasks that the trainer must drop, determined when the ticket's reports were applied; None until then.
    lost: list[ReturnedTask] | None = None
