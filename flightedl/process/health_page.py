"""Answer the probes that a cluster sends to a server.

The three probes differ in their answers and in their consequences:

* ``/started`` shows whether the server has started. The cluster sends the other two probes only after that.
* ``/live`` shows whether the main loop is running. A loop that has been stuck for ``STANDS_STILL_S`` will not recover,
  so the process must be replaced. A process that waits for others (a lock, etcd, loading a checkpoint) is alive,
  however long it waits.
* ``/ready`` shows whether the cluster may replace the next server. It must wait while this server is building, loading
  or ending. The answer does not affect where requests are sent, because the members of a job find each other through
  etcd.

An answer consists of the status 200 or 503 and one sentence, which states only what the process waits for. Probes need
no certificate, because a kubelet has none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from flightedl.process.http_page import Answer, Asked

#: `flightedl run` tolerates a frozen process for this many seconds.
STANDS_STILL_S = 30.0
PATHS = ("/started", "/live", "/ready")


class Condition(NamedTuple):
    """Most recently reported state of a process."""

    is_started: bool
    is_ready: bool
    #: Current activity, for people.
    doing: str
    #: Time of the main loop's last beat; None while the process waits for others, which may take any time.
    beat_at: float | None


class Health:
    """State of a process, reported by the process itself. Thread-safe.

    Args:
        now: Returns the time in seconds, which never decreases.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._condition = Condition(is_started=False, is_ready=False, doing="starting", beat_at=None)

    def waiting(self, doing: str, *, is_ready: bool = False) -> None:
        """Record that the process is waiting for others, which may take any time."""
        self._condition = Condition(is_started=True, is_ready=is_ready, doing=doing, beat_at=None)

    def beat(self, doing: str, *, is_ready: bool) -> None:
        self._condition = Condition(is_started=True, is_ready=is_ready, doing=doing, beat_at=self._now())

    def answer(self, path: str) -> tuple[int, str]:
        """Return the HTTP status and sentence for ``/started``, ``/live`` or ``/ready``; 404 for any other path."""
        found = self._condition
        still_s = 0.0 if found.beat_at is None else self._now() - found.beat_at
        is_live = still_s < STANDS_STILL_S
        answers = {"/started": found.is_started, "/live": is_live, "/ready": is_live and found.is_ready}
        if path not in answers:
            return 404, "ask for /started, /live or /ready"
        doing = found.doing if is_live else f"its main loop has been stuck for {still_s:.0f} s"
        return (200 if answers[path] else 503), doing

    def page(self, asked: Asked) -> Answer:
        status, doing = self.answer(asked.path)
        return Answer(f"{doing}\n".encode(), status=status)
