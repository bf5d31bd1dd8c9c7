"""Page of a server's condition, on a small HTTP port, for the probes of a cluster.

Three questions, because they have different answers and different consequences:

* ``/started``: has it begun? Until then nobody asks the other two.
* ``/live``: does its main loop go round? One that stands still for ``STANDS_STILL_S`` is not going to move again, and
  only another process helps. What waits for others (a lock, etcd, a checkpoint to load) is alive, however long it
  takes.
* ``/ready``: may the next one be replaced? No while it builds, loads or ends. Nobody is sent to a server by this
  answer: the members of a job find each other by etcd.

The answers are 200 or 503 with one sentence, which names nothing but what is waited for. They need no certificate: a
kubelet has none. Nothing can be ordered here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from flightedl.process.http_page import Answer, Asked, HttpPage

#: As long as `flightedl run` bears a process that stands still.
STANDS_STILL_S = 30.0
PATHS = ("/started", "/live", "/ready")


class Condition(NamedTuple):
    """How a process is doing, since a moment."""

    is_started: bool
    is_ready: bool
    #: What it does, for people.
    doing: str
    #: When its main loop said so; None: it waits for others, which may take any time.
    beat_at: float | None


class Health:
    """Condition of a process, reported by the process itself. Thread-safe.

    Args:
        now: Seconds that never go back.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._condition = Condition(is_started=False, is_ready=False, doing="starting", beat_at=None)

    def waits(self, doing: str, *, is_ready: bool = False) -> None:
        """It does something that may take any time."""
        self._condition = Condition(is_started=True, is_ready=is_ready, doing=doing, beat_at=None)

    def goes_round(self, doing: str, *, is_ready: bool) -> None:
        """Its main loop has gone round, and will again soon."""
        self._condition = Condition(is_started=True, is_ready=is_ready, doing=doing, beat_at=self._now())

    def answer(self, path: str) -> tuple[int, str]:
        """HTTP status and sentence for ``/started``, ``/live`` or ``/ready``; 404 for anything else."""
        found = self._condition
        still_s = 0.0 if found.beat_at is None else self._now() - found.beat_at
        is_live = still_s < STANDS_STILL_S
        answers = {"/started": found.is_started, "/live": is_live, "/ready": is_live and found.is_ready}
        if path not in answers:
            return 404, "ask for /started, /live or /ready"
        doing = found.doing if is_live else f"it has stood still for {still_s:.0f} s"
        return (200 if answers[path] else 503), doing

    def page(self, asked: Asked) -> Answer:
        """The same, as an answer of a page."""
        status, doing = self.answer(asked.path)
        return Answer(f"{doing}\n".encode(), status=status)


class HealthPage(HttpPage):
    """Answers on a port of its own until it is closed.

    Raises:
        UsageError: the port is taken.
    """

    def __init__(self, bind: str, port: int, health: Health) -> None:
        super().__init__("health page", bind, port, health.page)
