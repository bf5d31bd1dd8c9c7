"""A request of a trainer or of a person that waits: for work, to become a member, for a mode or for a checkpoint.

It is looked at again whenever something has changed that it may wait for, and when its time is up (``WaitEnded``).
"""

from __future__ import annotations

import msgspec

from flightedl.domain.master.events import Request
from flightedl.messages.tasks import ReturnedTask


class Waiting(msgspec.Struct, frozen=True):
    """A request, as far as it is not carried out yet."""

    call: int
    request: Request
    #: True if a checkpoint is waited for until the store has failed again and again.
    may_give_up: bool = False
    #: The reports of a ticket are applied, and its trainer must drop this work. None: they are not applied yet.
    lost: list[ReturnedTask] | None = None
