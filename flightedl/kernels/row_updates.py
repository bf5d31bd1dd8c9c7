"""Updates of existing rows. Each row is found, copied for cuts if necessary, and updated while it is in the cache.

Every optimizer rule has its own loop. 16-bit values are converted to float32 for the rule, and rounded afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba.extending import register_jitable

from flightedl.kernels.intrinsics import floats_at, halves_at
from flightedl.kernels.row_handles import (
    CONSTANTS,
    COUNT,
    DIM,
    FIRST,
    HANDLE_SIZE,
    MISSED,
    OLDEST_EPOCH,
    OLDEST_VERSION,
    SALT,
    TABLE,
    VALUES,
    Handles,
    Work,
    table_at,
)
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
    change,
    id_at,
    retouch,
)
from flightedl.kernels.row_rules import GOLDEN, Floats, scrambled, to_float32, to_half
from flightedl.kernels.rules import Constants, constants_in
from flightedl.kernels.subnormals import flush_subnormals, restore_subnormals

Loop = Callable[..., Any]

_U40 = np.uint64(40)
_ZERO = np.uint64(0)


@register_jitable
def _chance(stream: Any, element: Any) -> Any:
    """Return a pseudorandom number in [0, 1) for one element of a row."""
    bits = scrambled(stream + np.uint64(element + 1) * GOLDEN)
    return np.float32(bits >> _U40) * np.float32(2.0**-24)


@register_jitable
def _updates_of(t: Table, at: Any, at_updates: Any, size: Any) -> Any:
    """Count an update of a row. Return the number of earlier updates, at most ``size - 1``, or 0 if uncounted."""
    if at_updates < 0:
        return 0
    step = np.int64(t.words[at + at_updates])
    t.words[at + at_updates] += np.uint32(1)
    return min(step, size - 1)


class Half(NamedTuple):
    """Settings and scratch memory for the conversion and rounding of 16-bit values."""

    is_bfloat16: Any
    is_stochastic: Any
    #: Seed of the stochastic rounding.
    seed: Any
    #: Scratch memory of a row.
    values: Any
    #: Scratch memory for one number, and a view of its bits.
    box: Any
    box_bits: Any


@cache
def loop_of(step: Loop, rule: Loop | None = None, get: Loop | None = None, put: Loop | None = None) -> Loop:
    """Return the loop for a rule of ``row_rules``, or for ``by_element`` with a rule for single elements."""

    def update(
        handles: Handles,
        work: Work,
        ids: Ids,
        g: Floats,
        version: int,
        epoch: int,
        constants: npt.NDArray[np.float32],
        first: Floats,
        second: Floats,
        missing: npt.NDArray[np.int64],
        is_beside: bool,
        half: Any,
    ) -> int:
        """Update the rows of several tables by their gradients.

        Args:
            handles: Handles of all tables.
            work: (sections, WORK_SIZE). ``VALUES`` is a position in ``g``. ``MISSED`` is filled.
            ids: Ids of all sections.
            g: Flattened gradients of all sections.
            version: Version after the update.
            epoch: Epoch of the update.
            constants: (n, fields of ``rules.Constants``).
            first: Bias corrections of the average, by a row's number of earlier updates.
            second: Bias corrections of the average of squares, likewise.
            missing: Filled with the positions of ids without a row; see ``rows.gather``.
            is_beside: True in the second of two threads that work at the same time. It has its own scratch memory.
            half: A ``Half`` for 16-bit values; None for float32.

        Returns:
            The number of ids without a row.
        """
        state = flush_subnormals()
        total = 0
        for section in range(work.shape[0]):
            number, begin, size = work[section, TABLE], work[section, FIRST], work[section, COUNT]
            t, floats = table_at(handles, number, is_beside), floats_at(handles, number * HANDLE_SIZE)
            halves = halves_at(handles, number * HANDLE_SIZE)
            salt, width = np.uint64(handles[number * HANDLE_SIZE + SALT]), handles[number * HANDLE_SIZE + DIM]
            dim, c = np.uint64(width), constants_in(constants[work[section, CONSTANTS]])
            oldest_version, oldest_epoch = work[section, OLDEST_VERSION], work[section, OLDEST_EPOCH]
            stride, at_updates, at_slots, at_values = (
                t.layout[STRIDE],
                t.layout[AT_UPDATES],
                t.layout[AT_SLOTS],
                t.layout[AT_VALUES],
            )
            has_age = t.layout[AT_VERSION] >= 0 or t.layout[AT_EPOCH] >= 0
            shift = np.uint64(64 - t.state[DEPTH])
            row = np.uint64(work[section, VALUES])
            missed = 0
            for start in range(begin, begin + size, GROUP):
                count = min(GROUP, begin + size - start)
                ask_for(t, ids, start, count, salt, shift, stride)
                for i in range(count):
                    record = found(t, ids[start + i], i, stride, has_age, oldest_version, oldest_epoch)
                    if record < 0:
                        missing[begin + missed] = start + i
                        missed += 1
                        row += dim
                        continue
                    change(t, record)
                    if has_age:
                        retouch(t, record, t.places[2 * GROUP + i], version, epoch)
                    at = record * stride
                    updates = _updates_of(t, at, at_updates, first.size)
                    rate, square = c.rate * first[updates], second[updates]
                    k = Constants(c.scale, c.clip, c.decay, rate, c.a, c.b, c.c, c.d, c.first, square, c.shrink)
                    value, slot, slots = np.uint64(at + at_values), np.uint64(at + at_slots), (floats, floats)
                    if half is None:
                        step(floats, value, g, row, dim, slots, slot, dim, k, rule, get, put)
                    else:
                        packed = 2 * (at + at_values)
                        for j in range(width):
                            half.values[j] = to_float32(halves[packed + j], half.is_bfloat16, half.box, half.box_bits)
                        step(half.values, _ZERO, g, row, dim, slots, slot, dim, k, rule, get, put)
                        stream = scrambled(half.seed ^ id_at(t.words, at))
                        for j in range(width):
                            chance = _chance(stream, j) if half.is_stochastic else np.float32(0.5)
                            rounded = to_half(half.values[j], chance, half.is_bfloat16, half.box, half.box_bits)
                            halves[packed + j] = rounded
                    row += dim
            work[section, MISSED] = missed
            total += missed
        restore_subnormals(state)
        return total

    return update
