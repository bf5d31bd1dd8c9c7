"""Ranges of indices instead of files: divided into chunks, read, mixed and described."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest

from flightedl.adapters.storage import FsspecFiles
from flightedl.errors import DataError
from flightedl.formats.chunk_index import ChunkIndex
from flightedl.formats.dataset_spec import DatasetSpec, spec_of
from flightedl.formats.index import build_index
from flightedl.formats.indices import SCHEMA, indices_of, url_of
from flightedl.formats.layout import TaskLayout
from flightedl.formats.mixed_layout import layout_of
from flightedl.formats.reader import read_task
from flightedl.formats.record_places import described, record_ranges
from flightedl.messages.declarations import DatasetDeclaration

FILES = FsspecFiles()


def index_of(*urls: str, records_per_task: int = 0) -> tuple[DatasetSpec, ChunkIndex]:
    spec = spec_of(
        DatasetDeclaration(urls=list(urls), batch_size=4, format="indexed", records_per_task=records_per_task)
    )
    return spec, build_index(FILES, spec)


def read(spec: DatasetSpec, layout: TaskLayout, seed: int | None = None) -> list[list[int]]:
    """Return the indices of each task in the order in which trainers read them."""
    found = []
    for task in range(layout.task_count):
        batches = list(read_task(FILES, layout.chunks_of(task), spec, seed, 0, task, schema=layout.index.schema))
        assert all(batch.schema == SCHEMA for batch in batches)
        found.append([index for batch in batches for index in batch["index"].to_pylist()])
    return found


@pytest.mark.parametrize(("count", "tasks"), [(1, 1), (256, 256), (1000, 250), (1_000_000, 977), (2**50, 1_000_000)])
def test_a_range_has_enough_tasks_for_many_trainers(count: int, tasks: int) -> None:
    spec, index = index_of(url_of(range(count), is_shuffled=False))
    assert (index.record_count, TaskLayout(index, 4).task_count) == (count, tasks)
    assert index.stats[0].version == FILES.expand(spec.urls)[0].version


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("is_shuffled", [False, True])
def test_every_index_is_read_once(is_shuffled: bool, seed: int | None) -> None:
    spec, index = index_of(url_of(range(100, 150), is_shuffled=is_shuffled), records_per_task=8)
    tasks = read(spec, TaskLayout(index, 4), seed)
    assert list(map(len, tasks)) == [8] * 6 + [2]
    assert sorted(chain.from_iterable(tasks)) == list(range(100, 150))
    assert (sorted(tasks[0]) == list(range(100, 108))) is not is_shuffled


def test_a_shuffled_task_is_a_sample_of_the_whole_range() -> None:
    numbers = indices_of(url_of(range(10_000), is_shuffled=True), np.arange(1000))
    assert np.histogram(numbers, bins=10, range=(0, 10_000))[0].min() > 60


def test_ranges_are_mixed_by_their_weights() -> None:
    urls = [url_of(each, is_shuffled=True) for each in (range(700), range(700, 1000))]
    spec, index = index_of(*urls)
    declared = DatasetDeclaration(urls=urls, batch_size=4, mixture=[0.7, 0.3], shuffle=True, records_per_task=100)
    tasks = read(spec, layout_of(index, declared, 4), seed=1)
    assert [sum(number < 700 for number in task) for task in tasks] == [70] * 10
    assert sorted(chain.from_iterable(tasks)) == list(range(1000))


def test_a_batch_is_described_by_its_indices() -> None:
    _, index = index_of(url_of(range(10, 20), is_shuffled=False), records_per_task=10)
    assert described(record_ranges((index.chunk(0),), 2, 5, None, 0, 0)) == "indices 12-14"
    url = url_of(range(10), is_shuffled=True)
    _, index = index_of(url, records_per_task=10)
    ranges = record_ranges((index.chunk(0),), 0, 3, None, 0, 0)
    named = sorted(each.first_record + n for each in ranges for n in range(each.records))
    assert named == sorted(indices_of(url, np.arange(3)).tolist())


def test_invalid_ranges_are_rejected() -> None:
    with pytest.raises(DataError, match=r"^indexed://all names no range of indices: declare elements by their indices"):
        index_of("indexed://all")


def test_more_tasks_than_a_master_has_memory_for_are_refused() -> None:
    with pytest.raises(DataError, match=r"would have 1,000,000,000 tasks: choose a larger records_per_task"):
        index_of(url_of(range(10**9), is_shuffled=False), records_per_task=1)
