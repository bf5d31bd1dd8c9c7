"""The batches of a task, as pure functions of the task.

A task is ``records`` consecutive records, numbered from 0. Its batches are ranges of *positions*; without shuffling
position p is record p, with shuffling it is ``record_order(...)[p]``. Both are the same on every trainer, every
Python and every NumPy version, which is what makes (epoch, task, batch) an identity.

The order is a sort by splitmix64 of the record number under a key made of (seed, epoch, task), ties broken by the
number. Only wrapping uint64 arithmetic and a stable sort are used, never a generator whose stream may change.

Not guaranteed: cryptographic quality. It is a shuffle, not a cipher.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def batch_count(records: int, batch_size: int, *, drop_last: bool = False) -> int:
    """How many batches ``records`` records make; with ``drop_last`` only full ones count.

    Raises:
        ValueError: a negative number of records, or a batch size below 1.
    """
    if records < 0 or batch_size < 1:
        raise ValueError(f"no batches of {batch_size} in {records} records")
    return records // batch_size if drop_last else -(-records // batch_size)


def batch_range(records: int, batch_size: int, batch: int) -> range:
    """Positions of one batch; the last one of a task may be shorter.

    Raises:
        ValueError: there is no such batch.
    """
    if not 0 <= batch < batch_count(records, batch_size):
        raise ValueError(f"there is no batch {batch} of {batch_size} in {records} records")
    return range(batch * batch_size, min((batch + 1) * batch_size, records))


def record_order(records: int, seed: int, epoch: int, task: int) -> npt.NDArray[np.int64]:
    """The shuffled order of a task's records.

    Args:
        records: How many records the task has.
        seed: Of the dataset; any integer, taken modulo 2**64.
        epoch: From 0.
        task: Number of the task.

    Returns:
        (records,) int64, a permutation of 0 .. records - 1: the record at each position.
    """
    key = 0
    for part in (seed, epoch, task):
        key = _mixed((key + part * _GOLDEN + _GOLDEN) & _MASK)
    return np.argsort(_mixed_all(np.arange(records, dtype=np.uint64), key), kind="stable").astype(np.int64, copy=False)


def _mixed(value: int) -> int:
    """The finalizer of splitmix64 (Steele, Lea, Flood, 2014), on one number."""
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def _mixed_all(numbers: npt.NDArray[np.uint64], key: int) -> npt.NDArray[np.uint64]:
    """splitmix64's outputs number + 1 of the stream that starts at ``key``, (n,) uint64, wrapping."""
    value = (numbers + np.uint64(1)) * np.uint64(_GOLDEN) + np.uint64(key)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(_FIRST)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(_SECOND)
    return value ^ (value >> np.uint64(31))
