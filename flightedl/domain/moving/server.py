"""A pserver's decisions about blocks that move away from it or to it.

The caller holds the content of the blocks. It carries out the effects in order while it holds the block's lock, and
before its next call for the block. Messages and most effects concern a unit (see ``values.Move``), which its first
block identifies.

Rules:

* A block is served by the process that adopted or loaded it, unless the block is frozen.
* ``read`` takes the results of a single read of etcd: the placement, the intent and the holder of the index. Reads that
  are older than the last one are ignored. Only a read can thaw, adopt or release a block.
* A new process loads its blocks only if that read shows that the process still held its index. Otherwise, a process
  that was frozen before loading could serve a block that has moved to another pserver since.
* Staged content belongs to one attempt. It is adopted only if the stored placement names that attempt, because content
  from an earlier attempt lacks updates that the source has applied since.
* Messages of other attempts, repeated updates, and updates after a gap are ignored. A broken stream is not resumed: the
  source gives up, and the next attempt copies the block again.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from flightedl.domain.model.sharding import adjacent
from flightedl.domain.moving.values import (
    Acknowledged,
    Adopt,
    Append,
    Copy,
    Discard,
    Effect,
    End,
    Last,
    Message,
    Move,
    Release,
    Stage,
    StoredIntent,
    Thaw,
    Transaction,
    Update,
)
from flightedl.messages.declarations import Placement


class Serves(Enum):
    """Answer to a push for a block."""

    HERE = "here"
    #: The push must wait until the block is thawed or has moved.
    FROZEN = "frozen"
    ELSEWHERE = "elsewhere"


class Leaving(msgspec.Struct, frozen=True, array_like=True):
    """A unit that is being copied to another pserver."""

    block: int
    attempt: int
    #: Generation of the destination.
    generation: int
    #: Number of updates that were sent after the copy.
    sent: int = 0
    is_frozen: bool = False
    #: Number of blocks.
    count: int = 1

    @property
    def blocks(self) -> range:
        return range(self.block, self.block + self.count)


class Arriving(msgspec.Struct, frozen=True, array_like=True):
    """A unit that is staged."""

    block: int
    attempt: int
    #: Number of updates that were received after the copy.
    received: int = 0
    is_complete: bool = False
    #: Number of blocks.
    count: int = 1

    @property
    def blocks(self) -> range:
        return range(self.block, self.block + self.count)


class State(msgspec.Struct, frozen=True, array_like=True):
    """State of all moves of a pserver. Immutable: each change creates a new state."""

    #: The blocks that the process has, excluding staged blocks.
    blocks: tuple[int, ...]
    #: Revision of the newest read, and version of the placement that it returned.
    revision: int = 0
    version: int = 0
    leaving: tuple[Leaving, ...] = ()
    arriving: tuple[Arriving, ...] = ()


def is_surplus(index: int, placement: Placement, desired: int | None, *, is_serving: bool) -> bool:
    """True if a process must end, because no block is or will be on its pserver.

    Args:
        index: Index of the process.
        placement: The newest placement.
        desired: Number of pservers that the job will have; None if unknown.
        is_serving: True if the process has served blocks. Otherwise, the job may be about to add its pserver.
    """
    return index >= placement.pservers and (is_serving or (desired is not None and index >= desired))


class MovingBlocks:
    """State machine of the moving blocks in one pserver process. Not thread-safe.

    Args:
        index: Index of the pserver.
        generation: Generation of the process.
        state: Initial state.
    """

    def __init__(self, index: int, generation: int, state: State) -> None:
        self._index = index
        self._generation = generation
        self.state = state

    def serves(self, block: int) -> Serves:
        """Return the answer to a push for this block."""
        if block not in self.state.blocks:
            return Serves.ELSEWHERE
        is_frozen = any(leaving.is_frozen and block in leaving.blocks for leaving in self.state.leaving)
        return Serves.FROZEN if is_frozen else Serves.HERE

    def is_leaving(self, copy: Copy) -> bool:
        """True until a read shows that the attempt to move this copy's unit is over."""
        leaving = _find(self.state.leaving, copy.block)
        return leaving is not None and leaving.attempt == copy.attempt

    def read(
        self, revision: int, placement: Placement, stored: StoredIntent | None, holder: int | None
    ) -> list[Effect]:
        """Handle the results of a read at one revision of etcd.

        Args:
            revision: The revision.
            placement: Placement of all blocks.
            stored: The stored intent, if there is one.
            holder: Generation of the process that holds this index, if there is one.

        Returns:
            The effects to carry out. ``End`` is the last one.
        """
        if revision < self.state.revision:
            return []
        if holder != self._generation or placement.version < self.state.version:
            # Another process holds the index, or etcd has lost its last writes.
            return [End()]
        self.state = replace(self.state, revision=revision, version=placement.version)
        effects = list(self._adopt_or_release(placement))
        if End() in effects:
            return effects
        effects += self._end_attempts(stored)
        return effects + (self._begin_copies(stored) if stored is not None else [])

    def _adopt_or_release(self, placement: Placement) -> Iterable[Effect]:
        own, here = set(placement.blocks_of(self._index)), set(self.state.blocks)
        for run in adjacent(here - own):
            yield Release(run.start, len(run))
        self._set_blocks(here & own)
        for leaving in self.state.leaving:
            if leaving.block not in own:
                self._leave(leaving.block, None)
        new = own - here
        for arriving in self.state.arriving:
            is_whole = arriving.is_complete and arriving.attempt == placement.attempt_of(arriving.block)
            if is_whole and new.issuperset(arriving.blocks):
                new.difference_update(arriving.blocks)
                yield Adopt(arriving.block)
                self._set_blocks({*self.state.blocks, *arriving.blocks})
                self._arrive(arriving.block, None)
        if new:
            yield End()

    def _end_attempts(self, stored: StoredIntent | None) -> Iterable[Effect]:
        attempt = 0 if stored is None else stored.attempt
        for leaving in self.state.leaving:
            if leaving.attempt != attempt:
                self._leave(leaving.block, None)
                yield Thaw(leaving.block)
        for arriving in self.state.arriving:
            # A copy may arrive before this pserver has read the intent to which it belongs.
            if arriving.attempt != attempt and arriving.attempt <= self.state.revision:
                self._arrive(arriving.block, None)
                yield Discard(arriving.block)

    def _begin_copies(self, stored: StoredIntent) -> list[Effect]:
        intent = stored.intent
        if intent.generation_of(self._index) != self._generation:
            return []
        copies: list[Effect] = []
        for move in intent.moves:
            is_begun = _find(self.state.leaving, move.block) is not None
            if move.source == self._index and not is_begun and set(self.state.blocks).issuperset(move.blocks):
                copies.append(self._begin_copy(stored.attempt, move, intent.generation_of(move.destination)))
        return copies

    def _begin_copy(self, attempt: int, move: Move, generation: int | None) -> Copy:
        assert generation is not None, "an intent names the generation of each destination"
        self._leave(move.block, Leaving(move.block, attempt, generation, count=move.count))
        return Copy(attempt, move.block, generation, move.count)

    def updated(self, block: int) -> Update | None:
        """Return the message that sends applied updates to the destination, or None if the unit is not leaving."""
        leaving = _find(self.state.leaving, block)
        if leaving is None:
            return None
        assert not leaving.is_frozen, "a frozen block was updated"
        leaving = replace(leaving, sent=leaving.sent + 1)
        self._leave(block, leaving)
        return Update(leaving.attempt, block, leaving.generation, leaving.sent)

    def freeze(self, block: int, digest: bytes) -> Last | None:
        """Freeze a unit that is leaving, or repeat the last message about it.

        Args:
            block: First block of the unit.
            digest: Digest of the content, which does not change while the unit is frozen.

        Returns:
            The message to the destination; None if the unit does not leave.
        """
        leaving = _find(self.state.leaving, block)
        if leaving is None:
            return None
        self._leave(block, replace(leaving, is_frozen=True))
        return Last(leaving.attempt, block, leaving.generation, leaving.sent, digest)

    def give_up(self, block: int) -> Transaction | None:
        """Return the transaction that ends the attempt to move a leaving unit.

        Whatever its outcome, only a read thaws the unit, because the master may already have committed the move.
        """
        leaving = _find(self.state.leaving, block)
        return None if leaving is None else Transaction(leaving.attempt, None)

    def received(self, message: Message, digest: bytes = b"") -> Stage | Append | Acknowledged | None:
        """Handle a message from a source.

        Args:
            message: The message.
            digest: Digest of the staged content, for ``Last``.

        Returns:
            The effect to carry out before the next message of this unit; None if there is none.
        """
        block = message.block
        if message.generation != self._generation or block in self.state.blocks:
            return None
        arriving = _find(self.state.arriving, block)
        if isinstance(message, Copy):
            if arriving is not None and arriving.attempt >= message.attempt:
                return None
            self._arrive(block, Arriving(block, message.attempt, count=message.count))
            return Stage(block)
        if arriving is None or arriving.attempt != message.attempt:
            return None
        if isinstance(message, Update):
            if message.number != arriving.received + 1:
                return None
            self._arrive(block, replace(arriving, received=message.number))
            return Append(block)
        if message.count != arriving.received or message.digest != digest:
            return None
        self._arrive(block, replace(arriving, is_complete=True))
        return Acknowledged(message.attempt, block)

    def _set_blocks(self, blocks: Iterable[int]) -> None:
        self.state = replace(self.state, blocks=tuple(sorted(blocks)))

    def _leave(self, block: int, leaving: Leaving | None) -> None:
        self.state = replace(self.state, leaving=_with(self.state.leaving, block, leaving))

    def _arrive(self, block: int, arriving: Arriving | None) -> None:
        self.state = replace(self.state, arriving=_with(self.state.arriving, block, arriving))


_Each = TypeVar("_Each", Leaving, Arriving)


def _find(among: Iterable[_Each], block: int) -> _Each | None:
    return next((each for each in among if each.block == block), None)


def _with(among: Iterable[_Each], block: int, new: _Each | None) -> tuple[_Each, ...]:
    """Return the entries in the order of their blocks. ``new`` replaces the block's entry, or removes it if None."""
    entries = {each.block: each for each in among}
    entries.pop(block, None)
    if new is not None:
        entries[block] = new
    return tuple(entries[number] for number in sorted(entries))
