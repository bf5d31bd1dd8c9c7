"""Initial rows of a table, read from a file by each pserver when the model gets its initial values.

The rows exist before the first push, so every checkpoint contains them, and a replacement pserver restores them from a
checkpoint. If there is no checkpoint yet, the model is initialized again, and the file is read again.
"""

from __future__ import annotations

import logging

from flightedl.errors import UsageError
from flightedl.formats.table_files import read_table_file
from flightedl.ports import Clock, Files
from flightedl.pserver.stores.row_span import RowSpan
from flightedl.pserver.stores.stored_rows import chunk_of

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
                span.rows.restore(chunk_of(spec, rows.stored(spec, number)))
        _log.info(
            "loaded initial rows table=%s rows=%d seconds=%.3f",
            spec.name,
            span.rows.counts(number).rows,
            clock.now() - began,
        )
