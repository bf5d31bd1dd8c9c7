"""Rows of a table in a chain of files: each row is read from the newest file that has it, or not at all."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from flightedl.domain.checkpoint.manifest import Link, Manifest, ShardFile
from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.model.optimizers import SGD
from flightedl.domain.tables.placement import BUCKETS, as_ids, buckets_of
from flightedl.domain.tables.spec import TableSpec
from flightedl.formats.row_batches import TABLE, StoredRows, StoredRowSpan
from flightedl.formats.shard_files import ShardHeader, write_shard
from flightedl.formats.stored_tables import stored_rows
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
