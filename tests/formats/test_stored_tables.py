"""Rows of a table in a chain of files: each row is read from the newest file that has it, or not at all."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from msgspec import structs

from flightedl.domain.checkpoint.manifest import Link, Manifest, ShardFile
from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.model.optimizers import SGD
from flightedl.domain.tables.evict import Evict
from flightedl.domain.tables.optimizers import RowAdagrad
from flightedl.domain.tables.placement import BUCKETS, as_ids, buckets_of
from flightedl.domain.tables.spec import TableSpec
from flightedl.formats.row_batches import TABLE, StoredRows, StoredRowSpan
from flightedl.formats.shard_files import ShardHeader, StoredBlock, load_shard, write_shard
from flightedl.formats.stored_tables import stored_rows, with_rows
from flightedl.formats.table_files import FileRows, as_kept
from tests.support.memory import MemoryStorage

SPEC = TableSpec("t", 2, SGD(lr=1.0))
NOTHING = np.zeros(0, np.uint32)
Ids = npt.NDArray[np.uint64]


def rows(ids: Ids, value: float) -> StoredRows:
    ages = np.ones(ids.size, np.uint32)
    slots, values = np.zeros((ids.size, 0), np.float32), np.full((ids.size, 2), value, np.float32)
    return StoredRows(0, 0, "rows:float32", ids, ages, ages, ages, slots, values)


def removed(ids: Ids) -> StoredRows:
    slots, sketch = np.zeros((0, 0), np.float32), np.zeros(0, np.uint8)
    return StoredRows(0, 0, TABLE, ids, NOTHING, NOTHING, NOTHING, slots, sketch)


class Chain:
    """A base and its increments, which one pserver wrote."""

    def __init__(self) -> None:
        self.storage = MemoryStorage()
        self._links: list[Link] = []

    def write(self, *content: StoredRows) -> Manifest:
        number = len(self._links) + 1
        name = f"c-{number}/shard"
        span = StoredRowSpan(0, BUCKETS, 1, 1, 0)
        header = ShardHeader(job="j", number=number, index=0, pservers=1, plan_hash="p", blocks=[], rows=[span])
        applied = AppliedBatches(range(BUCKETS)).encode()
        written = write_shard(self.storage, name, header, applied, iter([]), 1, content)
        file = ShardFile(
            index=0,
            generation=1,
            name=name,
            size_bytes=written.size_bytes,
            hash=written.hash,
            blocks=0,
            lowest_version=0,
            highest_version=0,
            links=tuple(self._links),
        )
        self._links.append(
            Link(number=number, name=name, size_bytes=written.size_bytes, hash=written.hash, row_bytes=0)
        )
        return Manifest(
            job="j",
            number=number,
            plan_hash="p",
            pserver_count=1,
            cut_for=1,
            round=None,
            created_s=0.0,
            shards=(file,),
        )

    def read(self, manifest: Manifest, buckets: range = range(BUCKETS)) -> dict[int, float]:
        found: dict[int, float] = {}
        for some in stored_rows(self.storage, manifest, 0, SPEC, buckets):
            assert not found.keys() & set(some.ids.tolist()), "a row occurs twice"
            found.update(zip(some.ids.tolist(), some.values[:, 0].tolist(), strict=True))
        return found


IDS = as_ids(np.arange(40))


@pytest.fixture
def chain() -> Chain:
    made = Chain()
    made.write(removed(IDS[:0]), rows(IDS, 1.0))
    made.write(removed(IDS[30:32]), rows(IDS[:20], 2.0))
    return made


def test_each_row_is_that_of_the_newest_file(chain: Chain) -> None:
    manifest = chain.write(removed(IDS[:3]), rows(IDS[15:25], 3.0))
    expected = dict.fromkeys(IDS[3:15].tolist(), 2.0) | dict.fromkeys(IDS[15:25].tolist(), 3.0)
    expected |= dict.fromkeys([*IDS[25:30].tolist(), *IDS[32:].tolist()], 1.0)
    assert chain.read(manifest) == expected


def test_a_row_that_was_removed_and_written_again_exists(chain: Chain) -> None:
    manifest = chain.write(removed(IDS[:0]), rows(IDS[30:31], 3.0))
    found = chain.read(manifest)
    assert found[int(IDS[30])] == 3.0
    assert int(IDS[31]) not in found


@pytest.mark.parametrize("buckets", [range(512), range(512, BUCKETS), range(5, 900)])
def test_only_rows_of_the_requested_buckets_are_read(chain: Chain, buckets: range) -> None:
    manifest = chain.write(removed(IDS[:0]), rows(IDS[:1], 3.0))
    of_buckets = {int(each) for each in IDS if int(buckets_of(np.array([each]), SPEC.salt)[0]) in buckets}
    assert chain.read(manifest, buckets).keys() == of_buckets - set(IDS[30:32].tolist())


# --- imports ---

HALF = TableSpec("half", 3, RowAdagrad(lr=1.0), dtype="bfloat16", evict=Evict(unused_versions=2, unused_epochs=1))
#: Spans of the two pservers. The first one has got buckets from another pserver.
OWN = [
    [StoredRowSpan(5, 300, 40, 4, 6, [5]), StoredRowSpan(305, 212, 55, 5, 7)],
    [StoredRowSpan(517, BUCKETS - 512, 90, 9, 8)],
]


def state(span: StoredRowSpan, table: int, gone: Ids, shifts: npt.NDArray[np.int32]) -> StoredRows:
    empty, sketch = np.zeros((0, 0), np.float32), np.arange(3, dtype=np.uint8)
    given_up = np.full(BUCKETS, 7, np.uint32)
    return StoredRows(span.first, table, TABLE, gone, given_up, shifts.view(np.uint32), NOTHING, empty, sketch, 38)


def two_pservers() -> tuple[MemoryStorage, Manifest]:
    """Return a checkpoint with five blocks and two tables. The second pserver's file is an increment."""
    storage, files = MemoryStorage(), []
    base = Link(number=1, name="c-1/base", size_bytes=0, hash="", row_bytes=0)
    for index, spans in enumerate(OWN):
        blocks = [StoredBlock(n, 0, n, n + 1, 90, 9, np.float32([n]), (np.float32([-n]),)) for n in range(5)[index::2]]
        header = ShardHeader(
            job="j", number=2, index=index, pservers=2, plan_hash="p", blocks=[b.number for b in blocks], rows=spans
        )
        numbers = [*header.blocks, *(number for span in spans for number in span.numbers)]
        shifts = np.arange(BUCKETS, dtype=np.int32) if index else np.zeros(0, np.int32)
        content = [state(span, table, IDS[:2], shifts) for span in spans for table in range(2)]
        applied = AppliedBatches(numbers).encode()
        written = write_shard(storage, f"c-2/{index}", header, applied, blocks, 1, content)
        file = ShardFile(
            index=index,
            generation=3,
            name=f"c-2/{index}",
            size_bytes=written.size_bytes,
            hash=written.hash,
            blocks=len(blocks),
            lowest_version=0,
            highest_version=90,
            after=base.name * index,
            links=(base,) * index,
        )
        files.append(file)
    return storage, Manifest(
        job="j",
        number=2,
        plan_hash="p",
        pserver_count=2,
        cut_for=2,
        round=4,
        created_s=1.0,
        shards=tuple(files),
        queue=msgspec.Raw(b'{"q":1}'),
    )


def test_imported_rows_are_increments_with_the_blocks_and_states_of_the_newest_files() -> None:
    storage, manifest = two_pservers()
    before = {file.name: storage.read(file.name) for file in storage.list("")}
    slots = np.arange(4000, dtype=np.float32).reshape(-1, 1)
    ids = np.random.default_rng(3).integers(0, 2**64, 4000, np.uint64)
    values = np.linspace(-3, 3, 12_000, dtype=np.float32).reshape(4000, 3)
    rows = [FileRows(ids[:150], values[:150], np.arange(150, dtype=np.uint32), slots[:150])]
    rows.append(FileRows(ids[150:], values[150:], None, None))
    found = with_rows(storage, manifest, 1, HALF, rows, 7, 5.0)
    assert {name: storage.read(name) for name in before} == before
    assert Manifest.decode(found.encode()) == found
    assert (found.number, found.queue, found.round, found.created_s) == (7, manifest.queue, 4, 5.0)
    imported: dict[int, tuple[int, ...]] = {}
    for old, new in zip(manifest.shards, found.shards, strict=True):
        assert new.links[:-1] == old.links
        assert (new.links[-1].number, new.links[-1].name, new.links[-1].hash) == (2, old.name, old.hash)
        assert new.name.endswith(f"-on-{1 if old.links else 2}.arrow")
        header, applied, records = load_shard(storage, new.name, new.size_bytes, new.hash)
        former, former_applied, former_records = load_shard(storage, old.name, old.size_bytes, old.hash)
        assert header == structs.replace(former, number=7, rows=[structs.replace(s, complete=[]) for s in former.rows])
        assert applied == former_applied
        known = [repr(structs_of(each)) for each in former_records]
        others, last = [[*group] for _, group in groupby(records, lambda each: getattr(each, "kind", TABLE) != TABLE)]
        assert [repr(structs_of(each)) for each in others] == known
        assert not any(each.ids.size for each in others if isinstance(each, StoredRows)), "the rows still exist"
        for each in last:
            assert (each.table, each.kind) == (1, "rows:uint16")
            for place, one in enumerate(each.ids.tolist()):
                stamps = (each.span, int(each.versions[place]), int(each.epochs[place]), int(each.updates[place]))
                assert one not in imported
                imported[one] = (*stamps, float(each.slots[place, 0]), *each.values[place].tolist())
    buckets, bits = buckets_of(ids, HALF.salt).tolist(), as_kept(values, "bfloat16").tolist()
    expected = {}
    for place, (one, bucket) in enumerate(zip(ids.tolist(), buckets, strict=True)):
        stamps = (5, 40, 6) if bucket < 300 else (305, 55, 7) if bucket < 512 else (517, 90 + bucket, 8)
        own = (place, float(place)) if place < 150 else (0, 0.0)
        expected[one] = (*stamps, *own, *bits[place])
    assert imported == expected


def structs_of(record: object) -> tuple[object, ...]:
    """Return the content of a record without the ids that its file removes."""
    if isinstance(record, StoredRows):
        record = replace(record, ids=record.ids[:0])
    assert isinstance(record, StoredRows | StoredBlock)
    return tuple(getattr(record, name) for name in record.__dataclass_fields__)


def test_an_import_replaces_adds_and_restores_rows(chain: Chain) -> None:
    """Ids 30 and 31 were removed by the second file, and the rows 20 to 29 and 32 to 39 are only in the base."""
    manifest = chain.write(removed(IDS[:0]))
    ids = np.concatenate([IDS[:2], IDS[25:27], IDS[30:31], as_ids(np.array([-5]))])
    rows = [FileRows(ids, np.full((6, 2), 9, np.float32), None, None)]
    found = with_rows(chain.storage, manifest, 0, SPEC, rows, 4, 5.0)
    before = chain.read(manifest)
    assert chain.read(found) == before | dict.fromkeys(ids.tolist(), 9.0)
    assert int(IDS[31]) not in chain.read(found)
    again = with_rows(
        chain.storage, found, 0, SPEC, [FileRows(ids[:1], np.ones((1, 2), np.float32), None, None)], 5, 6.0
    )
    assert chain.read(again) == chain.read(found) | {int(ids[0]): 1.0}
