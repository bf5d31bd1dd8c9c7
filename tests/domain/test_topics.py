"""URLs of Kafka topics, and settings of topics that flightedl refuses or warns of."""

from __future__ import annotations

import pytest

from flightedl.domain.topics import is_topic, topic_and_ranges, url_of, warning_of
from flightedl.errors import DataError, UsageError

TOPIC = "kafka://a:9092,b:9092/clicks.v-1_x"


def test_a_topic_and_its_ranges_are_named_by_a_url() -> None:
    assert topic_and_ranges(TOPIC) == (TOPIC, {})
    ranges = {0: range(10, 20), 12: range(5, 5)}
    assert url_of(TOPIC, {12: range(5, 5), 0: range(10, 20)}) == f"{TOPIC}/0:10-20,12:5-5"
    assert topic_and_ranges(url_of(TOPIC, ranges)) == (TOPIC, ranges)


def test_only_kafka_urls_are_topics() -> None:
    assert is_topic(TOPIC)
    assert not is_topic("s3://kafka/x")


@pytest.mark.parametrize(
    "url",
    [
        "kafka://a:9092",
        "kafka://a/",
        "kafka://a/t*",
        "kafka://a/t/",
        "kafka://a/t/0",
        "kafka://a/t/0:1-2,",
        "kafka:///t",
    ],
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(DataError, match="is no topic: give one URL per topic, such as kafka://broker:9092/clicks"):
        topic_and_ranges(url)


def test_a_refused_url_is_named_without_its_password() -> None:
    with pytest.raises(DataError) as refused:
        topic_and_ranges("kafka://me:secret@a:9092/t")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("policy", ["compact", "compact,delete"])
def test_a_compacted_topic_is_refused(policy: str) -> None:
    with pytest.raises(UsageError, match="is compacted"):
        warning_of(TOPIC, {"cleanup.policy": policy}, 0.0)


@pytest.mark.parametrize(
    ("retention", "is_warned"), [("600000", False), ("599999", True), ("-1", False), (None, False), ("0", True)]
)
def test_a_topic_must_keep_messages_for_ten_checkpoint_intervals(retention: str | None, is_warned: bool) -> None:
    found = warning_of(TOPIC, {"cleanup.policy": "delete", "retention.ms": retention}, 600.0)
    assert bool(found) == is_warned
    assert not found or found.startswith(f"{TOPIC} keeps messages for ")
