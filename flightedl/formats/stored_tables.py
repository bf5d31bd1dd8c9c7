"""The rows of a table in a checkpoint: the latest state of each row in a base and its increments.

Each chain of files is read from its newest file to its base. Rows in an older file are skipped if a newer file contains
or removes them. So memory holds only one batch of rows, and the ids in the increments.

An import adds increments that contain the same blocks, applied batches and states of tables as the newest files, and
the imported rows, which get the version and epoch of their bucket, as if the newest batch had updated them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from msgspec import structs

from flightedl.domain.checkpoint.manifest import Link, Manifest, ShardFile, shard_name
from flightedl.domain.tables.placement import BUCKETS, buckets_of
from flightedl.domain.tables.spec import TableSpec
from flightedl.errors import CorruptError
from flightedl.formats.checkpoint_files import chain_buckets, require_file
from flightedl.formats.row_batches import TABLE, WAITING, StoredRows, StoredRowSpan
from flightedl.formats.shard_files import StoredBlock, read_blocks, read_rows, write_shard
from flightedl.formats.table_files import FileRows
from flightedl.ports import Storage

Ids = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]
#: A number that is higher than any version or epoch.
_UNKNOWN = 1 << 62
_BLOCKS_AT_ONCE = 16


def stored_rows(
    storage: Storage, manifest: Manifest, table: int, spec: TableSpec, buckets: range = range(BUCKETS)
) -> Iterator[StoredRows]:
    """Yield the rows of a table in batches, in an unspecified order.

    Args:
        storage: Storage with the checkpoint.
        manifest: Manifest of the checkpoint.
        table: Number of the table.
        spec: Declaration of the table.
        buckets: Buckets of the rows.

    Raises:
        CorruptError, NotFoundError: a file is damaged or missing.
        UnavailableError: the storage temporarily cannot be read.
    """
    chains = [(shard, chain_buckets(storage, shard)) for shard in manifest.shards]
    first = min((number for _, chain in chains for number in chain[-1].numbers), default=0)
    wanted = np.zeros(BUCKETS, np.bool_)
    wanted[buckets.start : buckets.stop] = True
    for shard, chain in chains:
        if not any(number - first in buckets for number in chain[-1].numbers):
            continue
        passed_over = np.empty(0, np.uint64)
        #: Lowest unexpired version of each bucket, and lowest unexpired epoch.
        oldest = np.full((2, BUCKETS), _UNKNOWN)
        for file, counting in zip(reversed(shard.chain), reversed(chain), strict=True):
            counts = np.zeros(BUCKETS, np.bool_)
            counts[[number - first for number in counting.numbers]] = True
            counts &= wanted
            header, _, stored = read_rows(storage, file.name, file.size_bytes)
            require_file(manifest, header, shard.index, file)
            spans = {span.first: span for span in header.rows}
            found: list[Ids] = []
            for rows in (each for each in stored if each.table == table):
                if rows.kind == TABLE:
                    found.append(rows.ids)
                    if counting.is_newest:
                        _note_oldest(oldest, first, spans[rows.span], rows, spec)
                elif rows.kind != WAITING:
                    yield _of_these(rows, spec, passed_over, counts, oldest)
                    if file is not shard.chain[0]:
                        found.append(rows.ids)
            passed_over = np.sort(np.concatenate([passed_over, *found]))


def _note_oldest(oldest: Numbers, first: int, span: StoredRowSpan, said: StoredRows, spec: TableSpec) -> None:
    buckets = slice(span.first - first, span.first - first + span.count)
    versions = said.oldest + said.shifts if said.shifts.size else np.full(BUCKETS, said.oldest)
    if spec.bucket_limit is not None:
        versions = np.maximum(versions, said.given_up)
    oldest[0, buckets], oldest[1, buckets] = versions[buckets], spec.oldest_epoch(span.epoch)


def _of_these(
    rows: StoredRows, spec: TableSpec, passed_over: Ids, counts: npt.NDArray[np.bool_], oldest: Numbers
) -> StoredRows:
    """Return the live rows in the buckets to read, without the rows that a newer file contains."""
    buckets = buckets_of(rows.ids, spec.salt)
    is_wanted = counts[buckets]
    version, epoch = oldest[:, buckets]
    if (version[is_wanted] == _UNKNOWN).any():
        raise CorruptError("rows of a table belong to no span of their checkpoint")
    is_wanted &= (rows.versions >= version) & (rows.epochs >= epoch)
    if passed_over.size:
        places = np.minimum(np.searchsorted(passed_over, rows.ids), passed_over.size - 1)
        is_wanted &= passed_over[places] != rows.ids
    if is_wanted.all():
        return rows
    columns = (rows.ids, rows.updates, rows.versions, rows.epochs, rows.slots, rows.values)
    return StoredRows(rows.span, rows.table, rows.kind, *(column[is_wanted] for column in columns))  # type: ignore[arg-type]


def with_rows(
    storage: Storage, manifest: Manifest, table: int, spec: TableSpec, rows: Sequence[FileRows], number: int, now: float
) -> Manifest:
    """Write files that add rows to a checkpoint. Return the new checkpoint's manifest, which the caller publishes.

    Args:
        storage: Storage of the job's checkpoints.
        manifest: The checkpoint to which the rows are added.
        table: Number of the table.
        spec: Its declaration.
        rows: Rows with distinct ids.
        number: Number of the new checkpoint.
        now: Seconds since 1970, which also make the files' names unique.

    Raises the same errors as ``read_blocks`` and ``write_shard``.
    """
    shards = []
    contents = [read_blocks(storage, shard.name, shard.size_bytes, ()) for shard in manifest.shards]
    first = min((span.first for old in contents for span in old.header.rows), default=0)
    for shard, old in zip(manifest.shards, contents, strict=True):
        require_file(manifest, old.header, shard.index, shard)
        states = [each for each in read_rows(storage, shard.name, shard.size_bytes)[2] if each.kind == TABLE]
        shifts = {state.span: state.shifts for state in states}
        new = [_part(span, first, shifts[span.first], table, spec, some) for span in old.header.rows for some in rows]
        since = shard.links[0].number if shard.links else manifest.number
        name = shard_name(number, shard.index, manifest.pserver_count, shard.generation, int(now * 1e6), since)
        spans = [structs.replace(span, complete=[]) for span in old.header.rows]
        header = structs.replace(old.header, number=number, rows=spans)
        records = [*(replace(state, ids=state.ids[:0]) for state in states), *new]
        blocks = _blocks(storage, shard, header.blocks)
        written = write_shard(storage, name, header, old.applied, blocks, old.slot_count, records)
        link = Link(number=manifest.number, **{key: getattr(shard, key) for key in Link.__struct_fields__[1:]})
        row_bytes = sum(part.values.nbytes + part.slots.nbytes + 20 * part.ids.size for part in new)
        file = {"name": name, "size_bytes": written.size_bytes, "hash": written.hash, "row_bytes": row_bytes}
        shards.append(structs.replace(shard, **file, after=shard.name, links=(*shard.links, link)))
    return structs.replace(manifest, number=number, created_s=now, shards=tuple(shards))


def _blocks(storage: Storage, shard: ShardFile, numbers: Sequence[int]) -> Iterator[StoredBlock]:
    for start in range(0, len(numbers), _BLOCKS_AT_ONCE):
        some = numbers[start : start + _BLOCKS_AT_ONCE]
        yield from read_blocks(storage, shard.name, shard.size_bytes, some).blocks


def _part(span: StoredRowSpan, first: int, shifts: Numbers, table: int, spec: TableSpec, rows: FileRows) -> StoredRows:
    """Return the rows that belong to a span. ``first`` is the position of the plan's first bucket."""
    buckets = buckets_of(rows.ids, spec.salt)
    own = np.flatnonzero((buckets >= span.first - first) & (buckets < span.first - first + span.count))
    versions = np.full(own.size, span.version) + (shifts[buckets[own]] if shifts.size else 0)
    epochs = np.full(own.size, span.epoch, np.uint32)
    stored = rows.chosen(own).stored(spec, table)
    return replace(stored, span=span.first, versions=versions.astype(np.uint32), epochs=epochs)
