"""Manifests: validity, choice and retention."""

from __future__ import annotations

import random

import msgspec
import pytest
from msgspec import structs

from flightedl.domain.checkpoint.manifest import (
    Link,
    Manifest,
    Skipped,
    candidates,
    deletable,
    examine,
    manifest_name,
    number_of,
    shard_name,
    without_manifest,
)
from flightedl.errors import CorruptError

from .checkpoint_shell import shard_file


def manifest(number=3, job="job", pserver_count=2) -> Manifest:
    shards = tuple(
        shard_file(i, 7 + i, shard_name(number, i, pserver_count, 7 + i, 1), b"x" * 10) for i in range(pserver_count)
    )
    return Manifest(
        job=job,
        number=number,
        plan_hash="ab",
        pserver_count=pserver_count,
        cut_for=2,
        round=4,
        created_s=1.5,
        shards=shards,
        declaration=msgspec.Raw(b'{"a":[1,2]}'),
        queue=msgspec.Raw(b'{"version":1}'),
    )


def test_a_decoded_manifest_is_unchanged():
    assert Manifest.decode(manifest().encode()) == manifest()


def test_no_mutation_of_a_manifest_is_accepted():
    data = manifest().encode()
    rng = random.Random(0)
    for _ in range(3000):
        mutated = bytearray(data)
        kind = rng.randrange(4)
        at = rng.randrange(len(data))
        if kind == 0:
            mutated[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del mutated[at:]
        elif kind == 2:
            del mutated[at]
        else:
            mutated.insert(at, rng.randrange(256))
        if bytes(mutated) != data:
            with pytest.raises(CorruptError):
                Manifest.decode(bytes(mutated))


def test_names_contain_their_checkpoint():
    assert number_of(manifest_name(12)) == 12
    assert number_of(shard_name(3, 0, 2, 5, 1)) == 3
    for foreign in ("c-x/manifest.json", "c-03/manifest.json", "other", "c-3", "d/c-3/manifest.json"):
        assert number_of(foreign) is None
    assert candidates(["c-2/manifest.json", "c-10/manifest.json", "c-4/shard"]) == (10, 2)
    assert [s.number for s in without_manifest(["c-2/manifest.json", "c-4/shard", "x"])] == [4]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda sizes: sizes.pop("c-3/shard-1-of-2-8-1.arrow"), "is missing"),
        (lambda sizes: sizes.update({"c-3/shard-0-of-2-7-1.arrow": 9}), "has 9 bytes instead of 10"),
    ],
)
def test_a_checkpoint_with_wrong_files_is_skipped(change, reason):
    sizes = {shard.name: 10 for shard in manifest().shards}
    assert examine(3, manifest().encode(), sizes, "job") == manifest()
    change(sizes)
    found = examine(3, manifest().encode(), sizes, "job")
    assert isinstance(found, Skipped)
    assert reason in found.reason


def test_foreign_and_misplaced_manifests_are_skipped():
    sizes = {shard.name: 10 for shard in manifest().shards}
    assert "belongs to job 'job'" in examine(3, manifest().encode(), sizes, "another").reason
    assert "checkpoint 3" in examine(4, manifest().encode(), sizes, "job").reason
    assert isinstance(examine(3, b"{}", sizes, "job"), Skipped)


def files(*numbers, without=()):
    names = []
    for number in numbers:
        names += [f"c-{number}/shard-0-of-1-1-1.arrow"]
        if number not in without:
            names.append(f"c-{number}/manifest.json")
    return names


def gone(names, **arguments):
    return {number_of(name) for name in deletable(names, **arguments)}


def test_the_newest_and_every_nth_checkpoint_are_kept():
    names = files(*range(1, 10))
    assert gone(names, latest=9, keep=2, keep_every=None) == set(range(1, 8))
    assert gone(names, latest=9, keep=2, keep_every=3) == {1, 2, 4, 5, 7}
    assert gone(names, latest=9, keep=20, keep_every=None) == set()


def test_bases_of_kept_increments_are_kept():
    names = [*files(*range(1, 10)), "c-8/shard-1-of-2-1-1-on-5.arrow", "c-9/shard-1-of-2-1-1-on-5.arrow"]
    assert gone(names, latest=9, keep=1, keep_every=None) == {1, 2, 3, 4}
    assert gone(names, latest=9, keep=2, keep_every=None, rejected=[8]) == {1, 2, 3, 4}
    names = [*files(*range(1, 10)), "c-4/shard-0-of-1-1-2-on-3.arrow"]
    assert gone(names, latest=9, keep=1, keep_every=None) == set(range(1, 9))
    assert gone(names, latest=9, keep=1, keep_every=4) == {1, 2, 5, 6, 7}, "they may have been kept by other rules"


def test_a_checkpoint_based_on_deleted_files_loses_its_manifest():
    """Two pservers whose chains have different bases: 3 is needed only as a base of 5, and is itself based on 1."""
    chained = ["c-3/shard-1-of-2-1-1-on-1.arrow", "c-4/shard-0-of-2-1-1-on-3.arrow", "c-5/shard-0-of-2-1-1-on-3.arrow"]
    names = [*files(*range(1, 6)), *chained]
    found = deletable(names, latest=5, keep=2, keep_every=None)
    assert {number_of(name) for name in found} == {1, 2, 3}
    assert [name for name in found if name.startswith("c-3")] == ["c-3/manifest.json"]
    assert gone(names, latest=5, keep=2, keep_every=3) == set(), "3 lasts, with its base"


def test_an_increment_needs_its_links():
    links = (
        Link(number=1, name="c-1/shard-0-of-1-1-1.arrow", size_bytes=7, hash="1" * 32, row_bytes=5),
        Link(number=2, name="c-2/shard-0-of-1-1-1-on-1.arrow", size_bytes=8, hash="2" * 32, row_bytes=5),
    )
    first, *others = manifest().shards
    with_links = structs.replace(first, after=links[-1].name, links=links)
    found = structs.replace(manifest(), shards=(with_links, *others))
    sizes = {shard.name: 10 for shard in found.shards} | {link.name: link.size_bytes for link in links}
    assert examine(3, found.encode(), sizes, "job") == found
    assert (
        "c-1/shard-0-of-1-1-1.arrow has 6 bytes" in examine(3, found.encode(), sizes | {links[0].name: 6}, "job").reason
    )
    sizes.pop(links[1].name)
    assert "c-2/shard-0-of-1-1-1-on-1.arrow is missing" in examine(3, found.encode(), sizes, "job").reason
    for wrong in (
        structs.replace(with_links, links=links[::-1], after=links[0].name),
        structs.replace(with_links, links=links[:1]),
        structs.replace(with_links, links=()),
        structs.replace(with_links, links=(*links, structs.replace(links[1], number=3))),
    ):
        broken = structs.replace(found, shards=(wrong, *others))
        assert "is based on other files" in examine(3, broken.encode(), sizes, "job").reason


def test_manifests_are_deleted_before_their_files():
    order = deletable(files(1, 2, 3), latest=3, keep=1, keep_every=None)
    assert order[0] == "c-1/manifest.json"
    assert order.index("c-2/manifest.json") < order.index("c-2/shard-0-of-1-1-1.arrow")


def test_a_checkpoint_that_is_being_written_is_kept():
    names = files(1, 2, 3, 4, 5, without=(2, 4, 5))
    assert gone(names, latest=3, keep=2, keep_every=None) == set(), "2 is between kept ones"
    assert gone(names, latest=3, keep=1, keep_every=None) == {1, 2}


def test_a_manifest_newer_than_the_pointer_is_kept_and_not_counted():
    assert gone(files(1, 2, 3, 4), latest=3, keep=1, keep_every=None) == {1, 2}


def test_rejected_checkpoints_are_not_counted():
    names = files(7, 8, 9, 10, 11)
    assert gone(names, latest=11, keep=2, keep_every=None, rejected=[8, 9, 10]) == set()
    assert gone(names, latest=11, keep=1, keep_every=10, rejected=[8, 9, 10]) == {7, 8, 9, 10}


def test_nothing_is_deleted_if_the_latest_is_missing():
    assert deletable(files(1, 2, 3), latest=4, keep=1, keep_every=None) == ()


def test_foreign_files_are_kept():
    assert deletable(["c-x/a", "notes", *files(1, 2)], latest=2, keep=1, keep_every=None) == (
        "c-1/manifest.json",
        "c-1/shard-0-of-1-1-1.arrow",
    )
