"""A trainer's step on the side of the pserver, and values that somebody waits for, whatever they travel by.

A step brings parts in one message after the other. Each message is answered with what became of its parts, and with
about as many values as it brought, of those that can leave already. When all have come, the values of blocks whose
rounds close in time follow. So both sides are busy all the time, and neither has to hold more than a few messages. Of a
little step the last outcomes wait for these values for a moment: all of it is one message and its answer then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from flightedl.errors import MessageError
from flightedl.messages.parameters import PushHeader
from flightedl.ports import Clock
from flightedl.pserver.shard import Shard
from flightedl.pserver.stores import Wanted
from flightedl.wire.parts import ReceivedBlocks
from flightedl.wire.rows import TARGET_BYTES, OutgoingBlocks

SLICE_S = 0.25
#: Blocks whose values are not there yet, after which no others are looked for.
_LOOK_AHEAD = 4
#: Of a step so small that what it costs is its messages: for so long its outcomes wait for the values.
MOMENT_S = 0.002
LITTLE_BYTES = 64 << 10
_FEW = 4


class StepSession:
    """One step: ``feed`` it what comes until it ``has_all``, then ``drain`` it unless it ``is_over``.

    Args:
        shard: The blocks.
        header: What the trainer asks for.
        waiting: Values that the trainer wants, if its messages were pushed already.
    """

    def __init__(self, shard: Shard, header: PushHeader, waiting: Iterable[Wanted] | None = None) -> None:
        self._shard = shard
        self._header = header
        self._left = header.rows if waiting is None else 0
        self._received_bytes = 0
        #: Values that the trainer wants and that have not left, in the order in which their rows came.
        self._waiting: deque[Wanted] = deque(waiting or ())

    @property
    def has_all(self) -> bool:
        """Whether everything that was announced has come."""
        return not self._left

    @property
    def is_over(self) -> bool:
        """Whether nothing is to come from either side."""
        return not self._left and not self._waiting

    @property
    def missing(self) -> str:
        """What has not come, for people."""
        return f"{self._header.rows} rows were announced, {self._left} of them did not come"

    @property
    def changes(self) -> int:
        """The blocks' count of changes: if it is another one, ``ready`` may find something."""
        return self._shard.changes.count

    def feed(self, parts: Sequence[ReceivedBlocks]) -> list[OutgoingBlocks]:
        """Push what one message carries.

        Returns:
            The outcomes, and values of some blocks. The last message's outcomes wait a moment for values that follow
            soon, because a message of their own costs time.

        Raises:
            FlightedlError: as ``Shard.push``; MessageError: more came than was announced.
        """
        shard, left, received_bytes = self._shard, self._left, 0
        for part in parts:
            left -= len(part.blocks)
            received_bytes += len(part.data)
        if left < 0:
            raise MessageError(f"{self._header.rows} rows were announced, {-left} more came")
        self._left = left
        self._received_bytes += received_bytes
        pieces, wanted = pushed(shard, self._header, parts)
        if self._waiting:
            pieces += self._ready(received_bytes - sum(piece.size_bytes for piece in pieces))
        self._waiting.extend(wanted)
        if self._waiting and not left:
            pieces += self._soon()
        return pieces

    def _ready(self, budget_bytes: int) -> list[OutgoingBlocks]:
        """About so much of the values that are there by now."""
        found: list[OutgoingBlocks] = []
        while self._waiting and budget_bytes > 0:
            # Rounds close in about the order in which their rows come: what is not there yet stops the search.
            ready, rest = self._shard.read(self._waiting.popleft(), self._header.member)
            found += ready
            ready_bytes = sum(piece.size_bytes for piece in ready)
            self._shard.meter.sent(ready_bytes)
            budget_bytes -= ready_bytes
            if rest:
                self._waiting.extendleft(reversed(rest))
                break
        return found

    def _soon(self) -> list[OutgoingBlocks]:
        """Values whose rounds close in a moment. The trainer has sent everything and waits for them."""
        if len(self._waiting) > _FEW or self._received_bytes > LITTLE_BYTES:
            return []
        seen = self._shard.changes.count
        found = self.ready()
        if self._waiting and self._shard.changes.wait(seen, MOMENT_S) != seen:
            found += self.ready()
        return found

    def ready(self) -> list[OutgoingBlocks]:
        """Return the values that are there by now; the others are still waited for."""
        found: list[OutgoingBlocks] = []
        missing: list[Wanted] = []
        while self._waiting:
            ready, rest = self._shard.read(self._waiting.popleft(), self._header.member)
            found += ready
            missing += rest
        self._waiting.extend(missing)
        self._shard.meter.sent(sum([piece.size_bytes for piece in found]))
        return found

    def drain(self, clock: Clock, deadline: float) -> Iterator[list[OutgoingBlocks]]:
        """The values that are still wanted, see ``awaited_values``."""
        return awaited_values(self._shard, self._header.member, self._waiting, clock, deadline)


def pushed(
    shard: Shard, header: PushHeader, parts: Sequence[ReceivedBlocks]
) -> tuple[list[OutgoingBlocks], list[Wanted]]:
    """Push what one message carries; return the outcomes, and the values that are still to follow."""
    pieces: list[OutgoingBlocks] = []
    waiting: list[Wanted] = []
    for each in shard.push(header, parts):
        pieces.append(each.piece)
        if each.wanted is not None:
            waiting.append(each.wanted)
    return pieces, waiting


def awaited_values(
    shard: Shard, member: int, waiting: deque[Wanted], clock: Clock, deadline: float
) -> Iterator[list[OutgoingBlocks]]:
    """Values as their versions are reached, a message's worth at a time, until the deadline.

    Args:
        shard: The blocks.
        member: Who wants them.
        waiting: What is wanted; what has been found is taken out of it. It is empty when what is yielded is the last.
        clock: Of the deadline.
        deadline: When to give up what is not there.

    Yields:
        What can leave now. Nothing: there was no change for a while; time to see whether anybody still waits.
    """
    seen = -1
    while waiting:
        known, seen = seen, shard.changes.wait(seen, min(SLICE_S, deadline - clock.now()))
        # Rounds close in about the order in which their rows came: a few that are not there yet stop the search.
        # When nothing has changed for a while there is time to look at all.
        patience = len(waiting) if known in {-1, seen} else _LOOK_AHEAD
        pieces: list[OutgoingBlocks] = []
        missing: list[Wanted] = []
        while waiting and len(missing) < patience:
            ready, rest = shard.read(waiting[0], member)
            shard.meter.sent(sum(piece.size_bytes for piece in ready))
            if pieces and sum(piece.size_bytes for piece in (*pieces, *ready)) > TARGET_BYTES:
                yield pieces
                pieces = []
            waiting.popleft()
            missing.extend(rest)
            pieces.extend(ready)
        waiting.extendleft(reversed(missing))
        if pieces:
            yield pieces
        if clock.now() >= deadline:
            return
        if not pieces:
            yield pieces
