"""A waiting request of a trainer or a user: for tasks, membership, a change of mode, or a checkpoint.

The core reconsiders a request after each change that may allow an answer, and when the request's timeout expires
(``WaitEnded``).
"""

from __future__ import annotations

import msgspec

from flightedl.domain.master.events import Request
from flightedl.messages.tasks import ReturnedTask


class Waiting(msgspec.Struct, frozen=True):
    """A request that is still waiting for its answer."""

    call: int
    request: Request
    #: True to stop waiting for a checkpoint after the store has failed several times.
    may_give_up: bool = False
    #: Tasks that the trainer must drop; None until the ticket's reports have been applied.
    lost: list[ReturnedTask] | None = None
