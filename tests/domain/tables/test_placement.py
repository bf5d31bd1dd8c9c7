"""Placement of ids in buckets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flightedl.domain.tables.placement import (
    BUCKETS,
    as_ids,
    bucket_of,
    bucket_owners,
    buckets_of,
    id_of_text,
    ids_of_texts,
    mixed,
    mixed_ids,
    salt_of,
)


@given(st.lists(st.integers(-(2**63), 2**63 - 1)), st.text(min_size=1))
def test_scalar_and_array_forms_agree(numbers: list[int], table: str) -> None:
    salt = salt_of(table)
    ids = as_ids(np.array(numbers, np.int64))
    assert mixed_ids(ids, salt).tolist() == [mixed(number, salt) for number in numbers]
    assert buckets_of(ids, salt).tolist() == [bucket_of(number, salt) for number in numbers]


@pytest.mark.parametrize("pserver_count", [1, 2, 3, 7, 64, 1000, 1024, 1500])
def test_pservers_have_ranges_of_buckets(pserver_count: int) -> None:
    owners = bucket_owners(pserver_count)
    counts = np.bincount(owners, minlength=pserver_count)
    assert (np.diff(owners) >= 0).all()
    assert (counts.sum(), len(counts)) == (BUCKETS, pserver_count)
    assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize("step", [1, 1024, 1 << 32, 1 << 54])
def test_regular_ids_are_spread(step: int) -> None:
    ids = np.arange(1 << 10, dtype=np.uint64) * np.uint64(step)
    counts = np.bincount(bucket_owners(4)[buckets_of(np.unique(ids), salt_of("users"))], minlength=4)
    assert counts.min() > 200


def test_different_ids_remain_different() -> None:
    ids = np.arange(100_000, dtype=np.uint64)
    assert np.unique(mixed_ids(ids, salt_of("users"))).size == ids.size


def test_ids_of_any_width_keep_their_bits() -> None:
    assert as_ids(np.array([-1, 5], np.int8)).tolist() == [2**64 - 1, 5]
    assert as_ids(np.array([255], np.uint8)).tolist() == [255]
    ids = np.array([1], np.uint64)
    assert as_ids(ids) is ids


def test_texts_are_hashed() -> None:
    assert ids_of_texts(["N123", b"N123", ""]).tolist() == [id_of_text("N123")] * 2 + [id_of_text("")]
