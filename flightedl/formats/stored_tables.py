"""The rows of a table as a checkpoint has them: of a base and its increments, the last of each, and none that is gone.

Files are read from the newest of a chain to its base: what a newer one has, or says was removed, is passed over in the
older ones. So beside some rows at a time only the ids of increments are in memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from flightedl.domain.checkpoint.manifest import Link, Manifest, ShardFile
from flightedl.domain.tables.spec import TableSpec
from flightedl.errors import CorruptError
from flightedl.formats.checkpoint_files import require_file
from flightedl.formats.row_batches import TABLE, WAITING, StoredRows, StoredRowSpan
from flightedl.formats.shard_files import read_rows
from flightedl.ports import Storage

Ids = npt.NDArray[np.uint64]


def stored_rows(storage: Storage, manifest: Manifest, table: int, spec: TableSpec) -> Iterator[StoredRows]:
    """The rows of a table, some at a time, in no particular order.

    Args:
        storage: Where the checkpoint lies.
        manifest: Of the checkpoint.
        table: Number of the table.
        spec: As declared.

    Raises:
        CorruptError, NotFoundError: a file is damaged or missing.
        UnavailableError: the storage cannot be read at the moment.
    """
    for shard in manifest.shards:
        passed_over = np.empty(0, np.uint64)
        newest: dict[int, tuple[StoredRowSpan, int]] = {}
        for file in reversed(shard.chain):
            found: list[Ids] = []
            for rows in _rows_of(storage, manifest, shard, file, table, newest):
                if rows.kind == TABLE:
                    found.append(rows.ids)
                elif (some := _of_these(rows, spec, passed_over, newest)) is not None:
                    yield some
                if rows.kind not in {TABLE, WAITING} and file is not shard.chain[0]:
                    found.append(rows.ids)
            passed_over = np.unique(np.concatenate([passed_over, *found]))


def _rows_of(
    storage: Storage,
    manifest: Manifest,
    shard: ShardFile,
    file: ShardFile | Link,
    table: int,
    newest: dict[int, tuple[StoredRowSpan, int]],
) -> Iterator[StoredRows]:
    """What one file has of a table; ``newest`` is filled from the newest one: a span, and the version that counts."""
    header, _, found = read_rows(storage, file.name, file.size_bytes)
    require_file(manifest, header, shard.index, file)
    spans = {span.first: span for span in header.rows}
    for rows in found:
        if rows.table == table:
            if rows.kind == TABLE:
                newest.setdefault(rows.span, (spans[rows.span], rows.oldest))
            yield rows


def _of_these(
    rows: StoredRows, spec: TableSpec, passed_over: Ids, newest: dict[int, tuple[StoredRowSpan, int]]
) -> StoredRows | None:
    """Those that exist, and that no newer file has; None: they are no rows."""
    if rows.kind == WAITING:
        return None
    if rows.span not in newest:
        raise CorruptError("rows of a table are of no span that their checkpoint has")
    span, oldest = newest[rows.span]
    is_wanted = (rows.versions >= oldest) & (rows.epochs >= spec.oldest_epoch(span.epoch))
    if passed_over.size:
        places = np.minimum(np.searchsorted(passed_over, rows.ids), passed_over.size - 1)
        is_wanted &= passed_over[places] != rows.ids
    if is_wanted.all():
        return rows
    columns = (rows.ids, rows.updates, rows.versions, rows.epochs, rows.slots, rows.values)
    return StoredRows(rows.span, rows.table, rows.kind, *(column[is_wanted] for column in columns))  # type: ignore[arg-type]
