"""Chooses the next moves, toward an equal distribution of blocks and buckets.

Blocks may be anywhere. The buckets of a pserver are neighbors, so the pservers with buckets form a line. A new pserver
joins the line beside the one with the most buckets, and the borders between neighbors are shifted until all shares are
equal.

In one intent, each pserver takes part in the move of at most one unit of buckets. Therefore, the buckets of each
pserver remain neighbors, no matter how many of the moves are committed, or in which order.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from flightedl.domain.model.sharding import Integers, ShardPlan
from flightedl.domain.moving.values import Move

#: Maximum number of bytes of values in a unit of blocks.
UNIT_BYTES = 4 << 20
#: Maximum number of bytes of values in all blocks of one intent.
INTENT_BYTES = 256 << 20
#: Maximum number of buckets in a unit.
UNIT_BUCKETS = 128


def next_moves(plan: ShardPlan, pservers: Collection[int]) -> list[Move]:
    """Return the next moves toward an equal distribution over these pservers; empty if shares are already equal.

    Args:
        plan: Plan with the current owners.
        pservers: Indexes of the pservers that should have blocks.
    """
    wanted = sorted(set(pservers))
    return [*_moves_of_blocks(plan, wanted), *_moves_of_buckets(plan, wanted)]


def _moves_of_blocks(plan: ShardPlan, wanted: Sequence[int]) -> list[Move]:
    sizes, owners = plan.block_bytes.tolist(), plan.block_pservers.tolist()
    loads = dict.fromkeys(wanted, 0)
    for owner, size in zip(owners, sizes, strict=True):
        loads[owner] = loads.get(owner, 0) + size
    share = sum(sizes) / len(wanted)
    moves: list[Move] = []
    bytes_left = INTENT_BYTES
    # Go from the last block to the first, so that the blocks that a pserver keeps are neighbors.
    for block in range(len(owners) - 1, -1, -1):
        source, size = owners[block], sizes[block]
        target = _target(loads, wanted, moves, source, size, share)
        if target is None or bytes_left < size:
            continue
        bytes_left -= size
        loads[source] -= size
        loads[target] += size
        append_block(moves, block, source, target, sizes)
    return moves


def append_block(moves: list[Move], block: int, source: int, target: int, sizes: Sequence[int] | Integers) -> None:
    """Add the move of a block. If it precedes the blocks of the last move, it joins this move while the unit is small.

    Args:
        moves: Moves of blocks, whose numbers decrease.
        block: Number of the block.
        source: Owner of the block.
        target: Pserver to which it moves.
        sizes: Size of each block in bytes.
    """
    last = moves[-1] if moves else None
    is_joined = last is not None and (last.block, last.source, last.destination) == (block + 1, source, target)
    if is_joined and last is not None and sum(int(sizes[each]) for each in (block, *last.blocks)) <= UNIT_BYTES:
        moves[-1] = Move(block, source, target, last.count + 1)
    else:
        moves.append(Move(block, source, target))


def _target(
    loads: dict[int, int], wanted: Sequence[int], moves: Sequence[Move], source: int, size: int, share: float
) -> int | None:
    """Return the pserver to which a block should move, or None."""
    target = min(wanted, key=lambda index: (loads[index], index))
    if moves and moves[-1].source == source and loads[moves[-1].destination] + size <= share:
        # Fill one pserver after another, so that neighbors stay together.
        target = moves[-1].destination
    if source not in wanted:
        return target
    is_due = loads[source] - size >= share or loads[target] + size <= share
    return target if is_due and loads[source] - loads[target] > size else None


def _moves_of_buckets(plan: ShardPlan, wanted: Sequence[int]) -> list[Move]:
    if plan.bucket_pservers is None:
        return []
    first, count = plan.block_count, plan.bucket_count
    ranges = {index: plan.buckets_of(index) for index in range(plan.pserver_count)}
    line = _line(ranges, wanted)
    kept = [index for index in line if index in wanted]
    borders = [-(-count * place // len(kept)) for place in range(len(kept) + 1)]
    new = np.repeat(np.array(kept), np.diff(borders))
    old = np.asarray(plan.bucket_pservers)
    ends = np.flatnonzero((np.diff(new) != 0) | (np.diff(old) != 0)) + 1
    moves: list[Move] = []
    for start, stop in zip([0, *ends.tolist()], [*ends.tolist(), count], strict=True):
        source, destination = int(old[start]), int(new[start])
        busy = {index for move in moves for index in (move.source, move.destination)}
        if source == destination or busy & {source, destination}:
            continue
        is_before = line.index(destination) < line.index(source)
        piece = _piece(ranges[source], ranges[destination], range(first + start, first + stop), is_before=is_before)
        if piece is not None:
            moves.append(Move(piece.start, source, destination, len(piece)))
    return moves


def _line(ranges: dict[int, range], wanted: Sequence[int]) -> list[int]:
    """Return the order of the pservers that have buckets or should have some."""
    line = [index for index in sorted(ranges, key=lambda index: ranges[index].start) if ranges[index]]
    shares = {index: len(ranges[index]) for index in line}
    for index in wanted:
        if index not in shares:
            # The neighbor gives away part of its share. Assume that it gives away half.
            beside = max(line, key=lambda each: (each not in wanted and shares[each] > 0, shares[each], -each))
            line.insert(line.index(beside) + 1, index)
            shares[index] = shares[beside] // 2
            shares[beside] -= shares[index]
    return line


def _piece(source: range, destination: range, buckets: range, *, is_before: bool) -> range | None:
    """Return the buckets that can move now, or None if the buckets of a pserver would not remain neighbors.

    Args:
        source: Buckets of the present owner.
        destination: Buckets of the pserver to which they move.
        buckets: Neighboring buckets that should move.
        is_before: True if the destination precedes the present owner in the line.
    """
    if is_before and buckets.start == source.start and (not destination or destination.stop == buckets.start):
        return buckets[:UNIT_BUCKETS]
    if not is_before and buckets.stop == source.stop and (not destination or destination.start == buckets.stop):
        return buckets[-UNIT_BUCKETS:]
    return None
