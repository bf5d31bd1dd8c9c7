"""Comparison of a job's last checkpoint with its final state: values, rows, versions and optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from flightedl.adapters.storage import open_storage
from flightedl.domain.checkpoint.manifest import Manifest
from flightedl.domain.checkpoint.restoring import saved_tables
from flightedl.examples.ledger import CLOCKS, TABLES, ids_of
from flightedl.formats.checkpoint_files import found_checkpoints, verify
from flightedl.formats.shard_files import StoredBlock, load_shard
from flightedl.formats.stored_tables import stored_rows
from flightedl.ports import Storage


def stored_findings(url: str, counts: Path, batches: int | None, *, counts_updates: bool) -> Iterator[str]:
    """Return all errors in the ledger's newest checkpoint at a URL.

    Args:
        url: URL of the checkpoints.
        counts: Counts that the ledger wrote at its end.
        batches: Number of batches of all epochs if each batch is one update, or None if rounds are unpredictable.
        counts_updates: True if each update advances a clock by 1. A mean does so if it is divided by exactly the
            weights in it, and Adam does so if its averages and its step number agree.
    """
    storage = open_storage(f"{url.rstrip('/')}/ledger")
    newest = next((each for each in found_checkpoints(storage, "ledger") if isinstance(each, Manifest)), None)
    if newest is None:
        yield "there is no checkpoint"
        return
    names = [
        parameter["name"] for parameter in msgspec.json.decode(newest.declaration)["model"]["declaration"]["parameters"]
    ]
    verify(storage, newest)
    with np.load(counts) as arrays:
        ended = {name: arrays[name].reshape(-1) for name in names}
        rows = {table: arrays[name] for table, name in TABLES.items() if name in arrays}
    yield from _row_findings(storage, newest, rows)
    for file in newest.shards:
        _, _, blocks = load_shard(storage, file.name, file.size_bytes, file.hash)
        for block in blocks:
            if not isinstance(block, StoredBlock):
                continue
            yield from _block_findings(block, names[block.parameter], ended, batches, counts_updates=counts_updates)


def _row_findings(storage: Storage, manifest: Manifest, ended: dict[str, np.ndarray]) -> Iterator[str]:
    """Check for each table, given as (epochs, ids), that every id has exactly one row with the job's final counts."""
    tables = saved_tables(manifest)
    if {spec.name for spec in tables} != ended.keys():
        yield f"checkpoint: tables {[spec.name for spec in tables]} are there, and counted were {[*ended]}"
        return
    for number, spec in enumerate(tables):
        parts = list(stored_rows(storage, manifest, number, spec))
        found = np.concatenate([np.empty(0, np.uint64), *(part.ids for part in parts)]).view(np.int64)
        values = np.concatenate([np.empty((0, spec.dim), np.float32), *(part.values for part in parts)])
        order, counts = np.argsort(found), ended[spec.name]
        where, ids = f"checkpoint: table {spec.name!r}", np.sort(ids_of(spec.name, counts))
        if not np.array_equal(found[order], ids):
            twice = len(found) - len(np.unique(found))
            missing, strange = np.setdiff1d(ids, found).size, np.setdiff1d(found, ids).size
            yield f"{where} has {len(found)} rows: {twice} twice, {missing} missing, {strange} that are nobody's"
        elif not np.array_equal(values[order], counts.T):
            yield f"{where} has other rows than the job ended with: {np.argwhere(values[order] != counts.T)[:5]}"


def _block_findings(
    block: StoredBlock, name: str, ended: dict[str, np.ndarray], batches: int | None, *, counts_updates: bool
) -> Iterator[str]:
    where = f"checkpoint: block {block.number} of {name!r}"
    if not np.array_equal(block.values, ended[name][block.start : block.stop]):
        yield f"{where} has other values than the job ended with"
    if block.updates > block.version:
        yield f"{where} had {block.updates} updates until version {block.version}"
    if batches is not None and {block.version, block.updates} != {batches}:
        yield f"{where} is at version {block.version} after {block.updates} updates, not {batches}"
    if counts_updates and name in CLOCKS and not block.start and abs(float(block.values[0]) - block.updates) > 0.01:
        yield f"{where} was moved by {float(block.values[0]):.4f} in {block.updates} updates"
