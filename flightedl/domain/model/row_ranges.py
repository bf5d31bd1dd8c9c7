"""Division of a parameter's rows among the servers from which they can be read.

A parameter is read by rows. A row of a vector is an element; a row of a matrix is a slice along its first axis. If
slices have more than ``MAX_WIDTH`` elements, the parameter is read as a vector, because rows are never divided in
messages.

A block may end within a row, so the first elements of a row may be on one pserver and the others on the next. Such a
*split* row is read from several pservers and put together.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import ShardPlan
from flightedl.errors import MessageError

#: Maximum number of elements in a row.
MAX_WIDTH = 1 << 16


class Part(NamedTuple):
    """Adjacent elements of a flattened parameter that are on the same pserver."""

    pserver: int
    start: int
    stop: int


class RowRange(NamedTuple):
    """Adjacent rows that are read together from one pserver, or one split row with its parts."""

    start: int
    stop: int
    parts: tuple[Part, ...]


def is_matrix(spec: ParameterSpec) -> bool:
    """True if rows are slices along the parameter's first axis, False if they are single elements."""
    return len(spec.shape) > 1 and math.prod(spec.shape[1:]) <= MAX_WIDTH


def width_of(spec: ParameterSpec) -> int:
    """Return the number of elements in each row."""
    return math.prod(spec.shape[1:]) if is_matrix(spec) else 1


def require_range(name: str, start: int, stop: int | None, count: int) -> range:
    """Return which of ``count`` rows were requested. Raises MessageError if they do not exist."""
    end = count if stop is None else stop
    if not 0 <= start <= end <= count:
        raise MessageError(f"rows {start} to {end} of {name!r:.80} were requested, but it has rows 0 to {count}")
    return range(start, end)


def parts_of(plan: ShardPlan, name: str, start: int, stop: int) -> list[Part]:
    """Return the owners of a parameter's elements ``start`` to ``stop``, in order."""
    numbers = plan.block_range(name)
    stops = plan.block_stops[numbers.start : numbers.stop]
    found: list[Part] = []
    for number in numbers[int(np.searchsorted(stops, start, side="right")) :]:
        block = plan.block(number)
        first, end = max(block.start, start), min(block.stop, stop)
        if first >= end:
            break
        if found and found[-1].pserver == block.pserver:
            found[-1] = Part(block.pserver, found[-1].start, end)
        else:
            found.append(Part(block.pserver, first, end))
    return found


def row_ranges(plan: ShardPlan, spec: ParameterSpec, rows: range) -> list[RowRange]:
    """Divide rows of a parameter, in order, into ranges that are each on one pserver, and split rows."""
    width = width_of(spec)
    found: list[RowRange] = []
    split: list[Part] = []
    for owner, start, stop in parts_of(plan, spec.name, rows.start * width, rows.stop * width):
        border = min(-(-start // width) * width, stop)
        if start < border:
            # This part begins within a row.
            split.append(Part(owner, start, border))
            if border % width:
                continue
            found.append(RowRange(border // width - 1, border // width, tuple(split)))
        end = stop - stop % width
        if border < end:
            found.append(RowRange(border // width, end // width, (Part(owner, border, end),)))
        split = [Part(owner, end, stop)] if end < stop else []
    return found
