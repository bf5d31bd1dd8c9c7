"""The gradients of one push, run by run: what lies in one piece of memory is sent as one piece of a message.

Encoded once: whatever is sent again is the same bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import groupby
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flightedl.client.tables.traffic import RowMessages
from flightedl.domain.model.sharding import Block, ShardPlan

Array = npt.NDArray[np.generic]
_NO_ARRAYS: Mapping[int, Array] = MappingProxyType({})
_NO_GRADIENTS: Mapping[str, Array] = MappingProxyType({})


class Stretch(NamedTuple):
    """Neighbouring blocks of one parameter, and where they lie in its gradient."""

    parameter: str
    blocks: range
    elements: slice


class Run(NamedTuple):
    """Blocks that travel in one message (``runs_of``), and what they are of."""

    blocks: range
    stretches: tuple[Stretch, ...]

    @classmethod
    def of(cls, plan: ShardPlan, blocks: range, places: Mapping[int, Block]) -> Run:
        """The run of these blocks; ``places``: where each lies."""
        stretches = []
        for parameter, found in groupby((places[number] for number in blocks), lambda place: place.parameter):
            neighbours = list(found)
            first, last = neighbours[0], neighbours[-1]
            name, numbers = plan.parameters[parameter].name, range(first.number, last.number + 1)
            stretches.append(Stretch(name, numbers, slice(first.start, last.stop)))
        return cls(blocks, tuple(stretches))


class Outgoing(NamedTuple):
    """The gradients of one push."""

    #: Parameter -> its (n,) gradient. Blocks of the others get the batch's arrival.
    gradients: Mapping[str, Array] = _NO_GRADIENTS
    #: First block of a run -> the (n,) gradients of all its blocks, where they were put together.
    together: Mapping[int, Array] = _NO_ARRAYS
    #: Of tables, with what is looked up.
    rows: RowMessages | None = None

    def of(self, run: Run) -> list[tuple[range, Array | None]]:
        """What lies in one piece of memory, or is nowhere, of the gradients of a run."""
        joined = self.together.get(run.blocks.start)
        if joined is not None:
            return [(run.blocks, joined)]
        found: list[tuple[range, Array | None]] = []
        for parameter, blocks, elements in run.stretches:
            gradient = self.gradients.get(parameter)
            if gradient is not None:
                found.append((blocks, gradient[elements]))
            elif found and found[-1][1] is None:
                found[-1] = (range(found[-1][0].start, blocks.stop), None)
            else:
                found.append((blocks, None))
        return found


def at_one_version(blocks: range, bases: Mapping[int, int], wanted: Collection[int] | None) -> list[range]:
    """Return stretches of neighbours with the same base version; only of the ``wanted`` blocks unless that is None."""
    if wanted is None and len(set(map(bases.__getitem__, blocks))) == 1:
        # As nearly always, and a few times faster to find out.
        return [blocks]
    numbers = [number for number in blocks if wanted is None or number in wanted]
    stretches = groupby(enumerate(numbers), lambda pair: (pair[1] - pair[0], bases[pair[1]]))
    return [range(found[0][1], found[-1][1] + 1) for _, neighbours in stretches if (found := list(neighbours))]
