"""Quarantined batches: how they are listed and released."""

from __future__ import annotations

from flightedl.domain.queue.failed import ERROR_LIMIT, FailedPieces, shortened
from flightedl.domain.queue.values import FailedPiece


def piece(position: int, first: int, end: int) -> FailedPiece:
    return FailedPiece(
        epoch=0, position=position, task=position, first_batch=first, end_batch=end, attempts=3, trainer="a", error="no"
    )


def test_an_error_of_maximum_length_is_not_truncated() -> None:
    assert shortened("x" * ERROR_LIMIT) == "x" * ERROR_LIMIT
    assert shortened("x" * (ERROR_LIMIT + 1)) == "x" * (ERROR_LIMIT - 1) + "…"


def test_a_released_range_is_no_longer_listed_but_its_neighbors_are() -> None:
    failed = FailedPieces(limit=10)
    for each in (piece(0, 0, 2), piece(0, 2, 4), piece(0, 4, 6), piece(1, 2, 4)):
        failed.quarantine(each)
    failed.release((0, 0), 2, 4)
    assert failed.details == [piece(0, 0, 2), piece(0, 4, 6), piece(1, 2, 4)]
    assert [list(batches) for _, batches in failed.failed] == [[(0, 2), (4, 6)], [(2, 4)]]


def test_one_batch_of_a_failed_range_can_be_selected() -> None:
    failed = FailedPieces(limit=10)
    failed.quarantine(piece(0, 2, 4))
    assert failed.select(lambda _: True, None) == [((0, 0), 2, 4)]
    assert failed.select(lambda _: True, 3) == [((0, 0), 3, 4)]
    assert failed.select(lambda _: True, 4) == []
    assert failed.select(lambda place: place == (0, 1), None) == []
    failed.drop((0, 0), 3, 4)
    assert [list(each) for each in failed.at((0, 0))] == [[(2, 3)], [(3, 4)]]
