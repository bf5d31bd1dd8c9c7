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


class Masters:
    """Records of masters."""

    def __init__(self) -> None:
        self.queue = QueueHistory()
        self.errors: list[str] = []
        self._calls = 0

    def ask(
        self, trainer: str, *given: tuple[int, int], finished: int = 0, lost: int = 0, note: str = "", master: str = "m"
    ) -> None:
        """Record a ticket and its answer. ``given`` are (attempt, position); positions are also those of reports."""
        self._calls += 1
        reports = [{"epoch": 0, "position": 3, "attempt": finished}] if finished else []
        ticket = {"TasksTicket": {"trainer": trainer, "evaluation": "", "finished": reports}}
        assigned = [
            {"attempt": attempt, "epoch": 0, "position": position, "first_batch": 0, "end_batch": 2}
            for attempt, position in given
        ]
        reply = {"TasksReply": {"assignments": assigned, "lost": [{"attempt": lost}] if lost else []}}
        effects: list[Any] = [{"Answer": {"call": self._calls, "revision": 1, "reply": reply}}]
        if note:
            effects.insert(0, {"Note": {"kind": note}})
        event = {"Asked": msgspec.Raw(json.dumps({"call": self._calls, "request": ticket}).encode())}
        record = ReadRecord(1.0, "master-1", event, msgspec.Raw(json.dumps(effects).encode()))
        self.errors += self.queue.read(master, record)


def test_an_attempt_belongs_to_one_trainer_and_one_piece() -> None:
    masters = Masters()
    masters.ask("a", (1, 3))
    masters.ask("a", (1, 3))  # the reply was lost
    assert not masters.errors
    masters.ask("b", (1, 4), master="successor")
    assert masters.errors == ["attempt 1 was given as ('a', 0, 3, 0, 2) and as ('b', 0, 4, 0, 2)"]


def test_finished_work_is_not_assigned_again_without_a_reason() -> None:
    masters = Masters()
    masters.ask("a", (1, 3))
    masters.ask("a", finished=1)
    masters.ask("b", (2, 3), master="successor")
    assert masters.errors == ["attempt 2 was given for (0, 3) although attempt 1 had finished it"]


def test_work_that_was_lost_may_be_assigned_again() -> None:
    masters = Masters()
    masters.ask("a", (1, 3))
    masters.ask("a", finished=1, note="work_lost")
    masters.ask("b", (2, 3))
    masters.ask("b", finished=2, lost=2)
    masters.ask("a", (4, 3))
    masters.ask("a", finished=4)
    masters.ask("b", note="pserver_settled")
    masters.ask("b", (5, 3))
    assert not masters.errors
