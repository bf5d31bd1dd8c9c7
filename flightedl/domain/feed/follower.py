"""A client's state of the feeds of all pservers; see the package for the rules."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from flightedl.marks import sometimes
from flightedl.messages.feed import ChangesHeader, Position


class Use(enum.Enum):
    """Decision about a received base or increment."""

    #: Apply the message, then call ``applied``.
    APPLY = "apply"
    #: Ignore the message: it is older than the applied state, or comes from a process that has been replaced.
    IGNORE = "ignore"
    #: The message does not fit the applied state. Send another request with ``since``.
    ASK_AGAIN = "ask again"
    #: The model has started over, and nothing of the applied state belongs to it. Request bases for an empty copy.
    START_OVER = "start over"


class FollowedFeeds:
    """Positions in the feeds of all pservers, and the owners of blocks and buckets, as a client knows them.

    Versions of the placement, numbers of checkpoints and positions are compared only within one life of the model.

    Args:
        life: Lowest life from which messages are applied. The first applied message may increase it.
    """

    def __init__(self, life: int = 0) -> None:
        self.life = life
        self._positions: dict[int, Position] = {}
        #: Block or bucket -> highest placement version of any message from which its content was applied.
        self._placements: dict[int, int] = {}
        #: Block or bucket -> checkpoint and proposal with whose state its content ends, or None; and the same for each
        #: pserver.
        self._checkpoints: dict[int, tuple[int, int] | None] = {}
        self._stops: dict[int, tuple[int, int] | None] = {}
        #: Block or bucket -> instant of the newest request that its owner answered.
        self._asked: dict[int, float] = {}

    def since(self, server: int) -> Position | None:
        """Return the position that a request to a pserver names; None to get a base."""
        return self._positions.get(server)

    def positions(self) -> dict[int, Position]:
        """Return the last applied position of each pserver."""
        return dict(self._positions)

    def use_of(self, server: int, header: ChangesHeader) -> Use:
        """Decide what to do with a pserver's message. Generations only increase, even when the model starts over."""
        known, received = self._positions.get(server), header.position
        if received.life < self.life:
            return Use.IGNORE
        if received.life > self.life and self._positions:
            sometimes("a follower met a model that had started over")
            return Use.START_OVER
        if known is not None and received.generation < known.generation:
            return Use.IGNORE
        if header.since is None:
            is_older = known is not None and known.generation == received.generation and received.number < known.number
            return Use.IGNORE if is_older else Use.APPLY
        if known is None or known.generation != received.generation:
            return Use.ASK_AGAIN
        if received.number < known.number:
            return Use.IGNORE
        return Use.APPLY if header.since <= known.number else Use.ASK_AGAIN

    def owned(self, header: ChangesHeader, blocks: Iterable[int]) -> set[int]:
        """Return the blocks whose content in this message is not older than the content sent by another owner."""
        placement = header.position.placement
        return {block for block in blocks if self._placements.get(block, 0) <= placement}

    def applied(self, server: int, header: ChangesHeader, blocks: Iterable[int], asked: float) -> None:
        """Record that the content of a message was applied.

        Args:
            server: The pserver that sent it.
            header: Its header.
            blocks: All blocks and buckets of the pserver, including those that have not changed.
            asked: Instant of the request.
        """
        self.life = header.position.life
        self._positions[server] = header.position
        leaving = {block for first, end in header.leaving for block in range(first, end)}
        stop = None if header.checkpoint is None else (header.checkpoint, header.proposal)
        for block in self.owned(header, blocks):
            self._placements[block] = header.position.placement
            self._checkpoints[block] = stop
            if block not in leaving and header.checkpoint is None:
                self._asked[block] = asked
        self._stops[server] = stop

    def checkpoint(self, blocks: Iterable[int]) -> int | None:
        """Return the checkpoint whose state is exactly the content of all these blocks and buckets; None if none is."""
        found = {self._checkpoints.get(block) for block in blocks}
        stop = found.pop() if len(found) == 1 else None
        return None if stop is None else stop[0]

    def waits(self, server: int) -> bool:
        """True if a pserver's content is that of the newest checkpoint at which any pserver's content is."""
        stop = self._stops.get(server)
        return stop is not None and all(other is None or other <= stop for other in self._stops.values())

    def covers(self, blocks: Iterable[int], begun: float) -> bool:
        """True if these blocks and buckets have all changes that their owners had at the instant ``begun``."""
        asked = self._asked
        return all(block in asked and asked[block] > begun for block in blocks)
