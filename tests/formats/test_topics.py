"""Kafka topics: divided into chunks and tasks, read and decoded by offsets, and described."""

from __future__ import annotations

import datetime as dt
import json
from typing import Any

import pyarrow as pa
import pytest
from msgspec.structs import replace

from flightedl.client import arguments
from flightedl.client.data.options import Reading, decoding
from flightedl.errors import DataError, UsageError, UserCodeError
from flightedl.formats.chunk_index import ChunkIndex
from flightedl.formats.chunks import CorruptChunkError
from flightedl.formats.dataset_spec import spec_of
from flightedl.formats.decode import slots, svmlight
from flightedl.formats.index import build_index
from flightedl.formats.layout import TaskLayout
from flightedl.formats.reader import ReadCounts, read_task
from flightedl.formats.record_places import described, record_ranges
from flightedl.formats.registry import format_for
from flightedl.formats.topics import SCHEMA, TASK_OFFSETS, Topic
from flightedl.messages.declarations import DatasetDeclaration
from tests.support.memory_topics import MemoryTopics

DECLARED = DatasetDeclaration(urls=[MemoryTopics.URL], batch_size=4, records_per_task=8)


@pytest.fixture
def topics() -> MemoryTopics:
    """Ten messages in partition 0, with two gaps, and three in partition 2."""
    made = MemoryTopics()
    made.put(0, *(b'{"k": %d}' % k for k in range(5)), gap=2)
    made.put(0, *(b'{"k": %d}' % k for k in range(5, 10)), gap=1)
    made.put(2, *(b'{"k": %d}' % k for k in range(10, 13)))
    return made


def layout_of(topics: MemoryTopics, declared: DatasetDeclaration = DECLARED) -> TaskLayout:
    index = build_index(topics, spec_of(declared))
    return TaskLayout(index, declared.batch_size, records_per_task=declared.records_per_task)


def batches(topics: MemoryTopics, declared: DatasetDeclaration = DECLARED, **more: Any) -> list[list[pa.RecordBatch]]:
    layout, spec = layout_of(topics, declared), spec_of(declared)
    return [
        list(read_task(topics, layout.chunks_of(task), spec, None, 0, task, schema=layout.index.schema, **more))
        for task in range(layout.task_count)
    ]


def layout_of_all(topics: MemoryTopics) -> TaskLayout:
    """Return a task of all messages of partition 0, including those that were deleted."""
    file = Topic().index(topics, topics.stat_of(f"{MemoryTopics.URL}/0:0-13"), spec_of(DECLARED).index_options())
    return TaskLayout(ChunkIndex([file], SCHEMA), 4, records_per_task=100)


def test_batches_are_cut_by_offsets_whatever_messages_are_there(topics: MemoryTopics) -> None:
    layout = layout_of(topics)
    assert [layout.records(task) for task in range(layout.task_count)] == [8, 8]
    found = [[list(zip(*batch.columns[2:4], strict=True)) for batch in task] for task in batches(topics)]
    assert [[[(p.as_py(), n.as_py()) for p, n in batch] for batch in task] for task in found] == [
        [[(0, 0), (0, 1), (0, 2), (0, 3)], [(0, 4), (0, 7)]],
        [[(0, 8), (0, 9), (0, 10), (0, 11)], [(2, 0), (2, 1), (2, 2)]],
    ]


def test_only_the_offsets_of_a_batch_are_read(topics: MemoryTopics) -> None:
    layout = layout_of(topics)
    schema = layout.index.schema
    list(read_task(topics, layout.chunks_of(0), spec_of(DECLARED), None, 0, 0, 1, 2, schema=schema))
    assert topics.opened == [f"{MemoryTopics.URL}/0:4-8"]


def test_a_message_has_its_value_key_partition_offset_and_time(topics: MemoryTopics) -> None:
    assert layout_of(topics).index.schema == SCHEMA
    assert batches(topics)[1][1].to_pylist()[2] == {
        "value": b'{"k": 12}',
        "key": b"key",
        "partition": 2,
        "offset": 2,
        "timestamp": dt.datetime(1970, 1, 1, 0, 0, 1, 2000, dt.UTC),
    }


def test_columns_and_filters_apply_to_messages(topics: MemoryTopics) -> None:
    declared = replace(DECLARED, columns=["offset"], filter=[("offset", ">=", 3)])
    found = [batch.to_pydict() for task in batches(topics, declared) for batch in task]
    assert found == [{"offset": [3]}, {"offset": [4, 7]}, {"offset": [8, 9, 10, 11]}, {"offset": []}]


def test_decode_converts_the_values_of_messages(topics: MemoryTopics) -> None:
    declared, decode = decoding(DECLARED, json.loads)
    assert (declared, decode) == (DECLARED, json.loads)
    found = [batch["k"].to_pylist() for task in batches(topics, decode=decode) for batch in task]
    assert found == [[0, 1, 2, 3], [4, 5], [6, 7, 8, 9], [10, 11, 12]]
    declared = replace(DECLARED, types={"k": "float32"}, filter=[("k", ">", 11)])
    assert batches(topics, declared, decode=decode)[1][1].to_pydict() == {"k": [12.0]}


def test_a_batch_of_gaps_has_the_columns_of_other_messages(topics: MemoryTopics) -> None:
    topics.put(2, gap=9)
    declared = replace(DECLARED, records_per_task=4, columns=["k"])
    found = [batch for task in batches(topics, declared, decode=json.loads) for batch in task]
    assert [batch.num_rows for batch in found] == [4, 2, 4, 3, 0, 0, 0]
    assert {str(batch.schema) for batch in found} == {"k: int64"}
    topics.delete(2, 3)
    layout = layout_of(topics, declared)
    (last,) = read_task(topics, layout.chunks_of(4), spec_of(declared), None, 0, 4, schema=SCHEMA, decode=json.loads)
    assert (last.num_rows, last.num_columns) == (0, 0), "nothing shows the columns"


def test_messages_may_have_different_keys() -> None:
    topics = MemoryTopics()
    topics.put(0, b'{"a": 1}', b'{"b": 2}')
    assert batches(topics, decode=json.loads)[0][0].to_pylist() == [{"a": 1, "b": None}, {"a": None, "b": 2}]


def test_ready_functions_decode_whole_batches() -> None:
    topics = MemoryTopics()
    topics.put(0, b"1 user:17 tag:4 tag:9", b"0 user:18\n", gap=1)
    assert batches(topics, decode=slots)[0][0].to_pylist() == [
        {"label": 1, "user": [17], "tag": [4, 9]},
        {"label": 0, "user": [18], "tag": []},
    ]
    declared = replace(DECLARED, types={"user": "list<int32>"}, columns=["user"])
    assert batches(topics, declared, decode=slots)[0][0]["user"].type == pa.list_(pa.int32())
    topics = MemoryTopics()
    topics.put(0, b"1 7:0.5", b"1 8:0.5")
    assert batches(topics, decode=svmlight)[0][0]["indices"].to_pylist() == [[7], [8]]
    topics.put(0, b"1 7:0.5\n1 8:0.5")
    with pytest.raises(UserCodeError, match="decode= returned values that do not form columns: 3 records have 4 lines"):
        batches(topics, decode=svmlight)


def test_a_message_without_value_is_passed_to_decode() -> None:
    topics = MemoryTopics()
    topics.put(0, b'{"k": 1}', None)
    found = batches(topics, decode=lambda value: {"is_there": value is not None})
    assert found[0][0].to_pydict() == {"is_there": [True, False]}
    with pytest.raises(UserCodeError, match="decode= failed at a record of 0 bytes"):
        batches(topics, decode=json.loads)


def test_deleted_messages_cost_only_their_own_batches(topics: MemoryTopics) -> None:
    topics.delete(0, 6)
    layout = layout_of_all(topics)
    for first, end, is_there in ((0, 1, False), (1, 2, False), (2, 3, True)):
        read = read_task(topics, layout.chunks_of(0), spec_of(DECLARED), None, 0, 0, first, end, schema=SCHEMA)
        if is_there:
            assert next(read)["offset"].to_pylist() == [8, 9, 10, 11]
        else:
            with pytest.raises(CorruptChunkError, match=r"^partition 0 begins at offset 6 now$"):
                next(read)


def test_deleted_messages_can_be_skipped(topics: MemoryTopics) -> None:
    layout, counts = layout_of_all(topics), ReadCounts()
    topics.delete(0, 2)
    spec = spec_of(replace(DECLARED, on_corrupt="skip"))
    found = read_task(topics, layout.chunks_of(0), spec, None, 0, 0, schema=SCHEMA, counts=counts)
    assert [batch["offset"].to_pylist() for batch in found] == [[], [4, 7], [8, 9, 10, 11], []]
    assert (counts.corrupt_records, counts.sentences) == (4, ["partition 0 begins at offset 2 now"])


def test_records_are_described_by_their_offsets(topics: MemoryTopics) -> None:
    layout = layout_of(topics)
    assert described(record_ranges(tuple(layout.chunks_of(1)), 1, 7, None, 0, 1)) == (
        f"partition 0 of {MemoryTopics.URL}, offsets 9-12; partition 2 of {MemoryTopics.URL}, offsets 0-1"
    )


def test_tasks_contain_whole_batches_of_several_partitions() -> None:
    declared = arguments.dataset_declaration(urls=MemoryTopics.URL, batch_size=1000)
    assert declared.records_per_task == 9000
    assert arguments.dataset_declaration(urls="/d/a.csv", batch_size=1000).records_per_task == 0
    topics = MemoryTopics()
    for partition in range(3):
        topics.put(partition, *[b""] * 4000)
    assert layout_of(topics, declared).task_records.tolist() == [12000]
    topics.put(1, *[b""] * TASK_OFFSETS * 2)
    assert layout_of(topics, declared).task_records.max() < 2 * declared.records_per_task


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"urls": [MemoryTopics.URL, "/d/a.csv"]}, "names each of them once, and no files"),
        ({"urls": ["/d/a.csv", MemoryTopics.URL]}, "names each of them once, and no files"),
        ({"urls": [MemoryTopics.URL] * 2}, "names each of them once, and no files"),
        ({"urls": [f"{MemoryTopics.URL}/0:0-5"]}, "name only the Kafka topic"),
        ({"shuffle": True}, "are read in the order of their offsets"),
    ],
)
def test_what_does_not_apply_to_topics_is_refused(more: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        spec_of(replace(DECLARED, **more))


def test_a_topic_has_no_format_and_cannot_be_written() -> None:
    assert format_for(MemoryTopics.URL).name == format_for(MemoryTopics.URL, "kafka").name == "kafka"
    for url, name in ((MemoryTopics.URL, "jsonl"), ("/d/a.csv", "kafka")):
        with pytest.raises(DataError, match="leave out format="):
            format_for(url, name)
    with pytest.raises(UsageError, match="a topic can only be read"):
        Topic().write([], SCHEMA)


def test_the_ranks_of_a_group_cannot_read_a_topic() -> None:
    with pytest.raises(UsageError, match="the ranks of a group cannot read a Kafka topic"):
        Reading({"group": (0, 2)}).remainder_for(replace(DECLARED, records_per_task=0))
