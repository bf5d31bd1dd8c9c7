"""Answers to the probes of a cluster about a server's condition.

Three questions, because they have different answers and different consequences:

* ``/started``: has it begun? Until then the cluster does not ask the other two.
* ``/live``: does its main loop go round? A loop that stands still for ``STANDS_STILL_S`` is not going to move again,
  and only another process helps. A process that waits for others (a lock, etcd, a checkpoint to load) is alive, however
  long that takes.
* ``/ready``: may the next server be replaced? No while this one builds, loads or ends. The answer routes no traffic:
  the members of a job find each other by etcd.

The answers are 200 or 503 with one sentence, which names only what the process waits for. They need no certificate,
because a kubelet has none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from flightedl.process.http_page import Answer, Asked

#: As long as `flightedl run` tolerates a process that stands still.
STANDS_STILL_S = 30.0
PATHS = ("/started", "/live", "/ready")


class Condition(NamedTuple):
    """How a process is doing, since a moment."""

    is_started: bool
    is_ready: bool
    #: Its activity, for people.
    doing: str
    #: Time of its main loop's last beat. None while it waits for others, which may take any time.
    beat_at: float | None


class Health:
    """Condition of a process, reported by the process itself. Thread-safe.

    Args:
        now: Returns seconds that never go back.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._condition = Condition(is_started=False, is_ready=False, doing="starting", beat_at=None)

    def waits(self, doing: str, *, is_ready: bool = False) -> None:
        """Note that it waits for others, which may take any time."""
        self._condition = Condition(is_started=True, is_ready=is_ready, doing=doing, beat_at=None)

    def goes_round(self, doing: str, *, is_ready: bool) -> None:
        """Note a beat of its main loop."""
        self._condition = Condition(is_started=True, is_ready=is_ready, doing=doing, beat_at=self._now())

    def answer(self, path: str) -> tuple[int, str]:
        """Return HTTP status and sentence for ``/started``, ``/live`` or ``/ready``, and 404 for anything else."""
        found = self._condition
        still_s = 0.0 if found.beat_at is None else self._now() - found.beat_at
        is_live = still_s < STANDS_STILL_S
        answers = {"/started": found.is_started, "/live": is_live, "/ready": is_live and found.is_ready}
        if path not in answers:
            return 404, "ask for /started, /live or /ready"
        doing = found.doing if is_live else f"it has stood still for {still_s:.0f} s"
        return (200 if answers[path] else 503), doing

    def page(self, asked: Asked) -> Answer:
        """Answer a request of a page."""
        status, doing = self.answer(asked.path)
        return Answer(f"{doing}\n".encode(), status=status)
