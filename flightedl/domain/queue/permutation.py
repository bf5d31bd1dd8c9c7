"""A keyed permutation of 0 … size-1 that takes no memory. It orders the tasks of an epoch.

Rules:

* ``at(position)`` and ``position_of(task)`` are inverses of each other for every size and key, and each takes O(1)
  time.
* The order is the same in every release, for every version of Python and NumPy, and on every processor, because it is
  computed from integers modulo 2**64 with an explicit mixing function (the finalizer of splitmix64, Steele, Lea and
  Flood 2014).
* Tests compare the order with golden values. A change in the number of rounds or in the mixing function would be a
  change of the stored format.

A Feistel network over ``bits = bit_length(size - 1)`` bits is a bijection of 0 … 2**bits - 1 for any round function. If
the result is outside 0 … size-1, it is passed through the network again until it is inside (cycle walking, Black and
Rogaway 2002). As 2**bits < 2 * size, this takes fewer than two passes on average.

The network changes the two halves of the number alternately, so their widths may differ by one bit.

The order is not secret, and not all of the ``size!`` possible orders can occur.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from flightedl.domain.splitmix64 import GOLDEN, mix, mix_all

Integers = npt.NDArray[np.int64]

_ROUNDS = 8


def key_of(*parts: int) -> int:
    """Derive a 64-bit key from integers, which are taken modulo 2**64. Their order matters."""
    key = 0
    for part in parts:
        key = mix(key + GOLDEN + mix(part))
    return key


class KeyedPermutation:
    """A bijection of 0 … size-1, selected by ``key`` (taken modulo 2**64)."""

    __slots__ = ("_high_mask", "_keys", "_low_bits", "_low_mask", "size")

    def __init__(self, size: int, key: int) -> None:
        if size < 0 or size > 1 << 62:
            raise ValueError(f"a permutation needs a size from 0 to 2**62, not {size}")
        bits = max(size - 1, 0).bit_length()
        self.size = size
        self._low_bits = (bits + 1) // 2
        self._low_mask = (1 << self._low_bits) - 1
        self._high_mask = (1 << (bits - self._low_bits)) - 1
        self._keys = tuple(key_of(key, number) for number in range(_ROUNDS))

    def at(self, position: int) -> int:
        """Return the element at ``position``. Raises IndexError if it is outside 0 … size-1."""
        self._check(position)
        value = position
        while True:
            value = self._forward(value)
            if value < self.size:
                return value

    def position_of(self, element: int) -> int:
        """Return the position of ``element``. Raises IndexError if it is outside 0 … size-1."""
        self._check(element)
        value = element
        while True:
            value = self._backward(value)
            if value < self.size:
                return value

    def positions_of(self, elements: Integers) -> Integers:
        """Vectorized ``position_of``: (n,) int64 -> (n,) int64."""
        return self._walked(elements, self._backward_all)

    def elements_at(self, positions: Integers) -> Integers:
        """Return the elements at all positions: (n,) int64 -> (n,) int64."""
        return self._walked(positions, self._forward_all)

    def _check(self, value: int) -> None:
        if not 0 <= value < self.size:
            raise IndexError(f"{value} is outside of 0 … {self.size - 1}")

    def _forward(self, value: int) -> int:
        low = value & self._low_mask
        high = value >> self._low_bits
        keys = iter(self._keys)
        for key in keys:
            high ^= mix(low ^ key) & self._high_mask
            low ^= mix(high ^ next(keys)) & self._low_mask
        return high << self._low_bits | low

    def _backward(self, value: int) -> int:
        low = value & self._low_mask
        high = value >> self._low_bits
        keys = reversed(self._keys)
        for key in keys:
            low ^= mix(high ^ key) & self._low_mask
            high ^= mix(low ^ next(keys)) & self._high_mask
        return high << self._low_bits | low

    def _walked(self, start: Integers, step: Callable[[npt.NDArray[np.uint64]], npt.NDArray[np.uint64]]) -> Integers:
        if start.size and (int(start.min()) < 0 or int(start.max()) >= self.size):
            raise IndexError(f"an element is outside of 0 … {self.size - 1}")
        values = step(start.astype(np.uint64))
        outside = np.flatnonzero(values >= np.uint64(self.size))
        while outside.size:
            walked = step(values[outside])
            values[outside] = walked
            outside = outside[walked >= np.uint64(self.size)]
        return values.astype(np.int64)

    def _forward_all(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        return self._rounds(values, enumerate(self._keys))

    def _backward_all(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        return self._rounds(values, reversed([*enumerate(self._keys)]))

    def _rounds(self, values: npt.NDArray[np.uint64], keys: Iterable[tuple[int, int]]) -> npt.NDArray[np.uint64]:
        low_mask, high_mask, shift = np.uint64(self._low_mask), np.uint64(self._high_mask), np.uint64(self._low_bits)
        low = values & low_mask
        high = values >> shift
        for number, key in keys:
            if number % 2:
                low ^= mix_all(high ^ np.uint64(key)) & low_mask
            else:
                high ^= mix_all(low ^ np.uint64(key)) & high_mask
        return high << shift | low
