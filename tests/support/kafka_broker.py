"""Kafka for tests: librdkafka's mock cluster of one broker, in a process of its own.

Topics exist as soon as something is produced to them, and have four partitions. Each partition keeps its newest 5 MB.
The mock cluster has no settings of topics, no transactions, and no way to add partitions.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import confluent_kafka as kafka

from tests.support.processes import ServerProcess

PARTITIONS = 4
_START_TIMEOUT_S = 30.0


class KafkaBroker:
    """A broker, and a producer of messages. A context manager."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.process: Any = None
        self._producer: Any = None
        self.address = ""

    def __enter__(self) -> Self:
        root = Path(__file__).resolve().parents[2]
        log_path = self._directory / "kafka.log"
        command = [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {str(root)!r}); import {__name__} as m; m.run()",
        ]
        self.process = ServerProcess(command, log_path)
        found: list[str] = []

        def is_ready() -> bool:
            found[:] = [line for line in log_path.read_text().splitlines() if line.startswith("address ")]
            return bool(found)

        if not self.process.wait_until(is_ready, _START_TIMEOUT_S):
            raise RuntimeError(f"the Kafka broker did not start: {self.process.log()}")
        self.address = found[0].split()[1]
        self._producer = kafka.Producer({"bootstrap.servers": self.address, "log_level": 0, "linger.ms": 0})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._producer = None
        self.process.kill()

    def url(self, topic: str) -> str:
        return f"kafka://{self.address}/{topic}"

    def produce(self, topic: str, values: Iterable[Any], partition: int | None = None) -> None:
        """Write values as JSON, by turns to all partitions, or to one. Return when the broker has them."""
        for number, value in enumerate(values):
            where = number % PARTITIONS if partition is None else partition
            self._producer.produce(topic, json.dumps(value).encode(), key=str(number).encode(), partition=where)
            self._producer.poll(0)
        if self._producer.flush(30.0):
            raise RuntimeError("the broker has not accepted all messages")


def run() -> None:
    """Be the broker until the process is killed."""
    owner = kafka.Producer({"bootstrap.servers": "unused", "test.mock.num.brokers": 1, "log_level": 0})
    (broker,) = owner.list_topics(timeout=10.0).brokers.values()
    print(f"address {broker.host}:{broker.port}", flush=True)
    while True:
        owner.poll(1.0)
