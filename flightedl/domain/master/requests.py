"""A waiting request of a trainer or a user: for tasks, membership, a change of mode, or a checkpoint.

The core reconsiders a request when something has changed for which the request may be waiting, and when its timeout
expires (``WaitEnded``).
"""

from __future__ import annotations

import msgspec

from flightedl.domain.master.events import Request
from flightedl.messages.tasks import ReturnedTask


class Waiting(msgspec.Struct, frozen=True):
    """A request that is still waiting for its answer."""

    call: int
    request: Request
    #: True if the wait for a checkpoint ends after the store has failed several times.
    may_give_up: bool = False
    #: Tasks that the trainer must drop. Determined when the ticket's reports are applied; None until then.
    lost: list[ReturnedTask] | None = None
