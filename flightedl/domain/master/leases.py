"""The trainers with a live lease, as of a revision of etcd. Only they may hold tasks or be members."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from flightedl.errors import NotReadyError, UnregisteredError
from flightedl.messages.base import Sender


class Ended(NamedTuple):
    """A trainer's registration that has ended."""

    trainer: str
    generation: int
    #: True if the trainer lost its lease but has registered again, so its tasks did not kill it.
    is_alive: bool


class Leases:
    """Registrations of trainers."""

    def __init__(self) -> None:
        #: Trainer -> generation, as of this revision of etcd or a later one.
        self.trainers: Mapping[str, int] = {}
        self._revision = 0
        #: True if this master has read the leases since it started.
        self.are_known = False

    def seen(self, trainers: Mapping[str, int], revision: int) -> tuple[list[Ended], dict[str, int]]:
        """Record the live leases. Return the registrations that have ended, and the new ones."""
        before, self.trainers, self._revision, self.are_known = self.trainers, trainers, revision, True
        ended = [Ended(name, old, name in trainers) for name, old in before.items() if trainers.get(name) != old]
        return ended, {name: number for name, number in trainers.items() if before.get(name) != number}

    def require(self, sender: Sender) -> None:
        """Raise an error unless the trainer has a live lease.

        The core checks this whenever it reconsiders a waiting request. A task assigned to a trainer whose lease has
        ended would never be taken back.

        Raises:
            UnregisteredError: the lease has ended.
            NotReadyError: the master has not read the lease yet.
        """
        if self.trainers.get(sender.trainer) == sender.generation:
            return
        if sender.generation > self._revision:
            raise NotReadyError(f"the master has not seen trainer {sender.trainer} yet")
        raise UnregisteredError(
            f"trainer {sender.trainer} has no lease of generation {sender.generation}: register again"
        )
