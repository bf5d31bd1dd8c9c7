"""The master's warnings about waiting rounds, and about calls that pservers refuse."""

from __future__ import annotations

from typing import Any

import pytest

from flightedl.domain.master.effects import Kind, Note, Outbox
from flightedl.domain.master.pserver_warnings import PserverWarnings
from flightedl.messages.status import PserverStatusReply

NAMES = {1: "t1", 2: "t2"}


def status(**more: Any) -> PserverStatusReply:
    numbers = dict.fromkeys(("index", "blocks", "lowest_version", "highest_version", "size_bytes", "pushes"), 0)
    return PserverStatusReply(**{**numbers, "state": "serving", "rows": {}, "members": [1, 2], **more})


class Watched:
    def __init__(self) -> None:
        self.pserver_warnings = PserverWarnings()

    def update(self, now: float, *replies: PserverStatusReply | None) -> list[tuple[Kind, str]]:
        outbox = Outbox()
        self.pserver_warnings.update(replies, NAMES, now, outbox)
        notes = [effect for effect in outbox.take() if isinstance(effect, Note)]
        for note in notes:
            assert note.text % note.values
        return [(note.kind, note.who) for note in notes]


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_a_waiting_round_is_logged_once_for_all_pservers(watched: Watched) -> None:
    assert watched.update(0.0, status(waits_for=[1], waits_s=9.9), None) == []
    slow = status(waits_for=[1], waits_at=7, waits_s=10.0)
    assert watched.update(1.0, slow, slow) == [(Kind.ROUND_WAITS, "t1")]
    assert watched.update(2.0, slow, slow) == []
    assert watched.update(3.0, status(), status()) == [(Kind.ROUND_GOES_ON, "t1")]
    assert watched.update(4.0, status(), status()) == []


def test_each_awaited_trainer_is_logged(watched: Watched) -> None:
    assert watched.update(0.0, status(waits_for=[1], waits_s=20)) == [(Kind.ROUND_WAITS, "t1")]
    assert watched.update(1.0, status(waits_for=[1, 2], waits_s=20)) == [(Kind.ROUND_WAITS, "t2")]
    assert watched.update(2.0, status(waits_for=[2], waits_s=30)) == [(Kind.ROUND_GOES_ON, "t1")]


def test_unknown_members_are_not_logged(watched: Watched) -> None:
    assert watched.update(0.0, status(waits_for=[99], waits_s=20)) == []


def test_refusals_are_logged_once_a_minute_and_usual_ones_never(watched: Watched) -> None:
    refusing = [(Kind.CALLS_REFUSED, "pserver-0")]
    assert watched.update(0.0, status(refused_calls={"not_ready": 500})) == []
    assert watched.update(1.0, status(refused_calls={"gradient": 1})) == refusing
    assert watched.update(2.0, status(refused_calls={"gradient": 9})) == []
    assert watched.update(62.0, status(refused_calls={"gradient": 9})) == refusing
    assert watched.update(200.0, status(refused_calls={"gradient": 9})) == []
    assert watched.update(300.0, status(refused_calls={"gradient": 2})) == refusing
