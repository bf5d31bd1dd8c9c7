"""Reader of a rank's records in a round: joins pieces of several tasks into one batch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flightedl.client.data.reading import report_skipped
from flightedl.domain.groups.plan import Piece, Round
from flightedl.domain.queue.batching import record_order
from flightedl.formats.dataset_spec import DatasetSpec
from flightedl.formats.layout import TaskLayout
from flightedl.formats.reader import ChunkReader, Decode, ReadCounts, joined
from flightedl.formats.record_places import described, record_ranges
from flightedl.messages.status import RecordRange
from flightedl.ports import Files

#: Maximum number of open tasks: the rank's current task, and a task at the end of the epoch.
_OPEN = 2


class PieceReader:
    """Reader of rounds. Not thread-safe.

    Args:
        files: The dataset's files.
        layout: Its tasks.
        spec: Columns, filter and policy for corrupt records; the other fields are ignored.
        seed: Seed for shuffling the records of each task; None for the stored order.
        decode: See ``formats.reader``.
        skipped: Called with the number of corrupt records that were skipped.
    """

    def __init__(
        self,
        files: Files,
        layout: TaskLayout,
        spec: DatasetSpec,
        seed: int | None,
        decode: Decode | None,
        skipped: Callable[[int], None],
    ) -> None:
        self._files = files
        self._layout = layout
        self._spec = spec
        self._seed = seed
        self._decode = decode
        self._skipped = skipped
        self._counts = ReadCounts()
        #: (epoch, task) -> the task's reader and the order of its records, least recently used first.
        self._opened: OrderedDict[tuple[int, int], tuple[ChunkReader, npt.NDArray[np.int64] | None]] = OrderedDict()

    def read(self, step: Round) -> pa.RecordBatch:
        """Return the records of a round; a round without pieces has no records.

        Raises:
            DataError: a file cannot be read, has changed, or is corrupt.
        """
        if step.pieces:
            batch = joined([self._piece(step.epoch, piece) for piece in step.pieces])
        else:
            batch = self._piece(step.epoch, Piece(0, 0, 1)).slice(0, 0)
        report_skipped(self._counts, self._skipped)
        return batch

    def place(self, step: Round) -> str:
        ranges: list[RecordRange] = []
        for piece in step.pieces:
            chunks = tuple(self._layout.chunks_of(piece.task))
            first, end = piece.first_record, piece.end_record
            ranges.extend(record_ranges(chunks, first, end, self._seed, step.epoch, piece.task))
        return described(ranges)

    def _piece(self, epoch: int, piece: Piece) -> pa.RecordBatch:
        reader, order = self._open(epoch, piece.task)
        records = range(piece.first_record, piece.end_record)
        if piece.end_record == reader.record_count:
            del self._opened[epoch, piece.task]
        return reader.range(records) if order is None else reader.take(order[records.start : records.stop])

    def _open(self, epoch: int, task: int) -> tuple[ChunkReader, npt.NDArray[np.int64] | None]:
        key = epoch, task
        if key not in self._opened:
            schema = self._layout.index.schema
            chunks = self._layout.chunks_of(task)
            reader = ChunkReader(self._files, chunks, self._spec, schema, self._decode, self._counts)
            seed = self._seed
            order = None if seed is None else record_order(reader.record_count, seed, epoch, task)
            self._opened[key] = reader, order
            if len(self._opened) > _OPEN:
                self._opened.popitem(last=False)
        self._opened.move_to_end(key)
        return self._opened[key]
