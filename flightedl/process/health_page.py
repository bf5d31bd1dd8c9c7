"""Answers to a cluster's probes of a server.

There are three probes, with different answers and different consequences:

* ``/started``: has the server started? Until then the cluster does not send the other two probes.
* ``/live``: is the main loop running? A loop that has been stuck for ``STANDS_STILL_S`` will not recover, so the
  process has to be replaced. A process that waits for others (a lock, etcd, loading a checkpoint) is alive, however
  long that takes.
* ``/ready``: may the next server be replaced? Not while this one is building, loading or ending. The answer does not
  route traffic: the members of a job find each other through etcd.

The answers are 200 or 503 with one sentence, which states only the reason for waiting. Probes need no certificate,
because a kubelet has none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from flightedl.process.http_page import Answer, Asked

#: The time for which `flightedl run` tolerates a frozen process.
STANDS_STILL_S = 30.0
PATHS = ("/started", "/live", "/ready")


class Condition(NamedTuple):
    """Condition of a process, as last reported."""

    is_started: bool
    is_ready: bool
    #: Current activity, for people.
    doing: str
    #: Time of the main loop's last beat. None while the process waits for others, which may take any time.
    beat_at: float | None


class Health:
    """Condition of a process, reported by the process itself. Thread-safe.

    Args:
        now: Returns seconds that never go back.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._condition = Condition(is_started=False, is_ready=False, doing="starting", beat_at=None)

    def waiting(self, doing: str, *, is_ready: bool = False) -> None:
        """Record that the process waits for others. This may take any length of time."""
        self._condition = Condition(is_started=True, is_ready=is_ready, doing=doing, beat_at=None)

    def beat(self, doing: str, *, is_ready: bool) -> None:
        """Record a beat of the main loop."""
        self._condition = Condition(is_started=True, is_ready=is_ready, doing=doing, beat_at=self._now())

    def answer(self, path: str) -> tuple[int, str]:
        """Return HTTP status and sentence for ``/started``, ``/live`` or ``/ready``, and 404 for any other path."""
        found = self._condition
        still_s = 0.0 if found.beat_at is None else self._now() - found.beat_at
        is_live = still_s < STANDS_STILL_S
        answers = {"/started": found.is_started, "/live": is_live, "/ready": is_live and found.is_ready}
        if path not in answers:
            return 404, "ask for /started, /live or /ready"
        doing = found.doing if is_live else f"its main loop has been stuck for {still_s:.0f} s"
        return (200 if answers[path] else 503), doing

    def page(self, asked: Asked) -> Answer:
        """Answer a request for a page."""
        status, doing = self.answer(asked.path)
        return Answer(f"{doing}\n".encode(), status=status)
