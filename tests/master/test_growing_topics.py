"""Messages join a running dataset of a Kafka topic: in the queue, in etcd, and for the next master."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from msgspec.structs import replace

from flightedl.adapters.clock import SystemClock
from flightedl.errors import DataError, NotReadyError, UnavailableError
from flightedl.messages.declarations import DatasetDeclaration
from flightedl.messages.tasks import EndGrowthRequest
from tests.support.contracts.coordinator import eventually
from tests.support.memory import MemoryCoordinator, MemoryStorage
from tests.support.memory_topics import MemoryTopics

from .test_growing import Master

SENDER = EndGrowthRequest(trainer="t", generation=1, job="demo")
DECLARED = DatasetDeclaration(urls=[MemoryTopics.URL], batch_size=2, records_per_task=4, follow=True)

Start = Callable[[], Master]


@pytest.fixture
def topics() -> MemoryTopics:
    made = MemoryTopics()
    made.put(0, *[b""] * 6)
    made.put(1)
    return made


@pytest.fixture
def start(topics: MemoryTopics) -> Iterator[Start]:
    coordinator, storage = MemoryCoordinator(SystemClock()), MemoryStorage()
    masters: list[Master] = []

    def begin() -> Master:
        for master in masters:
            master.close()
        masters.append(Master(coordinator.another(), topics, storage))
        return masters[-1]

    yield begin
    for master in masters:
        master.close()


def declare(master: Master, declared: DatasetDeclaration = DECLARED) -> None:
    def asked() -> bool:
        try:
            master.declaring.dataset(declared)
        except NotReadyError:
            return False
        return True

    eventually(asked)


def tasks(master: Master) -> list[list[tuple[int, int, int]]]:
    """Return (partition, first offset, end) of each chunk of each task."""
    dataset = master.state.dataset
    assert dataset is not None
    layout = dataset.layout
    return [
        [(each.number, each.first_record, each.first_record + each.records) for each in layout.chunks_of(task)]
        for task in range(layout.task_count)
    ]


def ranges(master: Master) -> list[str]:
    return [url.removeprefix(f"{MemoryTopics.URL}/") for url in master.files]


def end(master: Master) -> None:
    def has_ended() -> bool:
        try:
            master.growing.end(SENDER)
        except NotReadyError:
            return False
        return True

    eventually(has_ended)


def test_messages_join_in_ranges_also_after_a_takeover(start: Start, topics: MemoryTopics) -> None:
    first = start()
    declare(first)
    assert ranges(first) == ["0:0-6,1:0-0"]
    topics.put(1, b"", b"")
    topics.put(0, b"")
    eventually(lambda: ranges(first)[1:] == ["0:6-7,1:0-2"])
    expected = [[(0, 0, 4)], [(0, 4, 6)], [(0, 6, 7), (1, 0, 2)]]
    assert tasks(first) == expected
    second = start()
    assert tasks(second) == expected
    topics.put(2, b"", b"", b"", b"")
    end(second)
    assert tasks(second) == [*expected, [(2, 0, 4)]]
    assert second.state.core.work is not None
    assert not second.state.core.work.queue.is_growing
    topics.put(2, b"")
    third = start()
    assert tasks(third) == [*expected, [(2, 0, 4)]]
    assert third.growing._thread is None


def test_messages_that_were_deleted_too_early_are_left_out_at_the_end(start: Start, topics: MemoryTopics) -> None:
    master = start()
    declare(master)
    topics.put(0, *[b""] * 8)
    topics.delete(0, 9)
    eventually(lambda: ranges(master)[1:] == ["0:9-14"])
    eventually(lambda: "deleted offsets 6-8" in master.state.dataset_alarm)
    end(start())


def test_a_topic_that_is_not_followed_ends_where_it_was_declared(start: Start, topics: MemoryTopics) -> None:
    first = start()
    declare(first, replace(DECLARED, follow=False))
    topics.put(0, b"")
    topics.delete(0, 3)
    second = start()
    declare(second, replace(DECLARED, follow=False))
    assert tasks(first) == tasks(second) == [[(0, 0, 4)], [(0, 4, 6)]]
    assert second.growing._thread is None


def test_a_takeover_does_not_need_the_broker(start: Start, topics: MemoryTopics) -> None:
    declare(start())
    topics.plan.fail_from("expand", UnavailableError("no broker"))
    second = start()
    assert tasks(second) == [[(0, 0, 4)], [(0, 4, 6)]]


def test_it_waits_for_the_first_message(start: Start, topics: MemoryTopics, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flightedl.master.indexing._QUICK_S", 0.1)
    topics.readable = {0: range(5, 5)}
    master = start()
    with pytest.raises(NotReadyError, match=f"the first message of {MemoryTopics.URL}"):
        master.declaring.dataset(DECLARED)
    topics.put(0, b"")
    declare(master)
    assert tasks(master) == [[(0, 5, 6)]]


def test_a_topic_without_messages_has_to_be_followed(start: Start, topics: MemoryTopics) -> None:
    topics.readable = {0: range(5, 5)}
    with pytest.raises(DataError, match="there is no record in"):
        declare(start(), replace(DECLARED, follow=False))
