"""Updates of rows that are there: found, set aside for a cut, touched and changed while they are in the cache.

Each optimizer's rule has a loop of its own, and another for 16-bit values, which are unpacked for the rule and rounded
afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba.extending import register_jitable

from flightedl.kernels.row_index import ask_for, found
from flightedl.kernels.row_records import (
    AT_EPOCH,
    AT_SLOTS,
    AT_UPDATES,
    AT_VALUES,
    AT_VERSION,
    DEPTH,
    GROUP,
    STRIDE,
    Ids,
    Table,
    Words,
    change,
    id_at,
    retouch,
)
from flightedl.kernels.row_rules import GOLDEN, Constants, Floats, scrambled, to_float32, to_half
from flightedl.kernels.subnormals import flush_subnormals, restore_subnormals

_U40 = np.uint64(40)
_ZERO = np.uint64(0)


@register_jitable
def _chance(stream: Any, element: Any) -> Any:
    """A number in [0, 1) of its own for each element of a row."""
    bits = scrambled(stream + np.uint64(element + 1) * GOLDEN)
    return np.float32(bits >> _U40) * np.float32(2.0**-24)


@register_jitable
def _step_of(t: Table, at: Any, at_updates: Any, size: Any) -> Any:
    """The number of a row's updates, at most ``size`` - 1, which is counted on; 0 where none is kept."""
    if at_updates < 0:
        return 0
    step = np.int64(t.words[at + at_updates])
    t.words[at + at_updates] += np.uint32(1)
    return min(step, size - 1)


def loop_of(rule: Callable[..., Any]) -> Callable[..., Any]:
    """The loop of a rule on float32 values."""

    def update(
        t: Table,
        floats: Floats,
        ids: Ids,
        g: Floats,
        salt: int,
        version: int,
        epoch: int,
        oldest_version: int,
        oldest_epoch: int,
        c: Floats,
        first: Floats,
        second: Floats,
        missing: npt.NDArray[np.int64],
    ) -> int:
        """Update the rows of ids by their gradients, one after the other; the places of ids without one to ``missing``.

        ``floats`` is the memory of ``t.words``.

        Returns:
            How many are missing.
        """
        state = flush_subnormals()
        k = Constants(c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7])
        stride, at_updates, at_slots, at_values = (
            t.layout[STRIDE],
            t.layout[AT_UPDATES],
            t.layout[AT_SLOTS],
            t.layout[AT_VALUES],
        )
        has_age = t.layout[AT_VERSION] >= 0 or t.layout[AT_EPOCH] >= 0
        shift = np.uint64(64 - t.state[DEPTH])
        dim = np.uint64(g.size // max(ids.size, 1))
        missed = 0
        for start in range(0, ids.size, GROUP):
            count = min(GROUP, ids.size - start)
            ask_for(t, ids, start, count, salt, shift, stride)
            for i in range(count):
                record = found(t, ids[start + i], i, stride, has_age, oldest_version, oldest_epoch)
                if record < 0:
                    missing[missed] = start + i
                    missed += 1
                    continue
                change(t, record)
                if has_age:
                    retouch(t, record, version, epoch)
                at = record * stride
                step = _step_of(t, at, at_updates, first.size)
                value, slot = np.uint64(at + at_values), np.uint64(at + at_slots)
                rule(floats, value, g, np.uint64(start + i) * dim, dim, floats, slot, k, first[step], second[step])
        restore_subnormals(state)
        return missed

    return update


def half_loop_of(rule: Callable[..., Any]) -> Callable[..., Any]:
    """The loop of a rule on 16-bit values."""

    def update(
        t: Table,
        floats: Floats,
        halves: npt.NDArray[np.uint16],
        ids: Ids,
        g: Floats,
        salt: int,
        version: int,
        epoch: int,
        oldest_version: int,
        oldest_epoch: int,
        c: Floats,
        first: Floats,
        second: Floats,
        missing: npt.NDArray[np.int64],
        is_bfloat16: bool,
        is_stochastic: bool,
        seed: int,
        values: Floats,
        box: Floats,
        box_bits: Words,
    ) -> int:
        """As the other loop; ``values`` has room for a row, ``box`` for a number, with ``box_bits`` as its memory."""
        state = flush_subnormals()
        k = Constants(c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7])
        stride, at_updates, at_slots = t.layout[STRIDE], t.layout[AT_UPDATES], t.layout[AT_SLOTS]
        has_age = t.layout[AT_VERSION] >= 0 or t.layout[AT_EPOCH] >= 0
        shift = np.uint64(64 - t.state[DEPTH])
        dim = values.size
        missed = 0
        for start in range(0, ids.size, GROUP):
            count = min(GROUP, ids.size - start)
            ask_for(t, ids, start, count, salt, shift, stride)
            for i in range(count):
                record = found(t, ids[start + i], i, stride, has_age, oldest_version, oldest_epoch)
                if record < 0:
                    missing[missed] = start + i
                    missed += 1
                    continue
                change(t, record)
                if has_age:
                    retouch(t, record, version, epoch)
                at = record * stride
                step = _step_of(t, at, at_updates, first.size)
                half = 2 * (at + t.layout[AT_VALUES])
                for j in range(dim):
                    values[j] = to_float32(halves[half + j], is_bfloat16, box, box_bits)
                row, slot = np.uint64((start + i) * dim), np.uint64(at + at_slots)
                rule(values, _ZERO, g, row, np.uint64(dim), floats, slot, k, first[step], second[step])
                stream = scrambled(seed ^ id_at(t.words, at))
                for j in range(dim):
                    chance = _chance(stream, j) if is_stochastic else np.float32(0.5)
                    halves[half + j] = to_half(values[j], chance, is_bfloat16, box, box_bits)
        restore_subnormals(state)
        return missed

    return update
