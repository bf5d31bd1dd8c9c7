"""Location of a batch's records: files, chunks and record numbers.

In stored order, consecutive batches are consecutive records. Shuffled, they are scattered over the task in an order
that depends only on seed, epoch and task, so it can be recomputed here as trainers compute it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from flightedl.domain.queue.batching import record_order
from flightedl.formats.chunks import Chunk
from flightedl.messages.status import RecordRange

_SHOWN = 8


@lru_cache(maxsize=256)
def record_ranges(
    chunks: tuple[Chunk, ...], first: int, end: int, seed: int | None, epoch: int, task: int
) -> tuple[RecordRange, ...]:
    """Return the records at positions ``first`` to ``end`` (exclusive) of a task, as ranges of its files.

    With ``seed`` None, the task is read in stored order.
    """
    total = sum(chunk.records for chunk in chunks)
    if seed is None:
        numbers: npt.NDArray[np.int64] = np.arange(first, min(end, total))
    else:
        numbers = np.sort(record_order(total, seed, epoch, task)[first:end])
    return tuple(_stretches(chunks, numbers))


def _stretches(chunks: Sequence[Chunk], numbers: npt.NDArray[np.int64]) -> Iterator[RecordRange]:
    start = 0
    for chunk in chunks:
        inside = numbers[(numbers >= start) & (numbers < start + chunk.records)] - start + chunk.first_record
        runs = np.split(inside, np.flatnonzero(np.diff(inside) != 1) + 1) if len(inside) else ()
        for run in runs:
            yield RecordRange(url=chunk.url, chunk=chunk.number, first_record=int(run[0]), records=len(run))
        start += chunk.records


def described(ranges: Sequence[RecordRange]) -> str:
    """Return the ranges as text for people: ``a.parquet, records 20-29 and 35``."""
    by_file: dict[str, list[str]] = {}
    for each in ranges[:_SHOWN]:
        last = each.first_record + each.records - 1
        numbers = f"{last}" if each.records == 1 else f"{each.first_record}-{last}"
        by_file.setdefault(each.url, []).append(numbers)
    files = "; ".join(f"{url}, records {', '.join(numbers)}" for url, numbers in by_file.items())
    more = sum(each.records for each in ranges[_SHOWN:])
    return f"{files} and {more} more" if more else files
