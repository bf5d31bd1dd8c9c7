"""One pserver's answers for ranges of its buckets, as the one answer that a trainer's core hears of."""

from __future__ import annotations

from typing import Any

import pytest

from flightedl.domain.trainer.joined import JoinedAnswers
from flightedl.messages.parameters import Outcome

BUCKETS = range(10, 20)
FIRST, SECOND = range(10, 13), range(13, 20)
NOTHING, ROWS = memoryview(b""), memoryview(b"rows")
ACCEPTED, ALREADY, STALE, STRANGER, PARTLY, NONE = (
    Outcome.ACCEPTED,
    Outcome.ALREADY_APPLIED,
    Outcome.STALE,
    Outcome.NOT_MEMBER,
    Outcome.PARTLY_APPLIED,
    Outcome.NONE,
)


def told(*parts: tuple[range, int, Outcome, memoryview]) -> list[tuple[Any, ...]]:
    """What the core hears, in the order in which it does."""
    heard: list[tuple[Any, ...]] = []

    class Core:
        def answered(self, blocks: range, outcome: int, version: int | None = None, having: bytes = b"") -> None:
            assert blocks == range(10, 11)
            heard.append((Outcome(outcome), version, having) if having else (Outcome(outcome), version))

    joined = JoinedAnswers(BUCKETS, Core())
    for blocks, version, outcome, data in parts:
        if outcome is PARTLY:
            joined.answered(blocks, outcome, having=bytes(data))
        else:
            joined.answered(blocks, outcome, version if data else None)
    return heard


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([(BUCKETS, 4, ACCEPTED, ROWS)], [(ACCEPTED, 4)]),
        ([(BUCKETS, 4, ACCEPTED, NOTHING), (BUCKETS, 5, NONE, ROWS)], [(ACCEPTED, None), (NONE, 5)]),
        ([(BUCKETS, 7, NONE, ROWS)], [(NONE, 7)]),
        ([(FIRST, 4, ACCEPTED, ROWS)], []),
        ([(FIRST, 4, ACCEPTED, ROWS), (SECOND, 3, ALREADY, ROWS)], [(ACCEPTED, 3)]),
        ([(FIRST, 4, ALREADY, ROWS), (SECOND, 3, ALREADY, ROWS)], [(ALREADY, 3)]),
        (
            [(FIRST, 4, ACCEPTED, ROWS), (SECOND, 3, ACCEPTED, NOTHING), (SECOND, 6, NONE, ROWS)],
            [(ACCEPTED, None), (NONE, 4)],
        ),
        ([(FIRST, 4, ACCEPTED, ROWS), (SECOND, 3, STALE, NOTHING)], [(STALE, None)]),
        ([(FIRST, 4, NONE, ROWS), (SECOND, 3, STRANGER, NOTHING)], [(STRANGER, None)]),
        (
            [(FIRST, 4, PARTLY, memoryview(b"\x01")), (SECOND, 3, ACCEPTED, ROWS)],
            [(PARTLY, None, b"\x01")],
        ),
        (
            [(FIRST, 4, PARTLY, memoryview(b"\x02")), (SECOND, 3, PARTLY, memoryview(b"\x01"))],
            [(PARTLY, None, b"\x01"), (PARTLY, None, b"\x02")],
        ),
    ],
)
def test_ranges_are_one_answer(parts: list[Any], expected: list[Any]) -> None:
    assert told(*parts) == expected
