"""Replaced pserver processes, which determine if a report of finished work still counts after blocks have moved.

For each pserver that acknowledged a batch, a report of finished work names the oldest generation that did so. It also
names the oldest *placement* (version of the blocks' owners) with which one of its batches was pushed. The report counts
if

* none of these processes has been replaced, even if its pserver has no blocks any more, and
* no process with blocks was replaced while a placement newer than the report's was stored.

Proof: suppose that a block lacks a batch that it has acknowledged. Then a later owner of the block was replaced by a
process that loaded an older state.

If that owner is the one that acknowledged the batch, the first condition rejects the report. Otherwise, the block had
moved before the replacement, so the stored placement was newer than the report's, and the second condition rejects it.

The second condition may also reject reports that have lost nothing. Their batches are then repeated with a newer
placement. This happens only if a process is replaced while blocks move.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Process(msgspec.Struct, frozen=True, array_like=True):
    """The newest known process of a pserver."""

    index: int
    generation: int
    #: Newest placement that may have been stored when a process with blocks was replaced; 0 if none was replaced.
    replaced_at: int = 0


class Replacements(msgspec.Struct, frozen=True, array_like=True):
    """The newest known process of each pserver that the job has had."""

    processes: tuple[Process, ...] = ()

    def generation_of(self, index: int) -> int | None:
        """Return the generation of a pserver's newest process, or None if it has had none."""
        return next((each.generation for each in self.processes if each.index == index), None)

    def seen(self, index: int, generation: int, placement: int) -> Replacements:
        """Return the new state after observing this process.

        Args:
            index: Index of the process.
            generation: Its generation.
            placement: Newest placement that may be stored; 0 if the pserver has no blocks.
        """
        known = {each.index: each for each in self.processes}
        before = known.get(index)
        if before is not None and before.generation >= generation:
            return self
        replaced_at = 0 if before is None else max(before.replaced_at, placement)
        known[index] = Process(index, generation, replaced_at)
        return Replacements(tuple(known[each] for each in sorted(known)))

    def confirmed(self, placement: int) -> Replacements:
        """Return the new state after a read has shown that no newer placement than this one is stored."""
        if all(each.replaced_at <= placement for each in self.processes):
            return self
        limited = (Process(each.index, each.generation, min(each.replaced_at, placement)) for each in self.processes)
        return Replacements(tuple(limited))

    def accepts(self, pservers: Sequence[int], placement: int) -> bool:
        """True if a report of finished work must be counted.

        Args:
            pservers: Index -> oldest generation that acknowledged one of its batches.
            placement: Oldest placement according to which one of its batches was pushed; 0 if none is stored.
        """
        return all(
            each.replaced_at <= placement and (each.index >= len(pservers) or pservers[each.index] >= each.generation)
            for each in self.processes
        )
