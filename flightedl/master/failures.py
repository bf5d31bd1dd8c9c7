"""Convert batches of failed tasks to files, chunks and records. Pure."""

from __future__ import annotations

from flightedl.domain.queue.values import FailedPiece as Failed
from flightedl.formats.record_places import record_ranges
from flightedl.master.indexing import IndexedDataset
from flightedl.messages.status import FailedPiece

#: Maximum number of record ranges to list.
RANGES_LIMIT = 64


def failed_piece(failed: Failed, dataset: IndexedDataset, seed: int | None) -> FailedPiece:
    """Return a quarantined piece with its location in the files. ``seed`` determines the order of its records."""
    layout = dataset.layout
    chunks = tuple(layout.chunks_of(failed.task))
    records = layout.records_of(failed.task, range(failed.first_batch, failed.end_batch))
    ranges = list(record_ranges(chunks, records.start, records.stop, seed, failed.epoch, failed.task))
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
