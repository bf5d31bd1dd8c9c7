"""If a file of a chain is damaged or does not match its manifest, an older checkpoint is loaded completely."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.domain.checkpoint.manifest import ShardFile
from flightedl.domain.consistency.modes import Async
from flightedl.pserver.cuts.snapshots import Snapshots
from tests.support.memory import MemoryStorage

from .test_rows import Cluster, Pserver, rows_of

Files = dict[int, list[ShardFile]]
#: Checkpoint -> the rows of each table.
Rows = dict[int, list[dict[int, list[float]]]]


def _chain(job: str) -> tuple[Cluster, Files, Rows]:
    """Write checkpoints 1 to 3 of two pservers: a base and two increments each."""
    cluster = Cluster(2)
    for pserver in cluster.pservers:
        pserver.snapshots = Snapshots(pserver.shard.copying, cluster.storage, job, pserver.index, 2, SystemClock())
    files: Files = {}
    rows: Rows = {}
    for number, some in enumerate((1, 5, 7), 1):
        cluster.push(number - 1, every=some)
        files[number] = cluster.checkpoint(number)
        rows[number] = cluster.rows()
    assert [len(file.links) for file in files[3]] == [2, 2]
    return cluster, files, rows


Contents = Mapping[str, bytes]
Damage = Callable[[Contents, Files, int], bytes]


def _truncated(contents: Contents, files: Files, number: int) -> bytes:
    data = contents[files[number][0].name]
    return data[: len(data) * 3 // 4]


def _padded(contents: Contents, files: Files, number: int) -> bytes:
    """Replace the end of the file with zeros, as a file system does that has lost its last pages."""
    data = contents[files[number][0].name]
    return data[: len(data) // 2].ljust(len(data), b"\0")


def _empty(_contents: Contents, _files: Files, _number: int) -> bytes:
    return b""


def _of_another_pserver(contents: Contents, files: Files, number: int) -> bytes:
    return contents[files[number][1].name]


def _of_another_checkpoint(contents: Contents, files: Files, number: int) -> bytes:
    return contents[files[number - 1 or 2][0].name]


def _of_another_job(contents: Contents, files: Files, number: int) -> bytes:
    """Return the same file of another job, which has the same size."""
    theirs, named, _ = _written("k")
    data = theirs[named[number][0].name]
    assert len(data) == len(contents[files[number][0].name])
    return data


@cache
def _written(job: str) -> tuple[Mapping[str, bytes], Files, Rows]:
    cluster, files, rows = _chain(job)
    return dict(cluster.storage.files), files, rows


@pytest.mark.parametrize(("number", "count"), [(1, 1), (2, 1), (2, 3), (3, 1)])
@pytest.mark.parametrize(
    "damage", [_truncated, _padded, _empty, _of_another_pserver, _of_another_checkpoint, _of_another_job]
)
def test_checkpoints_that_depend_on_a_damaged_file_are_skipped(damage: Damage, number: int, count: int) -> None:
    contents, files, rows = _written("j")
    storage = MemoryStorage()
    storage.files = {**contents, files[number][0].name: damage(contents, files, number)}
    restored = [Pserver(storage, Async(), index, count) for index in range(count)]
    numbers = {pserver.restore() for pserver in restored}
    # One that needs nothing of the damaged file may have read a newer one; a master has all of them agree.
    assert numbers - {3} == {number - 1 or None}
    assert count > 1 or len(numbers) == 1
    if number > 1 and len(numbers) == 1:
        assert rows_of(restored) == rows[number - 1]
