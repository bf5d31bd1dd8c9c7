"""Initial rows of a table, read from a file by each pserver when the model gets its initial values.

The rows exist before the first push, so every checkpoint contains them, and a replacement pserver restores them from a
checkpoint. If there is no checkpoint yet, the model is initialized again, and the file is read again.
"""

from __future__ import annotations

import logging

import numpy as np

from flightedl.domain.tables.spec import TableSpec
from flightedl.errors import UsageError
from flightedl.formats.table_files import FileRows, as_kept, read_table_file
from flightedl.ports import Clock, Files
from flightedl.pserver.stores.row_span import RowSpan
from flightedl.rowstore.tables import RowChunk
from flightedl.rowstore.values import slots_of_new_rows

_log = logging.getLogger(__name__)

_WORD_BYTES = 4


def load_first_rows(span: RowSpan, files: Files, clock: Clock) -> None:
    """Load the declared initial rows of a span's tables. Must be called before the span is used.

    Raises:
        DataError: a file cannot be read, or contains no rows for its table.
        UsageError: the rows require too much memory.
    """
    for number, spec in enumerate(span.rows.specs):
        if not spec.first_rows:
            continue
        began, count = clock.now(), 0
        for rows in read_table_file(files, spec.first_rows, spec):
            with span.lock:
                count += len(rows.ids)
                if span.rows.memory.room_bytes() < len(rows.ids) * spec.row_words * _WORD_BYTES:
                    raise UsageError(
                        f"table {spec.name!r}: there is no memory for all rows of {spec.first_rows}: use more "
                        "pservers, or give them more memory (--table-memory-mb)"
                    )
                span.rows.restore(_chunk(number, spec, rows))
        _log.info(
            "loaded initial rows table=%s rows=%d seconds=%.3f",
            spec.name,
            span.rows.counts(number).rows,
            clock.now() - began,
        )


def _chunk(number: int, spec: TableSpec, rows: FileRows) -> RowChunk:
    zeros = np.zeros(len(rows.ids), np.uint32)
    slots = slots_of_new_rows(spec, len(rows.ids)) if rows.slots is None else rows.slots
    updates = zeros if rows.updates is None else rows.updates
    return RowChunk(number, False, rows.ids, updates, zeros, zeros, slots, as_kept(rows.values, spec.dtype))
