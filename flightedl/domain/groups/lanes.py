"""Order of an epoch's records: lanes that are read side by side, each shuffled in windows.

Rules:

* The chunks of a source are permuted by seed and epoch, and laid end to end. This sequence is divided into K lanes of
  equal length; the first lanes may be one record longer.
* A lane consists of windows of S records, which are shuffled. The first window of lane l is shorter, with
  ceil(S (l + 1) / K) records, so that not all lanes begin a window at the same time.
* Without a seed, chunks and records keep their order, and windows are chunks.
* A lane of a mixture takes records from one lane of each source, in proportion to the weights. Each ``_BLOCK`` of its
  records contain the shares of all sources, to within a record, in a random order. S is divided among the sources.

A global batch takes equally many records from all lanes (see ``plan``), so it mixes K distant parts of the data, and a
lane decodes each of its chunks only once. The order depends neither on the number of ranks nor on the machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from flightedl.domain.groups.plan import Order, Piece
from flightedl.domain.queue.batching import record_order
from flightedl.domain.queue.permutation import Integers, KeyedPermutation, key_of
from flightedl.domain.splitmix64 import GOLDEN, mix_all

#: Number of a mixture's records that contain the shares of all sources.
_BLOCK = 16


@dataclass(frozen=True, eq=False)
class GroupData:
    """Properties of the data that determine the order.

    Args:
        records: Number of records of each chunk, (chunk count,).
        decoded_bytes: Estimated memory of each chunk's records, (chunk count,).
        sources: Source of each chunk, (chunk count,). Each source has records.
        weights: Weight of each source; one weight for data that is not a mixture.
        stop: End of a mixture's epoch; see ``queue.mixture``.
        seed: Seed of the order; None for the files' order.
    """

    records: Integers
    decoded_bytes: Integers
    sources: Integers
    weights: tuple[float, ...] = (1.0,)
    stop: str = "all"
    seed: int | None = None

    @cached_property
    def shares(self) -> npt.NDArray[np.float64]:
        return np.array(self.weights) / sum(self.weights)

    @cached_property
    def sizes(self) -> Integers:
        """Number of records of each source."""
        return np.bincount(self.sources, self.records, len(self.weights)).astype(np.int64)

    @property
    def chunk_count(self) -> int:
        """Number of chunks with records."""
        return int(np.count_nonzero(self.records))

    def record_count(self, lanes: int) -> int:
        """Return the number of records in an epoch with this number of lanes."""
        if self.stop == "all":
            return int(self.sizes.sum())
        return lanes * int(self.shared(self.lane_sizes(lanes, 0))[-1].sum())

    def lane_sizes(self, lanes: int, lane: int) -> Integers:
        """Return the number of records that each source has for a lane of the mixture."""
        if self.stop != "all":
            return self.sizes // lanes if self.stop == "first" else -(-self.sizes // lanes)
        return np.array([_lane(int(n), lanes, (lane - self.shift(s)) % lanes)[1] for s, n in enumerate(self.sizes)])

    def shift(self, source: int) -> int:
        """Return the lane of the mixture that takes lane 0 of a source.

        It is chosen so that the longer lanes of all sources make the first lanes of the mixture longer by one record.
        """
        return int(self.sizes[:source].sum()) if self.stop == "all" else 0

    def shared(self, sizes: Integers) -> Integers:
        """Return the number of records of each source before each block of a lane, (block count + 1, source count)."""
        lengths = sizes / self.shares
        length = int(lengths.min()) if self.stop == "first" else int(np.ceil(lengths.max()))
        ends = np.minimum(np.arange(-(-length // _BLOCK) + 1) * _BLOCK, length)
        edges = np.rint(np.outer(np.concatenate([[0.0], np.cumsum(self.shares[:-1]), [1.0]]), ends)).astype(np.int64)
        given: Integers = np.maximum.accumulate(np.diff(edges, axis=0), axis=1).T
        if self.stop == "repeat":
            given[-1] = np.maximum(given[-1], sizes)
            return given
        given = np.minimum(given, sizes)
        given[-1] = sizes if self.stop == "all" else given[-1]
        return given


class SourceOrder:
    """Order of one source's records in an epoch. Positions are those in the sequence of all chunks.

    Args:
        chunks: Numbers of the source's chunks, ascending.
        records: Number of records of each chunk of the data.
        seed: Seed of the order; None for the files' order.
        epoch: The epoch.
        order: Number of lanes, and size of their windows.
    """

    def __init__(self, chunks: Integers, records: Integers, seed: int | None, epoch: int, order: Order) -> None:
        chunks = chunks[records[chunks] > 0]
        if seed is not None:
            chunks = chunks[KeyedPermutation(len(chunks), key_of(seed, epoch)).elements_at(np.arange(len(chunks)))]
        self._chunks = chunks
        self._ends = np.cumsum(records[chunks])
        self._count = int(self._ends[-1])
        self._seed = seed
        self._epoch = epoch
        self._order = order

    @property
    def is_shuffled(self) -> bool:
        return self._seed is not None

    def lane_size(self, lane: int) -> int:
        return _lane(self._count, self._order.lanes, lane)[1]

    def window(self, lane: int, number: int) -> range:
        """Return the records of a lane that are shuffled together with this one."""
        lanes, size = self._order.lanes, self._order.window
        start, count = _lane(self._count, lanes, lane)
        if not size:
            chunk = int(np.searchsorted(self._ends, start + number, side="right"))
            first = int(self._ends[chunk - 1]) if chunk else 0
            return range(max(first - start, 0), min(int(self._ends[chunk]) - start, count))
        end = -(-size * (lane + 1) // lanes)
        first = 0 if number < end else end + (number - end) // size * size
        return range(first, min(first + size if first else end, count))

    def positions(self, lane: int, window: range) -> Integers:
        """Return the positions of a window's records, in the order in which they are read."""
        first = _lane(self._count, self._order.lanes, lane)[0] + window.start
        if self._seed is None:
            return np.arange(first, first + len(window))
        return first + record_order(len(window), self._seed, self._epoch, first)

    def chunks(self, positions: Integers) -> tuple[int, list[int]]:
        """Return the first position and the numbers of the chunks from the lowest to the highest of these positions."""
        low, high = np.searchsorted(self._ends, [positions.min(), positions.max()], side="right").tolist()
        return int(self._ends[low - 1]) if low else 0, self._chunks[low : high + 1].tolist()


@dataclass(frozen=True, slots=True)
class SourcePiece:
    """Consecutive records of a lane of one source."""

    source: int
    lane: int
    records: range


class EpochOrder:
    """Order of all records in an epoch.

    Args:
        data: The data.
        epoch: The epoch.
        order: Number of lanes, and size of their windows.
    """

    def __init__(self, data: GroupData, epoch: int, order: Order) -> None:
        self._data = data
        self.epoch = epoch
        self.order = order
        single = len(data.weights) == 1
        self.sources = [
            SourceOrder(
                np.flatnonzero(data.sources == source),
                data.records,
                data.seed if single or data.seed is None else key_of(data.seed, source),
                epoch,
                order if single else Order(order.lanes, max(1, round(order.window * share)) if order.window else 0),
            )
            for source, share in enumerate(data.shares.tolist())
        ]
        #: Records of each source for a lane, which are the same for most lanes -> result of ``GroupData.shared``, and
        #: the number of the lane's records before each block.
        self._shared: dict[bytes, tuple[Integers, Integers]] = {}

    def parts(self, piece: Piece) -> tuple[list[SourcePiece], Integers | None]:
        """Return the records of a piece by source, and the place of each record in the piece; None if in order."""
        if len(self.sources) == 1:
            return [SourcePiece(0, piece.lane, range(piece.first_record, piece.end_record))], None
        data, lanes = self._data, self.order.lanes
        sizes = data.lane_sizes(lanes, piece.lane)
        if (key := sizes.tobytes()) not in self._shared:
            shared = data.shared(sizes)
            self._shared[key] = shared, shared.sum(axis=1)
        shared, starts = self._shared[key]
        first_block = int(np.searchsorted(starts, piece.first_record, side="right")) - 1
        end_block = int(np.searchsorted(starts, piece.end_record, side="left"))
        labels = self._labels(piece.lane, first_block, np.diff(shared[first_block : end_block + 1], axis=0), starts)
        before = piece.first_record - int(starts[first_block])
        firsts = shared[first_block] + np.bincount(labels[:before], minlength=len(sizes))
        labels = labels[before : before + piece.end_record - piece.first_record]
        parts = []
        for source, count in enumerate(np.bincount(labels, minlength=len(sizes)).tolist()):
            lane = (piece.lane - data.shift(source)) % lanes
            size, first = self.sources[source].lane_size(lane), int(firsts[source])
            while count:
                # With stop="repeat", a source starts over when all its records have been used.
                taken = min(count, size - first % size)
                parts.append(SourcePiece(source, lane, range(first % size, first % size + taken)))
                first, count = first + taken, count - taken  # noqa: PLW2901
        return parts, np.argsort(labels, kind="stable")

    def _labels(self, lane: int, block: int, counts: Integers, starts: Integers) -> Integers:
        """Return the source of each record of some blocks. ``counts``: (block count, source count)."""
        labels = np.repeat(np.tile(np.arange(counts.shape[1]), len(counts)), counts.ravel())
        blocks = np.repeat(np.arange(len(counts)), counts.sum(axis=1))
        numbers = np.arange(1, len(labels) + 1, dtype=np.uint64) + np.uint64(starts[block])
        key = key_of(self._data.seed or 0, self.epoch, lane)
        return labels[np.lexsort((mix_all(numbers * np.uint64(GOLDEN) + np.uint64(key)), blocks))]

    def chunk_records(self, piece: Piece) -> Iterator[tuple[int, Integers]]:
        """Yield the chunks of a piece, each with the numbers of its records in the piece, ascending."""
        for part in self.parts(piece)[0]:
            source, number = self.sources[part.source], part.records.start
            while number < part.records.stop:
                window = source.window(part.lane, number)
                end = min(window.stop, part.records.stop)
                found = np.sort(source.positions(part.lane, window)[number - window.start : end - window.start])
                start, chunks = source.chunks(found)
                bounds = start + np.cumsum(self._data.records[chunks])
                for chunk, inside in zip(chunks, np.split(found, np.searchsorted(found, bounds[:-1])), strict=True):
                    if len(inside):
                        yield chunk, inside - start
                    start += int(self._data.records[chunk])
                number = end

    def pieces_of(self, records: Mapping[int, AbstractSet[int]], within: Piece) -> Iterator[Piece]:
        """Yield where a piece contains any of these records, given as numbers by chunk. Reads the piece's order."""
        found = (
            not records[chunk].isdisjoint(numbers.tolist())
            for chunk, numbers in self.chunk_records(within)
            if chunk in records
        )
        if not any(found):
            return
        middle = (within.first_record + within.end_record) // 2
        if middle == within.first_record:
            yield within
            return
        yield from self.pieces_of(records, Piece(within.lane, within.first_record, middle))
        yield from self.pieces_of(records, Piece(within.lane, middle, within.end_record))


def _lane(count: int, lanes: int, lane: int) -> tuple[int, int]:
    """Return the first position and the length of a lane."""
    size, longer = divmod(count, lanes)
    return lane * size + min(lane, longer), size + (lane < longer)
