"""A waiting request of a trainer or a person: for tasks, for membership, for a mode, or for a checkpoint.

The core reconsiders it when something has changed that it may be waiting for, and when its timeout expires
(``WaitEnded``).
"""

from __future__ import annotations

import msgspec

from flightedl.domain.master.events import Request
from flightedl.messages.tasks import ReturnedTask


class Waiting(msgspec.Struct, frozen=True):
    """A request that is not answered yet."""

    call: int
    request: Request
    #: True if waiting for a checkpoint ends when the store has failed several times.
    may_give_up: bool = False
    #: Tasks that the trainer must drop, found when the ticket's reports were applied. None if they are not applied yet.
    lost: list[ReturnedTask] | None = None
