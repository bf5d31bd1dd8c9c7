"""Mixtures of real files, and the records in their tasks."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Any

import pyarrow as pa
import pytest

from flightedl.client.arguments import mixture_declaration
from flightedl.errors import DataError, UsageError
from flightedl.formats.dataset_spec import spec_of
from flightedl.formats.index import build_index
from flightedl.formats.mixed_layout import layout_of
from flightedl.formats.reader import read_task
from flightedl.messages.declarations import DatasetDeclaration

World = Any  # the one of this folder's conftest


def declared(world: World, format_name: str = "parquet", stop: str = "first", **more: Any) -> DatasetDeclaration:
    for folder, first, count in (("web", 0, 700), ("books", 10_000, 300)):
        for file in range(2):
            start = first + file * count // 2
            table = pa.table({"n": range(start, start + count // 2)})
            world.write(f"/{folder}/{file}.{format_name}", table, format_name, rows=100)
    sources = {f"/web/*.{format_name}": 0.5, f"/books/*.{format_name}": 0.5}
    return mixture_declaration(sources, stop, 10, 7, more)


def tasks_of(world: World, declaration: DatasetDeclaration, epoch: int = 0) -> list[list[int]]:
    spec = spec_of(declaration)
    index = build_index(world.files, spec)
    layout = layout_of(index, declaration, 10)
    found = []
    for task in range(layout.task_count):
        batches = read_task(world.files, layout.chunks_of(task), spec, 7, epoch, task, schema=index.schema)
        found.append([number for batch in batches for number in batch["n"].to_pylist()])
        assert len(found[-1]) == layout.records(task)
    assert layout.record_count == sum(map(len, found))
    return found


def test_every_task_of_parquet_files_mixes_the_sources_in_proportion(world: World) -> None:
    tasks = tasks_of(world, declared(world, records_per_task=60))
    assert len(tasks) == 10
    for task in tasks:
        books = [number >= 10_000 for number in task]
        assert abs(sum(books) - 30) <= 1
        assert 3 <= sum(books[:15]) <= 12, "records are shuffled within the task"
    assert set(Counter(chain(*tasks)).values()) == {1}
    assert tasks != tasks_of(world, declared(world, records_per_task=60), epoch=1)


def test_repeated_sources_yield_every_record(world: World) -> None:
    times = Counter(chain(*tasks_of(world, declared(world, stop="repeat"))))
    assert {times[number] for number in range(700)} == {1}
    assert {times[number] for number in range(10_000, 10_300)} <= {2, 3}


@pytest.mark.parametrize("format_name", ["arrow", "jsonl"])
def test_chunks_of_other_formats_are_not_divided(world: World, format_name: str) -> None:
    tasks = tasks_of(world, declared(world, format_name, stop="all"))
    assert sorted(chain(*tasks)) == [*range(700), *range(10_000, 10_300)]


def test_a_source_without_its_own_records_raises_an_error(world: World) -> None:
    declaration = declared(world)
    declaration.urls[:] = ["/**/*.parquet", "/books/*.parquet"]
    with pytest.raises(DataError, match=r"the source /books/\*.parquet of the mixture has no records"):
        tasks_of(world, declaration)


@pytest.mark.parametrize(
    ("sources", "more", "text"),
    [
        ({"a": 1.0}, {}, "at least two"),
        (["a", "b"], {}, "weights by URL"),
        ({"a": 1.0, "b": 0.0}, {}, "finite numbers above 0"),
        ({"a": 1.0, "b": "x"}, {}, "the weight of 'b' is 'x'"),
        ({"a": 1.0, "b": 1.0}, {"follow": True}, "a mixture has no argument follow"),
    ],
)
def test_a_wrong_mixture_raises_one_sentence(sources: Any, more: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        mixture_declaration(sources, "first", 10, 0, more)
    with pytest.raises(UsageError, match="stop is 'never', but must be one of first, all, repeat"):
        mixture_declaration({"a": 1.0, "b": 1.0}, "never", 10, 0, {})
