"""Descriptions of failed and skipped work, for users."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from flightedl.messages.status import FailedPiece, StatusReply


def place_of(piece: FailedPiece) -> str:
    """Describe the file, chunk and records of a failed piece."""
    total = sum(each.records for each in piece.ranges)
    last = piece.first_record + piece.records - 1
    records = f"record {last}" if piece.records == 1 else f"records {piece.first_record}-{last}"
    among = f"{total} of " if 0 < total < piece.records else ""
    return f"{piece.url} chunk {piece.chunk}, {among}{records}"


def joined(pieces: Iterable[FailedPiece]) -> list[FailedPiece]:
    """Sort failures by task and batch, and merge adjacent failures of a chunk that have the same error."""
    found: list[FailedPiece] = []
    for piece in sorted(pieces, key=lambda each: (each.epoch, each.task, each.first_batch)):
        last = found[-1] if found else None
        if last is None or not _continues(last, piece):
            found.append(piece)
            continue
        found[-1] = replace(
            last,
            end_batch=piece.end_batch,
            attempts=max(last.attempts, piece.attempts),
            records=last.records + piece.records,
            ranges=[*last.ranges, *piece.ranges],
        )
    return found


def failed_tasks(status: StatusReply) -> int:
    """Return the number of tasks with failed batches. A task that fails in two epochs counts twice."""
    return max(len({(piece.epoch, piece.task) for piece in status.failed}), status.tasks.failed)


def _continues(last: FailedPiece, piece: FailedPiece) -> bool:
    is_same = (last.epoch, last.task, last.url, last.chunk, last.error) == (
        piece.epoch,
        piece.task,
        piece.url,
        piece.chunk,
        piece.error,
    )
    ends = last.first_record + last.records, last.end_batch
    return is_same and bool(last.ranges) == bool(piece.ranges) and ends == (piece.first_record, piece.first_batch)


def skipped_of(status: StatusReply) -> str:
    """Describe the data that was skipped because it is corrupt; empty if no data was skipped."""
    counts = (
        (status.skipped_records, "corrupt record", "corrupt records"),
        (status.skipped_parts, "part of the files", "parts of the files"),
    )
    return " and ".join(f"{count:,} {one if count == 1 else many}" for count, one, many in counts if count)


def alarms_of(status: StatusReply) -> list[str]:
    """Describe each problem that does not stop the job."""
    missing = status.missing_tasks
    alarms = {
        "checkpoints": status.checkpoint_alarm,
        "tasks": f"{missing:,} that were reported as done had to be repeated" if missing else "",
        "dataset": status.dataset_alarm,
    }
    if forgotten := status.tasks.forgotten:
        alarms["quarantine"] = (
            f"{forgotten:,} ranges of batches were set aside and are no longer listed, so --resume cannot return them: "
            "the logs of the masters name them"
        )
    for table in status.tables:
        if table.refused:
            alarms[f"table {table.name}"] = (
                f"{table.refused:,} gradients of new rows were dropped for lack of memory: use more pservers, "
                "give them more memory (--table-memory-mb), or evict rows (evict=)"
            )
    return [f"{what}: {text}" for what, text in alarms.items() if text]
