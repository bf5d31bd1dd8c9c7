"""The thread that asks the master for the job's status while a run is displayed."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from flightedl.errors import FlightedlError, NotFoundError, UnavailableError
from flightedl.launch import run as runs
from flightedl.launch.run import StatusPoller
from flightedl.messages.status import StatusReply, TaskCounts
from tests.support.clock import FakeClock

WORKING = StatusReply(job="j", state="training", tasks=TaskCounts(total=4, done=1, todo=2, pending=1))
DONE = StatusReply(job="j", state="done", tasks=TaskCounts(total=4, done=4))


class Job:
    """A cluster whose master gives planned answers. The poller's thread does not ask by itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(runs, "_STATUS_EVERY_S", 3600.0)
        self.answers: list[StatusReply | FlightedlError] = []
        self.clock = FakeClock()
        self.opened = self.closed = 0
        cluster: Any = SimpleNamespace(status=self._open)
        self.poller = StatusPoller(cluster, self.clock)

    def poll_no_more(self) -> None:
        """End the thread, and all pauses of other threads."""
        self.poller._closing.set()
        self.poller._thread.join()

    def _open(self) -> Any:
        self.opened += 1
        return SimpleNamespace(read=self._read, close=self._close)

    def _read(self, _timeout_s: float) -> StatusReply:
        found = self.answers.pop(0)
        if isinstance(found, FlightedlError):
            raise found
        return found

    def _close(self) -> None:
        self.closed += 1


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    made = Job(monkeypatch)
    yield made
    made.poller.close()
    assert made.opened == made.closed


def test_the_last_status_stays_while_the_master_is_away_and_the_reason_is_shown_after_a_while(job: Job) -> None:
    job.answers = [NotFoundError("no master"), WORKING, NotFoundError("no master"), UnavailableError("no answer"), DONE]
    assert job.poller.refresh() is None
    job.clock.advance(60.0)
    assert job.poller.trouble == "", "every job starts without a master"
    assert job.poller.refresh() == WORKING
    assert job.poller.refresh() == WORKING
    assert job.poller.trouble == ""
    job.clock.advance(runs._PATIENCE_S)
    assert job.poller.trouble == "a new one takes over"
    assert job.poller.refresh() == WORKING
    assert job.poller.trouble == "no answer"
    assert job.poller.refresh() == DONE
    assert job.poller.trouble == ""
    job.clock.advance(runs._PATIENCE_S)
    assert job.poller.trouble == ""
    assert job.opened == 1


def test_the_last_word_is_of_a_master_that_answers_after_all_trainers_have_ended(job: Job) -> None:
    job.poll_no_more()
    job.answers = [DONE]
    job.poller.refresh()
    job.answers = [NotFoundError("it is being replaced"), WORKING, UnavailableError("no answer"), DONE]
    job.poller.wait_for_last_status()
    assert job.poller.status == DONE
    assert not job.answers, "an earlier status counts as the last word"


def test_the_last_word_is_awaited_for_a_limited_time(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.poll_no_more()
    began = job.clock.now()

    def read(_: float) -> StatusReply:
        job.clock.advance(1.0)
        return WORKING

    monkeypatch.setattr(job, "_read", read)
    job.poller.wait_for_last_status()
    assert runs._LAST_WORD_S <= job.clock.now() - began <= runs._LAST_WORD_S + 1.0
    assert job.poller.status == WORKING
