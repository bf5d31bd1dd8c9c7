"""Decisions of a pserver about blocks that leave it or arrive.

The content of the blocks lies with the caller: it carries out the effects, in their order, under the lock of the block
and before it asks anything else about it.

Rules:

* A block is served by the process that has adopted it or loaded it, unless it is frozen.
* ``read`` takes what one read of etcd has found: owners, intent and the holder of the index together. A read that is
  older than the last one is ignored. Nothing else thaws, adopts or releases a block.
* A new process loads the blocks of the owners only if it still holds its index at the revision of that read. Otherwise
  a process that froze before it loaded would serve a block that moved to its successor, with a higher loss number.
* Staged content belongs to one attempt. It is adopted only if the owners name that attempt: content that was staged by
  an earlier one lacks what the source applied since.
* Messages of another attempt, a repeated update and a gap change nothing. A stream that breaks is not continued: the
  source gives up, and the next attempt copies again.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import TypeVar

import msgspec
from msgspec.structs import replace

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
    Owners,
    Release,
    Stage,
    Standing,
    Thaw,
    Transaction,
    Update,
)


class Serves(Enum):
    """Answer to a push for a block."""

    HERE = "here"
    #: It waits until the block is thawed or has moved.
    FROZEN = "frozen"
    ELSEWHERE = "elsewhere"


class Leaving(msgspec.Struct, frozen=True, array_like=True):
    """A block that is being copied to another pserver."""

    block: int
    attempt: int
    #: Of the destination.
    generation: int
    #: Updates sent after the copy.
    sent: int = 0
    is_frozen: bool = False


class Arriving(msgspec.Struct, frozen=True, array_like=True):
    """A block that is staged."""

    block: int
    attempt: int
    #: Updates received after the copy.
    received: int = 0
    is_complete: bool = False


class State(msgspec.Struct, frozen=True, array_like=True):
    """All that a pserver knows of its moves. Replaced as a whole."""

    #: Blocks that are here, staged ones excluded.
    blocks: tuple[int, ...]
    #: Revision of the newest read, and the version of the owners then.
    revision: int = 0
    version: int = 0
    leaving: tuple[Leaving, ...] = ()
    arriving: tuple[Arriving, ...] = ()


def state_to_load(index: int, generation: int, revision: int, owners: Owners, holder: int | None) -> State | None:
    """Return the state in which a new process serves after it has loaded its blocks; None if it has to end.

    Args:
        index: The index that it has taken.
        generation: Its generation.
        revision: Revision of etcd at which it has read the owners, after it took the index.
        owners: The owners at that revision.
        holder: Generation of the process that held the index at that revision.
    """
    return State(tuple(owners.blocks_of(index)), revision, owners.version) if holder == generation else None


class MovingBlocks:
    """The blocks of one process of a pserver, as far as they move. Not thread-safe.

    Args:
        index: The pserver's.
        generation: The process's.
        state: To begin with.
    """

    def __init__(self, index: int, generation: int, state: State) -> None:
        self._index = index
        self._generation = generation
        self.state = state

    def serves(self, block: int) -> Serves:
        """Return what becomes of a push for this block."""
        if block not in self.state.blocks:
            return Serves.ELSEWHERE
        leaving = _find(self.state.leaving, block)
        return Serves.FROZEN if leaving is not None and leaving.is_frozen else Serves.HERE

    def answers_for(self, version: int) -> bool:
        """Return True if what this process has is its part of these owners.

        A request to all pservers, such as an audit or a checkpoint, names a version. A process that knows an older one
        reads before it answers, so that answers for different versions are never combined.
        """
        return self.state.version == version

    def read(self, revision: int, owners: Owners, standing: Standing | None, holder: int | None) -> list[Effect]:
        """Take what was read, all at one revision of etcd.

        Args:
            revision: The revision.
            owners: Owners of all blocks.
            standing: The intent, if one stands.
            holder: Generation of the process that holds this index, if one does.

        Returns:
            What follows. Nothing is done after ``End``.
        """
        if revision < self.state.revision:
            return []
        if holder != self._generation:
            return [End()]
        self.state = replace(self.state, revision=revision, version=owners.version)
        effects = [*self._adopt_or_release(owners), *self._end_attempts(standing)]
        return effects + (self._begin_copies(standing) if standing is not None else [])

    def _adopt_or_release(self, owners: Owners) -> Iterable[Effect]:
        own = set(owners.blocks_of(self._index))
        for block in sorted(set(self.state.blocks) - own):
            yield Release(block)
            self._set_blocks(set(self.state.blocks) - {block})
            self._leave(block, None)
        for block in sorted(own - set(self.state.blocks)):
            arriving = _find(self.state.arriving, block)
            if arriving is None or not arriving.is_complete or arriving.attempt != owners.attempts[block]:
                yield End()
                return
            yield Adopt(block)
            self._set_blocks(set(self.state.blocks) | {block})
            self._arrive(block, None)

    def _end_attempts(self, standing: Standing | None) -> Iterable[Effect]:
        attempt = 0 if standing is None else standing.attempt
        for leaving in self.state.leaving:
            if leaving.attempt != attempt:
                self._leave(leaving.block, None)
                yield Thaw(leaving.block)
        for arriving in self.state.arriving:
            # A copy of an attempt that is newer than this read has come early.
            if arriving.attempt != attempt and arriving.attempt <= self.state.revision:
                self._arrive(arriving.block, None)
                yield Discard(arriving.block)

    def _begin_copies(self, standing: Standing) -> list[Effect]:
        intent = standing.intent
        if intent.generation_of(self._index) != self._generation:
            return []
        copies: list[Effect] = []
        for move in intent.moves:
            is_begun = _find(self.state.leaving, move.block) is not None
            if move.source == self._index and move.block in self.state.blocks and not is_begun:
                copies.append(self._begin_copy(standing.attempt, move, intent.generation_of(move.destination)))
        return copies

    def _begin_copy(self, attempt: int, move: Move, generation: int | None) -> Copy:
        assert generation is not None, "an intent names the generation of each destination"
        self._leave(move.block, Leaving(move.block, attempt, generation))
        return Copy(attempt, move.block, generation)

    def updated(self, block: int) -> Update | None:
        """Return the update to send to the destination, if an update of this block was applied and it leaves."""
        leaving = _find(self.state.leaving, block)
        if leaving is None:
            return None
        assert not leaving.is_frozen, "a frozen block was updated"
        leaving = replace(leaving, sent=leaving.sent + 1)
        self._leave(block, leaving)
        return Update(leaving.attempt, block, leaving.generation, leaving.sent)

    def freeze(self, block: int, digest: bytes) -> Last | None:
        """Freeze a block that leaves, or repeat the last message.

        Args:
            block: Its number.
            digest: Of its content, which does not change from now on.

        Returns:
            The message to the destination; None if the block does not leave.
        """
        leaving = _find(self.state.leaving, block)
        if leaving is None:
            return None
        self._leave(block, replace(leaving, is_frozen=True))
        return Last(leaving.attempt, block, leaving.generation, leaving.sent, digest)

    def give_up(self, block: int) -> Transaction | None:
        """Return the transaction that ends the attempt of a block that leaves.

        Whatever its outcome is, the block is thawed by a read only: the master may have committed before.
        """
        leaving = _find(self.state.leaving, block)
        return None if leaving is None else Transaction(leaving.attempt, None)

    def received(self, message: Message, digest: bytes = b"") -> Stage | Append | Acknowledged | None:
        """Take a message of a source.

        Args:
            message: The message.
            digest: Of the staged content, for ``Last``.

        Returns:
            What follows, before the next message of this block; None if nothing does.
        """
        block = message.block
        if message.generation != self._generation or block in self.state.blocks:
            return None
        arriving = _find(self.state.arriving, block)
        if isinstance(message, Copy):
            if arriving is not None and arriving.attempt >= message.attempt:
                return None
            self._arrive(block, Arriving(block, message.attempt))
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
        others = (each for each in self.state.leaving if each.block != block)
        self.state = replace(self.state, leaving=tuple(sorted((*others, *([leaving] if leaving else ())), key=_block)))

    def _arrive(self, block: int, arriving: Arriving | None) -> None:
        others = (each for each in self.state.arriving if each.block != block)
        more = [arriving] if arriving else ()
        self.state = replace(self.state, arriving=tuple(sorted((*others, *more), key=_block)))


_Each = TypeVar("_Each", Leaving, Arriving)


def _block(each: Leaving | Arriving) -> int:
    return each.block


def _find(among: Iterable[_Each], block: int) -> _Each | None:
    return next((each for each in among if each.block == block), None)
