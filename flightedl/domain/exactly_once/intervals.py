"""Sets of non-negative integers, stored as sorted, disjoint, half-open intervals.

Rules:

* Intervals are never adjacent: [0, 3) and [3, 5) are stored as [0, 5). Equal sets therefore have equal intervals and
  equal bytes.
* A search takes O(log n) for n intervals. A change also moves the rest of the list in memory, which is fast. Each
  interval takes two integers of memory, regardless of its length.
* An empty interval (start >= end) may be passed as an argument and changes nothing; a negative number raises
  ValueError.

``encode`` returns a version byte, followed by two LEB128 numbers per interval: its distance from the previous
interval's end, and its length minus one. A contiguous run thus takes two to six bytes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import Self

from flightedl.errors import CorruptError

_VERSION = 1
_NUMBER_BYTES_LIMIT = 10


class IntervalSet:
    """A mutable set of non-negative integers; see the module's docstring. Not thread-safe, not hashable."""

    __slots__ = ("_ends", "_size", "_starts")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, intervals: Iterable[tuple[int, int]] = ()) -> None:
        """Build the union of half-open ``intervals``, which may be given in any order."""
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._size = 0
        for start, end in intervals:
            self.add(start, end)

    @classmethod
    def of(cls, values: Iterable[int]) -> Self:
        return cls((value, value + 1) for value in values)

    @property
    def size(self) -> int:
        return self._size

    @property
    def interval_count(self) -> int:
        return len(self._starts)

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __contains__(self, value: int) -> bool:
        index = bisect_right(self._starts, value) - 1
        return index >= 0 and value < self._ends[index]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Iterate over the intervals in ascending order. The set must not be changed during the iteration."""
        return zip(self._starts, self._ends, strict=True)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, IntervalSet):
            return NotImplemented
        return self._starts == other._starts and self._ends == other._ends

    def __repr__(self) -> str:
        shown = ", ".join(f"[{start}, {end})" for start, end in zip(self._starts[:8], self._ends[:8], strict=True))
        return f"IntervalSet({shown}{', …' if len(self._starts) > 8 else ''})"

    def copy(self) -> IntervalSet:
        twin = IntervalSet()
        twin._starts, twin._ends, twin._size = self._starts.copy(), self._ends.copy(), self._size
        return twin

    def covers(self, start: int, end: int) -> bool:
        """True if the set contains all of [start, end), or if the interval is empty."""
        if start >= end:
            return True
        index = bisect_right(self._starts, start) - 1
        return index >= 0 and end <= self._ends[index]

    def overlaps(self, start: int, end: int) -> bool:
        index = bisect_right(self._ends, start)
        return start < end and index < len(self._starts) and self._starts[index] < end

    def add(self, start: int, end: int) -> int:
        """Add [start, end). Return how many of these numbers were new."""
        if start < 0:
            raise ValueError(f"an interval set cannot contain negative numbers such as {start}")
        if start >= end:
            return 0
        if not self._ends or start > self._ends[-1]:
            self._starts.append(start)
            self._ends.append(end)
            self._size += end - start
            return end - start
        low = bisect_left(self._ends, start)
        high = bisect_right(self._starts, end)
        present = 0
        if low < high:
            present = sum(self._ends[low:high]) - sum(self._starts[low:high])
            start = min(start, self._starts[low])
            end = max(end, self._ends[high - 1])
        self._starts[low:high] = [start]
        self._ends[low:high] = [end]
        added = end - start - present
        self._size += added
        return added

    def remove(self, start: int, end: int) -> int:
        """Remove [start, end). Return how many of these numbers the set contained."""
        low = bisect_right(self._ends, start)
        high = bisect_left(self._starts, end)
        if start >= end or low >= high:
            return 0
        present = sum(self._ends[low:high]) - sum(self._starts[low:high])
        first, last = self._starts[low], self._ends[high - 1]
        starts, ends = [], []
        if first < start:
            starts.append(first)
            ends.append(start)
        if end < last:
            starts.append(end)
            ends.append(last)
        self._starts[low:high] = starts
        self._ends[low:high] = ends
        removed = present - sum(ends) + sum(starts)
        self._size -= removed
        return removed

    def within(self, start: int, end: int) -> IntervalSet:
        found = IntervalSet()
        low = bisect_right(self._ends, start)
        high = bisect_left(self._starts, end)
        if start < end and low < high:
            found._starts = self._starts[low:high]
            found._ends = self._ends[low:high]
            found._starts[0] = max(found._starts[0], start)
            found._ends[-1] = min(found._ends[-1], end)
            found._size = sum(found._ends) - sum(found._starts)
        return found

    def gaps(self, start: int, end: int) -> IntervalSet:
        found = IntervalSet()
        last = start
        for inside_start, inside_end in self.within(start, end):
            found.add(last, inside_start)
            last = inside_end
        found.add(last, end)
        return found

    def update(self, other: Iterable[tuple[int, int]]) -> None:
        for start, end in other:
            self.add(start, end)

    def difference_update(self, other: Iterable[tuple[int, int]]) -> None:
        for start, end in other:
            self.remove(start, end)

    def intersection(self, other: IntervalSet) -> IntervalSet:
        """Return the intersection with another set. The time is linear in the number of intervals of both sets."""
        found = IntervalSet()
        mine, theirs = 0, 0
        while mine < len(self._starts) and theirs < len(other._starts):
            start = max(self._starts[mine], other._starts[theirs])
            end = min(self._ends[mine], other._ends[theirs])
            if start < end:
                found._starts.append(start)
                found._ends.append(end)
                found._size += end - start
            if self._ends[mine] == end:
                mine += 1
            else:
                theirs += 1
        return found

    def check(self) -> None:
        assert len(self._starts) == len(self._ends)
        assert all(start < end for start, end in self)
        assert all(end < start for end, start in zip(self._ends, self._starts[1:], strict=False))
        assert self._size == sum(self._ends) - sum(self._starts)
        assert not self._starts or self._starts[0] >= 0

    def encode(self) -> bytes:
        """Return the set as bytes. Equal sets give equal bytes."""
        data = bytearray((_VERSION,))
        last = 0
        for start, end in self:
            _append(data, start - last)
            _append(data, end - start - 1)
            last = end
        return bytes(data)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Decode the output of ``encode``.

        Raises:
            CorruptError: for anything else.
        """
        if not data or data[0] != _VERSION:
            raise CorruptError("these bytes are not an interval set of a known version")
        numbers = _numbers(data)
        if len(numbers) % 2:
            raise CorruptError("an interval set's bytes end inside an interval")
        found = cls()
        last = 0
        for distance, length in zip(numbers[::2], numbers[1::2], strict=True):
            if distance == 0 and last > 0:
                raise CorruptError("an interval set's intervals touch")
            found._starts.append(last + distance)
            last += distance + length + 1
            found._ends.append(last)
            found._size += length + 1
        return found


def _append(data: bytearray, number: int) -> None:
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    data.append(number)


def _numbers(data: bytes) -> list[int]:
    numbers: list[int] = []
    number, shift = 0, 0
    for byte in memoryview(data)[1:]:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte & 0x80:
            if shift >= 7 * _NUMBER_BYTES_LIMIT:
                raise CorruptError("a number of an interval set is too long")
            continue
        if byte == 0 and shift != 7:
            raise CorruptError("a number of an interval set is not in its shortest form")
        numbers.append(number)
        number, shift = 0, 0
    if shift:
        raise CorruptError("an interval set's bytes end inside a number")
    return numbers
