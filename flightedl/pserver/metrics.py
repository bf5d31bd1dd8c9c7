"""What a pserver's Prometheus page shows."""

from __future__ import annotations

from flightedl.messages.status import PserverStatusReply
from flightedl.process.metrics_page import Figures


def figures(status: PserverStatusReply) -> Figures:
    """Name -> (help, value)."""
    return {
        "serving": ("1: it has values and serves them.", float(status.state == "serving")),
        "blocks": ("Blocks that it holds.", status.blocks),
        "size_bytes": ("Bytes of values, slots and accumulators.", status.size_bytes),
        "lowest_version": ("Lowest version of a block.", status.lowest_version),
        "highest_version": ("Highest version of a block.", status.highest_version),
        "rows_accepted": ("Rows that were applied, since its start.", status.rows_accepted),
        "rows_repeated": ("Rows that it had already, since its start.", status.rows_repeated),
        "rows_refused": ("Rows that were refused, since its start.", status.rows_refused),
    }
