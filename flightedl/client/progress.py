"""Tells the master what this trainer does: records, batches, means of metrics, what it waits for.

Twice a second where there is something new, more seldom where the master asks for that, and every few seconds that it
is there at all: so a script that hangs can be told from a process that stands still. Who looks after the job may also
ask where the trainer's threads stand.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, SupportsFloat

from flightedl.client.logged import LoggedValues
from flightedl.client.metrics import Totals, figures
from flightedl.client.probe import StepProbe
from flightedl.errors import FlightedlError, UsageError
from flightedl.messages.base import decode, encode
from flightedl.messages.tasks import METRICS_LIMIT, REPORT_EVERY_S, STACKS_LIMIT, LogReply, LogRequest
from flightedl.process.host import host_facts
from flightedl.process.stacks import stacks

if TYPE_CHECKING:
    from flightedl.process.metrics_page import Figures

#: Something is sent so often, whether there is news or not.
_SIGN_OF_LIFE_S = 5.0


class ProgressReporter:
    """Sums between two messages; a message that cannot be sent is kept and added to. Thread-safe.

    Args:
        send: Sends a message to the master, and returns its reply.
        sender: This trainer's id and generation.
        look: Called before each message: finds out what the trainer waits for.
        now: The process's clock.
        probe: Where the time of the loop goes; None: nobody notes it.
        logged: Writes metrics to files; None: nobody does.
    """

    def __init__(
        self,
        send: Callable[[bytes], bytes],
        sender: Callable[[], tuple[str, int]],
        look: Callable[[], None],
        now: Callable[[], float] = lambda: 0.0,
        probe: StepProbe | None = None,
        logged: LoggedValues | None = None,
    ) -> None:
        self._logged = logged
        self._probe = StepProbe(now) if probe is None else probe
        self._now = now
        self._batch_at = now()
        self._sent_at = now()
        #: Whether the master wants to know where the threads stand.
        self._wants_stacks = False
        self._send = send
        self._look = look
        self._sender = sender
        self._lock = threading.Lock()
        self._every_s = REPORT_EVERY_S
        self._totals = Totals()
        self._records = 0
        self._batches = 0
        self._idle_batches = 0
        self._skipped = 0
        self._metrics: dict[str, tuple[float, float]] = {}
        self._waiting_for = ""
        self._sent_waiting_for = ""
        #: True if the script shares what it trains with other trainers.
        self.shares_model: Callable[[], bool] = lambda: True
        self._sent_model = ""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flightedl-progress", daemon=True)
        self._thread.start()

    def batch(self, records: int, is_idle: bool = False) -> None:
        """A batch of so many records is through; ``is_idle``: the model got nothing from it."""
        with self._lock:
            self._batch_at = self._now()
            self._records += records
            self._batches += 1
            self._idle_batches += is_idle
            self._totals.batches += 1
            self._totals.records += records
            self._totals.idle_batches += is_idle
        if self._logged is not None:
            self._logged.batch(records)

    def advanced(self) -> None:
        """Note that the trainer has finished a batch of an evaluation."""
        with self._lock:
            self._batch_at = self._now()

    def skipped(self, records: int) -> None:
        """So many corrupt records were passed over."""
        with self._lock:
            self._skipped += records
            self._totals.skipped_records += records

    def metrics(self, values: Mapping[str, SupportsFloat], weight: float, epoch: int | None = None) -> None:
        """Metrics of a batch of this weight, and its epoch from 0; None: they are of no batch.

        Raises:
            UsageError: there are too many different ones.
        """
        with self._lock:
            if len(self._metrics.keys() | values.keys()) > METRICS_LIMIT:
                raise UsageError(f"job.log takes at most {METRICS_LIMIT} different names: log fewer of them")
            for name, value in values.items():
                total, weights = self._metrics.get(name, (0.0, 0.0))
                self._metrics[name] = (total + float(value) * weight, weights + weight)
            self._totals.logged.update(values)
        if self._logged is not None:
            self._logged.add(values, weight, epoch)

    def waiting_for(self, reason: str) -> None:
        """What the trainer waits for; empty: nothing."""
        with self._lock:
            self._waiting_for = reason[:500]

    def figures(self, slack_s: float) -> Figures:
        """For Prometheus; ``slack_s``: how long the lease is trusted without another renewal."""
        with self._lock:
            return figures(self._totals, slack_s)

    def close(self) -> None:
        """Send the rest and stop."""
        self._stopping.set()
        self._thread.join(2.0)

    def _run(self) -> None:
        while not self._stopping.wait(self._every_s):
            self._look()
            self._flush()
            if self._logged is not None:
                self._logged.write()
        self._flush()
        if self._logged is not None:
            self._logged.write(is_end=True)

    def _flush(self) -> None:
        with self._lock:
            records, batches, metrics, waiting = self._records, self._batches, self._metrics, self._waiting_for
            skipped, idle_batches = self._skipped, self._idle_batches
            is_sign_due = self._now() - self._sent_at >= _SIGN_OF_LIFE_S
            model = "" if not self._totals.batches else "common" if self.shares_model() else "own"
            has_news = records or skipped or metrics or (waiting, model) != (self._sent_waiting_for, self._sent_model)
            if not (has_news or is_sign_due or self._wants_stacks):
                return
            batch_s = self._now() - self._batch_at
            self._records, self._batches, self._idle_batches, self._skipped, self._metrics = 0, 0, 0, 0, {}
        profile = self._probe.take()
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
            batch_s=batch_s,
            profile=profile,
            doing=self._probe.doing,
            facts=host_facts(),
            model=model,
            stacks=stacks()[:STACKS_LIMIT] if self._wants_stacks else "",
        )
        try:
            reply = decode(self._send(encode(message)), LogReply)
        except FlightedlError:
            self._probe.give_back(profile)
            with self._lock:
                self._records += records
                self._batches += batches
                self._idle_batches += idle_batches
                self._skipped += skipped
                for name, (total, weight) in metrics.items():
                    more, weights = self._metrics.get(name, (0.0, 0.0))
                    self._metrics[name] = (total + more, weight + weights)
        else:
            self._sent_waiting_for, self._sent_model, self._sent_at = waiting, model, self._now()
            with self._lock:
                self._totals.spent(profile)
            self._wants_stacks, self._every_s = reply.wants_stacks, reply.every_s
