"""Drivers of standbys and of the copies that are sent to them. ``domain.moving.standby`` makes the decisions.

A standby requests the parts of a copy one by one. It gives up the copy if the source does not answer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from flightedl.domain.master.stored_moves import INTENT
from flightedl.domain.moving.standby import CopyId, CopySource, StandbyCopy
from flightedl.messages.control import OrderNumber, SnapshotRequest
from flightedl.messages.moving import CopyTicket
from tests.simulation.cores.etcd import pservers_in
from tests.simulation.cores.shard import Shard
from tests.simulation.cores.store import StoredShard
from tests.simulation.cores.world import NoAnswerError, Reply, Steps

if TYPE_CHECKING:
    from tests.simulation.cores.pserver import Pserver

_LAG_S = 0.4
_LONGEST_CUT_S = 5.0
#: Seconds that it takes to send a part.
_SEND_S = 0.02
#: Seconds until a part is requested again, and number of requests.
_PART_S = 0.3
_TRIES = 4


class CopyHead(NamedTuple):
    """Beginning of a copy: its identity, its number of parts, and the batches that its values contain."""

    copy: CopyId
    part_count: int
    applied: bytes


class Copies:
    """Copies that one pserver process sends."""

    def __init__(self, pserver: Pserver, shard: Shard) -> None:
        self._pserver = pserver
        self._shard = shard
        self._source = CopySource(pserver.generation)
        self._parts: Sequence[StoredShard] = ()

    @property
    def _newest(self) -> CopyId | None:
        return None if self._source.newest is None else self._source.newest.copy

    def begin(self, ticket: CopyTicket, reply: Reply) -> None:
        """Begin the next copy. Replies with its ``CopyHead`` as soon as all blocks have been copied."""
        shard, protocol = self._shard, self._shard.protocol
        knows = shard.knows_changed_rows()
        copy = self._source.begin(ticket.standby, ticket.has, self._pserver.life.election or 0, knows_changes=knows)
        self._parts = ()

        def copied(stored: StoredShard) -> None:
            self._parts = stored.parts()
            reply(CopyHead(copy, len(self._parts), stored.applied))

        at_round = protocol.highest_open_round() if protocol.is_synchronous else None
        order = SnapshotRequest(OrderNumber(0, 0, 0), at_round, "", plan_hash=ticket.plan_hash)
        shard.begin_copy(order, is_increment=copy.after > 0, done=copied)
        self._pserver.later(_LONGEST_CUT_S, lambda: shard.drop_copy() if self._newest == copy else None)

    def part(self, wanted: tuple[CopyId, int], reply: Reply) -> None:
        """Reply with a part of the newest copy, or with None if the standby asks for an older copy."""
        copy, number = wanted
        reply(self._parts[number] if copy == self._newest and number < len(self._parts) else None)


class Standby:
    """A copy of one pserver's blocks, which a process without an index keeps.

    Args:
        pserver: The process.
        index: Index of the pserver that it follows.
        generation: Generation of the process as a standby.
        layout: Returns the blocks that the pserver should have, and facts that determine what they are; None if
            unknown.
    """

    def __init__(
        self,
        pserver: Pserver,
        index: int,
        generation: int,
        layout: Callable[[int], tuple[Sequence[int], object, str] | None],
    ) -> None:
        self.index = index
        self.generation = generation
        self._pserver = pserver
        self._layout = layout
        self._core = StandbyCopy()
        #: Block -> its content; and the rows of each copy since the last complete one.
        self._content: dict[int, StoredShard] = {}
        self._chain: list[list[Any]] = []
        self._applied = b""
        self._is_over = False
        pserver.follow(self._steps())

    def close(self) -> None:
        self._is_over = True

    def take(self, election: int | None, layout: object) -> tuple[CopyId, StoredShard] | None:
        """End the copying. Return the content and the copy from which it comes, or None if it is unusable."""
        self.close()
        copy = self._core.has
        if copy is None or not self._core.is_usable(election, layout):
            return None
        content = [self._content[number] for number in sorted(self._content)]
        return copy, StoredShard.merged(content, self._chain, self._applied)

    def _steps(self) -> Steps:
        while not self._is_over:
            with contextlib.suppress(NoAnswerError):
                yield from self._copy()
            self._core.fail()
            yield self._pserver.pauses(_LAG_S)

    def _copy(self) -> Steps:
        """Receive a copy. Nothing changes after ``close``."""
        pserver, found = self._pserver, self._layout(self.index)
        source = pservers_in(pserver.directory).get(self.index)
        if found is None or source is None:
            return
        blocks, layout, plan_hash = found
        if self._core.waits(layout, plan_hash, is_moving=INTENT in pserver.directory):
            return
        self._core.follow(layout)
        ticket = CopyTicket(plan_hash=plan_hash, standby=self.generation, has=self._core.has)
        head = yield pserver.asks(source.value, source.value.copy, ticket, _LONGEST_CUT_S)
        if head is None or self._is_over or not self._core.begin(head.copy):
            return
        if not head.copy.after:
            self._content.clear()
            self._chain.clear()
        kept: list[StoredShard] = []
        rows: list[Any] = []
        for number in range(head.part_count):
            yield pserver.pauses(_SEND_S)
            part = yield from self._part(source.value, head.copy, number)
            if part is None or self._is_over:
                return
            kept.append(part)
            if not self._core.is_kept_back:
                self._fill(kept, rows)
        if head.copy.after:
            self._core.overwrite()
        self._fill(kept, rows)
        self._chain.append(rows)
        self._applied = head.applied
        if not self._core.end(list(blocks), sorted(self._content)):
            pserver.world.note("{} received a copy of other blocks than {}", pserver.name, blocks)

    def _part(self, source: Pserver, copy: CopyId, number: int) -> Steps:
        """Request a part, more than once if necessary, because streams repeat lost messages."""
        for _ in range(_TRIES):
            with contextlib.suppress(NoAnswerError):
                return (yield self._pserver.asks(source, source.copied_part, (copy, number), _PART_S))
        raise NoAnswerError

    def _fill(self, parts: list[StoredShard], rows: list[Any]) -> None:
        for part in parts:
            self._content |= {number: part.part([number]) for number in part.blocks}
            rows += part.tables
        parts.clear()
