"""Chooses blocks that move away from busy pservers, according to the measured loads.

The load of a pserver is the number of bytes per second that trainers push to it, plus a constant number of bytes for
each part of a message. (Trainers read about as many bytes as they push.) A pserver is busy if its load exceeds the mean
load of the others by a third, in two consecutive measurements. Some of its blocks or buckets then move to pservers with
lower loads.

With constant loads, the moves end:

* Blocks move only if the receiver's load remains below the previous load of the source.
* After the moves, the loads are measured again. If their *spread* (the variance relative to the mean) has not decreased
  by a twentieth, no more blocks move until it has grown by a third from its lowest value since. While a pserver is
  busy, the spread has a lower limit, so it can decrease only a limited number of times.

Limitation: the load of blocks that trainers push together is assumed to be proportional to their size, and the load of
buckets to be the same for each bucket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flightedl.domain.model.sharding import ShardPlan
from flightedl.domain.moving.balance import INTENT_BYTES, UNIT_BUCKETS, append_block
from flightedl.domain.moving.values import Move
from flightedl.messages.status import PserverStatusReply

#: A part of a message costs about as much processor time as this many bytes of values.
PART_BYTES = 64 << 10
#: If no pserver has a higher load than this, in bytes per second, blocks do not move.
_IDLE = 1e6
#: A pserver is busy if its load exceeds the mean of the others by this factor.
_BUSY = 4 / 3
#: Moves have helped if the spread is at most this fraction of the spread before them.
_HELPED = 0.95
#: A pserver gives away at least this fraction of its load, or nothing.
_LEAST = 0.05
#: Maximum load of a block's receiver, as a fraction of the previous load of the source.
_LARGEST = 0.9

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Load:
    """Load of one pserver: in total, and the part of each block and bucket of the plan."""

    total: float
    each: Floats


class Relief(NamedTuple):
    """Moves away from busy pservers, the busiest of these, and its share of the load of all pservers."""

    moves: list[Move]
    busiest: int
    share: float


class Measured(NamedTuple):
    """The pservers' counters (index -> counters) at the beginning and at the end of a measurement, and its duration."""

    before: Mapping[int, PserverStatusReply]
    after: Mapping[int, PserverStatusReply]
    seconds: float


class _Window(NamedTuple):
    """Beginning of a measurement: version of the placement, generations of the processes, time, and counters."""

    placement: int
    generations: Mapping[int, int]
    began: float
    seen: Mapping[int, PserverStatusReply]


class Rebalancing:
    """Measurements of the pservers' loads, and the moves that follow from them. Not thread-safe.

    Args:
        after_s: Seconds that a pserver must be busy before its blocks move.
    """

    def __init__(self, after_s: float) -> None:
        self._window_s = after_s / 2
        self._window: _Window | None = None
        self._busy: frozenset[int] = frozenset()
        #: Spread before the newest moves, until the loads have been measured again; None otherwise.
        self._before: float | None = None
        #: Lowest spread since moves no longer helped, or None.
        self._given_up: float | None = None

    def forget(self) -> None:
        """Measure again from the beginning, because a user has changed the pservers."""
        self._window, self._busy, self._before, self._given_up = None, frozenset(), None, None

    def measured(
        self, placement: int, generations: Mapping[int, int], seen: Mapping[int, PserverStatusReply], now: float
    ) -> Measured | None:
        """Return a measurement that has ended, or None.

        A measurement begins again when blocks have moved or a pserver was replaced.

        Args:
            placement: Version of the placement.
            generations: Index -> generation of the pservers that should have blocks.
            seen: Index -> counters of these pservers.
            now: The time.
        """
        begun = self._window
        is_valid = (
            begun is not None
            and (begun.placement, begun.generations) == (placement, generations)
            and all(seen[index].pushes >= counted.pushes for index, counted in begun.seen.items())
        )
        if not is_valid or begun is None:
            self._window, self._busy = _Window(placement, dict(generations), now, dict(seen)), frozenset()
            return None
        seconds = now - begun.began
        if seconds < self._window_s:
            return None
        self._window = begun._replace(began=now, seen=dict(seen))
        return Measured(begun.seen, dict(seen), seconds)

    def relief(self, plan: ShardPlan, measured: Measured) -> Relief | None:
        """Return the moves that are due after a measurement; None if there are none.

        Args:
            plan: Plan with the current owners.
            measured: Counters of the pservers that should have blocks.
        """
        loads = {
            index: _load(plan, measured.before[index], after, measured.seconds)
            for index, after in measured.after.items()
        }
        totals = {index: load.total for index, load in loads.items()}
        mean = sum(totals.values()) / len(totals)
        if len(totals) < 2 or max(totals.values()) < _IDLE:
            self._busy = frozenset()
            return None
        spread = sum((total / mean - 1) ** 2 for total in totals.values())
        if self._before is not None and spread > _HELPED * self._before:
            self._given_up = spread
        self._before = None
        if self._given_up is not None and spread <= _BUSY * self._given_up:
            self._given_up = min(self._given_up, spread)
            return None
        self._given_up = None
        others = len(totals) - 1
        ratios = {index: total * others / max(mean * (others + 1) - total, 1.0) for index, total in totals.items()}
        before, self._busy = self._busy, frozenset(index for index, ratio in ratios.items() if ratio > _BUSY)
        busy = sorted(before & self._busy, key=lambda index: -totals[index])
        moves = _moves(plan, loads, busy)
        if not moves:
            return None
        self._before = spread
        return Relief(moves, busy[0], totals[busy[0]] / sum(totals.values()))


def _load(plan: ShardPlan, before: PserverStatusReply, after: PserverStatusReply, seconds: float) -> Load:
    weights = np.concatenate([plan.block_bytes, np.ones(plan.bucket_count)])
    earlier = {(first, count): counts for first, count, *counts in before.pushed}
    total, each = 0.0, np.zeros(len(weights))
    for first, count, parts, size_bytes in after.pushed:
        parts_before, bytes_before = earlier.get((first, count), (0, 0))
        parts_load = max(parts - parts_before, 0) * PART_BYTES / seconds
        bytes_load = max(size_bytes - bytes_before, 0) / seconds
        total += parts_load + bytes_load
        those = weights[first : first + count]
        if those.size:
            # If only some of the buckets move, the number of messages remains the same.
            movable = bytes_load if first >= plan.block_count else parts_load + bytes_load
            each[first : first + count] += movable * those / max(those.sum(), 1.0)
    return Load(total, each)


def _moves(plan: ShardPlan, loads: Mapping[int, Load], busy: Sequence[int]) -> list[Move]:
    totals = {index: load.total for index, load in loads.items()}
    moves: list[Move] = []
    bytes_left = INTENT_BYTES
    for source in busy:
        after, found = dict(totals), list[Move]()
        for block in reversed(plan.blocks_of(source).tolist()):
            target = min(after, key=lambda index: (after[index], index))
            load, size_bytes = float(loads[source].each[block]), int(plan.block_bytes[block])
            # The receiver must not become as busy as the source was.
            if 0 < load <= _LARGEST * after[source] - after[target] and size_bytes <= bytes_left:
                bytes_left -= size_bytes
                append_block(found, block, source, target, plan.block_bytes)
                after[source], after[target] = after[source] - load, after[target] + load
        if totals[source] - after[source] >= _LEAST * totals[source]:
            totals = after
            moves += found
    mean = sum(totals.values()) / len(totals)
    # Buckets only move to neighbors, so a neighbor of a busy pserver may first have to pass on some of its own.
    sources = [index for index, total in totals.items() if total > mean]
    return moves + _moves_of_buckets(plan, loads, totals, sources) if busy else []


def _moves_of_buckets(
    plan: ShardPlan, loads: Mapping[int, Load], totals: dict[int, float], sources: Sequence[int]
) -> list[Move]:
    """Return the moves of buckets, at most one for each pserver, to neighbors or to pservers without buckets.

    ``totals`` are the loads of the pservers after all other moves.
    """
    if not plan.bucket_count:
        return []
    ranges, moves, taken = {index: plan.buckets_of(index) for index in loads}, list[Move](), set[int]()
    pairs = [
        (source, target) for source in sources for target in totals if _are_neighbors(ranges[source], ranges[target])
    ]
    # Begin with the largest differences, so that a busy pserver passes buckets on before it receives more.
    for source, target in sorted(pairs, key=lambda pair: totals[pair[1]] - totals[pair[0]]):
        own, half = ranges[source], (totals[source] - totals[target]) / 2
        is_before = len(ranges[target]) > 0 and ranges[target].stop == own.start
        part = own[: min(UNIT_BUCKETS, len(own) - 1)] if is_before else own[: -min(UNIT_BUCKETS, len(own) - 1) - 1 : -1]
        given = np.cumsum(loads[source].each[list(part)])
        count = int(np.searchsorted(given, half, side="right"))
        if count and given[count - 1] >= _LEAST * totals[source] and not taken & {source, target}:
            taken |= {source, target}
            moves.append(Move(own.start if is_before else own.stop - count, source, target, count))
    return moves


def _are_neighbors(source: range, target: range) -> bool:
    """True if buckets can move from the end of one range to the other, which may be empty."""
    return len(source) > 1 and (not target or source.start == target.stop or source.stop == target.start)
