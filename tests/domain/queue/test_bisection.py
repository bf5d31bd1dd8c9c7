"""Search for the batches that make a piece fail."""

from __future__ import annotations

import pytest

from flightedl.domain.queue.bisection import after_failure
from flightedl.domain.queue.values import BatchRange

LIMIT, CONFIRMATIONS = 3, 2


def failing(first: int, end: int, failures: int) -> BatchRange:
    return BatchRange(0, 0, first, end, 8, failures)


def test_a_piece_is_retried_unchanged_below_the_limit() -> None:
    piece = failing(2, 6, LIMIT - 1)
    assert after_failure(piece, 3, LIMIT, CONFIRMATIONS) == (piece,)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (2, [(2, 3, LIMIT), (3, 6, LIMIT - 1)]),
        (4, [(2, 4, LIMIT - 1), (4, 5, LIMIT), (5, 6, LIMIT - 1)]),
        (5, [(2, 5, LIMIT - 1), (5, 6, LIMIT)]),
        # Unknown, or not one of its batches: in halves.
        (None, [(2, 4, LIMIT), (4, 6, LIMIT)]),
        (1, [(2, 4, LIMIT), (4, 6, LIMIT)]),
        (6, [(2, 4, LIMIT), (4, 6, LIMIT)]),
    ],
)
def test_a_suspect_is_split_around_the_failing_batch_or_in_halves(batch, expected) -> None:
    parts = after_failure(failing(2, 6, LIMIT), batch, LIMIT, CONFIRMATIONS)
    assert [(part.first_batch, part.end_batch, part.failures) for part in parts] == expected


def test_a_single_batch_is_quarantined_after_its_confirmations() -> None:
    piece = failing(2, 3, LIMIT + CONFIRMATIONS - 1)
    assert after_failure(piece, 2, LIMIT, CONFIRMATIONS) == (piece,)
    assert after_failure(failing(2, 3, LIMIT + CONFIRMATIONS), 2, LIMIT, CONFIRMATIONS) == ()
