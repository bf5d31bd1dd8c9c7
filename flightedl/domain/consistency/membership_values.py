"""Members of a view, and the effects of ``membership``."""

from __future__ import annotations

from dataclasses import dataclass

from flightedl.messages.control import ViewRequest


@dataclass(frozen=True, slots=True)
class SendView:
    """Send this view to a pserver, then call ``answered`` or ``send_failed``."""

    index: int
    generation: int
    view: ViewRequest


@dataclass(frozen=True, slots=True)
class Admitted:
    """All pservers now wait for this trainer, starting with its first round. Send the trainer its member id."""

    trainer: str
    member_id: int


@dataclass(frozen=True, slots=True)
class Persist:
    """The state has changed, so ``encode()`` must be stored again."""


Effect = SendView | Admitted | Persist


@dataclass(frozen=True, slots=True)
class Member:
    """A trainer in the view."""

    trainer: str
    generation: int
    member_id: int
    first_round: int
    #: Serial of this master's first view with the member.
    serial: int
    is_admitted: bool = False
    #: Number of refusals since the trainer first asked to join.
    refusals: int = 0
