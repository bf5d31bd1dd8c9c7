"""The search for the checkpoint that a pserver loads."""

from __future__ import annotations

from collections.abc import Container

import pytest
from msgspec.structs import replace

from flightedl.domain.checkpoint.manifest import Link, Manifest, ShardFile, Skipped, manifest_name, shard_name
from flightedl.domain.pserver.search import CheckpointSearch, Found, ListFiles, LoadBlocks, NothingFound, ReadManifest


class Store:
    """Files of checkpoints with one shard each, and a search in them."""

    def __init__(self, *numbers: int) -> None:
        self.sizes: dict[str, int] = {}
        self.data: dict[int, bytes] = {}
        for number in numbers:
            self.add(number)

    def add(self, number: int) -> None:
        name = shard_name(number, 0, 1, 7, 1)
        file = ShardFile(
            index=0, generation=7, name=name, size_bytes=9, hash="0" * 32, blocks=1, lowest_version=0, highest_version=0
        )
        manifest = Manifest(
            job="job",
            number=number,
            plan_hash="p",
            pserver_count=1,
            cut_for=1,
            round=None,
            created_s=0.0,
            shards=(file,),
        )
        self.data[number] = manifest.encode()
        self.sizes |= {name: 9, manifest_name(number): len(self.data[number])}

    def sweep(self, number: int) -> None:
        for name in [name for name in self.sizes if name.startswith(f"c-{number}/")]:
            del self.sizes[name]

    def tried(
        self, loadable: range | None = None, damaged: Container[int] = (), rejected: Container[int] = ()
    ) -> list[object]:
        """Return the numbers that were loaded or could not be, and the result."""
        search = CheckpointSearch("job", loadable, rejected)
        step, seen = search.begin(), []
        while True:
            match step:
                case ListFiles():
                    step = search.listed(self.sizes)
                case ReadManifest(number):
                    step = search.manifest_read(self.data[number])
                case LoadBlocks(manifest):
                    seen.append(manifest.number)
                    step = search.unusable("flipped") if manifest.number in damaged else search.loaded()
                case _:
                    return [*seen, step]


def test_the_newest_checkpoint_is_loaded():
    assert Store(1, 3, 2).tried() == [3, Found(3, ())]


def test_an_unusable_checkpoint_gives_way_to_the_previous_one():
    store = Store(1, 2, 3)
    store.data[3] = store.data[3][:-1]
    flipped = Skipped(2, "flipped")
    *tried, found = store.tried(damaged={2})
    assert tried == [2, 1]
    assert isinstance(found, Found)
    assert (found.number, [each.number for each in found.skipped], found.skipped[1]) == (1, [3, 2], flipped)


def test_checkpoints_based_on_a_damaged_file_are_skipped_unread():
    store = Store(1, 2, 3, 4, 5)
    for number in (3, 4, 5):
        links = tuple(
            Link(number=n, name=shard_name(n, 0, 1, 7, 1), size_bytes=9, hash="0" * 32, row_bytes=9)
            for n in range(2, number)
        )
        manifest = Manifest.decode(store.data[number])
        file = replace(manifest.shards[0], links=links, after=links[-1].name)
        store.data[number] = replace(manifest, shards=(file,)).encode()
        store.sizes[manifest_name(number)] = len(store.data[number])
    search = CheckpointSearch("job", None)
    search.begin()
    step, loaded = search.listed(store.sizes), []
    while isinstance(step, ReadManifest | LoadBlocks):
        if isinstance(step, ReadManifest):
            step = search.manifest_read(store.data[step.number])
        else:
            loaded.append(step.manifest.number)
            damaged = shard_name(3, 0, 1, 7, 1)
            is_damaged = any(file.name == damaged for file in step.manifest.shards[0].chain)
            step = search.unusable("flipped", damaged) if is_damaged else search.loaded()
    assert loaded == [5, 2]
    assert isinstance(step, Found)
    assert [each.number for each in step.skipped] == [5, 4, 3]
    assert step.skipped[1].reason == f"it also needs {damaged}"


def test_a_listing_reveals_an_incomplete_checkpoint_before_it_is_read():
    store = Store(1, 2)
    store.sizes[shard_name(2, 0, 1, 7, 1)] -= 1
    assert store.tried()[0] == 1


@pytest.mark.parametrize(("loadable", "number"), [(range(2, 4), 3), (range(1, 3), 2), (range(4, 9), None)])
def test_only_allowed_checkpoints_are_considered(loadable: range, number: int | None):
    found = Store(1, 2, 3).tried(loadable)[-1]
    assert found == (NothingFound(()) if number is None else Found(number, ()))


def test_checkpoints_that_another_pserver_could_not_load_are_not_considered():
    """With rollback, pservers would otherwise never agree on a checkpoint."""
    tried, found = Store(1, 2, 3).tried(rejected={3})
    assert tried == 2
    assert isinstance(found, Found)
    assert [each.number for each in found.skipped] == [3]


def test_without_a_usable_checkpoint_the_reasons_are_listed():
    found = Store(1, 2).tried(damaged={1, 2})[-1]
    assert found == NothingFound((Skipped(2, "flipped"), Skipped(1, "flipped")))


def test_checkpoints_that_were_never_completed_are_listed_too():
    store = Store()
    store.sizes["c-4/shard"] = 1
    (found,) = store.tried()
    assert isinstance(found, NothingFound)
    assert [each.number for each in found.skipped] == [4]


def test_the_store_is_listed_again_when_all_listed_files_are_deleted():
    store = Store(1)
    search = CheckpointSearch("job", None)
    search.begin()
    assert search.listed(store.sizes) == ReadManifest(1)
    store.add(2)
    store.sweep(1)
    assert search.unusable("it is gone") == ListFiles()
    assert search.listed(store.sizes) == ReadManifest(2)
    assert isinstance(search.manifest_read(store.data[2]), LoadBlocks)
    assert search.loaded() == Found(2, ())
