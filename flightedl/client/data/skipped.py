"""Says what a trainer passes over because ``on_corrupt="skip"``: in its log, and to whom the job's progress goes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pyarrow as pa

from flightedl.formats.reader import ReadCounts

_log = logging.getLogger(__name__)


def telling(
    read: Callable[[ReadCounts], Iterator[pa.RecordBatch]], tell: Callable[[int], None]
) -> Iterator[pa.RecordBatch]:
    """The batches of ``read``, which counts what it skips; ``tell`` is given the number of records, as they come."""
    counts = ReadCounts()
    told_records, told_sentences = 0, 0
    for batch in read(counts):
        if counts.corrupt_records > told_records:
            tell(counts.corrupt_records - told_records)
            for sentence in counts.sentences[told_sentences:]:
                _log.warning("skipped: %s", sentence)
            told_records, told_sentences = counts.corrupt_records, len(counts.sentences)
        yield batch
