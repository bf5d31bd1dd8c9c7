"""The batches of a task, computed by pure functions.

A task contains ``records`` consecutive records, numbered from 0, and its batches are ranges of *positions*. Position p
is record p without shuffling, and record ``record_order(...)[p]`` with shuffling. The order is the same on every
trainer and for every version of Python and NumPy, so (epoch, task, batch) identifies a batch's records.

Records are sorted by a hash of their numbers, and by number if hashes are equal. The hash function is splitmix64's,
with a key derived from (seed, epoch, task). It needs only wrapping uint64 arithmetic and a stable sort, not a random
number generator whose output may change between versions.

Not guaranteed: cryptographic quality.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def batch_count(records: int, batch_size: int, *, drop_last: bool = False) -> int:
    """Return the number of batches that ``records`` records form. If ``drop_last`` is true, count only full batches.

    Raises:
        ValueError: the number of records is negative, or the batch size is below 1.
    """
    if records < 0 or batch_size < 1:
        raise ValueError(f"cannot divide {records} records into batches of {batch_size}")
    return records // batch_size if drop_last else -(-records // batch_size)


def batch_range(records: int, batch_size: int, batch: int) -> range:
    """Return the positions in one batch. The last batch of a task may be smaller.

    Raises:
        ValueError: there is no such batch.
    """
    if not 0 <= batch < batch_count(records, batch_size):
        raise ValueError(f"there is no batch {batch} of {batch_size} in {records} records")
    return range(batch * batch_size, min((batch + 1) * batch_size, records))


def record_order(records: int, seed: int, epoch: int, task: int) -> npt.NDArray[np.int64]:
    """Return the order of a shuffled task's records.

    Args:
        records: Number of records in the task.
        seed: Seed of the dataset; any integer, used modulo 2**64.
        epoch: Number of the epoch, from 0.
        task: Number of the task.

    Returns:
        (records,) int64, the record at each position: a permutation of 0 … records - 1.
    """
    key = 0
    for part in (seed, epoch, task):
        key = _mixed((key + part * _GOLDEN + _GOLDEN) & _MASK)
    return np.argsort(_mixed_all(np.arange(records, dtype=np.uint64), key), kind="stable").astype(np.int64, copy=False)


def _mixed(value: int) -> int:
    """Apply the finalizer of splitmix64 (Steele, Lea, Flood, 2014) to one number."""
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def _mixed_all(numbers: npt.NDArray[np.uint64], key: int) -> npt.NDArray[np.uint64]:
    """Return the outputs at positions ``numbers + 1`` of the splitmix64 stream with seed ``key``: (n,) uint64."""
    value = (numbers + np.uint64(1)) * np.uint64(_GOLDEN) + np.uint64(key)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(_FIRST)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(_SECOND)
    return value ^ (value >> np.uint64(31))
