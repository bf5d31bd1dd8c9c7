"""Where a failed piece of work lies: from batches of a task to files, chunks and records.

In stored order the batches of a piece are one stretch of records. Shuffled they are scattered over the task, in the
order that its seed, epoch and number give, so the same computation that the trainers do finds them. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from flightedl.domain.datasets import record_order
from flightedl.domain.tasks_values import FailedPiece as Failed
from flightedl.formats.chunks import Chunk
from flightedl.master.indexing import IndexedDataset
from flightedl.wire.messages_status import FailedPiece, RecordRange

#: More stretches of records than this are not listed one by one.
RANGES_LIMIT = 64


def failed_piece(failed: Failed, dataset: IndexedDataset) -> FailedPiece:
    """A quarantined piece with its place in the files."""
    layout, declared = dataset.layout, dataset.reply.declaration
    chunks = tuple(layout.chunks_of(failed.task))
    first = failed.first_batch * declared.batch_size
    end = min(failed.end_batch * declared.batch_size, layout.records(failed.task))
    seed = declared.seed if declared.shuffle else None
    ranges = list(_ranges(chunks, first, end, seed, failed.epoch, failed.task))
    of_first_file = [each for each in ranges if each.url == ranges[0].url]
    first_record = min(each.first_record for each in of_first_file)
    last_record = max(each.first_record + each.records for each in of_first_file)
    return FailedPiece(
        epoch=failed.epoch,
        task=failed.task,
        first_batch=failed.first_batch,
        end_batch=failed.end_batch,
        attempts=failed.attempts,
        trainer=failed.trainer,
        error=failed.error,
        url=ranges[0].url,
        chunk=ranges[0].chunk,
        first_record=first_record,
        records=last_record - first_record,
        ranges=ranges[:RANGES_LIMIT],
    )


@lru_cache(maxsize=256)
def _ranges(
    chunks: tuple[Chunk, ...], first: int, end: int, seed: int | None, epoch: int, task: int
) -> tuple[RecordRange, ...]:
    """The records at positions ``first`` to ``end`` (exclusive) of a task, as stretches of its files."""
    total = sum(chunk.records for chunk in chunks)
    if seed is None:
        numbers: npt.NDArray[np.int64] = np.arange(first, end)
    else:
        numbers = np.sort(record_order(total, seed, epoch, task)[first:end])
    return tuple(_stretches(chunks, numbers))


def _stretches(chunks: Sequence[Chunk], numbers: npt.NDArray[np.int64]) -> list[RecordRange]:
    found: list[RecordRange] = []
    start = 0
    for chunk in chunks:
        inside = numbers[(numbers >= start) & (numbers < start + chunk.records)] - start + chunk.first_record
        runs = np.split(inside, np.flatnonzero(np.diff(inside) != 1) + 1) if len(inside) else ()
        found += [
            RecordRange(url=chunk.url, chunk=chunk.number, first_record=int(run[0]), records=len(run)) for run in runs
        ]
        start += chunk.records
    return found
