"""Copies of a shard's blocks for cuts. The protocol decides when to copy a block, under the lock of its span.

Several cuts may be in progress. Each has a ``Copier``, which holds the memory of its copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.pserver.block_values import BlocksDue, CopyBlocks
from flightedl.errors import UnavailableError
from flightedl.pserver.cuts.copier import Copier
from flightedl.pserver.stores.held import Held
from flightedl.pserver.stores.interface import Content, Span

AnyCopier = TypeVar("AnyCopier", bound=Copier)


class Copying:
    """All cuts in progress on one pserver. Thread-safe.

    Args:
        held: The blocks.
        plan_hash: Hash of the shard plan.
    """

    def __init__(self, held: Held, plan_hash: str) -> None:
        self.plan_hash = plan_hash
        self.held = held
        #: Cuts in progress, by number.
        self.under_way: dict[int, Copier] = {}

    def begin(self, begin: Callable[[Mapping[int, int], int], AnyCopier | None]) -> AnyCopier | None:
        """Call ``begin(versions, highest open round)`` under all locks. Start a cut for the copier that it returns.

        Returns:
            The copier; None if ``begin`` returns None.
        """
        held = self.held
        with held.all_locked():
            copies = begin(held.protocol.versions(), held.protocol.highest_open_round())
            if copies is not None:
                with held.deciding:
                    if copies.replaces is not None:
                        self._drop(copies.replaces)
                        copies.replaces = None
                    copies.cut, due = held.protocol.begin_cut(copies.at_round)
                    self.under_way[copies.cut] = copies
                copies.note_due(due)
        return copies

    def carry_out(self, span: Span[Content], effect: CopyBlocks | BlocksDue) -> None:
        """Carry out the protocol's decision about a span's cut. The caller holds the span's lock."""
        # The thread that writes the file may complete or drop the copies concurrently.
        copies = self.under_way.get(effect.cut)
        if copies is None:
            return
        if isinstance(effect, BlocksDue):
            copies.note_due(effect.numbers)
            return
        try:
            span.cut(copies, effect)
        except (MemoryError, UnavailableError) as error:
            # Training continues without the checkpoint.
            self.drop(copies)
            copies.give_up(str(error) or "not enough memory for the copies of blocks and rows")

    def copy_due(self, copies: Copier) -> None:
        """Copy all due blocks. Stop if the copies are dropped."""
        self.held.soundness.require()
        while (number := copies.next_due()) is not None:
            if not self.copy_one(copies, number):
                return

    def copy_one(self, copies: Copier, number: int) -> bool:
        """Copy a block unless a push has copied it already. Return False if the copies have been dropped."""
        held = self.held
        with held.locked(held.store(number), number) as span:
            with held.deciding:
                copy = held.protocol.copy(copies.cut, number)
            if copy is not None:
                span.cut(copies, copy)
                copies.resume_after(copy.numbers)
            return self.under_way.get(copies.cut) is copies

    def end(self, copies: Copier) -> AppliedBatches | None:
        """Complete the copies. Return the batches that they contain, or None if the copies have been dropped."""
        with self.held.deciding:
            self.under_way.pop(copies.cut, None)
            return None if self.held.soundness.is_lost else self.held.protocol.end_cut(copies.cut)

    def drop(self, copies: Copier) -> None:
        """Abandon these copies: no more blocks are copied for them."""
        with self.held.deciding:
            self._drop(copies)

    def _drop(self, copies: Copier) -> None:
        self.under_way.pop(copies.cut, None)
        self.held.protocol.drop_cut(copies.cut)
