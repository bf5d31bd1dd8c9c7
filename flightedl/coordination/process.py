"""The common part of master and pserver processes: settings, shutdown, and the record with the process's address.

A process ends for the first of these reasons: a signal, or a notice that its machine is about to end (exit code 0),
the loss of its lease (75, after which it should be restarted), a job that cannot continue (3), or a rolled-back etcd
(3). A ``FlightedlError`` that reaches ``run_server`` is converted to a message and an exit code.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import ClassVar, Generic, TypeVar

import msgspec
from prometheus_client import CollectorRegistry

from flightedl.adapters.clock import SystemClock
from flightedl.adapters.etcd import EtcdCoordinator
from flightedl.adapters.instruments import PrometheusInstruments
from flightedl.adapters.notices import watched
from flightedl.adapters.telemetry import telemetry
from flightedl.config import ServerSettings, host_port
from flightedl.coordination.coordinators import open_coordinator
from flightedl.coordination.keeper import HeldKey
from flightedl.coordination.keys import JobKeys
from flightedl.coordination.lives import JobCoordinator
from flightedl.coordination.records import ServerRecord
from flightedl.domain.etcd_versions import warning_about
from flightedl.errors import EXIT_START_AGAIN, FlightedlError, exit_code_of
from flightedl.ports import Clock, Coordinator, Instruments, Measure, NoInstruments
from flightedl.process import log_format, machine
from flightedl.process.health_page import PATHS, Health
from flightedl.process.http_page import Answer, Asked, Handler, HttpPage, patient_page
from flightedl.process.metrics_page import Figure, Figures, Metrics
from flightedl.recording.writer import Recorder, recording_process
from flightedl.rpc.authentication import Credentials, Role, pem_files_of
from flightedl.rpc.identity import ServerIdentity
from flightedl.rpc.routes import Routes
from flightedl.rpc.server import FlightServer

_log = logging.getLogger(__name__)

Settings = TypeVar("Settings", bound=ServerSettings)


class ServerProcess(abc.ABC, Generic[Settings]):
    """A server process. Subclasses implement the work between its start and its end."""

    #: Readable name of this kind of process.
    role: ClassVar[str]

    def __init__(self, chosen: Settings) -> None:
        self._settings = chosen
        self._clock: Clock = SystemClock()
        self._keys = JobKeys(chosen.job)
        self._stop = threading.Event()
        self._exit_code = 0
        self._reason = ""
        self._health = Health(self._clock.now)
        #: Recorder of this process's events; None if events are not recorded.
        self._recorder: Recorder | None = None
        #: Metrics of the Prometheus page.
        self._registry = CollectorRegistry()
        self._measured: PrometheusInstruments | None = None

    def end(self, exit_code: int, reason: str) -> None:
        """Request the end of the process. Only the first reason is kept."""
        if not self._stop.is_set():
            self._exit_code, self._reason = exit_code, reason
            self._stop.set()

    def lost(self, what: str) -> None:
        """Request the end of the process, because it has lost its key."""
        self.end(EXIT_START_AGAIN, what)

    def failed(self, error: BaseException) -> None:
        """Request the end of the process after a bug. The process that replaces it recovers the state."""
        self.end(EXIT_START_AGAIN, f"it cannot continue after a bug: {error!r:.500}")

    def _thread_failed(self, failure: threading.ExceptHookArgs) -> None:
        """Handle the error that ended a thread. Other threads would wait for a thread of this process for ever."""
        threading.__excepthook__(failure)
        if failure.thread is not None and failure.thread.name.startswith("flightedl-"):
            self.failed(failure.exc_value or failure.exc_type())

    def run(self) -> int:
        """Serve until the end of the process is requested. Return the exit code."""
        threading.excepthook = self._thread_failed
        machine.on_termination(partial(self.end, 0))
        coordinator = JobCoordinator(
            self._open_coordinator(),
            self._keys,
            lambda error: self.end(exit_code_of(error), str(error)),
        )
        chosen = self._settings
        with (
            contextlib.closing(coordinator),
            self._health_page(),
            watched(chosen, _log.warning),
            recording_process(chosen.record, self.role, chosen.job, self._clock) as self._recorder,
        ):
            return self._serve(coordinator)

    def _open_coordinator(self) -> Coordinator:
        etcd = open_coordinator(self._settings, clock=self._clock)
        threading.Thread(target=self._look_at, args=(etcd,), name="flightedl-etcd-version", daemon=True).start()
        return etcd

    def _look_at(self, etcd: EtcdCoordinator) -> None:
        """Warn once if this version of etcd may lose acknowledged writes. Do nothing if etcd does not answer."""
        with contextlib.suppress(FlightedlError):
            if warning := warning_about(*etcd.version(), self._settings.etcd):
                _log.warning("%s", warning)

    @abc.abstractmethod
    def _serve(self, coordinator: JobCoordinator) -> int:
        """Run the process to completion and return its exit code."""

    def _server(self, routes: Routes) -> FlightServer:
        chosen = self._settings
        return FlightServer(
            routes,
            ServerIdentity(chosen.job, self.role),
            host=chosen.bind,
            port=chosen.port,
            credentials=self._load_credentials(),
            clock=self._clock,
        )

    def _load_credentials(self) -> Credentials | None:
        return Credentials.load(self._settings.tls_dir, Role.SERVER)

    def _instruments(self, index: int, measures: Iterable[Measure]) -> Instruments:
        """Return instruments whose measurements appear on the Prometheus page if the settings enable it."""
        if not self._settings.metrics_port:
            return NoInstruments()
        if self._measured is None:
            self._measured = PrometheusInstruments(self._registry, self._labels(index), measures)
        return self._measured

    def _labels(self, index: int) -> dict[str, str]:
        return {"job": self._settings.job, "role": self.role, "index": str(index)}

    def _health_page(self) -> contextlib.AbstractContextManager[object]:
        bind, port = self._settings.bind, self._settings.health_port
        if not port:
            return contextlib.nullcontext()
        return contextlib.closing(HttpPage("health page", bind, port, self._health.page))

    def _pages(
        self, index: int, held: HeldKey, read: Callable[[], Figures], other: Handler | None = None
    ) -> contextlib.AbstractContextManager[object]:
        """Serve this process's HTTP pages during the ``with`` block if the settings enable them.

        The pages are metrics for Prometheus, answers to probes, and those in ``other``.
        """
        if not self._settings.metrics_port:
            return contextlib.nullcontext()

        def read_all() -> Figures:
            slack = Figure("How long its lease is trusted without another renewal.", held.slack_s)
            return {**read(), "lease_slack_seconds": slack}

        metrics = Metrics(self._labels(index), read_all, self._registry)

        def answer(asked: Asked) -> Answer:
            if asked.path == "/metrics":
                return metrics.page(asked)
            if asked.path in PATHS or other is None:
                return self._health.page(asked)
            return other(asked)

        chosen, tls = self._settings, pem_files_of(self._settings.tls_dir, Role.SERVER)
        return patient_page(partial(HttpPage, "metrics page", chosen.bind, chosen.metrics_port, answer, tls))

    def _record(self, port: int = 0, generation: int = 0, *, refuses_standbys: bool = False) -> bytes:
        address = host_port(self._settings.advertise or self._settings.bind, port) if port else ""
        return msgspec.json.encode(
            ServerRecord(
                address=address,
                generation=generation,
                name=machine.host_name(),
                pid=machine.process_id(),
                integrity=self._settings.integrity,
                process=self._settings.process_name,
                refuses_standbys=refuses_standbys,
            )
        )


def run_server(process: type[ServerProcess[Settings]], chosen: Settings) -> int:
    """Run a server of this kind in this process. Return its exit code."""
    machine.tune_server()
    log_format.set_up(chosen.log_level, chosen.log_format)
    try:
        with telemetry(chosen, process.role, SystemClock()):
            return process(chosen).run()
    except FlightedlError as error:
        sys.stderr.write(f"flightedl {process.role}: {error}\n")
        return exit_code_of(error)
