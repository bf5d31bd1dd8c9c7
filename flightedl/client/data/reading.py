"""Read tasks: all batches of an assigned task, or the first batches of a promised one. Also locate errors.

The master decides the order of records, because this trainer's declaration may contain a seed that takes effect only in
a later epoch.

The master promises tasks of the next epoch before it assigns them, and the trainer reads promised tasks early. The
script receives no batch of a task before the task is assigned, so early reading only saves time. If an early read
fails, the task is read again once it is assigned, and only then is the error reported.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
from msgspec.structs import replace

from flightedl.domain.trainer.feed import AssignedTask
from flightedl.formats.chunks import chunks_from_rows
from flightedl.formats.dataset_spec import DatasetSpec
from flightedl.formats.reader import ReadCounts, read_task
from flightedl.messages.tasks import Assignment
from flightedl.ports import Files

_log = logging.getLogger(__name__)
_LIBRARY = Path(__file__).resolve().parents[2]
_LINES_LIMIT = 8

#: Reads the batches of a task, in order.
ReadTask = Callable[[AssignedTask], Iterator[pa.RecordBatch]]


def batches_of(files: Files, task: AssignedTask, spec: DatasetSpec, **more: Any) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a task in order. For ``more`` see ``read_task``."""
    a = task.assignment
    chunks = chunks_from_rows(a.chunks, a.parts)
    return read_task(files, chunks, spec, a.seed, a.epoch, a.task, a.first_batch, a.end_batch, **more)


def reporting(
    read: Callable[[ReadCounts], Iterator[pa.RecordBatch]], report: Callable[[int], None]
) -> Iterator[pa.RecordBatch]:
    """Yield the batches of ``read``. Log the number of corrupt records that it skips, and pass it to ``report``."""
    counts = ReadCounts()
    for batch in read(counts):
        report_skipped(counts, report)
        yield batch


def report_skipped(counts: ReadCounts, report: Callable[[int], None]) -> None:
    """Log the number of corrupt records skipped since the last call and pass it to ``report``, unless it is 0."""
    if counts.corrupt_records:
        report(counts.corrupt_records)
        for sentence in counts.sentences:
            _log.warning("skipped: %s", sentence)
        counts.corrupt_records = 0
        counts.sentences.clear()


class EarlyReads:
    """Promised tasks of one reader, and their batches that have been read. Not thread-safe.

    Args:
        read: Reads a task.
        limit: Number of batches of a task to read early.
    """

    def __init__(self, read: ReadTask, limit: int) -> None:
        self._read = read
        self._limit = limit
        #: Promised tasks of one epoch, each with its first batches and an iterator over its remaining batches.
        self._begun: list[tuple[Assignment, list[pa.RecordBatch], Iterator[pa.RecordBatch]]] = []

    def begin(self, promised: Assignment) -> None:
        """Read the first few batches of a promised task."""
        self._begun = [each for each in self._begun if each[0].epoch == promised.epoch]
        batches = self._read(AssignedTask(promised))
        try:
            first = list(islice(batches, self._limit))
        except BaseException:  # noqa: BLE001 - raised again, and reported, when the task is assigned
            return
        self._begun.append((promised, first, batches))

    def batches(self, task: AssignedTask) -> Iterator[pa.RecordBatch]:
        given = replace(task.assignment, attempt=0)
        found = next((each for each in self._begun if each[0] == given), None)
        self._begun = [each for each in self._begun if each is not found and each[0].epoch >= given.epoch]
        return self._read(task) if found is None else chain(found[1], found[2])


def place_of(error: BaseException) -> str:
    """Return the location at which the script raised an exception, to recognize the same error in other batches.

    The location consists of the exception's class and the innermost lines of its traceback, with file names but without
    directories. The exception's message is not part of it, because it may name the record.
    """
    frames = traceback.extract_tb(error.__traceback__)
    of_user = [frame for frame in frames if not _is_ours(Path(frame.filename))] or list(frames)
    lines = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in of_user[-_LINES_LIMIT:]]
    return f"{type(error).__name__} at {' > '.join(lines)}"[:500]


def _is_ours(path: Path) -> bool:
    return _LIBRARY in path.parents and _LIBRARY / "examples" not in path.parents
