"""Kafka topics, listed and read through librdkafka as if ranges of their offsets were files.

* There is no consumer group: the master decides which trainer reads which offsets, and nothing is committed to Kafka.
* A listing ends before the first open transaction. A read ends with its range, whatever transactions have left in it.
* Reading offsets that the broker has deleted is an error. They are never skipped.
* URLs contain addresses. All other properties are in ``FLIGHTEDL_KAFKA_CONFIG``, or in the file that it names. Messages
  contain neither passwords nor keys.

fsspec keeps one instance for each thread and list of brokers, so no two threads use the same instance.
"""

from __future__ import annotations

import io
import logging
from concurrent.futures import TimeoutError as NoAnswerError
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import confluent_kafka as kafka
import pyarrow as pa
from confluent_kafka.admin import AdminClient, ConfigResource, OffsetSpec
from fsspec import AbstractFileSystem

from flightedl.config import kafka_config
from flightedl.domain.topics import topic_and_ranges, url_of, warning_of
from flightedl.errors import NotFoundError, StoreError, UnavailableError, UsageError

_log = logging.getLogger(__name__)

_CONFIG = "FLIGHTEDL_KAFKA_CONFIG"
#: Seconds without an answer after which a request, or the optional request for a topic's settings, has failed.
_ANSWER_S, _SETTINGS_S = 10.0, 3.0
#: Seconds for which to wait for a message, and number of such waits without any after which a read has failed.
_POLL_S, _POLLS = 0.5, 20
#: Defaults. Another process usually reads the messages after a range, so little more than the range is fetched. A
#: consumer must have a group, although it joins none.
_DEFAULTS: dict[str, Any] = {"group.id": "flightedl", "check.crcs": True, "topic.metadata.refresh.interval.ms": 20_000}
_DEFAULTS |= {"fetch.wait.max.ms": 100, "fetch.queue.backoff.ms": 10, "queued.max.messages.kbytes": 2048}
#: Properties that cannot be changed.
_FIXED: dict[str, Any] = {"auto.offset.reset": "error", "enable.partition.eof": True, "enable.auto.commit": False}
_FIXED |= {"isolation.level": "read_committed", "log_level": 0}
_SECRET = ("password", "secret", "key", "config", "pem", "token")  # Parts of the names of properties.
#: Names of librdkafka's errors that a retry does not solve.
_REFUSED = ("_AUTHENTICATION", "SASL_AUTHENTICATION_FAILED", "TOPIC_AUTHORIZATION_FAILED")
_MISSING = ("UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC")
_ERRORS = (kafka.KafkaException, NoAnswerError)
#: Topics whose settings this process has checked.
_CHECKED: set[str] = set()


class Topics(AbstractFileSystem):  # type: ignore[misc]
    """The topics of one Kafka cluster, given the addresses of its brokers with commas between them."""

    protocol: ClassVar[str] = "kafka"

    def __init__(self, brokers: str, **more: Any) -> None:
        super().__init__(**more)
        self._brokers = brokers
        #: Secrets, which messages must not contain.
        self._hidden: list[str] = []
        self._admin: Any = None
        self._consumer: Any = None
        #: Topic, partition and end of the latest read, the offset up to which it consumed, and messages after its end.
        self._at: tuple[str, int, int] | None = None
        self._consumed = 0
        self._ahead: list[Any] = []
        #: Latest error of a connection.
        self._trouble: Any = None
        #: Seconds for which topics should keep messages.
        self.least_retention_s = 0.0

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, str]:
        return {"brokers": path.removeprefix("kafka://").partition("/")[0]}

    def info(self, path: str, **options: Any) -> dict[str, Any]:  # noqa: ARG002 - as fsspec calls it
        """Describe ranges of offsets as a file, without asking the broker."""
        _, ranges = topic_and_ranges(f"kafka://{path}")
        if not ranges:
            raise FileNotFoundError(path)
        return {"name": path, "size": sum(map(len, ranges.values())), "type": "file", "ETag": "offsets"}

    def glob(self, path: str, **options: Any) -> dict[str, Any]:  # noqa: ARG002 - as fsspec calls it
        """Return the readable offsets of the topic in a pattern such as ``broker:9092/clicks/*``, as one file."""
        topic, _ = topic_and_ranges(f"kafka://{path.removesuffix('/*')}")
        name = topic.rpartition("/")[2]
        self._connect()
        try:
            found = self._consumer.list_topics(name, timeout=_ANSWER_S).topics[name]  # Creates no topic.
            if found.error is not None:
                raise kafka.KafkaException(found.error)
            if topic not in _CHECKED:
                self._check_settings(topic, name)
            places = [kafka.TopicPartition(name, number) for number in found.partitions]
            first, end = (self._offsets(places, spec) for spec in (OffsetSpec.earliest(), OffsetSpec.latest()))
        except _ERRORS as error:
            raise self._explained(topic, *error.args) from None
        ranges = {number: range(start, end[number]) for number, start in first.items()}
        listed = url_of(topic, ranges).removeprefix("kafka://")
        return {listed: self.info(listed)}

    def _offsets(self, places: list[Any], spec: OffsetSpec) -> dict[int, int]:
        level, wanted = kafka.IsolationLevel.READ_COMMITTED, dict.fromkeys(places, spec)
        futures = self._admin.list_offsets(wanted, isolation_level=level, request_timeout=_ANSWER_S)
        return {place.partition: future.result(2 * _ANSWER_S).offset for place, future in futures.items()}

    def _check_settings(self, topic: str, name: str) -> None:
        resource = ConfigResource(ConfigResource.Type.TOPIC, name)
        future = self._admin.describe_configs([resource], request_timeout=_SETTINGS_S)[resource]
        try:
            settings = {key: entry.value for key, entry in future.result(2 * _SETTINGS_S).items()}
            warning = warning_of(topic, settings, self.least_retention_s)
        except _ERRORS as error:
            reason = self._reason(*error.args)
            warning = f"the settings of {topic} are unknown ({reason}): make sure that it is not compacted"
        if warning:
            _log.warning("%s", warning)
        _CHECKED.add(topic)

    def _open(self, path: str, *_: Any, **__: Any) -> BinaryIO:
        """Read all messages of ranges of offsets, as an Arrow stream."""
        topic, ranges = topic_and_ranges(f"kafka://{path}")
        self._connect()
        found = [each for number, offsets in ranges.items() for each in self._messages(topic, number, offsets)]
        times = [each.timestamp()[1] if each.timestamp()[0] else None for each in found]
        columns = {
            "value": pa.array([each.value() for each in found], pa.binary()),
            "key": pa.array([each.key() for each in found], pa.binary()),
            "partition": pa.array([each.partition() for each in found], pa.int64()),
            "offset": pa.array([each.offset() for each in found], pa.int64()),
            "timestamp": pa.array(times, pa.int64()),
        }
        batch, sink = pa.record_batch(columns), io.BytesIO()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        sink.seek(0)
        return sink

    def _messages(self, topic: str, partition: int, offsets: range) -> list[Any]:
        at, self._at = self._at, None  # After an error, the next read begins anew.
        name, place, silent = topic.rpartition("/")[2], f"partition {partition} of {topic}", 0
        if at != (topic, partition, offsets.start):
            self._consumed, self._ahead, self._trouble = offsets.start, [], None
            self._consumer.assign([kafka.TopicPartition(name, partition, offsets.start)])
        while self._consumed < offsets.stop:
            message = self._consumer.poll(_POLL_S)
            error = self._trouble if message is None else message.error()
            code = None if error is None else error.name()
            if message is not None and code in (None, "_PARTITION_EOF"):
                self._trouble, silent = None, 0
                self._consumed = max(self._consumed, message.offset() + (code is None))
                self._ahead += [message] if code is None else []
            elif code == "_AUTO_OFFSET_RESET":
                self._require_kept(place, kafka.TopicPartition(name, partition), offsets)
            elif message is not None or code in (*_REFUSED, *_MISSING) or (silent := silent + 1) == _POLLS:
                raise self._explained(place, error)
        found = [message for message in self._ahead if message.offset() < offsets.stop]
        self._at, self._ahead = (topic, partition, offsets.stop), self._ahead[len(found) :]
        return found

    def _require_kept(self, place: str, partition: Any, offsets: range) -> None:
        """Raise NotFoundError if the broker no longer has these offsets, and UnavailableError if it should."""
        try:
            first, _ = self._consumer.get_watermark_offsets(partition, timeout=_ANSWER_S)
        except _ERRORS as error:
            raise self._explained(place, *error.args) from None
        if first > offsets.start:
            raise NotFoundError(f"{place} begins at offset {first} now: the broker deleted messages that were not read")
        raise UnavailableError(f"{place} has no offset {self._consumed} now: check that all brokers are running")

    def _explained(self, place: str, error: Any = None) -> StoreError | UnavailableError:
        """Return the error to raise for one of librdkafka; None if there was no answer."""
        self._consumer.poll(0)  # Calls ``_note``.
        if error is None or (self._trouble is not None and error.name() not in (*_REFUSED, *_MISSING)):
            error = self._trouble
        code, reason = None if error is None else error.name(), self._reason(error)
        if code in _REFUSED:
            return StoreError(f"no access to {place} ({reason}): check {_CONFIG}, and the user's rights")
        if code in _MISSING:
            return StoreError(f"there is no {place} ({reason}): check its name")
        return UnavailableError(f"{place} cannot be read now ({reason}): check that its brokers can be reached")

    def _reason(self, error: Any = None) -> str:
        text = "no answer" if error is None else error.str()
        for value in self._hidden:
            text = text.replace(value, "...")
        return " ".join(text.split())[:200]

    def _connect(self) -> None:
        if self._consumer is not None:
            return
        given = _read_properties(kafka_config())
        self._hidden = [value for name, value in given.items() if value and any(part in name for part in _SECRET)]
        chosen = {**_DEFAULTS, **given, **_FIXED, "bootstrap.servers": self._brokers}
        try:
            self._admin, self._consumer = AdminClient(chosen), kafka.Consumer({**chosen, "error_cb": self._note})
        except kafka.KafkaException as error:
            reason = self._reason(*error.args)
            raise UsageError(f"{_CONFIG} has a property that librdkafka refuses ({reason}): correct it") from None

    def _note(self, error: Any) -> None:
        self._trouble = self._trouble if error.name() == "_ALL_BROKERS_DOWN" else error


def _read_properties(given: str) -> dict[str, str]:
    """Return the properties in a file or a text. Raises UsageError without its content if it has another form."""
    try:
        lines = (Path(given).read_text() if given and "=" not in given else given).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise UsageError(f"{_CONFIG} names {given}, which cannot be read: {reason}") from None
    parts = [line.partition("=") for line in map(str.strip, lines) if line and not line.startswith("#")]
    if not all(equals for _, equals, _ in parts):
        raise UsageError(f"{_CONFIG} has a line other than name=value: give each property of librdkafka its own line")
    return {name.strip(): value.strip() for name, _, value in parts}
