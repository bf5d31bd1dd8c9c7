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

from flightedl.domain.splitmix64 import GOLDEN, mix, mix_all


def batch_count(records: int, batch_size: int) -> int:
    """Return the number of batches that ``records`` records form.

    Raises:
        ValueError: the number of records is negative, or the batch size is below 1.
    """
    if records < 0 or batch_size < 1:
        raise ValueError(f"cannot divide {records} records into batches of {batch_size}")
    return -(-records // batch_size)


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
        key = mix(key + part * GOLDEN + GOLDEN)
    # Outputs at positions 1 … records of the splitmix64 stream with this seed.
    hashes = mix_all(np.arange(1, records + 1, dtype=np.uint64) * np.uint64(GOLDEN) + np.uint64(key))
    return np.argsort(hashes, kind="stable").astype(np.int64, copy=False)
