"""The optimizers' rules for rows, and rows' first values, as loops for numba to compile.

The formulas are those of ``flightedl.domain.tables.rules`` and ``domain.model.initial``, in float32. What
``flightedl.kernels.rules`` says of constants and None holds here, too. A loop gets the numbers of the records to
update; -1 is none. They were asked for by ``rows.locate``; the loop asks again, for those a few places ahead.

A rule is a function of one row: ``w[at:at + dim]`` are its values, ``g[row, :]`` its gradient, ``s[slot:]`` its slots,
and ``c`` its constants. The loop around it is compiled once for each rule; with 16-bit values, which are unpacked for
the rule and rounded afterwards, it is another.

numba's cache looks at this file alone, so functions that are called from here are here.
"""

# ruff: noqa: ARG001 - every rule has the same arguments, for the loop around it

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba.extending import register_jitable

from flightedl.kernels.intrinsics import prefetch
from flightedl.kernels.subnormals import flush_subnormals, restore_subnormals

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]
Records = npt.NDArray[np.int64]

#: Records that are asked for ahead of their turn.
_AHEAD = 8

#: c: scale, clip and decay come first, then what the rule has.
_SCALE, _CLIP, _DECAY, _RATE, _A, _B, _C, _D = range(8)

_U1, _U11, _U27, _U30, _U31, _U40 = (np.uint64(n) for n in (1, 11, 27, 30, 31, 40))
_FACTOR_1 = np.uint64(0xBF58476D1CE4E5B9)
_FACTOR_2 = np.uint64(0x94D049BB133111EB)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@register_jitable
def _gradient(w: Any, at: Any, g: Any, row: Any, i: Any, c: Any) -> Any:
    return min(max(g[row, i] * c[_SCALE], -c[_CLIP]), c[_CLIP]) + c[_DECAY] * w[at + i]


@register_jitable
def _mean_square(w: Any, at: Any, g: Any, row: Any, dim: Any, c: Any) -> Any:
    total = np.float32(0)
    for i in range(dim):
        one = _gradient(w, at, g, row, i, c)
        total += one * one
    return total / np.float32(dim)


@register_jitable
def sgd(w: Any, at: Any, g: Any, row: Any, dim: Any, s: Any, slot: Any, c: Any, first: Any, second: Any) -> None:
    """c: rate."""
    for i in range(dim):
        w[at + i] -= c[_RATE] * _gradient(w, at, g, row, i, c)


@register_jitable
def momentum(w: Any, at: Any, g: Any, row: Any, dim: Any, s: Any, slot: Any, c: Any, first: Any, second: Any) -> None:
    """c: rate, momentum."""
    for i in range(dim):
        speed = c[_A] * s[slot + i] + _gradient(w, at, g, row, i, c)
        s[slot + i] = speed
        w[at + i] -= c[_RATE] * speed


@register_jitable
def nesterov(w: Any, at: Any, g: Any, row: Any, dim: Any, s: Any, slot: Any, c: Any, first: Any, second: Any) -> None:
    """c: rate, momentum."""
    for i in range(dim):
        one = _gradient(w, at, g, row, i, c)
        speed = c[_A] * s[slot + i] + one
        s[slot + i] = speed
        w[at + i] -= c[_RATE] * (one + c[_A] * speed)


@register_jitable
def adagrad(w: Any, at: Any, g: Any, row: Any, dim: Any, s: Any, slot: Any, c: Any, first: Any, second: Any) -> None:
    """c: rate, eps."""
    for i in range(dim):
        one = _gradient(w, at, g, row, i, c)
        total = s[slot + i] + one * one
        s[slot + i] = total
        divisor = np.float32(math.sqrt(total)) + c[_A]
        w[at + i] -= c[_RATE] * one / (divisor if divisor != np.float32(0) else np.float32(1))


@register_jitable
def row_adagrad(
    w: Any, at: Any, g: Any, row: Any, dim: Any, s: Any, slot: Any, c: Any, first: Any, second: Any
) -> None:
    """c: rate, eps."""
    total = s[slot] + _mean_square(w, at, g, row, dim, c)
    s[slot] = total
    divisor = np.float32(math.sqrt(total)) + c[_A]
    if divisor != np.float32(0):
        rate = c[_RATE] / divisor
        for i in range(dim):
            w[at + i] -= rate * _gradient(w, at, g, row, i, c)


@register_jitable
def adam(w: Any, at: Any, g: Any, row: Any, dim: Any, s: Any, slot: Any, c: Any, first: Any, second: Any) -> None:
    """c: rate, 1 - beta1, beta2, 1 - beta2, eps; ``first`` and ``second`` are the corrections of this step."""
    rate = c[_RATE] * first
    for i in range(dim):
        one = _gradient(w, at, g, row, i, c)
        mean = s[slot + i]
        mean = mean + c[_A] * (one - mean)
        s[slot + i] = mean
        square = c[_B] * s[slot + dim + i] + c[_C] * one * one
        s[slot + dim + i] = square
        divisor = np.float32(math.sqrt(square)) * second + c[_D]
        w[at + i] -= rate * mean / (divisor if divisor != np.float32(0) else np.float32(1))


@register_jitable
def row_adam(w: Any, at: Any, g: Any, row: Any, dim: Any, s: Any, slot: Any, c: Any, first: Any, second: Any) -> None:
    """As ``adam``."""
    square = c[_B] * s[slot + dim] + c[_C] * _mean_square(w, at, g, row, dim, c)
    s[slot + dim] = square
    divisor = np.float32(math.sqrt(square)) * second + c[_D]
    rate = c[_RATE] * first / (divisor if divisor != np.float32(0) else np.float32(1))
    for i in range(dim):
        mean = s[slot + i]
        mean = mean + c[_A] * (_gradient(w, at, g, row, i, c) - mean)
        s[slot + i] = mean
        w[at + i] -= rate * mean


@register_jitable
def ftrl(w: Any, at: Any, g: Any, row: Any, dim: Any, s: Any, slot: Any, c: Any, first: Any, second: Any) -> None:
    """c: 1 / rate, l1, beta, 2 * l2."""
    zero = np.float32(0)
    for i in range(dim):
        one = _gradient(w, at, g, row, i, c)
        before = s[slot + i]
        total = before + one * one
        s[slot + i] = total
        root = np.float32(math.sqrt(total))
        pull = s[slot + dim + i] + (one - (root - np.float32(math.sqrt(before))) * c[_RATE] * w[at + i])
        s[slot + dim + i] = pull
        step = np.float32(math.copysign(max(abs(pull) - c[_A], zero), pull))
        w[at + i] = zero if step == zero else -step / ((root + c[_B]) * c[_RATE] + c[_C])


def loop_of(rule: Callable[..., Any]) -> Callable[..., Any]:
    """The loop of a rule on float32 values."""

    def update(
        words: Words,
        floats: Floats,
        layout: npt.NDArray[np.int64],
        records: Records,
        g: Any,
        c: Floats,
        first: Floats,
        second: Floats,
    ) -> None:
        """``floats`` is the memory of ``words``."""
        state = flush_subnormals()
        stride, at_updates, at_slots, at_values = layout[0], layout[1], layout[4], layout[5]
        dim = g.shape[1]
        for row in range(records.size):
            ahead = records[min(row + _AHEAD, records.size - 1)] * stride
            for word in range(0, stride + 15, 16):
                prefetch(words, ahead + min(word, stride - 1))
            if records[row] < 0:
                continue
            at = records[row] * stride
            step: Any = 0
            if at_updates >= 0:
                step = min(np.int64(words[at + at_updates]), first.size - 1)
                words[at + at_updates] += np.uint32(1)
            rule(floats, at + at_values, g, row, dim, floats, at + at_slots, c, first[step], second[step])
        restore_subnormals(state)

    return update


@register_jitable
def _scrambled(bits: Any) -> Any:
    """As ``initial.scrambled``."""
    bits = (bits ^ (bits >> _U30)) * _FACTOR_1
    bits = (bits ^ (bits >> _U27)) * _FACTOR_2
    return bits ^ (bits >> _U31)


@register_jitable
def _to_float32(bits: Any, is_bfloat16: Any, box: Any, box_bits: Any) -> Any:
    """A 16-bit float; ``box_bits`` is the memory of ``box``, both of one number."""
    wide = np.uint32(bits)
    if is_bfloat16:
        box_bits[0] = wide << np.uint32(16)
        return box[0]
    if wide & np.uint32(0x7C00):
        box_bits[0] = (wide & np.uint32(0x7FFF)) << np.uint32(13)
        value = box[0] * np.float32(2.0**112)
    else:
        # As a float32 it would be subnormal, which counts as zero here.
        value = np.float32(wide & np.uint32(0x3FF)) * np.float32(2.0**-24)
    return -value if wide & np.uint32(0x8000) else value


@register_jitable
def _to_half(value: Any, chance: Any, is_bfloat16: Any, box: Any, box_bits: Any) -> Any:
    """A finite number's two neighbours of 16 bits: the lower one unless ``chance`` in [0, 1) reaches beyond the number.

    With a chance of one half what is in the middle is rounded up, else to the nearest. What is beyond the largest
    becomes that.
    """
    magnitude = abs(value)
    box[0] = magnitude
    sign = np.uint32(0x8000) if value < np.float32(0) else np.uint32(0)
    if is_bfloat16:
        wide = min(box_bits[0] + np.uint32(chance * np.float32(65536)), np.uint32(0x7F7FFFFF))
        return np.uint16(sign | np.uint32(wide) >> np.uint32(16))
    if magnitude < np.float32(2.0**-14):
        # Subnormal: multiples of 2**-24.
        return np.uint16(sign | np.uint32(magnitude * np.float32(2.0**24) + chance))
    wide = min(box_bits[0] + np.uint32(chance * np.float32(8192)), np.uint32(0x477FE000))
    return np.uint16(sign | (np.uint32(wide) - np.uint32(0x38000000)) >> np.uint32(13))


def half_loop_of(rule: Callable[..., Any]) -> Callable[..., Any]:
    """The loop of a rule on 16-bit values."""

    def update(
        words: Words,
        floats: Floats,
        halves: npt.NDArray[np.uint16],
        layout: npt.NDArray[np.int64],
        records: Records,
        g: Any,
        c: Floats,
        first: Floats,
        second: Floats,
        is_bfloat16: bool,
        is_stochastic: bool,
        seed: int,
    ) -> None:
        """``floats`` and ``halves`` are the memory of ``words``."""
        state = flush_subnormals()
        stride, at_updates, at_slots, at_values = layout[0], layout[1], layout[4], layout[5]
        dim = g.shape[1]
        values = np.empty(dim, np.float32)
        box = np.empty(1, np.float32)
        box_bits = box.view(np.uint32)
        for row in range(records.size):
            if records[row] < 0:
                continue
            at = records[row] * stride
            step: Any = 0
            if at_updates >= 0:
                step = min(np.int64(words[at + at_updates]), first.size - 1)
                words[at + at_updates] += np.uint32(1)
            for i in range(dim):
                values[i] = _to_float32(halves[2 * (at + at_values) + i], is_bfloat16, box, box_bits)
            rule(values, 0, g, row, dim, floats, at + at_slots, c, first[step], second[step])
            row_id = np.uint64(words[at]) | (np.uint64(words[at + 1]) << np.uint64(32))
            stream = _scrambled(seed ^ row_id)
            chance = np.float32(0.5)
            for i in range(dim):
                if is_stochastic:
                    bits = _scrambled(stream + np.uint64(i + 1) * _GOLDEN)
                    chance = np.float32(bits >> _U40) * np.float32(2.0**-24)
                halves[2 * (at + at_values) + i] = _to_half(values[i], chance, is_bfloat16, box, box_bits)
        restore_subnormals(state)

    return update


ZEROS, CONSTANT, UNIFORM, NORMAL = range(4)


def first_values(
    ids: npt.NDArray[np.uint64], places: Records, key: int, kind: int, a: float, b: float, out: Any
) -> None:
    """``out[place]`` for each place: the first values of that id. ``a``: constant, scale or deviation; ``b``: mean."""
    dim = out.shape[1]
    for place in places:
        stream = _scrambled(key ^ ids[place])
        for i in range(dim):
            if kind <= CONSTANT:
                out[place, i] = a
            elif kind == UNIFORM:
                bits = _scrambled(stream + np.uint64(i + 1) * _GOLDEN)
                out[place, i] = (np.float64(bits >> _U40) * 2.0**-23 - 1.0) * a
            elif i % 2 == 0:
                one = _scrambled(stream + np.uint64(i + 1) * _GOLDEN)
                other = _scrambled(stream + np.uint64(i + 2) * _GOLDEN)
                radius = math.sqrt(-2.0 * math.log(np.float64((one >> _U11) + _U1) * 2.0**-53)) * a
                angle = np.float64(other >> _U11) * 2.0**-53 * (2 * math.pi)
                out[place, i] = b + radius * math.cos(angle)
                if i + 1 < dim:
                    out[place, i + 1] = b + radius * math.sin(angle)


def combine(
    ids: npt.NDArray[np.uint64],
    gradients: Any,
    weight: float,
    index: Records,
    unique: npt.NDArray[np.uint64],
    sums: Any,
    count: int,
) -> int:
    """Add a contribution to the sums of a round by id.

    Args:
        ids: (n,), of the contribution.
        gradients: (n, dim).
        weight: They are multiplied by it.
        index: Places in ``unique`` by hash, -1 where there is none; a power of two, more than all ids.
        unique: Ids so far, ``count`` of them.
        sums: Their sums, (places, dim).
        count: Of ``unique``.

    Returns:
        The new count.
    """
    mask = np.uint64(index.size - 1)
    dim = sums.shape[1]
    for i in range(ids.size):
        at = _scrambled(ids[i]) & mask
        while index[np.int64(at)] >= 0 and unique[index[np.int64(at)]] != ids[i]:
            at = (at + _U1) & mask
        place = index[np.int64(at)]
        if place < 0:
            place = index[np.int64(at)] = count
            unique[count] = ids[i]
            count += 1
            for j in range(dim):
                sums[place, j] = weight * gradients[i, j]
        else:
            for j in range(dim):
                sums[place, j] += weight * gradients[i, j]
    return count
