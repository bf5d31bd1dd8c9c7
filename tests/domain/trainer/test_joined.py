"""One pserver's answers for ranges of its buckets, merged into the single answer that a trainer's core handles."""

from __future__ import annotations

from typing import Any

import pytest

from flightedl.domain.trainer.joined import joined_answers
from flightedl.domain.trainer.transfers import Answer
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
    """Return the answers for the block that represents all buckets."""
    answers = [
        Answer(blocks.start, blocks.stop, outcome, None, bytes(data))
        if outcome is PARTLY
        else Answer(blocks.start, blocks.stop, outcome, version if data else None)
        for blocks, version, outcome, data in parts
    ]
    found = joined_answers([Answer(0, 3, ACCEPTED), *answers], BUCKETS)
    assert found[0] == Answer(0, 3, ACCEPTED), "answers that belong to no bucket are unchanged"
    assert all((each.begin, each.end) == (10, 11) for each in found[1:])
    return [
        (Outcome(each.outcome), each.version, each.having) if each.having else (Outcome(each.outcome), each.version)
        for each in found[1:]
    ]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([(BUCKETS, 4, ACCEPTED, ROWS)], [(ACCEPTED, 4)]),
        ([(BUCKETS, 4, ACCEPTED, NOTHING), (BUCKETS, 5, NONE, ROWS)], [(ACCEPTED, 5)]),
        ([(BUCKETS, 7, NONE, ROWS)], [(NONE, 7)]),
        ([(FIRST, 4, ACCEPTED, ROWS)], []),
        ([(FIRST, 4, ACCEPTED, ROWS), (SECOND, 3, ALREADY, ROWS)], [(ACCEPTED, 3)]),
        ([(FIRST, 4, ALREADY, ROWS), (SECOND, 3, ALREADY, ROWS)], [(ALREADY, 3)]),
        (
            [(FIRST, 4, ACCEPTED, ROWS), (SECOND, 3, ACCEPTED, NOTHING), (SECOND, 6, NONE, ROWS)],
            [(ACCEPTED, 4)],
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
def test_answers_for_ranges_are_merged_into_one(parts: list[Any], expected: list[Any]) -> None:
    assert told(*parts) == expected
