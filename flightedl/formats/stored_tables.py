"""Rows of a table in a checkpoint: the latest state of each row from a base file and its increments.

Files are read from the newest of a chain to its base. Rows that a newer file contains or removed are skipped in older
files. Memory therefore holds one batch of rows and the ids found in the increments.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from flightedl.domain.checkpoint.manifest import Link, Manifest, ShardFile
from flightedl.domain.tables.placement import BUCKETS, buckets_of
from flightedl.domain.tables.spec import TableSpec
from flightedl.errors import CorruptError
from flightedl.formats.checkpoint_files import require_file
from flightedl.formats.row_batches import TABLE, WAITING, StoredRows, StoredRowSpan
from flightedl.formats.shard_files import read_rows
from flightedl.ports import Storage

Ids = npt.NDArray[np.uint64]


def stored_rows(storage: Storage, manifest: Manifest, table: int, spec: TableSpec) -> Iterator[StoredRows]:
    """Yield the rows of a table in batches, in no particular order.

    Args:
        storage: Storage with the checkpoint.
        manifest: Manifest of the checkpoint.
        table: Number of the table.
        spec: Declaration of the table.

    Raises:
        CorruptError, NotFoundError: a file is damaged or missing.
        UnavailableError: the storage temporarily cannot be read.
    """
    for shard in manifest.shards:
        passed_over = np.empty(0, np.uint64)
        newest: dict[int, tuple[StoredRowSpan, StoredRows]] = {}
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
    newest: dict[int, tuple[StoredRowSpan, StoredRows]],
) -> Iterator[StoredRows]:
    """Yield one file's batches of a table. The newest file sets each span and its ``TABLE`` in ``newest``."""
    header, _, found = read_rows(storage, file.name, file.size_bytes)
    require_file(manifest, header, shard.index, file)
    spans = {span.first: span for span in header.rows}
    for rows in found:
        if rows.table == table:
            if rows.kind == TABLE:
                newest.setdefault(rows.span, (spans[rows.span], rows))
            yield rows


def _of_these(
    rows: StoredRows, spec: TableSpec, passed_over: Ids, newest: dict[int, tuple[StoredRowSpan, StoredRows]]
) -> StoredRows | None:
    """Return the live rows that no newer file has, or None for ids that await admission."""
    if rows.kind == WAITING:
        return None
    if rows.span not in newest:
        raise CorruptError("rows of a table belong to no span of their checkpoint")
    span, said = newest[rows.span]
    oldest = said.oldest + said.shifts if said.shifts.size else np.full(BUCKETS, said.oldest)
    if spec.bucket_limit is not None:
        oldest = np.maximum(oldest, said.given_up)
    is_wanted = (rows.versions >= oldest[buckets_of(rows.ids, spec.salt)]) & (
        rows.epochs >= spec.oldest_epoch(span.epoch)
    )
    if passed_over.size:
        places = np.minimum(np.searchsorted(passed_over, rows.ids), passed_over.size - 1)
        is_wanted &= passed_over[places] != rows.ids
    if is_wanted.all():
        return rows
    columns = (rows.ids, rows.updates, rows.versions, rows.epochs, rows.slots, rows.values)
    return StoredRows(rows.span, rows.table, rows.kind, *(column[is_wanted] for column in columns))  # type: ignore[arg-type]
