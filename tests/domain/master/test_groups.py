"""The master's answers to the ranks of a group: what waits, what is stored, and what is logged."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flightedl.domain.groups.incarnation import OVER, RUNNING
from flightedl.domain.master.effects import Done, Kind, Note, Outbox
from flightedl.domain.master.groups import GroupRequests
from flightedl.errors import NotReadyError, UsageError
from flightedl.messages.base import encode
from flightedl.messages.groups import (
    GroupLeaveRequest,
    GroupPlaceReply,
    GroupPlaceRequest,
    GroupStartReply,
    GroupStartRequest,
)


class Ranks:
    """Two ranks of each start, whose rank 0 has the start's number as its generation."""

    def __init__(self, attempts_limit: int = 1, stored: bytes | None = None) -> None:
        self.outbox = Outbox()
        self.requests = GroupRequests(attempts_limit, stored, self.outbox)

    def ask(self, request: Any, **more: bool) -> Any:
        given = {"has_dataset": True, "has_model": False, "is_last": False} | more
        return self.requests.answer(request, 1.0, **given)

    def enter(self, start: int, rank: int, wait_s: float = 5.0, **more: bool) -> GroupStartReply | None:
        request = GroupStartRequest(**_own(start, rank), start=str(start), size=2, wait_s=wait_s)
        reply: GroupStartReply | None = self.ask(request, **more)
        return reply

    def begin(self, start: int) -> None:
        for rank in (0, 1):
            self.enter(start, rank, 0.0)

    def at(self, start: int, rank: int) -> GroupPlaceReply:
        pieces = [(0, rank, 0, 10)]
        reply: GroupPlaceReply = self.ask(
            GroupPlaceRequest(**_own(start, rank), incarnation=start, at=40, pieces=pieces)
        )
        return reply

    def notes(self) -> list[tuple[Kind, str, bool]]:
        notes = [effect for effect in self.outbox.take() if isinstance(effect, Note)]
        return [(note.kind, note.text % note.values, note.is_warning) for note in notes]


def _own(start: int, rank: int) -> dict[str, Any]:
    return {"trainer": f"{start}-{rank}", "generation": start + rank, "job": "j", "rank": rank}


def test_a_rank_waits_for_all_others_unless_it_has_no_time_or_the_deadline_is_near() -> None:
    ranks = Ranks()
    assert ranks.enter(10, 0) is None, "it has joined, and waits for the other"
    assert ranks.enter(10, 0) is None
    reply = ranks.enter(10, 0, 0.0)
    assert reply is not None
    assert not reply.incarnation
    late = ranks.enter(10, 0, is_last=True)
    assert late is not None
    assert late.waiting_for == "rank 1 of 2 to ask for its first batch"
    started = ranks.enter(10, 1)
    assert started is not None
    assert started.incarnation == 10
    again = ranks.enter(10, 0)
    assert again is not None
    assert again.incarnation == 10


def test_a_rank_that_waits_changes_nothing_when_it_asks_again() -> None:
    ranks = Ranks()
    ranks.enter(10, 0)
    revision = ranks.outbox.revision
    assert revision == 1
    ranks.outbox.wakes_requests = False
    ranks.enter(10, 0)
    ranks.enter(10, 0, is_last=True)
    assert (ranks.outbox.revision, ranks.outbox.wakes_requests) == (revision, False)
    ranks.enter(10, 1)
    assert ranks.outbox.wakes_requests


def test_a_group_needs_data_and_no_parameters() -> None:
    ranks = Ranks()
    with pytest.raises(NotReadyError):
        ranks.enter(10, 0, has_dataset=False)
    with pytest.raises(UsageError, match="cannot have a group"):
        ranks.enter(10, 0, has_model=True)
    assert ranks.outbox.revision == 0


def test_starts_and_ends_are_logged_once() -> None:
    ranks = Ranks(attempts_limit=3)
    ranks.begin(10)
    assert ranks.notes() == [(Kind.GROUP_RUNS, "a group runs incarnation=10 ranks=2 start=1", False)]
    assert ranks.at(10, 0).is_current
    ranks.at(10, 1)
    assert ranks.notes() == []
    ranks.requests.gone("10-1", 11)
    over = [(Kind.GROUP_OVER, "a group has ended and must start again incarnation=10", False)]
    assert ranks.notes() == over
    assert ranks.requests.group.record.phase == OVER
    ranks.requests.gone("10-0", 10)
    ranks.begin(20)
    assert ranks.notes() == [(Kind.GROUP_RUNS, "a group runs incarnation=20 ranks=2 start=2", False)]
    # A new start replaces one that runs.
    ranks.enter(30, 0)
    assert ranks.notes() == [(Kind.GROUP_OVER, "a group has ended and must start again incarnation=20", False)]


def test_ranks_that_leave_cleanly_end_no_group() -> None:
    ranks = Ranks()
    ranks.begin(10)
    ranks.notes()
    for rank in (0, 1):
        leave = GroupLeaveRequest(**_own(10, rank), incarnation=10, is_clean=True, has_finished=True)
        assert ranks.ask(leave, has_dataset=False) == Done()
    assert ranks.requests.group.is_done
    assert ranks.notes() == []


def test_convicted_records_are_logged_each_once() -> None:
    ranks = Ranks()
    for number, start in enumerate((10, 20)):
        ranks.begin(start)
        ranks.at(start, number)
        ranks.notes()
        ranks.requests.gone(f"{start}-{number}", start + number)
        (_, text, is_warning) = ranks.notes()[-1]
        assert is_warning
        assert f"starts=1 records=[(0, {number}, 0, 10)] error=it ended without a word" in text
    ranks.begin(30)
    assert [kind for kind, _, _ in ranks.notes()] == [Kind.GROUP_RUNS]


def test_a_successor_forgets_ranks_that_died_while_there_was_no_master() -> None:
    ranks = Ranks()
    ranks.begin(10)
    stored = encode(ranks.requests.group.record)
    for alive, phase in (({"10-0": 10, "10-1": 11}, RUNNING), ({"10-0": 10, "10-1": 12}, OVER), ({"10-1": 11}, OVER)):
        successor = Ranks(stored=stored)
        successor.requests.forget_the_dead(alive)
        assert successor.requests.group.record.phase == phase
        assert successor.outbox.revision == (phase == OVER)
    assert msgspec.json.decode(stored)["phase"] == RUNNING
