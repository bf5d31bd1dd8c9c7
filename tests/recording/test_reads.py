"""The checks of reads, which run in storms, find each kind of error."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from flightedl.recording.reader import ReadRecord

from ..faults.reads import QueueHistory, Received, backward_versions, different_values, two_holders


def test_versions_may_start_again_only_from_another_process() -> None:
    reads = [Received(1.0, 7, 0, 2, 5), Received(2.0, 7, 0, 2, 5), Received(3.0, 9, 0, 2, 3), Received(4.0, 9, 0, 1, 4)]
    assert list(backward_versions("a", reads)) == []
    (found,) = backward_versions("a", [*reads, Received(5.0, 9, 0, 2, 3)])
    assert found == "a received block 0 at version 3 from generation 9, after version 4"


def line(at: float, version: int, digest: str) -> dict[str, Any]:
    return {"at": at, "versions": {"w": version}, "digests": {"w": digest}, "blocks": {"w": [3, 5]}}


def test_trainers_with_the_same_versions_have_the_same_values() -> None:
    first = [Received(1.0, 7, 3, 5, 5), Received(3.0, 7, 3, 5, 6)]
    second = [Received(1.5, 7, 3, 5, 5), Received(2.5, 7, 4, 5, 6)]
    trainers = {"a": (first, [line(2.0, 5, "x"), line(4.0, 6, "y")]), "b": (second, [line(2.0, 5, "x")])}
    assert list(different_values(trainers)) == []
    trainers["b"][1].append(line(3.0, 5, "z"))
    assert list(different_values(trainers)) == [], "one of its blocks has another version"
    trainers["b"][1][0] = line(2.0, 5, "z")
    (found,) = different_values(trainers)
    assert found == "trainers a and b have different values of 'w' at ((7, 5), (7, 5))"


def test_values_are_not_judged_where_the_recording_is_missing() -> None:
    trainers = {"a": ([Received(1.0, 7, 3, 5, 5)], [line(2.0, 6, "x")]), "b": ([], [line(2.0, 6, "y")])}
    assert list(different_values(trainers)) == []


def held(generation: int, began: float, ended: float) -> dict[str, Any]:
    return {"name": "n", "generation": generation, "began": began, "ended": ended}


def test_a_name_is_not_held_by_an_earlier_claim_after_a_later_one() -> None:
    lines = [held(4, 1.0, 2.0), held(4, 2.0, 3.5), held(6, 3.0, 4.0), held(4, 3.5, 5.0)]
    assert list(two_holders(lines)) == [], "the checks overlap, so they may have happened in this order"
    (found,) = two_holders([*lines, held(4, 4.5, 6.0)])
    assert found == "n was held by claim 4 after claim 6 had been seen"


class Queue:
    """Records of masters and of trainers' feeds."""

    def __init__(self) -> None:
        self.history = QueueHistory()
        self._now = 100.0
        self._callers: dict[int, str] = {}

    def ask(
        self,
        trainer: str,
        *given: tuple[int, int],
        finished: int = 0,
        lost: int = 0,
        note: str = "",
        is_told: bool = True,
    ) -> None:
        """Record a ticket and its answer. ``given`` are (attempt, position)."""
        self._now += 10.0
        call = len(self._callers) + 1
        assigned = [
            {"attempt": attempt, "epoch": 0, "position": position, "first_batch": 0, "end_batch": 2}
            for attempt, position in given
        ]
        reply = {"TasksReply": {"assignments": assigned, "lost": [{"attempt": lost}] if lost else []}}
        effects: list[Any] = [{"Answer": {"call": call, "revision": 1, "reply": reply}}]
        if note:
            effects.insert(0, {"Note": {"kind": note}})
        asked = {"call": call, "request": {"TasksTicket": {"trainer": trainer}}}
        self.history.read_master(self._now, record("master-1", "Asked", asked, effects), self._callers)
        if is_told:
            ask = {"Ask": {"reports": {"finished": [{"attempt": finished}] if finished else []}}}
            answered = record("feed-1", "answered", {"ask": ask, "reply": reply}, [])
            self.history.read_feed(self._now + 0.1, answered, trainer)

    def errors(self) -> list[str]:
        return list(self.history.errors())


def record(core: str, name: str, fields: Any, effects: list[Any]) -> ReadRecord:
    event = {name: msgspec.Raw(json.dumps(fields).encode())}
    return ReadRecord(1.0, core, event, msgspec.Raw(json.dumps(effects).encode()))


def test_an_attempt_belongs_to_one_trainer_and_one_piece() -> None:
    queue = Queue()
    queue.ask("a", (1, 3))
    queue.ask("a", (1, 3))  # the reply was lost
    assert not queue.errors()
    queue.ask("b", (1, 4), is_told=False)  # the master died before it had stored its state
    assert not queue.errors()
    queue.ask("b", (1, 4))
    assert queue.errors() == ["attempt 1 was given as ('a', 0, 3, 0, 2) and as ('b', 0, 4, 0, 2)"]


def test_finished_work_is_not_assigned_again_without_a_reason() -> None:
    queue = Queue()
    queue.ask("a", (1, 3))
    queue.ask("b", (2, 3))  # a copy, before the report
    queue.ask("a", finished=1)
    assert not queue.errors()
    queue.ask("b", (3, 3))
    assert queue.errors() == ["attempt 3 was given for ('b', 0, 3, 0, 2) although attempt 1 had finished it"]


def test_work_that_was_lost_may_be_assigned_again() -> None:
    queue = Queue()
    queue.ask("a", (1, 3))
    queue.ask("a", finished=1, note="work_lost")
    queue.ask("b", (2, 3))
    queue.ask("b", finished=2, lost=2)
    queue.ask("a", (4, 3))
    queue.ask("a", finished=4)
    queue.ask("b", note="pserver_settled")
    queue.ask("b", (5, 3))
    assert not queue.errors()
