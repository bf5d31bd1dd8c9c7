"""Convert batches of failed tasks to files, chunks and records. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flightedl.domain.queue.tasks import TaskQueue
from flightedl.domain.queue.values import FailedPiece as Failed
from flightedl.formats.record_places import described, record_ranges
from flightedl.master.indexing import IndexedDataset
from flightedl.messages.status import FailedPiece, RecordRange

#: Maximum number of record ranges to list.
RANGES_LIMIT = 64


def lost_data(queue: TaskQueue, dataset: IndexedDataset) -> dict[str, Any]:
    """Return the fields of a ``TasksReply`` that describe the quarantined batches."""
    records_of, table = dataset.layout.records_of, queue.failed.failed
    ranges: dict[str, list[RecordRange]] = {}
    for each in queue.failed.details:
        ranges.setdefault(each.error, []).extend(failed_piece(each, dataset, queue.seed_of(each.epoch)).ranges)
    return {
        "failed": table.batch_count,
        "lost_records": sum(
            len(records_of(queue.order(epoch).at(position), range(first, end)))
            for (epoch, position), batches in table
            for first, end in batches
        ),
        "lost_places": [f"{described(found)}: {error}" for error, found in ranges.items()],
    }


def failed_piece(failed: Failed, dataset: IndexedDataset, seed: int | None) -> FailedPiece:
    """Return a quarantined piece with its location in the files. ``seed`` determines the order of its records."""
    batches = range(failed.first_batch, failed.end_batch)
    chunks, records = tuple(dataset.layout.chunks_of(failed.task)), dataset.layout.records_of(failed.task, batches)
    return located(
        record_ranges(chunks, records.start, records.stop, seed, failed.epoch, failed.task),
        epoch=failed.epoch,
        task=failed.task,
        first_batch=batches.start,
        end_batch=batches.stop,
        attempts=failed.attempts,
        trainer=failed.trainer,
        error=failed.error,
    )


def located(ranges: Sequence[RecordRange], **more: Any) -> FailedPiece:
    """Return a failed piece with the location of its records."""
    of_first_file = [each for each in ranges if each.url == ranges[0].url]
    first_record = min(each.first_record for each in of_first_file)
    return FailedPiece(
        url=ranges[0].url,
        chunk=ranges[0].chunk,
        first_record=first_record,
        records=max(each.first_record + each.records for each in of_first_file) - first_record,
        ranges=list(ranges[:RANGES_LIMIT]),
        **more,
    )
