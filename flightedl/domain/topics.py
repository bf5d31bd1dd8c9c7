"""URLs of Kafka topics, and of ranges of their offsets. Pure.

``kafka://broker:9092,other:9092/clicks`` is a topic. Ranges of offsets in some of its partitions take the place of a
file, whose URL is ``kafka://broker:9092,other:9092/clicks/0:100-250,1:0-80``. Ends of ranges are exclusive.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from flightedl.domain.data_urls import without_credentials
from flightedl.errors import DataError, UsageError

#: Partition -> its offsets, in the order of partitions.
Ranges = Mapping[int, range]

_URL = re.compile(r"(kafka://[^/@?#*\s]+/[a-zA-Z0-9._-]+)(?:/(\d+:\d+-\d+(?:,\d+:\d+-\d+)*))?")


def is_topic(*urls: str) -> bool:
    """True if any of the URLs names a topic, or ranges of its offsets."""
    return any(url.startswith("kafka://") for url in urls)


def topic_and_ranges(url: str) -> tuple[str, Ranges]:
    """Return the URL of the topic, and the ranges, if any. Raises DataError if the URL has another form."""
    found = _URL.fullmatch(url)
    if found is None:
        raise DataError(
            f"{without_credentials(url)} is no topic: give one URL per topic, such as kafka://broker:9092/clicks, "
            "without user, password and wildcards"
        )
    parts = [[int(number) for number in re.split("[:-]", part)] for part in (found[2] or "").split(",") if part]
    return found[1], {partition: range(first, end) for partition, first, end in parts}


def url_of(topic: str, ranges: Ranges) -> str:
    """Return the URL of these ranges of a topic's offsets."""
    return f"{topic}/{','.join(f'{number}:{each.start}-{each.stop}' for number, each in sorted(ranges.items()))}"


def warning_of(topic: str, settings: Mapping[str, str | None], least_retention_s: float) -> str:
    """Return a warning if a topic keeps messages for less than that, or "". Raises UsageError if it is compacted."""
    if "compact" in (settings.get("cleanup.policy") or ""):
        raise UsageError(f"{topic} is compacted (cleanup.policy), so it loses messages: read another topic")
    retention_s = int(settings.get("retention.ms") or -1) / 1000
    if not 0 <= retention_s < least_retention_s:
        return ""
    return (
        f"{topic} keeps messages for {retention_s:g} s (retention.ms), which should be ten checkpoint intervals "
        f"({least_retention_s:g} s): messages that are deleted before a fault makes the job repeat them are lost"
    )
