"""Descriptions of failed and skipped work."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from flightedl.errors import EXIT_INCOMPLETE
from flightedl.launch.failed import alarms_of, failed_tasks, joined, place_of, skipped_of
from flightedl.launch.progress import Figures
from flightedl.launch.verdict import verdict
from flightedl.messages.status import FailedPiece, StatusReply, TableCounts, TaskCounts

PIECE = FailedPiece(
    epoch=0,
    task=3,
    first_batch=0,
    end_batch=1,
    attempts=5,
    trainer="t",
    error="a is corrupt",
    url="a",
    chunk=2,
    first_record=100,
    records=10,
)


def test_batches_of_a_corrupt_chunk_are_one_failure() -> None:
    pieces = [
        replace(PIECE, first_batch=number, end_batch=number + 1, first_record=100 + 10 * number) for number in range(34)
    ]
    # The order in which they fail depends on the trainers.
    (joined_piece,) = joined(pieces[1::2] + pieces[::2])
    assert place_of(joined_piece) == "a chunk 2, records 100-439"
    assert (joined_piece.first_batch, joined_piece.end_batch) == (0, 34)


def test_failed_tasks_are_counted_and_not_their_pieces() -> None:
    pieces = [replace(PIECE, first_batch=number, end_batch=number + 1) for number in (0, 7, 9)]
    pieces.append(replace(PIECE, epoch=1))
    assert failed_tasks(StatusReply(job="j", state="done", failed=pieces)) == 2
    assert failed_tasks(StatusReply(job="j", state="done", tasks=TaskCounts(failed=3), failed=pieces)) == 3
    assert failed_tasks(StatusReply(job="j", state="done")) == 0


def test_different_failures_are_listed_separately() -> None:
    after = {"first_batch": 1, "end_batch": 2, "first_record": 110}
    others = [
        replace(PIECE, **after, error="another error"),
        replace(PIECE, **after, epoch=1),
        replace(PIECE, **after, url="b"),
        replace(PIECE, first_batch=2, end_batch=3, first_record=120),
    ]
    for other in others:
        assert joined([PIECE, other]) == [PIECE, other]


def test_skipped_records_are_counted() -> None:
    assert skipped_of(StatusReply(job="j", state="done")) == ""
    assert skipped_of(StatusReply(job="j", state="done", skipped_records=1)) == "1 corrupt record"
    both = StatusReply(job="j", state="done", skipped_records=333, skipped_parts=2)
    assert skipped_of(both) == "333 corrupt records and 2 parts of the files"


def test_rejected_rows_raise_an_alarm() -> None:
    status = StatusReply(job="j", state="training", tables=[TableCounts(name="a"), TableCounts(name="b", refused=1200)])
    (alarm,) = alarms_of(status)
    assert alarm.startswith("table b: 1,200 gradients of new rows were dropped")
    assert "--table-memory-mb" in alarm


def test_ranges_that_are_no_longer_listed_are_lost() -> None:
    status = StatusReply(job="j", state="done", epochs=1, epoch=1, tasks=TaskCounts(done=9, total=9, forgotten=2))
    assert alarms_of(status)[0].startswith("quarantine: 2 ranges of batches were set aside and are no longer listed")
    assert verdict(status, keeps_checkpoints=False).exit_code == EXIT_INCOMPLETE


@pytest.mark.parametrize(
    ("count", "expected"), [(2, {"t0 0 rows", "t1 1,000 rows"}), (5, {"10,000 rows in 5 tables"}), (0, set())]
)
def test_the_progress_shows_tables(count: int, expected: set[str]) -> None:
    tables = [TableCounts(name=f"t{number}", rows=1000 * number) for number in range(count)]
    figures = Figures(1.0, StatusReply(job="j", state="training", tables=tables), 1, 1, 1)
    assert {text for text in figures.texts if "rows" in text} == expected
