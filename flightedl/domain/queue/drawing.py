"""Tasks of shuffled data: each task consists of records of several chunks, which are drawn once, by the seed.

Rules:

* The chunks are permuted by the seed and laid end to end. There are T = max(24, chunks / ``_MOST_MIXED``) tasks, or
  more if the chunks of a task would exceed ``size_bytes``, but at most as many as chunks. ``records_per_task`` sets T
  instead.
* From 48 chunks on, a task consists of whole chunks that follow one another, so a chunk is decoded once an epoch. Task
  boundaries are the boundaries of chunks that are closest to equal tasks.
* Fewer chunks, and data of at most ``_SMALL_BYTES``, are cut. The sequence is divided into lanes of equal length (one
  lane per chunk, but at most ``_MOST_MIXED``, and at most as many as chunks fit into ``size_bytes``), and each task
  contains the next records of every lane. Tasks have whole batches, and differ by at most one batch. If tasks are
  smaller than a batch, they differ by at most one record. Each trainer decodes the chunks of its tasks, and keeps them
  if they fit.

Neither the number of trainers nor the machine matters. The layout is the same in all epochs, because the numbers of
tasks and batches are stored with the job. A change of these rules requires a new ``VERSION``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flightedl.domain.queue.mixture import Numbers, Pieces
from flightedl.domain.queue.permutation import KeyedPermutation

VERSION = 1
#: Default memory of the decoded chunks of a task.
SIZE_BYTES = 1 << 30
#: Number of tasks below which chunks are cut.
_LEAST_TASKS = 24
_MOST_MIXED = 64
#: Number of chunks from which mixing more of them matters little.
_FEW_MIXED = 8
#: Decoded size of data that each trainer may decode as a whole.
_SMALL_BYTES = 64 << 20


def drawn(
    records: Numbers,
    decoded_bytes: Numbers,
    batch_size: int,
    seed: int,
    size_bytes: int = SIZE_BYTES,
    records_per_task: int = 0,
) -> Pieces:
    """Return the tasks of shuffled data.

    Args:
        records: Number of records in each chunk, above 0, (chunk count,).
        decoded_bytes: Estimated memory of each chunk's records, (chunk count,).
        batch_size: Records per batch.
        seed: Key of the permutation of the chunks.
        size_bytes: Memory of the decoded chunks of a task.
        records_per_task: Records per task; 0 to choose it.
    """
    count, total = len(records), int(records.sum())
    chunks = KeyedPermutation(count, seed).elements_at(np.arange(count))
    most = min(_MOST_MIXED, max(2, size_bytes // max(int(decoded_bytes.max()), 1)))
    tasks = -(-total // records_per_task) if records_per_task else min(count, max(_LEAST_TASKS, -(-count // most)))
    ends = np.cumsum(records[chunks])
    if count < 2 * _LEAST_TASKS or decoded_bytes.sum() <= _SMALL_BYTES:
        return _cut(chunks, ends, min(count, most), tasks, batch_size)
    wanted = total * np.arange(1, tasks) / tasks
    after = np.searchsorted(ends, wanted)
    nearest = after + (ends[after] - wanted < wanted - (ends[after] - records[chunks[after]]))
    firsts = np.union1d(0, nearest[nearest < count])
    return Pieces(chunks, np.zeros(count, np.int64), records[chunks], firsts)


def _cut(chunks: Numbers, ends: Numbers, lanes: int, tasks: int, batch_size: int) -> Pieces:
    total = int(ends[-1])
    batches = -(-total // batch_size)
    numbers = np.arange(tasks + 1)
    ends_of_tasks = total * numbers // tasks if batches < tasks else batches * numbers // tasks * batch_size
    # Record i of all tasks is the next one of lane i mod ``lanes``.
    given = -((np.arange(lanes)[:, np.newaxis] - np.minimum(ends_of_tasks, total)) // lanes)
    lane_ends = np.cumsum(given[:, -1])
    given += (lane_ends - given[:, -1])[:, np.newaxis]
    starts_of_chunks = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
    starts = np.union1d(given, starts_of_chunks)[:-1]
    lane = np.searchsorted(lane_ends, starts, side="right")
    task = np.concatenate([np.searchsorted(given[n], starts[lane == n], side="right") - 1 for n in range(lanes)])
    by_task = np.argsort(task, kind="stable")
    chunk = np.searchsorted(ends, starts, side="right")
    found = np.stack([chunks[chunk], starts - starts_of_chunks[chunk], np.diff(starts, append=total)])[:, by_task]
    return Pieces(found[0], found[1], found[2], np.flatnonzero(np.diff(task[by_task], prepend=-1)))


@dataclass(frozen=True, slots=True)
class Advice:
    """Consequences of a layout, for users."""

    #: Mean number of chunks whose records a task contains, and mean number of tasks that contain records of a chunk.
    mixed_chunks: int
    tasks_per_chunk: float
    #: Most bytes of decoded records of a task.
    task_bytes: int
    #: Consequences, and what is wrong with the files or the size of the tasks.
    text: str
    warnings: tuple[str, ...]


def advice_of(pieces: Pieces, records: Numbers, decoded_bytes: Numbers, size_bytes: int = SIZE_BYTES) -> Advice:
    """Return the consequences of a layout of chunks that ``drawn`` has returned."""
    count, tasks = len(records), len(pieces.firsts)
    task = np.repeat(np.arange(tasks), np.diff(pieces.firsts, append=len(pieces.chunks)))
    pairs = len(np.unique(task * count + pieces.chunks))
    mixed = round(pairs / tasks)
    each = np.add.reduceat(pieces.records * (decoded_bytes / records)[pieces.chunks], pieces.firsts)
    is_cut = bool((pieces.records < records[pieces.chunks]).any())
    task_bytes, all_bytes = int(each.max()), int(decoded_bytes.sum())
    text = (
        f"a task has about {int(records.sum()) // tasks:,} records of {mixed:,} of {count:,} chunks, and a batch mixes "
        f"them; a trainer holds up to {megabytes(2 * task_bytes)} of tasks"
    )
    if is_cut:
        text += f" and keeps up to {megabytes(min(size_bytes, all_bytes))} of chunks, which are cut: "
        often = f"a chunk is decoded about {pairs / count:.0f} times an epoch"
        text += "each trainer decodes all of them" if all_bytes <= size_bytes else often
    warnings = []
    if count == 1 and all_bytes > _SMALL_BYTES:
        warnings.append("there is only one chunk: `flightedl dataset split` makes more, which more trainers can share")
    elif mixed < min(_FEW_MIXED, count):
        warnings.append(
            f"a batch mixes records of only {mixed} of {count:,} chunks: if the files are sorted, increase "
            "records_per_task or shuffle_bytes"
        )
    return Advice(mixed, pairs / count, task_bytes, text, tuple(warnings))


def megabytes(count: int) -> str:
    """Return a number of bytes as text."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"
