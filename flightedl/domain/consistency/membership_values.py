"""Members of a view, and what the master has to do when the membership changes; ``membership`` decides."""

from __future__ import annotations

from dataclasses import dataclass

from flightedl.messages.control import ViewRequest


@dataclass(frozen=True, slots=True)
class SendView:
    """Send this view to a pserver; then call ``answered`` or ``send_failed``."""

    index: int
    generation: int
    view: ViewRequest


@dataclass(frozen=True, slots=True)
class Admitted:
    """All pservers wait for this trainer from its first round on: tell it its member id."""

    trainer: str
    member_id: int


@dataclass(frozen=True, slots=True)
class Persist:
    """The state has changed: store ``encode()``."""


Effect = SendView | Admitted | Persist


@dataclass(frozen=True, slots=True)
class Member:
    """A trainer in the view."""

    trainer: str
    generation: int
    member_id: int
    first_round: int
    #: Serial of the first view of this master that has it.
    serial: int
    is_admitted: bool = False
    #: How often the trainer was refused since it asked.
    refusals: int = 0
