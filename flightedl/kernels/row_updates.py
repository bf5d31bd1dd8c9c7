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
    ) -> int:
        """Update the rows of ids of some tables by their gradients, one after the other.

        Args:
            handles: Of all tables.
            work: (sections, WORK_SIZE), whose values are the gradients; the last column is filled.
            ids: Of all sections.
            g: Gradients of all sections.
            version: That this makes.
            epoch: Of it.
            constants: (n, numbers of ``Constants``).
            first: Bias corrections by the number of updates before.
            second: Likewise.
            missing: Filled with the places of ids without a row, see ``rows.gather``.
            is_beside: Another call works on the same tables now.

        Returns:
            How many are missing.
        """
        state = flush_subnormals()
        total = 0
        for section in range(work.shape[0]):
            number, begin, size = work[section, TABLE], work[section, FIRST], work[section, COUNT]
            t, floats = table_at(handles, number, is_beside), floats_at(handles, number * HANDLE_SIZE)
            salt, dim = np.uint64(handles[number * HANDLE_SIZE + SALT]), np.uint64(handles[number * HANDLE_SIZE + DIM])
            c = constants[work[section, CONSTANTS]]
            k = Constants(c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7])
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
                        retouch(t, record, version, epoch)
                    at = record * stride
                    step = _step_of(t, at, at_updates, first.size)
                    value, slot = np.uint64(at + at_values), np.uint64(at + at_slots)
                    rule(floats, value, g, row, dim, floats, slot, k, first[step], second[step])
                    row += dim
            work[section, MISSED] = missed
            total += missed
        restore_subnormals(state)
        return total

    return update


def half_loop_of(rule: Callable[..., Any]) -> Callable[..., Any]:
    """The loop of a rule on 16-bit values."""

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
        is_bfloat16: bool,
        is_stochastic: bool,
        seed: int,
        values: Floats,
        box: Floats,
        box_bits: Words,
    ) -> int:
        """As the other loop; ``values`` has room for a row, ``box`` for a number, with ``box_bits`` as its memory."""
        state = flush_subnormals()
        total = 0
        for section in range(work.shape[0]):
            number, begin, size = work[section, TABLE], work[section, FIRST], work[section, COUNT]
            t, floats = table_at(handles, number, is_beside), floats_at(handles, number * HANDLE_SIZE)
            halves = halves_at(handles, number * HANDLE_SIZE)
            salt, dim = np.uint64(handles[number * HANDLE_SIZE + SALT]), handles[number * HANDLE_SIZE + DIM]
            c = constants[work[section, CONSTANTS]]
            k = Constants(c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7])
            oldest_version, oldest_epoch = work[section, OLDEST_VERSION], work[section, OLDEST_EPOCH]
            stride, at_updates, at_slots = t.layout[STRIDE], t.layout[AT_UPDATES], t.layout[AT_SLOTS]
            has_age = t.layout[AT_VERSION] >= 0 or t.layout[AT_EPOCH] >= 0
            shift = np.uint64(64 - t.state[DEPTH])
            missed = 0
            for start in range(begin, begin + size, GROUP):
                count = min(GROUP, begin + size - start)
                ask_for(t, ids, start, count, salt, shift, stride)
                for i in range(count):
                    record = found(t, ids[start + i], i, stride, has_age, oldest_version, oldest_epoch)
                    if record < 0:
                        missing[begin + missed] = start + i
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
                    row, slot = np.uint64(work[section, VALUES] + (start - begin + i) * dim), np.uint64(at + at_slots)
                    rule(values, _ZERO, g, row, np.uint64(dim), floats, slot, k, first[step], second[step])
                    stream = scrambled(seed ^ id_at(t.words, at))
                    for j in range(dim):
                        chance = _chance(stream, j) if is_stochastic else np.float32(0.5)
                        halves[half + j] = to_half(values[j], chance, is_bfloat16, box, box_bits)
            work[section, MISSED] = missed
            total += missed
        restore_subnormals(state)
        return total

    return update
