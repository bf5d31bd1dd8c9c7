"""The components of a trainer process other than its data and its model, opened and closed in order.

The components are opened in this order: the recording, etcd, the registration (a lease on this trainer's id), the
directory that follows etcd, and the connections to the servers. The registration is closed first, so that other
processes notice immediately.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

import msgspec

from flightedl.adapters.clock import SystemClock
from flightedl.adapters.telemetry import telemetry
from flightedl.client.connections import SLICE_S, Servers, persistently
from flightedl.client.data.feed import Fetch, TaskFeed
from flightedl.client.own_master import own_master
from flightedl.client.probe import StepProbe
from flightedl.client.progress import LoggedValues, ProgressReporter, metrics_page, require_files
from flightedl.client.registration import Registration
from flightedl.client.waiting import Waiting, Waits
from flightedl.config import TrainerSettings
from flightedl.coordination.coordinators import open_coordinator
from flightedl.coordination.directory import Directory
from flightedl.coordination.keys import JobKeys
from flightedl.coordination.lives import JobCoordinator
from flightedl.coordination.presence import PresenceStreams
from flightedl.domain.trainer.feed import Feed
from flightedl.formats.dataset_spec import moved_folders
from flightedl.messages.base import SenderOfJob, decode, encode
from flightedl.ports import Clock
from flightedl.process.fork_guard import GUARD
from flightedl.recording.recorded import recorded, recording_trainer
from flightedl.rpc.authentication import Role
from flightedl.rpc.connector import Connector
from flightedl.rpc.identity import Caller
from flightedl.rpc.request_stream import RequestStream

Answer = TypeVar("Answer", bound=msgspec.Struct)

#: Polling interval, in seconds, of a thread that waits for a change in etcd.
_LOOK_S = 0.5
#: Maximum seconds between the end of a dead master's lease and the start of its successor.
_TAKEOVER_S = 1.5


class TrainerProcess:
    """The registration, connections and reports of one trainer.

    Args:
        chosen: The settings.
        job_over: Returns the reason why the servers will never answer again; empty while they may answer.

    Raises:
        UsageError: the settings enable recording or TensorBoard, but it is not possible.
        UnavailableError: etcd is unreachable.
    """

    def __init__(self, chosen: TrainerSettings, job_over: Callable[[], str]) -> None:
        require_files(chosen)
        self.clock: Clock = SystemClock()
        self._job_over = job_over
        self.keys = JobKeys(chosen.job)
        #: The launcher's name for this start of the process's group; empty if there is none.
        self.start = chosen.start
        self.start_timeout_s = chosen.start_timeout_s
        self.data_moved = moved_folders(chosen.data_moved)
        self._cover_s = chosen.lease_ttl_s + _TAKEOVER_S
        with contextlib.ExitStack() as stack:
            #: None if nothing is recorded.
            stack.enter_context(telemetry(chosen, "trainer", self.clock))
            self.recorder = stack.enter_context(recording_trainer(chosen.record, chosen.job, self.clock))
            #: The master that the group has started; None if the job has an etcd.
            self.own_master = None if chosen.etcd else stack.enter_context(own_master(chosen, self.clock))
            etcd = open_coordinator(self.own_master.access if self.own_master else chosen, clock=self.clock)
            self.coordinator = stack.enter_context(contextlib.closing(JobCoordinator(etcd, self.keys)))
            self.registration = Registration(
                self.coordinator, self.clock, self.keys, chosen.lease_ttl_s, chosen.process_name
            )
            #: Resources that the registration needs.
            self._base = stack.pop_all()
        self.directory = Directory(self.coordinator, self.keys, self.clock).start()
        self._waits = Waits(self.clock, chosen.say_after_s, chosen.give_up_s, self._waits_for, self._servers_over)
        tls = (self.own_master.access.credentials or "") if self.own_master else chosen.tls_dir
        connector = Connector(Caller("trainer", self.trainer), Role.TRAINER, tls, chosen.integrity, chosen.same_host)
        self.directory.watch_over(lambda: self.registration.latest)
        self._presence = PresenceStreams(
            self.keys.job_name, self.directory, connector, lambda: self.registration.latest
        )
        self.servers = Servers(chosen.job, self.directory, connector, self._waits.calls)
        #: The time that the script's loop spends in each activity.
        self.probe = StepProbe(self.clock.now)
        self._waits.watch(self.probe.conversations)
        logged = LoggedValues(chosen, self.trainer, self.clock)
        self.progress = ProgressReporter(
            self._send_progress,
            lambda: (self.trainer, self.generation),
            self._waits.look,
            self.clock.now,
            self.probe,
            logged,
        )
        self._page = contextlib.ExitStack()
        self._page.enter_context(metrics_page(chosen, lambda: self.progress.figures(self.registration.held.slack_s)))
        GUARD.register(self)

    @property
    def trainer(self) -> str:
        return self.registration.trainer

    @property
    def generation(self) -> int:
        return self.registration.generation

    def _servers_over(self) -> str:
        return (self.own_master.over() if self.own_master else "") or self._job_over()

    def waiting(self) -> Waiting:
        GUARD.check()
        return self._waits.begin()

    def _waits_for(self, reason: str) -> None:
        self.progress.waiting_for(reason)

    # the servers

    def ask_master(self, verb: str, body: bytes, kind: type[Answer]) -> Answer:
        return persistently(
            self.waiting(), lambda: decode(self.servers.master().action(verb, body, timeout_s=SLICE_S), kind)
        )

    def send_to_master(self, verb: str, kind: type[SenderOfJob], **more: str) -> None:
        """Repeat a request, under this trainer's current registration, until a master has processed it."""

        def attempt() -> None:
            generation = self.registration.under_lease(lambda held: held.generation)
            request = kind(trainer=self.trainer, generation=generation, job=self.keys.job_name, **more)
            self.servers.master().action(verb, encode(request), timeout_s=SLICE_S)

        persistently(self.waiting(), attempt)

    def _send_progress(self, body: bytes) -> bytes:
        return self.servers.master().action("log", body, timeout_s=SLICE_S)

    def wait_for_pservers(self, count: int) -> None:
        """Wait until the job's first ``count`` pservers are there, or fewer if the job has been scaled down since."""
        waiting = self.waiting()

        def missing(directory: Directory) -> tuple[int, int]:
            wanted = min(count, directory.ps_desired() or count)
            return wanted - len([index for index in directory.pservers() if index < wanted]), wanted

        def are_there(directory: Directory) -> bool | None:
            return None if missing(directory)[0] else True

        while True:
            self.directory.require_followed()
            if self.directory.wait_until(are_there, _LOOK_S):
                break
            lacking, wanted = missing(self.directory)
            waiting.because(f"{lacking} of {wanted} pservers are missing: start them with `flightedl pserver`")
            waiting.pause()
        waiting.over()

    # tasks

    def request_stream(self) -> RequestStream:
        return RequestStream("tasks", self.clock)

    def task_feed(self, fetch: Fetch, requests: RequestStream, evaluation: str = "") -> TaskFeed:
        """Return a feed of tasks, either for the training data or for an evaluation."""
        feed = recorded(self.recorder, {"trainer": self.trainer, "evaluation": evaluation}, Feed, self._cover_s)
        return TaskFeed(fetch, requests.close_idle, self.clock, feed=feed)

    # the end

    def close(self, *, is_clean: bool = False) -> None:
        if self.own_master is not None:
            self.own_master.is_clean = is_clean
        self._page.close()
        self.progress.close()
        self.registration.close()
        self._presence.close()
        self.servers.close()
        self.directory.close()
        self._base.close()
        GUARD.forget(self)
