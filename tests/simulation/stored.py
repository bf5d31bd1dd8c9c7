"""Judges the checkpoints of a run: what each file has, against its applied batches and the values in closed form."""

from __future__ import annotations

import io
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.simulation.files import URL, Store
from tests.simulation.programs import (
    CHECKPOINTS,
    JOB,
    PARAMETERS,
    REPORT,
    SAVED_MODEL,
    SAVED_ROWS,
    Array,
    Copy,
)
from tests.simulation.scenario import Scenario

if TYPE_CHECKING:
    from flightedl.domain.checkpoint.manifest import Manifest

#: (epoch, task, batch).
Place = tuple[int, int, int]
_ROOT = f"{CHECKPOINTS.rpartition('/')[2]}/{JOB}"
_CLOSE = 1e-3
#: Number of checkpoints that were deleted before the end, and are judged all the same.
_DELETED = 3


def problems(store: Store, scenario: Scenario, pointer: bytes | None, results: Sequence[Array]) -> list[str]:
    """Describe what is wrong with the checkpoints, one sentence each.

    Args:
        store: The store.
        scenario: The job.
        pointer: Value of the key of the newest checkpoint in etcd.
        results: Values that the trainers read at their end.
    """
    if not scenario.has_store:
        return []
    return [*_of_listing(store, scenario, pointer, results), *_of_all(store, scenario)]


def _of_listing(store: Store, scenario: Scenario, pointer: bytes | None, results: Sequence[Array]) -> Iterator[str]:
    """Judge what a user finds: the listed checkpoints, as ``fe.load`` reads them, and the pointer in etcd."""
    from flightedl.adapters.storage import open_storage
    from flightedl.domain.checkpoint.manifest import Manifest, checksum
    from flightedl.domain.checkpoint.pointer import latest_of
    from flightedl.formats.checkpoint_files import found_checkpoints

    store.mend()
    latest = None if pointer is None else latest_of(pointer)
    if latest is not None and checksum(store.files.get(_manifest(latest.number), b"")) != latest.manifest_checksum:
        yield f"etcd names checkpoint {latest.number}, whose manifest is missing or another one"
    # A master that cannot write the last checkpoint, or finds a damaged file of it, ends the job without it.
    has_failed = store.failure_count > 0 or store.has_damage
    has_result = any(result.any() for result in results) and not has_failed
    if latest is None and has_result:
        yield "the job is over, but it has no checkpoint"
    found = found_checkpoints(open_storage(f"{CHECKPOINTS}/{JOB}"), JOB)
    numbers = [each.number for each in found]
    for each in found:
        if isinstance(each, Manifest):
            saved = _loaded(store, each.number, numbers)
            if ((abs(saved - scenario.final_value) > _CLOSE) & (saved != 0.0)).any():
                yield f"checkpoint {each.number} has values other than {scenario.final_value}"
            is_last = latest is not None and each.number == latest.number and has_result
            if is_last and any(abs(saved - result[: len(saved)]).max() > _CLOSE for result in results):
                yield f"the job is over, but its last checkpoint {each.number} has other values"
        elif _manifest(each.number) in store.written:
            # Otherwise, a master has died while it wrote the manifest to a disk.
            yield f"checkpoint {each.number} is listed, but {each.reason}"


def of_copies(store: Store, scenario: Scenario, copies: Sequence[Copy]) -> Iterator[str]:
    """Compare what a follower had at checkpoints with their files, also of checkpoints that were deleted since."""
    from flightedl.adapters.storage import open_storage
    from flightedl.domain.checkpoint.manifest import Manifest

    listed, store.files = store.files, store.written
    numbers = [number for number in range(1000) if _manifest(number) in store.files]
    storage = open_storage(f"{CHECKPOINTS}/{JOB}")
    try:
        for copy in copies:
            if copy.checkpoint not in numbers:
                continue
            if not np.array_equal(_loaded(store, copy.checkpoint, numbers), copy.values):
                yield f"a follower had other values than checkpoint {copy.checkpoint}"
            manifest = Manifest.decode(storage.read(f"c-{copy.checkpoint}/manifest.json"))
            rows = _Judge(storage, manifest, scenario).all_rows()
            had = dict(zip(copy.ids.tolist(), copy.rows.tolist(), strict=True))
            if had != {each: values.tolist() for each, values in rows.items()}:
                yield f"a follower has {len(had)} rows at checkpoint {copy.checkpoint}, not {len(rows)}, or other ones"
    finally:
        store.files = listed


def of_saves(store: Store, scenario: Scenario, results: Sequence[Array]) -> Iterator[str]:
    """Judge the files that trainers have written at their end: they have the final values."""
    store.mend()
    names = {url: url.removeprefix(URL) for url in (SAVED_MODEL, SAVED_ROWS, REPORT)}
    missing = [name for url, name in names.items() if name not in store.files]
    if missing and (scenario.has_table or missing != [names[SAVED_ROWS]]):
        yield f"the trainers have ended, but have not written {', '.join(missing)}"
        return
    final, dense = results[0], len(PARAMETERS)
    if store.files[names[REPORT]] != str(len(final)).encode():
        yield f"the report is {store.files[names[REPORT]]!r}"
    with np.load(io.BytesIO(store.files[names[SAVED_MODEL]])) as saved:
        if any(not np.array_equal(saved[name], final[place]) for place, name in enumerate(PARAMETERS)):
            yield "the saved model has other values than the trainers at their end"
    if scenario.has_table and not scenario.eviction:
        rows = pq.read_table(pa.BufferReader(store.files[names[SAVED_ROWS]]))
        found = np.zeros_like(final[dense:])
        values = np.stack(rows["values"].to_numpy())
        found.reshape(2, -1)[:, rows["id"].to_numpy()] = values.T
        if not np.array_equal(found, final[dense:]):
            yield "the exported rows have other values than the trainers at their end"


def _manifest(number: int) -> str:
    return f"{_ROOT}/c-{number}/manifest.json"


def _loaded(store: Store, number: int, numbers: Sequence[int]) -> Array:
    """Return the parameters that ``fe.load`` reads if there is no newer checkpoint."""
    from flightedl.client.model.loading import load

    everything = store.files
    newer = [_manifest(other) for other in numbers if other > number]
    store.files = {name: data for name, data in everything.items() if name not in newer}
    try:
        values = load(CHECKPOINTS)
    finally:
        store.files = everything
    return np.stack([values[name] for name in PARAMETERS]).astype(np.float32)


def _of_all(store: Store, scenario: Scenario) -> Iterator[str]:
    """Judge complete files, also of checkpoints that were deleted since."""
    from flightedl.adapters.storage import open_storage
    from flightedl.domain.checkpoint.manifest import Manifest, candidates

    listed, store.files = store.files, store.written
    try:
        storage = open_storage(f"{CHECKPOINTS}/{JOB}")
        numbers = candidates({file.name: file.size_bytes for file in storage.list("")})
        kept = [each for each in numbers if _manifest(each) in listed]
        deleted = [each for each in numbers if each not in kept]
        for number in (*kept, *deleted[:: math.ceil(len(deleted) / _DELETED) or 1]):
            manifest = Manifest.decode(storage.read(f"c-{number}/manifest.json"))
            for sentence in _Judge(storage, manifest, scenario).problems():
                yield f"checkpoint {number}: {sentence}"
    finally:
        store.files = listed


class _Judge:
    """Compares the blocks and rows of one checkpoint with its applied batches."""

    def __init__(self, storage: Any, manifest: Manifest, scenario: Scenario) -> None:
        from flightedl.coordination.checkpoint_places import specs_of
        from flightedl.domain.checkpoint.restoring import saved_plan

        self._storage, self._manifest, self._scenario = storage, manifest, scenario
        self._specs = specs_of(manifest)
        self._plan = saved_plan(manifest, self._specs)
        self._found: list[str] = []
        #: Ids of all rows, and the applied batches of all kinds of buckets.
        self._ids: list[int] = []
        self._of_buckets: set[frozenset[Place]] = set()

    def problems(self) -> list[str]:
        """Describe what is wrong."""
        from flightedl.formats.checkpoint_files import load_shard_blocks
        from flightedl.formats.shard_files import StoredBlock

        for index in range(self._plan.pserver_count):
            taken: list[Any] = []
            applied = load_shard_blocks(self._storage, self._manifest, self._specs, self._plan, index, taken.append)
            for each in taken:
                if isinstance(each, StoredBlock):
                    self._block(each, applied)
            if self._scenario.has_table:
                self._rows(index, taken, applied)
        if self._of_buckets:
            self._row_counts()
        return self._found

    def _block(self, block: Any, applied: Any) -> None:
        scenario, name = self._scenario, f"block {block.number}"
        if self._manifest.round not in {None, block.version}:
            self._found.append(f"{name} has version {block.version}, not {self._manifest.round}")
        values = np.asarray(block.values).reshape(-1, scenario.records)
        batches = self._applied(applied, block.number)
        for epoch, in_epoch in enumerate(values, start=block.start // scenario.records):
            count = sum(each[0] == epoch for each in batches)
            if np.count_nonzero(in_epoch) != count * scenario.batch_size:
                having = f"{np.count_nonzero(in_epoch)} records of epoch {epoch}"
                self._found.append(f"{name} has {having}, but names {count} batches")
        if scenario.push_every > 1:
            return
        if scenario.mode != "sync" and not scenario.changes_modes and block.updates != len(batches):
            self._found.append(f"{name} has {block.updates} updates, but {len(batches)} batches")
        if any(abs(slot.reshape(values.shape) - (values != 0.0)).max() > _CLOSE for slot in block.slots):
            self._found.append(f"{name} has slots that do not belong to its values")

    def _applied(self, applied: Any, number: int) -> frozenset[Place]:
        """Return the batches that a block or bucket has applied."""
        from flightedl.domain.exactly_once.batches import Batch

        scenario = self._scenario
        tasks, size = scenario.records // scenario.records_per_task, scenario.records_per_task // scenario.batch_size
        places = itertools.product(range(scenario.epochs), range(tasks), range(size))
        return frozenset(place for place in places if applied.has(number, Batch(*place)))

    def all_rows(self) -> dict[int, Array]:
        """Return all rows by their ids."""
        from flightedl.formats.checkpoint_files import load_shard_blocks

        found: dict[int, Array] = {}
        for index in range(self._plan.pserver_count if self._scenario.has_table else 0):
            taken: list[Any] = []
            load_shard_blocks(self._storage, self._manifest, self._specs, self._plan, index, taken.append)
            found |= self._rows_of(index, taken)
        return found

    def _rows(self, index: int, taken: list[Any], applied: Any) -> None:
        """Note the rows of a pserver and the applied batches of its buckets."""
        rows = self._rows_of(index, taken)
        self._ids += rows
        if any(abs(value - self._scenario.final_value).max() > _CLOSE for value in rows.values()):
            self._found.append(f"rows of pserver {index} have values other than {self._scenario.final_value}")
        own = self._plan.buckets_of(index)
        self._of_buckets.update(self._applied(applied, alike.start) for alike in applied.alike(own))

    def _rows_of(self, index: int, taken: list[Any]) -> dict[int, Array]:
        from flightedl.domain.tables.placement import BUCKETS, buckets_of, salt_of
        from flightedl.domain.tables.restoring import FileBuckets
        from flightedl.formats.row_batches import ROWS_OF, StoredRows

        own = self._plan.buckets_of(index)
        is_read = np.zeros(self._plan.block_count + BUCKETS, np.bool_)
        is_read[own] = True
        rows: dict[int, Any] = {}
        for each in taken:
            if isinstance(each, FileBuckets):
                is_read[:] = False
                is_read[[number for number in each.numbers if number in own]] = True
            elif isinstance(each, StoredRows) and each.kind.startswith(ROWS_OF):
                kept = is_read[buckets_of(each.ids, salt_of("rows")) + self._plan.block_count]
                rows.update(zip(each.ids[kept].tolist(), each.values[kept], strict=True))
        return rows

    def _row_counts(self) -> None:
        """Compare the number of rows of each epoch with the number of its batches."""
        counts = Counter(each // self._scenario.records for each in self._ids)
        least, most = frozenset.intersection(*self._of_buckets), frozenset.union(*self._of_buckets)
        if len(self._ids) != len(set(self._ids)):
            self._found.append("some rows are in the files of two pservers")
        for epoch in range(self._scenario.epochs):
            low, high = (sum(each[0] == epoch for each in some) * self._scenario.batch_size for some in (least, most))
            if not low <= counts[epoch] <= high:
                self._found.append(f"there are {counts[epoch]} rows of epoch {epoch}, not {low} to {high}")
