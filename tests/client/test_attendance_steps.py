"""Single steps of a rank's membership in its group, without a job."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from flightedl.client.data.attendance import GroupAttendance
from flightedl.client.waiting import Waiting
from flightedl.domain.groups.incarnation import OVER_TEXT
from flightedl.errors import FencedError, UnregisteredError
from flightedl.messages.base import Reply
from flightedl.messages.groups import GroupPlaceReply
from flightedl.testing.clock import FakeClock


class Leaving:
    """The membership of a rank, whose requests are remembered."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Any]] = []
        made = self.attendance = object.__new__(GroupAttendance)
        process: Any = SimpleNamespace(trainer="t", keys=SimpleNamespace(job_name="demo"), clock=FakeClock())
        made._process, made._rank, made._incarnation = process, 1, 4
        made._held = SimpleNamespace(generation=3, lost_because="")  # type: ignore[assignment]
        made._over, made._has_finished, made._place = "", False, None
        made._closing = threading.Event()
        made._reporter = threading.Thread(target=lambda: None)
        made._reporter.start()
        made._once = self._send  # type: ignore[method-assign,assignment]

    def _send(self, verb: str, request: Any, *_: object) -> Reply:
        self.sent.append((verb, request))
        return Reply()


def test_a_rank_whose_script_fails_reports_its_round_and_its_own_error() -> None:
    rank = Leaving()
    place: Any = object()
    rank.attendance._place = place
    rank.attendance.leave(ValueError("an odd record"))
    (first, reported), (second, left) = rank.sent
    assert (first, reported, second) == ("group_at", place, "group_leave")
    assert (left.rank, left.generation, left.incarnation) == (1, 3, 4)
    assert (left.is_clean, left.has_finished, left.error) == (False, False, "ValueError: an odd record")
    rank.attendance.leave(None)
    assert len(rank.sent) == 2, "a rank leaves twice"
    other = Leaving()
    other.attendance.leave(SystemExit(143))
    assert [(verb, request.error) for verb, request in other.sent] == [("group_leave", "")]


def test_a_rank_starts_no_round_once_its_start_is_over_or_its_lease_lost() -> None:
    rank = Leaving()
    rank.attendance._held = SimpleNamespace(lost_because="the lease has ended")  # type: ignore[assignment]
    with pytest.raises(FencedError, match="start this rank again"):
        rank.attendance._require_lease()
    rank.attendance._over = OVER_TEXT
    with pytest.raises(FencedError) as raised:
        rank.attendance._require_lease()
    assert str(raised.value) == OVER_TEXT


def test_the_newest_round_is_the_one_that_a_rank_reports() -> None:
    rank = Leaving()
    made = rank.attendance
    made._watched_until, made._watched_since = 0, None
    made._every_s, made._confirmed_at = 0.5, made._process.clock.now()
    piece = SimpleNamespace(task=1, first_record=0, end_record=2)
    for at in (0, 4):
        made.take(at, SimpleNamespace(epoch=0, pieces=[piece]))  # type: ignore[arg-type]
    assert not rank.sent, "the thread reports rounds"
    made.leave(ValueError("odd"))
    assert [request.at for verb, request in rank.sent if verb == "group_at"] == [4]


def test_a_rank_that_the_master_does_not_know_belongs_to_a_start_that_is_over() -> None:
    rank = Leaving()
    made = rank.attendance

    def refuse(*_: object) -> Reply:
        raise UnregisteredError("who are you?")

    made._once = refuse  # type: ignore[method-assign,assignment]
    made._process.waiting = lambda: Waiting(FakeClock(), 60.0, 60.0, lambda _: None)  # type: ignore[method-assign]
    with pytest.raises(FencedError) as raised:
        made._ask("group_at", Reply(), Reply)
    assert str(raised.value) == OVER_TEXT


@pytest.mark.parametrize("is_watched", [False, True])
def test_a_rank_that_learns_that_its_start_is_over_does_not_start_the_round(is_watched: bool) -> None:
    rank = Leaving()
    made = rank.attendance
    made._watched_until, made._watched_since = (100 if is_watched else 0), None
    made._every_s, made._confirmed_at = 0.5, made._process.clock.now() - 60.0
    made._once = lambda *_: GroupPlaceReply(is_current=False)  # type: ignore[method-assign,assignment,return-value]
    made._process.waiting = lambda: Waiting(FakeClock(), 60.0, 60.0, lambda _: None)  # type: ignore[method-assign]
    with pytest.raises(FencedError) as raised:
        made.take(0, SimpleNamespace(epoch=0, pieces=[]))  # type: ignore[arg-type]
    assert str(raised.value) == OVER_TEXT
