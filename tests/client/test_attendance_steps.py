"""Single steps of a rank's membership in its group, without a job."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from flightedl.client.data.attendance import GroupAttendance
from flightedl.client.waiting import Waiting
from flightedl.domain.groups.incarnation import OVER_TEXT
from flightedl.domain.groups.plan import Order, Piece, Round
from flightedl.errors import FencedError, UnregisteredError
from flightedl.messages.base import Reply
from flightedl.messages.groups import GroupPlaceReply
from tests.support.clock import FakeClock


def round_of(*pieces: Piece) -> Round:
    return Round(0, 0, 0, 4, Order(2, 8), pieces)


class Leaving:
    """The membership of a rank, whose requests are remembered."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Any]] = []
        made = self.attendance = object.__new__(GroupAttendance)
        process: Any = SimpleNamespace(
            trainer="t", keys=SimpleNamespace(job_name="demo"), clock=FakeClock(), own_master=None
        )
        made._process, made._rank, made._incarnation = process, 1, 4
        made._held = SimpleNamespace(generation=3, lost_because="")  # type: ignore[assignment]
        made._over, made._has_finished, made._place = "", False, None
        made.is_stopping, made._stop_after = False, None
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
    rank.attendance._place = lambda: place
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
    rank.attendance._process.own_master = SimpleNamespace(over=lambda: "its master has ended")  # type: ignore[assignment]
    with pytest.raises(FencedError, match="its master has ended: start this rank again"):
        rank.attendance._require_lease()
    rank.attendance._process.own_master = None
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
    piece = Piece(1, 0, 2)
    for at in (0, 4):
        made.take(at, round_of(piece))
    assert not rank.sent, "the thread reports rounds"
    made.leave(ValueError("odd"))
    assert [request.at for verb, request in rank.sent if verb == "group_at"] == [4]


def test_rounds_that_are_not_committed_are_reported_with_the_newest() -> None:
    rank = Leaving()
    made = rank.attendance
    made._watched_until, made._watched_since = 0, None
    made._every_s, made._confirmed_at = 0.5, made._process.clock.now()
    made.take(4, round_of(Piece(1, 4, 6)), [round_of(Piece(1, 0, 2)), round_of(Piece(0, 2, 4))])
    made.leave(ValueError("odd"))
    (reported,) = [request for verb, request in rank.sent if verb == "group_at"]
    assert [piece[3:] for piece in reported.pieces] == [(1, 0, 2), (0, 2, 4), (1, 4, 6)]


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
        made.take(0, round_of())
    assert str(raised.value) == OVER_TEXT


def test_a_rank_of_a_stopped_job_reports_each_round_and_ends_where_the_master_says() -> None:
    rank = Leaving()
    made = rank.attendance
    made._watched_until, made._watched_since = 0, None
    made._every_s, made._confirmed_at = 0.5, made._process.clock.now()
    made._process.waiting = lambda: Waiting(FakeClock(), 60.0, 60.0, lambda _: None)  # type: ignore[method-assign]
    replies = {16: GroupPlaceReply(is_stopping=True), 32: GroupPlaceReply(is_stopping=True, stop_after=32)}
    reported: list[tuple[int, bool]] = []

    def answer(_verb: str, request: Any, *_: object) -> Reply:
        reported.append((request.at, request.is_stopping))
        return replies.get(request.at, GroupPlaceReply(is_stopping=True, stop_after=32))

    made._once = answer  # type: ignore[method-assign,assignment]

    def take(at: int) -> bool:
        return made.take(at, round_of())

    assert take(0)
    assert reported == [], "the thread reports rounds"
    made._confirm(made._place(), 1.0)  # type: ignore[misc]
    assert [take(16), take(32), take(48)] == [True, True, False]
    assert reported == [(0, False), (16, True), (32, True)], "a rank starts no round before its report"
    assert made._place is not None
    assert made._place().at == 32
    late = Leaving().attendance
    late._once = answer  # type: ignore[method-assign,assignment]
    late._process.waiting = made._process.waiting  # type: ignore[method-assign]
    late.is_stopping = True
    late._watched_until = 0
    assert not late.take(64, round_of()), "another rank may be a round behind the last one"
