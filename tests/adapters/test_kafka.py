"""Kafka topics as files, read from librdkafka's mock cluster: listings, ranges, and errors."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from flightedl.adapters import kafka
from flightedl.adapters.storage import FsspecFiles
from flightedl.errors import DataError, NotFoundError, StoreError, UnavailableError, UsageError
from tests.support.kafka_broker import PARTITIONS, KafkaBroker
from tests.support.processes import closed_port

pytestmark = pytest.mark.slow

CONFIG = "FLIGHTEDL_KAFKA_CONFIG"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    with KafkaBroker(tmp_path_factory.mktemp("kafka")) as started:
        yield started


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka, "_SETTINGS_S", 0.1)
    monkeypatch.setattr(kafka, "_POLLS", 2)
    monkeypatch.setattr(kafka, "_ANSWER_S", 1.0)
    kafka.Topics.clear_instance_cache()


def listed(url: str) -> str:
    (found,) = FsspecFiles().expand([url])
    return found.url


def offsets(url: str) -> list[int]:
    return table(url)["offset"].to_pylist()


def table(url: str) -> pa.Table:
    with FsspecFiles().open(url) as file:
        return pa.ipc.open_stream(file.read()).read_all()


def test_a_listing_has_all_offsets_of_all_partitions(broker: KafkaBroker) -> None:
    url = broker.url("listed")
    broker.produce("listed", range(10))
    assert listed(url) == f"{url}/0:0-3,1:0-3,2:0-2,3:0-2"
    broker.produce("listed", range(1), partition=3)
    (found,) = FsspecFiles().expand([url], may_be_empty=True)
    assert (found.url, found.size_bytes) == (f"{url}/0:0-3,1:0-3,2:0-2,3:0-3", 11)
    assert FsspecFiles().stat(found.url) == found
    assert FsspecFiles().stat(url) is None


def test_ranges_are_read_exactly_in_any_order(broker: KafkaBroker) -> None:
    url = broker.url("read")
    broker.produce("read", range(20), partition=0)
    broker.produce("read", range(20, 30), partition=1)
    for first, end in ((0, 5), (5, 9), (9, 9), (9, 20), (3, 6), (7, 8), (6, 7), (0, 20)):
        assert offsets(f"{url}/0:{first}-{end}") == [*range(first, end)]
    assert offsets(f"{url}/0:17-20,1:0-2") == [17, 18, 19, 0, 1]
    found = table(f"{url}/1:2-4")
    assert found.drop_columns(["timestamp"]).to_pylist() == [
        {"value": b"%d" % (20 + n), "key": b"%d" % n, "partition": 1, "offset": n} for n in (2, 3)
    ]
    assert found["timestamp"].null_count == 0


def test_messages_that_arrive_later_are_read_on(broker: KafkaBroker) -> None:
    url = broker.url("later")
    broker.produce("later", range(3), partition=0)
    assert offsets(f"{url}/0:0-3") == [0, 1, 2]
    broker.produce("later", range(3), partition=0)
    assert offsets(f"{url}/0:3-6") == [3, 4, 5]


def test_deleted_offsets_are_an_error(broker: KafkaBroker) -> None:
    url = broker.url("deleted")
    broker.produce("deleted", ["x" * 500_000] * 12, partition=0)  # The broker keeps 5 MB.
    first = int(listed(url).rpartition("/0:")[2].partition("-")[0])
    assert first > 0
    with pytest.raises(NotFoundError, match=f"partition 0 of {url} begins at offset {first} now: the broker deleted"):
        offsets(f"{url}/0:{first - 1}-12")
    assert offsets(f"{url}/0:{first}-12") == [*range(first, 12)]


def test_offsets_that_do_not_exist_are_waited_for(broker: KafkaBroker) -> None:
    url = broker.url("short")
    broker.produce("short", range(3), partition=0)
    with pytest.raises(UnavailableError, match=f"partition 0 of {url} has no offset 7 now"):
        offsets(f"{url}/0:7-9")
    with pytest.raises(UnavailableError, match=r"cannot be read now \(no answer\)"):
        offsets(f"{url}/0:0-4")
    assert offsets(f"{url}/0:0-3") == [0, 1, 2]


def test_a_missing_topic_and_partition_are_named(broker: KafkaBroker) -> None:
    with pytest.raises(StoreError, match=f"there is no {broker.url('nope')} .*: check its name"):
        listed(broker.url("nope"))
    broker.produce("few", range(PARTITIONS))
    with pytest.raises(UnavailableError, match=f"partition 9 of {broker.url('few')} cannot be read now .*nknown part"):
        offsets(f"{broker.url('few')}/9:0-1")


def test_brokers_that_do_not_answer_are_named() -> None:
    with closed_port() as port:
        url = f"kafka://127.0.0.1:{port}/t"
        with pytest.raises(UnavailableError, match=f"{url} cannot be read now .*refused.*: check that its brokers"):
            listed(url)
        with pytest.raises(UnavailableError, match=f"partition 0 of {url} cannot be read now .*refused"):
            offsets(f"{url}/0:0-1")


def test_a_frozen_broker_is_unavailable_until_it_goes_on(broker: KafkaBroker) -> None:
    url = broker.url("frozen")
    broker.produce("frozen", range(4), partition=0)
    assert offsets(f"{url}/0:0-1") == [0]
    broker.process.freeze()
    try:
        with pytest.raises(UnavailableError, match="cannot be read now"):
            listed(url)
        with pytest.raises(UnavailableError, match="cannot be read now"):
            offsets(f"{url}/1:0-1")
    finally:
        broker.process.thaw()
    assert offsets(f"{url}/0:1-4") == [1, 2, 3]


def test_unknown_settings_of_a_topic_are_a_warning(broker: KafkaBroker, caplog: pytest.LogCaptureFixture) -> None:
    broker.produce("settings", range(4))
    with caplog.at_level(logging.WARNING):
        listed(broker.url("settings"))
        listed(broker.url("settings"))
    (warning,) = [record.message for record in caplog.records if "settings of" in record.message]
    assert warning.startswith(f"the settings of {broker.url('settings')} are unknown (")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("sasl.password", f"{CONFIG} has a line other than name=value"),
        ("# user\n\nsasl.username=me\nsasl.pasword=hidden", r"property that librdkafka refuses .*sasl.pasword"),
        ("security.protocol=ssl\nssl.key.pem=hidden", r"property that librdkafka refuses .*ssl.key.pem"),
        ("security.protocol=wrong", r"property that librdkafka refuses .*\"wrong\""),
    ],
)
def test_a_wrong_property_is_refused_without_its_value(
    content: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kafka.properties").write_text(content)
    for given in (str(tmp_path / "kafka.properties"), f"# as text =\n{content}"):
        kafka.Topics.clear_instance_cache()
        monkeypatch.setenv(CONFIG, given)
        with pytest.raises(UsageError, match=sentence) as refused:
            listed("kafka://127.0.0.1:1/t")
        assert "hidden" not in str(refused.value)


def test_a_broker_that_refuses_the_user_is_named(broker: KafkaBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    user = "security.protocol=sasl_plaintext\nsasl.mechanism=PLAIN\nsasl.username=me\nsasl.password=hidden"
    monkeypatch.setenv(CONFIG, user)
    url = broker.url("refused")
    with pytest.raises(StoreError, match=f"no access to {url} .*SASL.*: check {CONFIG}, and the user's rights"):
        listed(url)
    with pytest.raises(StoreError, match=f"no access to partition 0 of {url}"):
        offsets(f"{url}/0:0-1")


def test_a_missing_file_of_properties_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG, str(tmp_path / "missing"))
    with pytest.raises(UsageError, match=f"{CONFIG} names {tmp_path / 'missing'}, which cannot be read: No such file"):
        listed("kafka://127.0.0.1:1/t")


@pytest.mark.parametrize("url", ["kafka://me:hidden@127.0.0.1:1/t", "kafka://127.0.0.1:1/t*", "kafka://127.0.0.1:1"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(DataError, match=r"is no topic: give one URL per topic") as refused:
        listed(url)
    assert "hidden" not in str(refused.value)


def test_properties_of_the_file_are_used(broker: KafkaBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kafka.properties").write_text("client.id = me\nauto.offset.reset=latest\nfetch.wait.max.ms=50\n")
    monkeypatch.setenv(CONFIG, str(tmp_path / "kafka.properties"))
    given: list[dict[str, Any]] = []
    real = kafka.kafka.Consumer
    monkeypatch.setattr(kafka.kafka, "Consumer", lambda chosen: given.append(chosen) or real(chosen))
    broker.produce("chosen", range(4))
    assert offsets(f"{broker.url('chosen')}/0:0-1") == [0]
    chosen = given[0]
    assert (chosen["client.id"], chosen["fetch.wait.max.ms"], chosen["auto.offset.reset"]) == ("me", "50", "error")


class Polled:
    """What a consumer polls: a message of an offset, or an error."""

    def __init__(self, offset: int, error: kafka.kafka.KafkaError | None = None) -> None:
        self._offset, self._error = offset, error

    def offset(self) -> int:
        return self._offset

    def error(self) -> kafka.kafka.KafkaError | None:
        return self._error


class Consumer:
    """A consumer that polls what a test wants, because the mock cluster writes no markers of transactions."""

    def __init__(self, *polled: Polled) -> None:
        self.polled = list(polled)
        self.assigned: list[int] = []

    def assign(self, places: list[kafka.kafka.TopicPartition]) -> None:
        self.assigned += [place.offset for place in places]

    def poll(self, timeout_s: float) -> Polled | None:
        return self.polled.pop(0) if self.polled and timeout_s else None


def read_through(consumer: Consumer, first: int, end: int, topics: kafka.Topics | None = None) -> list[int]:
    topics = topics or kafka.Topics("a:1")
    topics._consumer = consumer
    return [message.offset() for message in topics._messages("kafka://a:1/t", 0, range(first, end))]


def test_a_read_ends_with_its_range_whatever_the_gaps() -> None:
    end = kafka.kafka.KafkaError(kafka.kafka.KafkaError._PARTITION_EOF)
    consumer = Consumer(Polled(0), Polled(1), Polled(5, end), Polled(6), Polled(9), Polled(12, end))
    topics = kafka.Topics("a:1")
    ranges = [(0, 5), (5, 5), (5, 8), (8, 9), (9, 11), (11, 12)]
    assert [read_through(consumer, *each, topics) for each in ranges] == [[0, 1], [], [6], [], [9], []]
    assert consumer.assigned == [0]


@pytest.mark.parametrize("code", ["_BAD_MSG", "_TRANSPORT", "UNKNOWN_LEADER_EPOCH"])
def test_no_message_is_skipped_after_an_error(code: str) -> None:
    error = kafka.kafka.KafkaError(getattr(kafka.kafka.KafkaError, code))
    consumer, topics = Consumer(Polled(0), Polled(1, error), Polled(2)), kafka.Topics("a:1")
    with pytest.raises(UnavailableError, match="cannot be read now"):
        read_through(consumer, 0, 3, topics)
    consumer.polled = [Polled(0), Polled(1), Polled(2)]
    assert read_through(consumer, 0, 3, topics) == [0, 1, 2]
    assert consumer.assigned == [0, 0]
