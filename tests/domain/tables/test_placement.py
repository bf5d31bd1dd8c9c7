"""Where ids lie."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flightedl.domain.tables.placement import (
    BUCKETS,
    as_ids,
    bucket_of,
    buckets_of,
    buckets_of_pserver,
    id_of_text,
    ids_of_texts,
    mixed,
    mixed_ids,
    pserver_of,
    pservers_of,
    salt_of,
)


@given(st.lists(st.integers(-(2**63), 2**63 - 1)), st.text(min_size=1), st.integers(1, 1100))
def test_the_forms_agree(numbers: list[int], table: str, pserver_count: int) -> None:
    salt = salt_of(table)
    ids = as_ids(np.array(numbers, np.int64))
    assert mixed_ids(ids, salt).tolist() == [mixed(number, salt) for number in numbers]
    assert buckets_of(ids, salt).tolist() == [bucket_of(number, salt) for number in numbers]
    owners = [pserver_of(bucket_of(number, salt), pserver_count) for number in numbers]
    assert pservers_of(ids, salt, pserver_count).tolist() == owners
    assert all(bucket_of(n, salt) in buckets_of_pserver(k, pserver_count) for n, k in zip(numbers, owners, strict=True))


@pytest.mark.parametrize("pserver_count", [1, 2, 3, 7, 64, 1000, 1024, 1500])
def test_pservers_have_ranges_of_buckets(pserver_count: int) -> None:
    ranges = [buckets_of_pserver(index, pserver_count) for index in range(pserver_count)]
    assert [bucket for one in ranges for bucket in one] == list(range(BUCKETS))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


@pytest.mark.parametrize("step", [1, 1024, 1 << 32, 1 << 54])
def test_regular_ids_are_spread(step: int) -> None:
    ids = np.arange(1 << 10, dtype=np.uint64) * np.uint64(step)
    counts = np.bincount(pservers_of(np.unique(ids), salt_of("users"), 4), minlength=4)
    assert counts.min() > 200


def test_no_two_ids_become_one() -> None:
    ids = np.arange(100_000, dtype=np.uint64)
    assert np.unique(mixed_ids(ids, salt_of("users"))).size == ids.size


def test_ids_of_any_width_keep_their_bits() -> None:
    assert as_ids(np.array([-1, 5], np.int8)).tolist() == [2**64 - 1, 5]
    assert as_ids(np.array([255], np.uint8)).tolist() == [255]
    ids = np.array([1], np.uint64)
    assert as_ids(ids) is ids


def test_texts_are_hashed() -> None:
    assert ids_of_texts(["N123", b"N123", ""]).tolist() == [id_of_text("N123")] * 2 + [id_of_text("")]
