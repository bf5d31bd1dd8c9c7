"""What one pserver is to be sent, and what it sent, cut into stretches of blocks that are one part of a message."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]
_Value = TypeVar("_Value")


@dataclass(slots=True)
class ShardTransfer:
    """What one pserver still has to be sent and asked for, for one batch."""

    #: block -> the (n,) gradient of its whole parameter, or None for an arrival without one.
    pushes: dict[int, Array | None]
    #: block -> lowest version wanted.
    pulls: dict[int, int]
    pull_after_push: bool
    #: Under which membership; 0: as a reader.
    member: int = 0
    #: The gradient was too late, or the membership is gone.
    must_repeat: bool = False
    #: Nobody waits for it any more.
    is_given_up: bool = False
    #: Of the pserver that is being asked.
    generation: int = 0
    #: First block of a run -> the (n,) gradients of all its blocks, where they were put together.
    together: Mapping[int, Array] = field(default_factory=dict)
    #: What each block lacks that did not take a sum: places of the sum's batches.
    refusals: set[tuple[int, ...]] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Shard:
    """The client's side of one pserver."""

    index: int
    #: Blocks that travel in one message, see ``runs_of``.
    runs: Sequence[range]
    #: block -> number of its run, by rising block.
    run_of: Mapping[int, int]

    @classmethod
    def of(cls, index: int, runs: Sequence[range]) -> Shard:
        """The shard with the blocks of these runs."""
        return cls(index, runs, {number: run for run, blocks in enumerate(runs) for number in blocks})

    def by_run(self, numbers: Sequence[int]) -> Iterator[Sequence[int]]:
        """Rising numbers of blocks, those of a run together."""
        if len(numbers) == len(self.run_of):
            yield from self.runs
            return
        for _, found in groupby(numbers, self.run_of.__getitem__):
            yield list(found)

    def own(self, table: Mapping[int, _Value]) -> Mapping[int, _Value]:
        """What of a table by block is of this pserver's blocks."""
        if table.keys() <= self.run_of.keys():
            return table
        return {number: value for number, value in table.items() if number in self.run_of}


def at_one_version(
    numbers: Sequence[int], base: Mapping[int, int], pushes: Mapping[int, Array | None]
) -> Iterator[tuple[int, int]]:
    """Stretches of neighbouring blocks with the same base version, all with a gradient or all without."""
    if (
        numbers[-1] - numbers[0] + 1 == len(numbers)
        and len(set(map(base.__getitem__, numbers))) == 1
        and len(set(map(type, map(pushes.__getitem__, numbers)))) == 1
    ):
        # As nearly always, and a few times faster to find out.
        yield 0, len(numbers)
        return
    start = 0
    last, version, is_empty = numbers[0], base[numbers[0]], pushes[numbers[0]] is None
    for place in range(1, len(numbers)):
        number = numbers[place]
        if number != last + 1 or base[number] != version or (pushes[number] is None) != is_empty:
            yield start, place
            start, version, is_empty = place, base[number], pushes[number] is None
        last = number
    yield start, len(numbers)


def forget(table: dict[int, Any], blocks: range) -> None:
    """Take blocks out of a table, those that are in it."""
    for block in blocks if table else ():
        table.pop(block, None)
