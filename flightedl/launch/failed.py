"""Failed work in words."""

from __future__ import annotations

from flightedl.wire.messages_status import FailedPiece


def place_of(piece: FailedPiece) -> str:
    """File, chunk and records of a failed piece."""
    total = sum(each.records for each in piece.ranges)
    last = piece.first_record + piece.records - 1
    records = f"record {last}" if piece.records == 1 else f"records {piece.first_record}-{last}"
    among = f"{total} of " if 0 < total < piece.records else ""
    return f"{piece.url} chunk {piece.chunk}, {among}{records}"
