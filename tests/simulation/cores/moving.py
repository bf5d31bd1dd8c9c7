"""Driver of a simulated pserver's moves. The cores in ``domain.moving`` decide what to copy, freeze, stage and adopt.

Content is sent only after the unit was frozen, as a real pserver does with dense blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from flightedl.domain.master.stored_moves import INTENT
from flightedl.domain.moving.sender import EDGE_S, Do, LeavingUnit, UnitSender
from flightedl.domain.moving.server import MovingBlocks, State
from flightedl.domain.moving.values import (
    Acknowledged,
    Adopt,
    Copy,
    Discard,
    Effect,
    End,
    Last,
    Release,
    Thaw,
    Update,
)
from flightedl.domain.pserver.life_values import BlocksLost
from flightedl.messages.declarations import Placement
from flightedl.messages.moving import MovedRequest
from tests.simulation.cores.etcd import ADDRESS, Transaction, intent_in, placement_read, pservers_in
from tests.simulation.cores.shard import MovedSpan, Shard
from tests.simulation.cores.world import Reply

if TYPE_CHECKING:
    from tests.simulation.cores.pserver import Pserver

_CALL_S = 1.0
_ACKNOWLEDGE_S = 0.05


class Sent(NamedTuple):
    """A message to another pserver, with the content that belongs to it."""

    message: Copy | Update | Last
    content: Sequence[MovedSpan] = ()


class Mover:
    """Moves of one pserver's blocks.

    Args:
        pserver: The pserver.
        shard: Its blocks.
        placement: Placement with which the blocks were made.
    """

    def __init__(self, pserver: Pserver, shard: Shard, placement: Placement) -> None:
        self._pserver = pserver
        self._shard = shard
        state = State(tuple(placement.blocks_of(pserver.index)), version=placement.version)
        self.core = MovingBlocks(pserver.index, pserver.generation, state)
        self._sender = UnitSender()
        self._queue: deque[LeavingUnit] = deque()
        #: The unit that is being sent.
        self._leaving: LeavingUnit | None = None
        self._is_calling = False
        self._timer = 0
        #: First block of each frozen unit.
        self._pinned: set[int] = set()
        #: First block of a unit -> the content that has arrived.
        self._arrivals: dict[int, list[MovedSpan]] = {}
        self._acknowledged: dict[int, Acknowledged] = {}
        self._is_acknowledging = False

    @property
    def is_pinned(self) -> bool:
        """True if a unit is frozen or acknowledged, so that no view may be applied and no cut may begin."""
        return bool(self._pinned or self._acknowledged)

    @property
    def is_empty(self) -> bool:
        """True if all blocks are on other pservers."""
        return not self.core.state.blocks

    def look(self) -> None:
        """Read the placement and the intent, and carry out the resulting effects."""
        pserver, keys = self._pserver, self._pserver.directory
        placement, holder = placement_read(keys), pservers_in(keys).get(pserver.index)
        if placement is None:
            return
        before = self.core.state.version
        generation = None if holder is None else holder.created
        for effect in self.core.read(pserver.directory_revision, placement, intent_in(keys), generation):
            self._carry_out(effect)
            if not pserver.is_alive:
                return
        if self.core.state.version != before:
            pserver.placed(placement)
        self._go_on()

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Copy():
                self._queue.append(LeavingUnit.of(effect, intent_in(self._pserver.directory)))
            case Release(block, count):
                self._note("releases", block)
                numbers = range(block, block + count)
                self._shard.drop(numbers)
                self._thaw(numbers)
            case Thaw(block):
                self._note("thaws", block)
                self._thaw(range(block, block + 1))
            case Adopt(block):
                self._note("adopts", block)
                self._pserver.cluster.account.moves += 1
                del self._acknowledged[block]
                for part in self._arrivals.pop(block):
                    self._shard.adopt(part)
            case Discard(block):
                self._acknowledged.pop(block, None)
                self._arrivals.pop(block, None)
            case End():
                self._pserver.apply(BlocksLost("its blocks have changed in etcd while it did not have them"))

    def _note(self, text: str, block: int) -> None:
        self._pserver.world.note("{} {} block {}", self._pserver.name, text, block)

    def _thaw(self, numbers: range) -> None:
        self._shard.thaw(numbers)
        self._pinned.difference_update(numbers)

    # units that leave

    def _go_on(self) -> None:
        """Take the next steps, until one has to wait."""
        self._timer += 1
        while not self._is_calling and self._pserver.is_alive:
            if self._leaving is None:
                while self._queue and not self.core.is_leaving(self._queue[0].copy):
                    self._queue.popleft()
                if not self._queue:
                    return
                self._leaving = self._queue.popleft()
                self._sender.begin(self._now)
            if (pause_s := self._step(self._leaving)) is not None:
                self._go_on_later(pause_s)
                return

    def _go_on_later(self, pause_s: float) -> None:
        timer = self._timer
        self._pserver.later(pause_s, lambda: self._go_on() if timer == self._timer else None)

    @property
    def _now(self) -> float:
        return self._pserver.world.now

    def _step(self, leaving: LeavingUnit) -> float | None:
        """Carry out one step. Return the seconds to wait before the next one; None to continue at once."""
        block, sender, is_leaving = leaving.copy.block, self._sender, self.core.is_leaving(leaving.copy)
        step = sender.next_step(self._now, is_leaving=is_leaving)
        match step.do:
            case Do.END:
                self._leaving = None
            case Do.WAIT:
                return max(step.until - self._now, 1e-6)
            case Do.COPY:
                self._send(leaving, Sent(leaving.copy))
            case Do.FREEZE if not self._shard.freeze(leaving.numbers):
                return EDGE_S
            case Do.FREEZE:
                self._note("freezes", block)
                self._pinned.add(block)
                sender.done(self._now)
            case Do.REST:
                update = self.core.updated(block)
                assert update is not None, "a unit that leaves has updates"
                self._send(leaving, Sent(update, self._shard.moved(leaving.numbers)))
            case Do.LAST:
                last = self.core.freeze(block, _digest(self._shard.moved(leaving.numbers)))
                assert last is not None, "a unit that leaves can be frozen"
                self._send(leaving, Sent(last))
            case _:
                self._give_up(block)
        return None

    def _send(self, leaving: LeavingUnit, sent: Sent) -> None:
        pserver = self._pserver
        key = pservers_in(pserver.directory).get(leaving.destination)
        if key is None or key.created != leaving.copy.generation:
            self._sender.failed(self._now, may_repeat=True)
            return

        def answered(problem: str) -> None:
            self._is_calling = False
            if problem:
                self._sender.failed(self._now, may_repeat=True)
            else:
                self._sender.done(self._now)
            self._go_on()

        def failed() -> None:
            self._is_calling = False
            self._sender.failed(self._now, may_repeat=False)
            self._go_on()

        self._is_calling = True
        pserver.world.call(pserver, key.value, key.value.receive, sent, answered, failed, timeout_s=_CALL_S)

    def _give_up(self, block: int) -> None:
        transaction, pserver = self.core.give_up(block), self._pserver
        assert transaction is not None, "a unit that leaves can be given up"
        self._note("gives up", block)

        def done(_: object = None) -> None:
            self._is_calling = False
            self._sender.done(self._now)
            self.look()

        self._is_calling = True
        deletion = Transaction(created={INTENT: transaction.attempt}, deletes=(INTENT,))
        pserver.world.call(pserver, pserver.cluster.etcd, pserver.cluster.etcd.transact, deletion, done, done)

    # units that arrive

    def receive(self, sent: Sent, reply: Reply) -> None:
        """Handle a message from another pserver. Replies with a problem, or with an empty text."""
        message = sent.message
        if isinstance(message, Copy):
            is_accepted = self.core.received(message) is not None
            if is_accepted:
                self._arrivals[message.block] = []
        elif (arrived := self._arrivals.get(message.block)) is None:
            is_accepted = False
        elif isinstance(message, Update):
            is_accepted = self.core.received(message) is not None
            arrived += sent.content if is_accepted else ()
        else:
            is_accepted = self._received_last(message, arrived)
        reply("" if is_accepted else "the message belongs to another attempt, or cannot be accepted yet")

    def _received_last(self, last: Last, arrived: Sequence[MovedSpan]) -> bool:
        if any(self._shard.protocol.unadoptable(part.released) is not None for part in arrived):
            return False
        acknowledged = self.core.received(last, _digest(arrived))
        if not isinstance(acknowledged, Acknowledged):
            return False
        self._acknowledged[last.block] = acknowledged
        if not self._is_acknowledging:
            self._acknowledge()
        return True

    def _acknowledge(self) -> None:
        """Repeat the acknowledgements to the master, until a read shows that their attempt is over."""
        pserver = self._pserver
        self._is_acknowledging = bool(self._acknowledged)
        if not self._acknowledged:
            return
        master = pserver.directory.get(ADDRESS)
        for each in self._acknowledged.values():
            request = MovedRequest(attempt=each.attempt, block=each.block, generation=pserver.generation)
            if master is not None:
                pserver.world.call(pserver, master.value, master.value.moved, request, lambda _: None, lambda: None)
        pserver.later(_ACKNOWLEDGE_S, self._acknowledge)


def _digest(content: Sequence[MovedSpan]) -> bytes:
    return blake2b(repr(content).encode(), digest_size=8).digest()
