"""Piecess: shares in every task, every record at most or exactly once, chunks that must not be cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flightedl.domain.queue.mixture import STOPS, Pieces, mixed


def records_by_task(found: Pieces, sources: np.ndarray, count: int) -> np.ndarray:
    """Return the records of each task by source, (task count, count)."""
    task = np.searchsorted(found.firsts, np.arange(len(found.chunks)), side="right") - 1
    table = np.zeros((len(found.firsts), count), np.int64)
    np.add.at(table, (task, sources[found.chunks]), found.records)
    return table


def given_records(found: Pieces, records: np.ndarray) -> list[np.ndarray]:
    """Return how often each record of each chunk is used."""
    times = [np.zeros(count, np.int64) for count in records]
    for chunk, skipped, count in zip(found.chunks, found.skipped, found.records, strict=True):
        assert 0 <= skipped < skipped + count <= records[chunk]
        times[chunk][skipped : skipped + count] += 1
    return times


def test_every_task_has_its_share_of_every_source() -> None:
    records = np.array([1000, 1000, 1000, 700, 700, 5000])
    sources = np.array([0, 0, 0, 1, 1, 2])
    found = mixed(records, sources, [0.6, 0.3, 0.1], [True] * 3, records_per_task=100)
    table = records_by_task(found, sources, 3)
    assert (np.abs(table[:-1] - [60, 30, 10]) <= 1).all()
    # The second source is exhausted first, after 1,400 of its records.
    assert np.abs(table.sum(axis=0) - [2800, 1400, 1400 / 3]).max() <= 2
    assert max(times.max() for times in given_records(found, records)) == 1


def test_a_task_contains_about_one_chunk_of_the_source_with_the_greatest_weight() -> None:
    records, sources = np.array([700] * 10 + [200] * 40), np.array([0] * 10 + [1] * 40)
    table = records_by_task(mixed(records, sources, [7, 3], [True, True]), sources, 2)
    assert (np.abs(table - [700, 300]) <= 1).all()
    assert len(table) == 10


@pytest.mark.parametrize(("stop", "times"), [("all", {1}), ("repeat", {1, 5})])
def test_all_records_are_used_once_or_shorter_sources_are_repeated(stop: str, times: set[int]) -> None:
    records, sources = np.array([100, 400, 50, 50]), np.array([0, 0, 1, 1])
    found = given_records(mixed(records, sources, [0.5, 0.5], [True, True], 64, stop), records)
    assert {int(each) for chunk in found for each in chunk} == times
    assert {int(each) for chunk in found[:2] for each in chunk} == {1}


chunks = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 2)), min_size=3, max_size=30)


@given(
    chunks,
    st.lists(st.floats(0.05, 1.0), min_size=3, max_size=3),
    st.lists(st.booleans(), min_size=3, max_size=3),
    st.integers(0, 400),
    st.sampled_from(STOPS),
)
def test_no_piece_leaves_its_chunk(
    found: list[tuple[int, int]], weights: list[float], is_cut: list[bool], per_task: int, stop: str
) -> None:
    records = np.array([count for count, _ in found] + [5, 5, 5])
    sources = np.array([source for _, source in found] + [0, 1, 2])
    mixture = mixed(records, sources, weights, is_cut, per_task, stop)
    times = given_records(mixture, records)
    if stop == "first":
        assert max(each.max() for each in times) <= 1
    elif stop == "all":
        assert all((each == 1).all() for each in times)
    else:
        assert all((each >= 1).all() for each in times if len(each))
    for source, cut in enumerate(is_cut):
        if not cut:
            whole = sources[mixture.chunks] == source
            assert (mixture.records[whole] == records[mixture.chunks[whole]]).all()
    assert len(mixture.firsts) == len(np.unique(mixture.firsts))
    assert (np.add.reduceat(mixture.records, mixture.firsts) > 0).all()
    again = mixed(records, sources, weights, is_cut, per_task, stop)
    assert all((getattr(again, name) == getattr(mixture, name)).all() for name in ("chunks", "skipped", "records"))
