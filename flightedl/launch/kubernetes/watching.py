"""Waits for a job on a cluster, and shows its progress, its trainers' output, and its result.

The job's status comes from ``flightedl status`` in a master's pod, so no port need be open. Users who may not run
commands in pods see less, but can still wait for the job. One thread per pod follows the pod's output.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from flightedl.errors import EXIT_FAILED, FlightedlError
from flightedl.launch.kubernetes.submitting import find
from flightedl.launch.kubernetes.views import (
    JobView,
    component_of,
    has_output,
    is_ready,
    labels_of,
    obstacles,
    outcome_of,
)
from flightedl.launch.supervisor import Outcome
from flightedl.launch.verdict import verdict
from flightedl.messages.decoding import from_json
from flightedl.messages.status import StatusReply
from flightedl.ports import Clock, Cluster

_STATUS_TIMEOUT_S = 10.0
#: Maximum number of pods whose output is followed.
_FOLLOWED_LIMIT = 20
#: Maximum number of requests in a row that the cluster may leave unanswered.
_PATIENCE = 30
#: Seconds between two requests for the namespace's events, of which there may be many.
_EVENTS_EVERY_S = 10.0

#: Called with the name of a pod and lines of its output.
OnLines = Callable[[str, Sequence[str]], None]


@dataclass(slots=True)
class Followers:
    """Follows the output of pods until it is closed, including pods that start later."""

    cluster: Cluster
    on_lines: OnLines
    _threads: dict[str, threading.Thread] = field(init=False, default_factory=dict)
    _open: contextlib.ExitStack = field(init=False, default_factory=contextlib.ExitStack)

    def follow(self, labels: dict[str, str]) -> None:
        """Start following the output of each pod with these labels that is not yet being followed."""
        for pod in self.cluster.list("Pod", labels):
            name = pod["metadata"]["name"]
            if has_output(pod) and name not in self._threads and self._running < _FOLLOWED_LIMIT:
                lines = self._open.enter_context(self.cluster.logs(name, follow=True))
                thread = threading.Thread(target=self._read, args=(name, lines), name=f"logs {name}", daemon=True)
                self._threads[name] = thread
                thread.start()

    @property
    def _running(self) -> int:
        return sum(thread.is_alive() for thread in self._threads.values())

    def _read(self, name: str, lines: Iterator[str]) -> None:
        for line in lines:
            self.on_lines(name, [line])

    def close(self, wait_s: float = 0.0) -> None:
        """Stop following the output, after waiting for the rest of it for at most ``wait_s`` seconds per pod."""
        for thread in self._threads.values():
            thread.join(wait_s)
        self._open.close()


def status_of(cluster: Cluster, job: str) -> StatusReply | None:
    """Return the status that the job's master reports, or None if it is unavailable."""
    for pod in cluster.list("Pod", labels_of(job, "master")):
        if is_ready(pod):
            with contextlib.suppress(FlightedlError, msgspec.MsgspecError):
                said = cluster.execute(pod["metadata"]["name"], ["flightedl", "status", "--json"], _STATUS_TIMEOUT_S)
                return from_json(said, StatusReply)
    return None


def wait(
    cluster: Cluster,
    job: str,
    clock: Clock,
    on_progress: Callable[[JobView, StatusReply | None, Sequence[str]], None],
    poll_s: float = 2.0,
    *,
    keeps_checkpoints: bool,
) -> tuple[Outcome, StatusReply | None]:
    """Wait until a job has ended. Return how it ended, and the last status from its master.

    Args:
        cluster: The job's cluster.
        job: The job's name.
        clock: Paces the requests.
        on_progress: Receives the job, its master's status, and the obstacles that keep pods from starting.
        poll_s: Seconds between two polls.
        keeps_checkpoints: True if the job should have written checkpoints.
    """
    newest: StatusReply | None = None
    failures = 0
    events: list[dict[str, Any]] = []
    events_at = 0.0
    while True:
        try:
            view = find(cluster, job)
            pods = cluster.list("Pod", labels_of(job))
            said = status_of(cluster, job)
            failures = 0
        except FlightedlError as error:
            # A missing job never comes back, but an unreachable cluster may.
            failures += 1
            if not error.retryable or failures >= _PATIENCE:
                return Outcome(EXIT_FAILED, str(error)), newest
            clock.sleep(poll_s)
            continue
        newest = said or newest
        outcome = outcome_of(view, [pod for pod in pods if component_of(pod) == "trainer"])
        if outcome is None:
            if clock.now() >= events_at and (said is None or not all(map(has_output, pods))):
                # Some users may not list events.
                with contextlib.suppress(FlightedlError):
                    events = cluster.list("Event", {})
                events_at = clock.now() + _EVENTS_EVERY_S
            on_progress(view, said, obstacles(view, pods, events))
            clock.sleep(poll_s)
            continue
        if outcome.exit_code == 0 and said is not None:
            outcome = verdict(said, keeps_checkpoints=keeps_checkpoints)
        return outcome, newest
