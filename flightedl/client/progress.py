"""A trainer's reports of its progress: to the master, on the metrics page, and in files in the output directory.

The user's thread counts batches and collects the values of ``job.log``, which takes a microsecond per call. Another
thread reports the first batch at once, because a script that ends before one is taken for broken, and further changes
twice a second, or less often if the master requests that. Even without changes, it reports every few seconds, so that a
hanging script can be distinguished from a stopped process. On the master's request, it also sends the stack traces of
the trainer's threads.

The reporting thread also writes the files. If the directory is not writable, it reports this once, and training
continues without files.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, SupportsFloat

from flightedl.client.probe import StepProbe
from flightedl.config import TrainerSettings
from flightedl.curves.files import PointFile
from flightedl.curves.gathering import Gathering
from flightedl.curves.tensorboard import EventFile, require_tensorboard
from flightedl.errors import FlightedlError, UsageError
from flightedl.messages.base import decode, encode
from flightedl.messages.tasks import METRICS_LIMIT, REPORT_EVERY_S, STACKS_LIMIT, LogReply, LogRequest
from flightedl.ports import Clock
from flightedl.process import machine
from flightedl.process.stacks import stacks
from flightedl.rpc.authentication import Role, pem_files_of

if TYPE_CHECKING:
    from flightedl.process.metrics_page import Figures

_log = logging.getLogger(__name__)

#: Maximum seconds between two reports, even if nothing has changed.
_SIGN_OF_LIFE_S = 5.0


@dataclass(slots=True)
class Totals:
    """Counters since the start of the trainer's process. Only the user's thread writes them, so no lock is needed."""

    batches: int = 0
    idle_batches: int = 0
    records: int = 0
    skipped_records: int = 0
    #: Seconds of the loop's activities that have been reported to the master; see ``probe``.
    profile: dict[str, float] = field(default_factory=dict)
    #: Name -> the most recently logged value.
    logged: dict[str, float] = field(default_factory=dict)


class ProgressReporter:
    """Sends the changes since the previous report. Changes that could not be sent are reported later. Thread-safe.

    Args:
        send: Sends a message to the master, and returns its reply.
        sender: Returns this trainer's id and generation.
        look: Called before each message, to determine why the trainer is waiting.
        now: The process's clock.
        probe: Times of the loop's activities; None to report none.
        logged: Writes metrics to files; None to write none.
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
        #: True if the master has requested the threads' stack traces.
        self._wants_stacks = False
        self._send = send
        self._look = look
        self._sender = sender
        self._every_s = REPORT_EVERY_S
        self._totals = Totals()
        #: Totals that have been reported to the master.
        self._sent = Totals()
        self._lock = threading.Lock()
        #: Name -> weighted sum, and sum of weights, since the previous report. Guarded by the lock.
        self._metrics: dict[str, tuple[float, float]] = {}
        self._waiting_for = ""
        self._sent_waiting_for = ""
        #: Returns True if other trainers are training the same model.
        self.shares_model: Callable[[], bool] = lambda: True
        self._sent_model = ""
        self._is_stopping = False
        #: Set when there is something to report at once.
        self._is_urgent = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flightedl-progress", daemon=True)
        self._thread.start()

    def batch(self, records: int, is_idle: bool = False) -> None:
        """Count a batch. ``is_idle`` is true if the batch did not contribute to the model."""
        totals = self._totals
        totals.batches += 1
        totals.records += records
        totals.idle_batches += is_idle
        self._batch_at = self._now()
        if totals.batches == 1:
            self._is_urgent.set()

    def advanced(self) -> None:
        """Record that the trainer has measured one batch of an evaluation."""
        self._batch_at = self._now()

    def skipped(self, records: int) -> None:
        with self._lock:
            self._totals.skipped_records += records

    def metrics(self, values: Mapping[str, SupportsFloat], weight: float, epoch: int | None = None) -> None:
        """Add metrics of a batch with this weight and epoch (counted from 0), or metrics without a batch (None).

        Raises:
            UsageError: there are too many different names.
        """
        totals, numbers = self._totals, {name: float(value) for name, value in values.items()}
        with self._lock:
            if len(self._metrics.keys() | numbers.keys()) > METRICS_LIMIT:
                raise UsageError(f"job.log accepts at most {METRICS_LIMIT} different names: log fewer of them")
            for name, value in numbers.items():
                total, weights = self._metrics.get(name, (0.0, 0.0))
                self._metrics[name] = (total + value * weight, weights + weight)
            totals.logged.update(numbers)
        if self._logged is not None:
            self._logged.add(numbers, weight, epoch, totals.batches, totals.records)

    def waiting_for(self, reason: str) -> None:
        """Set the reason why the trainer is waiting. An empty reason means that it is not waiting."""
        self._waiting_for = reason[:500]

    def figures(self, slack_s: float) -> Figures:
        """Return metrics for Prometheus. ``slack_s`` is the time left until the lease expires."""
        with self._lock:
            return figures(self._totals, slack_s)

    def close(self) -> None:
        self._is_stopping = True
        self._is_urgent.set()
        self._thread.join(2.0)

    def _run(self) -> None:
        while True:
            self._is_urgent.wait(self._every_s)
            self._is_urgent.clear()
            if self._is_stopping:
                break
            self._look()
            self._flush()
            if self._logged is not None:
                self._logged.write()
        self._flush()
        if self._logged is not None:
            self._logged.write(is_end=True)

    def _flush(self) -> None:
        totals, sent, waiting = replace(self._totals), self._sent, self._waiting_for
        batches, records = totals.batches - sent.batches, totals.records - sent.records
        skipped = totals.skipped_records - sent.skipped_records
        model = "" if not totals.batches else "common" if self.shares_model() else "own"
        with self._lock:
            metrics, self._metrics = self._metrics, {}
        has_news = records or skipped or metrics or (waiting, model) != (self._sent_waiting_for, self._sent_model)
        if not (has_news or self._wants_stacks or self._now() - self._sent_at >= _SIGN_OF_LIFE_S):
            return
        profile = self._probe.take()
        trainer, generation = self._sender()
        message = LogRequest(
            trainer=trainer,
            generation=generation,
            records=records,
            batches=batches,
            idle_batches=totals.idle_batches - sent.idle_batches,
            skipped_records=skipped,
            metrics=metrics,
            host=machine.host_name(),
            pid=machine.process_id(),
            waiting_for=waiting,
            batch_s=self._now() - self._batch_at,
            profile=profile,
            doing=self._probe.doing,
            starting_s=self._now() - self._batch_at if self._probe.is_unused else 0.0,
            facts=machine.host_facts(),
            model=model,
            stacks=stacks()[:STACKS_LIMIT] if self._wants_stacks else "",
        )
        try:
            reply = decode(self._send(encode(message)), LogReply)
        except FlightedlError:
            self._probe.give_back(profile)
            with self._lock:
                for name, (total, weight) in metrics.items():
                    more, weights = self._metrics.get(name, (0.0, 0.0))
                    self._metrics[name] = (total + more, weight + weights)
        else:
            self._sent = totals
            self._sent_waiting_for, self._sent_model, self._sent_at = waiting, model, self._now()
            with self._lock:
                spent = self._totals.profile
                spent.update({what: spent.get(what, 0.0) + seconds for what, seconds in profile.items()})
            self._wants_stacks, self._every_s = reply.wants_stacks, reply.every_s


def figures(totals: Totals, slack_s: float) -> Figures:
    """Return the values on the metrics page, by name."""
    from flightedl.process.metrics_page import Figure

    return {
        "loop_batches_total": Figure("Batches that this trainer finished.", totals.batches),
        "loop_idle_batches_total": Figure("Finished batches without any gradient for the model.", totals.idle_batches),
        "loop_records_total": Figure("Records of its batches.", totals.records),
        "loop_skipped_records_total": Figure("Corrupt records that it skipped.", totals.skipped_records),
        "loop_seconds_total": Figure("Seconds of its loop, by activity.", dict(totals.profile), "doing"),
        "logged": Figure("The newest value that its script logged.", dict(totals.logged), "name"),
        "lease_slack_seconds": Figure("How long its lease is trusted without another renewal.", slack_s),
    }


def metrics_page(chosen: TrainerSettings, read: Callable[[], Figures]) -> contextlib.AbstractContextManager[object]:
    """Serve the metrics page inside the ``with`` block if the settings enable it.

    Raises:
        UsageError: the certificates cannot be read.
    """
    if not chosen.metrics_port:
        return contextlib.nullcontext()
    from flightedl.process.http_page import Answer, Asked, HttpPage, patient_page
    from flightedl.process.metrics_page import Metrics

    metrics = Metrics({"job": chosen.job, "role": "trainer", "index": chosen.process_name}, read)

    def answer(asked: Asked) -> Answer:
        return metrics.page(asked) if asked.path == "/metrics" else Answer(b"there is /metrics\n", status=404)

    tls = pem_files_of(chosen.tls_dir, Role.TRAINER)
    return patient_page(lambda: HttpPage("metrics page", chosen.bind, chosen.metrics_port, answer, tls))


def require_files(chosen: TrainerSettings) -> None:
    """Check that the requested files can be written, before anything else starts.

    Raises:
        UsageError: a library is missing, or no directory is set.
    """
    if chosen.tensorboard:
        require_tensorboard()
        if not chosen.output_dir:
            raise UsageError("files for TensorBoard need a directory: also set output_dir (FLIGHTEDL_OUTPUT_DIR)")


class LoggedValues:
    """Files with one trainer's logged values. Thread-safe, but only one thread may write the files.

    Args:
        chosen: The settings.
        trainer: The trainer's id.
        clock: The process's clock.
    """

    def __init__(self, chosen: TrainerSettings, trainer: str, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._gathering = Gathering(trainer, clock.now())
        self._epoch = 1
        directory = Path(chosen.output_dir)
        #: Writer of the files; None if no files are requested, or if writing has failed.
        self._points = PointFile(directory, trainer) if chosen.output_dir else None
        self._events = EventFile(directory, trainer) if chosen.tensorboard else None

    def add(self, values: Mapping[str, float], weight: float, epoch: int | None, batches: int, records: int) -> None:
        """Add the values of a batch in this epoch (from 0, or None). ``batches`` and ``records`` are totals so far."""
        if self._points is None:
            return
        with self._lock:
            self._epoch = self._epoch if epoch is None else epoch + 1
            now, wall_s = self._clock.now(), self._clock.wall_time()
            self._gathering.add(values, weight, self._epoch, now, wall_s, batches, records)

    def write(self, *, is_end: bool = False) -> None:
        """Write the points that are due. At the end of training, write all points."""
        if self._points is None:
            return
        with self._lock:
            points = self._gathering.take(self._clock.now(), is_end=is_end)
        try:
            if points:
                self._points.append(points)
                if self._events is not None:
                    self._events.append(points)
            if is_end and self._events is not None:
                self._events.close()
        except OSError as error:
            _log.warning("values of job.log are no longer written to files: %s", error)
            self._points = None
