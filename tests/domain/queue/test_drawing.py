"""Tasks of shuffled data: every record once, equal sizes, several chunks in each task, and few decoded chunks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flightedl.domain.queue.drawing import SIZE_BYTES, advice_of, drawn
from flightedl.domain.queue.mixture import Pieces
from flightedl.domain.queue.order import order_of
from tests.domain.queue.test_mixture import given_records

MEGABYTE = 1 << 20


def sizes_of(found: Pieces) -> np.ndarray:
    return np.add.reduceat(found.records, found.firsts)


def chunks_of(found: Pieces) -> list[list[int]]:
    return [part.tolist() for part in np.split(found.chunks, found.firsts[1:])]


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=130),
    record_bytes=st.sampled_from([1, 1000, 10 * MEGABYTE]),
    batch_size=st.integers(1, 40),
    seed=st.integers(-(2**63), 2**63 - 1),
    size_bytes=st.sampled_from([1, 5000, SIZE_BYTES]),
    records_per_task=st.sampled_from([0, 1, 7, 100, 10**6]),
)
def test_each_record_is_in_one_task(
    sizes: list[int], record_bytes: int, batch_size: int, seed: int, size_bytes: int, records_per_task: int
) -> None:
    records = np.array(sizes)
    found = drawn(records, records * record_bytes, batch_size, seed, size_bytes, records_per_task)
    assert {int(times) for chunk in given_records(found, records) for times in chunk} == {1}
    assert (np.diff(found.firsts, prepend=-1) > 0).all()
    if len(sizes) < 48 or records.sum() * record_bytes <= 64 * MEGABYTE:
        of_tasks = sizes_of(found)
        assert of_tasks.max() - of_tasks[:-1].min(initial=of_tasks.max()) <= batch_size
        assert of_tasks.max() - of_tasks.min() <= 2 * batch_size
    else:
        assert (found.records == records[found.chunks]).all(), "chunks are whole"
        mean = records.sum() / len(found.firsts)
        assert np.abs(np.cumsum(sizes_of(found)) - mean * np.arange(1, len(found.firsts) + 1)).max() <= 60


@pytest.mark.parametrize(
    ("count", "size", "bytes_each", "tasks", "mixed"),
    [
        (1, 1000, 1, 1, 1),
        (2, 1000, 1, 2, 2),
        (11, 128, 1, 11, 11),
        (47, 128, 1, 24, 47),
        (72, 64, 1, 24, 64),
        (47, 128, 100 * MEGABYTE, 24, 10),
        (11, 128, 500 * MEGABYTE, 11, 2),
        (48, 128, 2 * MEGABYTE, 24, 2),
        (24 * 7, 128, MEGABYTE, 24, 7),
        (24 * 100, 128, MEGABYTE, 38, 63),
        (24 * 100, 128, 100 * MEGABYTE, 240, 10),
        (24 * 100, 128, 2000 * MEGABYTE, 1200, 2),
    ],
)
def test_the_number_of_tasks_and_of_the_chunks_that_they_mix(
    count: int, size: int, bytes_each: int, tasks: int, mixed: int
) -> None:
    records, decoded_bytes = np.full(count, size), np.full(count, bytes_each)
    found = drawn(records, decoded_bytes, 16, 5)
    assert len(found.firsts) == tasks
    for chunks in chunks_of(found):
        assert mixed <= len(set(chunks)) <= mixed * 3, "lanes may cross the boundaries of chunks"
        assert len(set(chunks)) == len(chunks)
    advice = advice_of(found, records, decoded_bytes)
    assert advice.mixed_chunks == pytest.approx(mixed, rel=0.7)
    if count >= 48 and bytes_each > 1:
        assert advice.tasks_per_chunk == 1


def test_neither_an_epoch_nor_the_number_of_trainers_changes_tasks_but_the_seed_does() -> None:
    records = np.full(240, 100)
    found = [drawn(records, records * MEGABYTE, 10, seed).chunks.tolist() for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]


def test_chunks_that_lie_next_to_each_other_are_in_different_tasks() -> None:
    """Sorted files have equal labels there."""
    records = np.full(24 * 10, 100)
    distances = [np.diff(np.sort(chunks)).tolist() for chunks in chunks_of(drawn(records, records * MEGABYTE, 10, 0))]
    assert np.mean([distance == 1 for task in distances for distance in task]) < 0.15


def test_a_trainer_that_keeps_few_chunks_decodes_each_chunk_once_if_they_are_whole() -> None:
    records = np.full(24 * 4, 100)
    tasks = chunks_of(drawn(records, records * MEGABYTE // 10, 10, 0))
    order = order_of(len(tasks), len(tasks), 3, 0)
    decoded = [chunk for position in range(len(tasks)) for chunk in tasks[order.at(position)]]
    assert sorted(decoded) == list(range(len(records)))


def test_warnings_name_what_helps() -> None:
    records = np.full(48, 100)
    few = advice_of(drawn(records, records * MEGABYTE, 10, 0), records, records * MEGABYTE)
    assert [each.partition(":")[0] for each in few.warnings] == ["a batch mixes records of only 2 of 48 chunks"]
    many = advice_of(drawn(records, records * MEGABYTE, 10, 0, records_per_task=800), records, records * MEGABYTE)
    assert (many.warnings, many.mixed_chunks) == ((), 8)
    one = advice_of(drawn(records[:1], records[:1] * MEGABYTE, 10, 0), records[:1], records[:1] * MEGABYTE)
    assert [each.partition(":")[0] for each in one.warnings] == ["there is only one chunk"]
    assert "each trainer decodes all of them" in advice_of(drawn(records, records, 10, 0), records, records).text
