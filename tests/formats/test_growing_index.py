"""Indexes and tasks of a growing dataset: existing entries do not change."""

from __future__ import annotations

import threading
from typing import Any, BinaryIO

import pyarrow as pa
import pytest

from flightedl.domain.queue.drawing import SIZE_BYTES
from flightedl.errors import DataError
from flightedl.formats.chunk_index import ChunkIndex
from flightedl.formats.dataset_spec import DatasetSpec
from flightedl.formats.index import build_index, extended_index, restored_index
from flightedl.formats.layout import TaskLayout
from flightedl.formats.mixed_layout import drawing_of, layout_of
from flightedl.messages.declarations import DatasetDeclaration
from tests.support.memory import MemoryFiles

ROWS = pa.table({"a": list(range(10))})
SPEC = DatasetSpec(("*",))


@pytest.fixture
def known(world: Any) -> ChunkIndex:
    world.write("m.parquet", ROWS, "parquet", 4)
    return build_index(world.files, DatasetSpec(("m.parquet",)))


def test_new_files_follow_known_ones_regardless_of_their_names(world: Any, known: ChunkIndex) -> None:
    world.write("z.parquet", ROWS.slice(0, 3), "parquet", 2)
    world.write("a.parquet", ROWS.slice(0, 5), "parquet", 5)
    stats = [world.files.stat("z.parquet"), world.files.stat("a.parquet")]
    index, refused = extended_index(world.files, SPEC, known, stats)
    assert refused == {}
    assert [stat.url for stat in index.stats] == ["m.parquet", "z.parquet", "a.parquet"]
    assert index.records.tolist() == [4, 4, 2, 2, 1, 5]
    assert [index.chunk(number) for number in range(len(known))] == [known.chunk(n) for n in range(len(known))]
    assert [index.first_chunk(number) for number in range(4)] == [0, 3, 5, 6]


def test_a_file_that_does_not_fit_is_rejected_and_others_join(world: Any, known: ChunkIndex) -> None:
    world.write("other.parquet", pa.table({"b": [1]}), "parquet", 2)
    world.write("good.parquet", ROWS.slice(0, 1), "parquet", 2)
    world.files.contents["broken.parquet"] = b"PAR1 this is none"
    world.files.contents["what.ever"] = b"?"
    stats = [world.files.stat(name) for name in ("other.parquet", "broken.parquet", "good.parquet", "what.ever")]
    index, refused = extended_index(world.files, SPEC, known, stats)
    assert [stat.url for stat in index.stats] == ["m.parquet", "good.parquet"]
    reasons = {stat.url: str(error) for stat, error in refused.items()}
    assert set(reasons) == {"other.parquet", "broken.parquet", "what.ever"}
    assert "does not go with m.parquet" in reasons["other.parquet"]
    assert "broken.parquet is corrupt" in reasons["broken.parquet"]


def test_a_file_that_fails_with_any_error_does_not_exclude_others(world: Any, known: ChunkIndex) -> None:
    world.write("a.parquet", ROWS.slice(0, 1), "parquet", 2)
    world.write("b.parquet", ROWS.slice(0, 1), "parquet", 2)
    stats = [world.files.stat(name) for name in ("a.parquet", "b.parquet")]
    world.files.plan.fail_at("open", 1, MemoryError())
    index, failed = extended_index(world.files, SPEC, known, stats, concurrency=1)
    assert [stat.url for stat in index.stats] == ["m.parquet", "b.parquet"]
    assert [(stat.url, type(error)) for stat, error in failed.items()] == [("a.parquet", MemoryError)]


def test_text_that_fits_the_columns_joins_and_text_that_would_widen_them_does_not() -> None:
    files = MemoryFiles({"0.csv": b"x,y\n1.5,a\n"})
    known = build_index(files, DatasetSpec(("*.csv",)))
    files.contents |= {"1.csv": b"x,y\n2,b\n", "2.csv": b"x,y\nword,b\n", "3.csv": b"x\n1\n"}
    index, refused = extended_index(files, SPEC, known, [files._stat(f"{n}.csv") for n in (1, 2, 3)])
    assert [stat.url for stat in index.stats] == ["0.csv", "1.csv"]
    assert index.schema.equals(known.schema)
    assert sorted(stat.url for stat in refused) == ["2.csv", "3.csv"]


def test_joined_files_are_restored_in_order_without_reading_known_ones(world: Any, known: ChunkIndex) -> None:
    world.write("a.parquet", ROWS.slice(0, 5), "parquet", 5)
    index, _ = extended_index(world.files, SPEC, known, [world.files.stat("a.parquet")])
    assert restored_index(world.files, SPEC, index.stats, index.schema).content_hash() == index.content_hash()
    world.files.contents.clear()
    again = restored_index(world.files, SPEC, index.stats, index.schema, known=index)
    assert again.content_hash() == index.content_hash()
    with pytest.raises(DataError, match="parquet is gone since it joined the job's dataset: put it back"):
        restored_index(world.files, SPEC, index.stats, index.schema)


def test_a_restored_file_must_be_unchanged(world: Any, known: ChunkIndex) -> None:
    world.write("m.parquet", ROWS.slice(0, 9), "parquet", 4)
    with pytest.raises(DataError, match=r"m\.parquet has changed since it joined"):
        restored_index(world.files, SPEC, known.stats, known.schema)


@pytest.mark.parametrize("records_per_task", [0, 5, 7])
def test_existing_tasks_do_not_change_when_the_dataset_grows(
    world: Any, known: ChunkIndex, records_per_task: int
) -> None:
    def layout(index: ChunkIndex, *bounds: int) -> TaskLayout:
        return TaskLayout(index, 2, records_per_task=records_per_task, bounds=bounds)

    before = layout(known)
    world.write("a.parquet", ROWS, "parquet", 3)
    index, _ = extended_index(world.files, SPEC, known, [world.files.stat("a.parquet")])
    after = layout(index, len(known))
    for task in range(before.task_count):
        assert after.chunks_of(task) == before.chunks_of(task)
        assert after.batch_count(task) == before.batch_count(task)
    new = [chunk for task in range(before.task_count, after.task_count) for chunk in after.chunks_of(task)]
    assert new == [index.chunk(number) for number in range(len(known), len(index))]
    assert layout(index, len(known), len(index)).task_count == after.task_count


def test_drawn_tasks_do_not_change_when_the_dataset_grows(world: Any, known: ChunkIndex) -> None:
    declared = DatasetDeclaration(urls=["*"], batch_size=2, shuffle=True, seed=-1, shuffle_bytes=SIZE_BYTES)
    before = layout_of(known, declared, 2, (), drawing_of(declared))
    index = known
    for number, count in enumerate((9, 10, 8)):
        world.write(f"{number}.parquet", ROWS.slice(0, count), "parquet", 3)
        bounds = [index.first_chunk(file) for file in range(1, number + 1)]
        bounds.append(len(index))
        index, _ = extended_index(world.files, SPEC, index, [world.files.stat(f"{number}.parquet")])
        after = layout_of(index, declared, 2, bounds, drawing_of(declared))
        assert [after.chunks_of(task) for task in range(before.task_count)] == [
            before.chunks_of(task) for task in range(before.task_count)
        ]
        before = after
        assert before.record_count == index.record_count
        read = [chunk for task in range(before.task_count) for chunk in before.chunks_of(task)]
        places = [(chunk.url, chunk.first_record + n) for chunk in read for n in range(chunk.records)]
        assert len(set(places)) == len(places) == index.record_count


def test_files_of_an_earlier_index_are_found_in_any_order(world: Any) -> None:
    for name, count in (("a.parquet", 3), ("b.parquet", 5), ("c.parquet", 7)):
        world.write(name, ROWS.slice(0, count), "parquet", 10)
    known = build_index(world.files, SPEC)
    stats = [world.files.stat(f"{name}.parquet") for name in "cab"]
    for index in (
        restored_index(world.files, SPEC, stats, known.schema, known=known),
        build_index(world.files, SPEC, known=known, stats=stats),
    ):
        assert [index.chunk(number).url for number in range(3)] == ["c.parquet", "a.parquet", "b.parquet"]
        assert index.records.tolist() == [7, 3, 5]


class SlowFiles(MemoryFiles):
    """Files of which those named first are opened last."""

    def __init__(self, contents: dict[str, bytes]) -> None:
        super().__init__(contents)
        self.opened_last = threading.Event()

    def open(self, url: str) -> BinaryIO:
        if url == "z.parquet":
            self.opened_last.set()
        elif url == "a.parquet":
            assert self.opened_last.wait(20.0)
            threading.Event().wait(0.05)
        return super().open(url)


def test_files_are_added_in_their_order_whichever_is_read_first(world: Any, known: ChunkIndex) -> None:
    for name, count in (("a.parquet", 3), ("z.parquet", 5)):
        world.write(name, ROWS.slice(0, count), "parquet", 10)
    stats = [world.files.stat(name) for name in ("a.parquet", "z.parquet")]
    index, refused = extended_index(SlowFiles(world.files.contents), SPEC, known, stats, concurrency=2)
    assert not refused
    assert [stat.url for stat in index.stats] == ["m.parquet", "a.parquet", "z.parquet"]
    built = build_index(SlowFiles(world.files.contents), SPEC, concurrency=3)
    assert [stat.url for stat in built.stats] == ["a.parquet", "m.parquet", "z.parquet"]
    assert built.records.tolist() == [3, 4, 4, 2, 5]
