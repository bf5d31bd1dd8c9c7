"""Single steps of a rank's membership in its group, without a job."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from flightedl.client.data.attendance import GroupAttendance
from flightedl.domain.groups.incarnation import OVER_TEXT
from flightedl.errors import FencedError
from flightedl.messages.base import Reply
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
