"""Increments: on which files they are based, and when a chain ends."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from flightedl.domain.checkpoint.chains import Chains, Offer, files_of
from flightedl.domain.checkpoint.checkpoints import Checkpoints
from flightedl.domain.checkpoint.manifest import Manifest, ShardFile, checksum, shard_name, since_of
from flightedl.domain.checkpoint.values import CheckpointSettings, OrderSnapshot, Pointer
from flightedl.messages.control import SnapshotRequest


def file(number: int, after: str = "", *, size_bytes: int = 1000, **more: Any) -> ShardFile:
    given: dict[str, Any] = {"index": 0, "generation": 5, "row_bytes": size_bytes - 100, **more}
    return ShardFile(
        name=f"c-{number}/a",
        size_bytes=size_bytes,
        hash="0" * 32,
        blocks=1,
        lowest_version=0,
        highest_version=0,
        after=after,
        **given,
    )


def made(chains: Chains, number: int, size_bytes: int = 10, rejected: tuple[int, ...] = ()) -> Offer:
    """Complete a checkpoint as offered; return the offer."""
    offer = chains.offer(0, 5, number, rejected)
    found = file(number, size_bytes=1000) if offer.is_base else file(number, offer.after, size_bytes=size_bytes)
    linked = chains.linked(found, offer)
    assert linked is not None
    chains.completed(number, [linked])
    return offer


def test_a_chain_is_a_base_and_a_limited_number_of_increments():
    chains = Chains(2, None)
    offers = [made(chains, number) for number in range(1, 8)]
    assert [offer.is_base for offer in offers] == [True, False, False, True, False, False, True]
    assert [offer.since for offer in offers] == [1, 1, 1, 4, 4, 4, 7]
    assert offers[3].after == "c-3/a", "changes since then are kept in case the base is lost"
    last = chains.linked(file(9, "c-7/a", size_bytes=10), chains.offer(0, 5, 9, ()))
    assert last is not None
    assert [link.name for link in last.links] == ["c-7/a"]


def test_without_increments_all_files_are_bases():
    chains = Chains(0, None)
    assert all(made(chains, number).is_base for number in range(1, 5))


def test_a_chain_ends_when_its_increments_are_larger_than_its_base():
    chains = Chains(100, None)
    assert [made(chains, number, 400).is_base for number in range(1, 6)] == [True, False, False, False, True]
    chains = Chains(100, None)
    assert [made(chains, number, 500).is_base for number in range(1, 6)] == [True, False, False, False, True]


def test_files_with_few_rows_have_no_increments():
    chains = Chains(8, None)
    chains.completed(1, [file(1, row_bytes=333)])
    assert chains.offer(0, 5, 2, ()).is_base
    for size_bytes, row_bytes in ((1000, 334), (999, 333)):
        chains.completed(1, [file(1, size_bytes=size_bytes, row_bytes=row_bytes)])
        assert not chains.offer(0, 5, 2, ()).is_base


def test_a_permanent_checkpoint_is_a_base():
    chains = Chains(8, 4)
    assert [number for number in range(1, 10) if made(chains, number).is_base] == [1, 4, 8]


def test_no_increment_is_based_on_an_unloadable_checkpoint():
    chains = Chains(8, None)
    for number in (1, 2, 3):
        made(chains, number)
    assert not chains.offer(0, 5, 4, [9]).is_base
    assert chains.offer(0, 5, 4, [2]) == Offer("c-3/a", is_base=True, since=4)


def test_another_process_begins_with_a_base():
    chains = Chains(8, None)
    made(chains, 1)
    assert chains.offer(0, 6, 2, ()) == Offer("", is_base=True, since=2)
    assert chains.offer(1, 5, 2, ()) == Offer("", is_base=True, since=2)


def test_a_process_may_write_a_base_instead_of_an_increment():
    chains = Chains(8, None)
    made(chains, 1)
    offer = chains.offer(0, 5, 2, ())
    assert chains.linked(file(2), offer) == file(2)


@pytest.mark.parametrize("after", ["c-1/a", "c-3/a"])
def test_an_increment_on_a_file_not_offered_is_refused(after: str):
    chains = Chains(8, None)
    made(chains, 1)
    made(chains, 2)
    offer = chains.offer(0, 5, 3, ())
    assert chains.linked(file(3, after), offer) is None
    assert chains.linked(file(3, "c-2/a"), Offer("c-2/a", is_base=True, since=3)) is None
    assert chains.linked(replace(file(3, "c-2/a"), index=1), offer) is None


def test_a_file_name_contains_the_checkpoint_of_its_base():
    assert since_of(shard_name(12, 0, 2, 7, 1, since=9)) == 9
    assert since_of(shard_name(12, 0, 2, 7, 1, since=12)) is None
    assert since_of(shard_name(12, 0, 2, 7, 1)) is None
    assert since_of("c-12/manifest.json") is None


def manifest_of(number: int, *shards: ShardFile) -> Manifest:
    return Manifest(
        job="j",
        number=number,
        plan_hash="p",
        pserver_count=len(shards),
        cut_for=1,
        round=None,
        created_s=0.0,
        shards=shards,
    )


def ordered_by_a_successor(generation: int, files: tuple[ShardFile, ...], latest: Pointer) -> SnapshotRequest:
    """Return the order of a new master to the only pserver, which serves with ``generation``."""
    settings = CheckpointSettings()
    predecessor = Checkpoints(settings, 1, 1, 0.0, next_number=8, latest=latest)
    successor = Checkpoints.restore(predecessor.encode(), settings, 2, 1, 0.0, files)
    successor.pserver_up(0, generation, 0.0)
    successor.request("a test")
    (order,) = (each for each in successor.tick(1.0, None) if isinstance(each, OrderSnapshot))
    return order.snapshot


def increment_of_two() -> ShardFile:
    chains = Chains(8, None)
    for number in (3, 5):
        made(chains, number)
    linked = chains.linked(file(7, "c-5/a", size_bytes=10), chains.offer(0, 5, 7, ()))
    assert linked is not None
    return linked


def test_a_new_master_continues_the_chain_of_the_newest_manifest():
    data = manifest_of(7, increment_of_two()).encode()
    latest = Pointer(7, checksum(data))
    files = files_of(latest, data)
    order = ordered_by_a_successor(5, files, latest)
    assert (order.after, order.is_base, since_of(order.name)) == ("c-7/a", False, 3)
    of_another_process = ordered_by_a_successor(6, files, latest)
    assert (of_another_process.after, of_another_process.is_base) == ("", True)


def test_bases_are_ordered_if_the_newest_manifest_is_unknown_or_has_other_pservers():
    whole = increment_of_two()
    data = manifest_of(7, whole).encode()
    latest = Pointer(7, checksum(data))
    two = (whole, replace(whole, index=1))
    for files in ((), two):
        order = ordered_by_a_successor(5, files, latest)
        assert (order.after, order.is_base, since_of(order.name)) == ("", True, None)


@pytest.mark.parametrize("number", [6, 7])
def test_only_the_manifest_of_the_pointer_counts(number: int):
    data = manifest_of(7, increment_of_two()).encode()
    assert files_of(Pointer(number, checksum(data)), data) == ((increment_of_two(),) if number == 7 else ())
    assert files_of(Pointer(7, checksum(data[:-1])), data) == ()
    assert files_of(Pointer(7, checksum(data[:-1])), data[:-1]) == ()
