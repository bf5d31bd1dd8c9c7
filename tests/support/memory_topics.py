"""In-memory twin of Kafka topics as files. Offsets without a message are gaps, as transactions leave them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import BinaryIO

import pyarrow as pa

from flightedl.domain.topics import topic_and_ranges, url_of
from flightedl.errors import NotFoundError
from flightedl.ports import FileListing, FileStat
from tests.support.memory import MemoryFiles


class MemoryTopics(MemoryFiles):
    """In-memory twin of a cluster with the topic ``kafka://twin:9092/clicks``."""

    URL = "kafka://twin:9092/clicks"

    def __init__(self) -> None:
        super().__init__()
        #: Partition -> offset -> value.
        self.messages: dict[int, dict[int, bytes | None]] = {}
        #: Partition -> readable offsets.
        self.readable: dict[int, range] = {}
        #: URLs that were opened.
        self.opened: list[str] = []

    def put(self, partition: int, *values: bytes | None, gap: int = 0) -> None:
        """Append messages, and then ``gap`` offsets without a message."""
        known = self.readable.get(partition, range(0))
        self.messages.setdefault(partition, {}).update(enumerate(values, known.stop))
        self.readable[partition] = range(known.start, known.stop + len(values) + gap)

    def delete(self, partition: int, end: int) -> None:
        """Delete the messages before an offset."""
        self.readable[partition] = range(end, self.readable[partition].stop)

    def expand(self, patterns: Sequence[str], *, may_be_empty: bool = False) -> FileListing:
        self.plan.reached("expand")
        return FileListing([self.stat_of(url_of(topic, self.readable)) for topic in patterns])

    def stat(self, url: str) -> FileStat | None:
        return self.stat_of(url) if topic_and_ranges(url)[1] else None

    @staticmethod
    def stat_of(url: str) -> FileStat:
        return FileStat(url, sum(map(len, topic_and_ranges(url)[1].values())), "offsets")

    def open(self, url: str) -> BinaryIO:
        self.opened.append(url)
        rows = []
        for partition, offsets in topic_and_ranges(url)[1].items():
            if offsets.start < self.readable[partition].start:
                raise NotFoundError(f"partition {partition} begins at offset {self.readable[partition].start} now")
            known = self.messages[partition]
            rows += [(known[n], b"key", partition, n, 1000 + n) for n in offsets if n in known]
        kinds = (pa.binary(), pa.binary(), pa.int64(), pa.int64(), pa.int64())
        columns = [pa.array([row[place] for row in rows], kind) for place, kind in enumerate(kinds)]
        batch, sink = pa.record_batch(columns, list("abcde")), io.BytesIO()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        sink.seek(0)
        return sink
