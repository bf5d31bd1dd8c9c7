"""The pserver's side of a step, independent of the transport. It also delivers values when their rounds close.

The trainer sends a step in several messages. Each answer contains the outcomes of the message's parts, and available
values of about the same size as the message. After the last message, further answers contain values whose rounds close
before the deadline. So both sides are always busy, and neither buffers more than a few messages. In a small step, the
outcomes are held back briefly until the values are available, so that the whole step takes one message and one answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from flightedl.errors import MessageError
from flightedl.messages.parameters import PushHeader
from flightedl.ports import Clock
from flightedl.pserver.shard import Shard
from flightedl.pserver.stores.interface import Wanted
from flightedl.wire.parts import ReceivedBlocks
from flightedl.wire.rows import TARGET_BYTES, OutgoingBlocks

SLICE_S = 0.25
#: A search for available values stops after this many reads if it has found none.
_LOOK_AHEAD = 4
#: Seconds that the outcomes of a small step wait for its values, to save a message.
MOMENT_S = 0.002
#: Maximum bytes of values in a small step.
LITTLE_BYTES = 64 << 10
#: Maximum number of reads that a small step waits for.
_FEW = 4


class StepSession:
    """One step. Call ``feed`` for each message until ``has_all`` is true, then ``drain`` unless ``is_over`` is true.

    Args:
        shard: The blocks.
        header: The trainer's request.
        waiting: Requested values, if the step's messages have already been pushed; otherwise None.
    """

    def __init__(self, shard: Shard, header: PushHeader, waiting: Iterable[Wanted] | None = None) -> None:
        self._shard = shard
        self._header = header
        self._left = header.rows if waiting is None else 0
        self._received_bytes = 0
        #: Requested values that have not been sent, in the order in which their rows arrived.
        self._waiting: deque[Wanted] = deque(waiting or ())

    @property
    def shard(self) -> Shard:
        return self._shard

    @property
    def has_all(self) -> bool:
        """True if all announced rows have arrived."""
        return not self._left

    @property
    def is_over(self) -> bool:
        return not self._left and not self._waiting

    @property
    def missing(self) -> str:
        return f"{self._left} of {self._header.rows} announced rows are missing"

    @property
    def changes(self) -> int:
        """Count of changes of blocks. When it changes, ``ready`` may find more values."""
        return self._shard.changes.count

    def feed(self, parts: Sequence[ReceivedBlocks]) -> list[OutgoingBlocks]:
        """Push the parts of one message.

        Returns:
            The outcomes, and the values of some blocks. The outcomes of the last message wait briefly for values, to
            save a separate message.

        Raises:
            FlightedlError: As for ``Shard.push``. A MessageError if there are more rows than announced.
        """
        shard, left, received_bytes = self._shard, self._left, 0
        for part in parts:
            left -= len(part.blocks)
            received_bytes += len(part.data)
        if left < 0:
            raise MessageError(f"received {-left} more rows than the announced {self._header.rows}")
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
        found: list[OutgoingBlocks] = []
        while self._waiting and budget_bytes > 0:
            # Rounds close roughly in the order in which their rows arrive, so the search ends at the first value that
            # is unavailable.
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
        if len(self._waiting) > _FEW or self._received_bytes > LITTLE_BYTES:
            return []
        seen = self._shard.changes.count
        found = self.ready()
        if self._waiting and self._shard.changes.wait(seen, MOMENT_S) != seen:
            found += self.ready()
        return found

    def ready(self) -> list[OutgoingBlocks]:
        """Return all values that are available now. The others remain awaited."""
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
        """Yield the values that have not been sent yet; see ``awaited_values``."""
        return awaited_values(self._shard, self._header.member, self._waiting, clock, deadline)


def pushed(
    shard: Shard, header: PushHeader, parts: Sequence[ReceivedBlocks]
) -> tuple[list[OutgoingBlocks], list[Wanted]]:
    """Push the parts of one message. Return their outcomes, and reads of the values that must follow."""
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
    """Yield values, one message at a time, as their versions are reached, until the deadline.

    Args:
        shard: The blocks.
        member: The client's membership; 0 for read-only clients.
        waiting: Requested values. Values that have been found are removed; none are left at the last message.
        clock: Clock of the deadline.
        deadline: Time at which to give up on unavailable values.

    Yields:
        Values to send now. An empty list after a while without changes, so that the caller can check if the client is
        still waiting.
    """
    seen = -1
    while waiting:
        known, seen = seen, shard.changes.wait(seen, min(SLICE_S, deadline - clock.now()))
        # Rounds close roughly in the order in which their rows arrived, so the search ends after a few unavailable
        # values. After a while without changes, there is time to check all values.
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
