"""Skipped data is reported once."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pyarrow as pa
import pytest

from flightedl.client.data.reading import reporting
from flightedl.formats.reader import ReadCounts

BATCH = pa.RecordBatch.from_pylist([{"k": 1}])


def test_each_corrupt_chunk_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    def read(counts: ReadCounts) -> Iterator[pa.RecordBatch]:
        for records, sentence in ((0, ""), (5, "a is corrupt"), (0, ""), (3, "b is corrupt")):
            if records:
                counts.corrupt_records += records
                counts.sentences.append(sentence)
            yield BATCH

    reported: list[int] = []
    with caplog.at_level(logging.WARNING):
        assert len(list(reporting(read, reported.append))) == 4
    assert reported == [5, 3]
    assert [record.message for record in caplog.records] == ["skipped: a is corrupt", "skipped: b is corrupt"]
