"""Acknowledgements of named consumers to one pserver, and the decision about which are stored."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from flightedl.messages.feed import Acknowledgement, Position


class Consumer(msgspec.Struct):
    """State of a named consumer."""

    #: Generation of the key by which a process holds the consumer's name.
    generation: int
    #: Number of the last answer, and the time whose state it contains.
    sent: tuple[int, float] = (-1, 0.0)
    acknowledged: Acknowledgement | None = None
    #: True if the acknowledgement has changed since it was last taken.
    is_new: bool = False


class Consumers:
    """Named consumers of one pserver.

    A consumer acknowledges a position by requesting the changes after it. That something was sent proves nothing,
    because the consumer may have died before it applied the answer.
    """

    def __init__(self) -> None:
        self.known: dict[str, Consumer] = {}

    def acknowledged(self, name: str, generation: int, position: Position, newest: int) -> None:
        """Record that a consumer has applied everything up to a position.

        Args:
            name: Name of the consumer.
            generation: See ``Consumer``. Former holders of the name are ignored.
            position: A position in this pserver's feed.
            newest: Number of the feed's last change.
        """
        known = self._consumer(name, generation)
        if known is None or not may_replace(known.acknowledged, position):
            return
        before, (number, at_s) = known.acknowledged, known.sent
        # If the position is not that of the last answer, its time is unknown.
        former_s = 0.0 if before is None else before.as_of_s
        as_of_s = at_s if position.number == number else former_s
        known.acknowledged = Acknowledgement(position=position, behind=newest - position.number, as_of_s=as_of_s)
        known.is_new = known.is_new or known.acknowledged != before

    def answered(self, name: str, generation: int, number: int, at_s: float) -> None:
        """Record that an answer with all changes until ``at_s``, which end at ``number``, is sent to a consumer."""
        known = self._consumer(name, generation)
        if known is None:
            return
        known.sent = number, at_s
        before = known.acknowledged
        if before is not None and before.position.number == number:
            # There was nothing to send, so the consumer's state was still the newest.
            known.acknowledged = msgspec.structs.replace(before, behind=0, as_of_s=at_s)
            known.is_new = True

    def take(self, holders: Mapping[str, int]) -> dict[str, Acknowledgement]:
        """Return the acknowledgements that have changed since the last call, by name.

        Args:
            holders: Generations of the names that are held at the moment. Others are forgotten.
        """
        self.known = {name: each for name, each in self.known.items() if each.generation <= holders.get(name, -1)}
        found = {}
        for name, each in self.known.items():
            if each.is_new and each.generation == holders[name] and each.acknowledged is not None:
                each.is_new, found[name] = False, each.acknowledged
        return found

    def _consumer(self, name: str, generation: int) -> Consumer | None:
        """Return a consumer; None if another process has held the name since."""
        known = self.known.get(name)
        if known is None or known.generation < generation:
            known = self.known[name] = Consumer(generation)
        return known if known.generation == generation else None


def may_replace(stored: Acknowledgement | None, position: Position) -> bool:
    """True if a position is not older than the stored one. Generations of a pserver only increase."""
    known = None if stored is None else stored.position
    return known is None or (known.generation, known.number) <= (position.generation, position.number)
