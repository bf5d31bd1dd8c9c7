"""Tells the master, twice a second, what this trainer did: records, batches, means of metrics, what it waits for."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping
from typing import SupportsFloat

from flightedl.errors import FlightedlError, UsageError
from flightedl.messages.base import encode
from flightedl.messages.tasks import METRICS_LIMIT, LogRequest

_EVERY_S = 0.5


class ProgressReporter:
    """Sums between two messages; a message that cannot be sent is kept and added to. Thread-safe.

    Args:
        send: Sends a message to the master.
        sender: This trainer's id and generation.
        look: Called before each message: finds out what the trainer waits for.
    """

    def __init__(
        self, send: Callable[[bytes], None], sender: Callable[[], tuple[str, int]], look: Callable[[], None]
    ) -> None:
        self._send = send
        self._look = look
        self._sender = sender
        self._lock = threading.Lock()
        self._records = 0
        self._batches = 0
        self._idle_batches = 0
        self._skipped = 0
        self._metrics: dict[str, tuple[float, float]] = {}
        self._waiting_for = ""
        self._sent_waiting_for = ""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flightedl-progress", daemon=True)
        self._thread.start()

    def batch(self, records: int, is_idle: bool = False) -> None:
        """A batch of so many records is through; ``is_idle``: the model got nothing from it."""
        with self._lock:
            self._records += records
            self._batches += 1
            self._idle_batches += is_idle

    def skipped(self, records: int) -> None:
        """So many corrupt records were passed over."""
        with self._lock:
            self._skipped += records

    def metrics(self, values: Mapping[str, SupportsFloat], weight: float) -> None:
        """Metrics of a batch of this weight.

        Raises:
            UsageError: there are too many different ones.
        """
        with self._lock:
            if len(self._metrics.keys() | values.keys()) > METRICS_LIMIT:
                raise UsageError(f"job.log takes at most {METRICS_LIMIT} different names: log fewer of them")
            for name, value in values.items():
                total, weights = self._metrics.get(name, (0.0, 0.0))
                self._metrics[name] = (total + float(value) * weight, weights + weight)

    def waiting_for(self, reason: str) -> None:
        """What the trainer waits for; empty: nothing."""
        with self._lock:
            self._waiting_for = reason[:500]

    def close(self) -> None:
        """Send the rest and stop."""
        self._stopping.set()
        self._thread.join(2.0)

    def _run(self) -> None:
        while not self._stopping.wait(_EVERY_S):
            self._look()
            self._flush()
        self._flush()

    def _flush(self) -> None:
        with self._lock:
            records, batches, metrics, waiting = self._records, self._batches, self._metrics, self._waiting_for
            skipped, idle_batches = self._skipped, self._idle_batches
            if not (records or skipped or metrics or waiting != self._sent_waiting_for):
                return
            self._records, self._batches, self._idle_batches, self._skipped, self._metrics = 0, 0, 0, 0, {}
        trainer, generation = self._sender()
        message = LogRequest(
            trainer=trainer,
            generation=generation,
            records=records,
            batches=batches,
            idle_batches=idle_batches,
            skipped_records=skipped,
            metrics=metrics,
            host=socket.gethostname(),
            pid=os.getpid(),
            waiting_for=waiting,
        )
        try:
            self._send(encode(message))
        except FlightedlError:
            with self._lock:
                self._records += records
                self._batches += batches
                self._idle_batches += idle_batches
                self._skipped += skipped
                for name, (total, weight) in metrics.items():
                    more, weights = self._metrics.get(name, (0.0, 0.0))
                    self._metrics[name] = (total + more, weight + weights)
        else:
            self._sent_waiting_for = waiting
