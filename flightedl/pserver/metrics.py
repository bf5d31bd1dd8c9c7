"""Metrics on a pserver's Prometheus page, in addition to the histograms in ``meter``."""

from __future__ import annotations

from flightedl.messages.status import PserverStatusReply
from flightedl.process.metrics_page import Figure, Figures

#: Name of a metric with one value per table -> (help text, field of ``TableCounts``). Its label is the table's name.
_TABLES = {
    "table_rows": ("Rows that exist.", "rows"),
    "table_size_bytes": ("Bytes of rows, slots and index.", "size_bytes"),
    "table_waiting_ids": ("Ids that wait for admission.", "waiting"),
    "table_reads_total": ("Ids read.", "reads"),
    "table_hits_total": ("Ids read that had a row.", "hits"),
    "table_created_total": ("Rows created.", "created"),
    "table_evicted_total": ("Rows evicted.", "evicted"),
    "table_refused_total": ("Gradients dropped because there was no memory for more rows.", "refused"),
}


def _of_tables(status: PserverStatusReply) -> Figures:
    return {
        name: Figure(text, {each.name: getattr(each, field) for each in status.tables}, "table")
        for name, (text, field) in _TABLES.items()
    }


def figures(status: PserverStatusReply) -> Figures:
    """Return the figures by name."""
    waits_s = status.waits_s if status.waits_for else 0.0
    return {
        "serving": Figure("1 if the pserver has values and serves them.", float(status.state == "serving")),
        "blocks": Figure("Blocks that the pserver holds.", status.blocks),
        "size_bytes": Figure("Bytes of values, slots and accumulators.", status.size_bytes),
        "lowest_version": Figure("Lowest version of a block.", status.lowest_version),
        "highest_version": Figure("Highest version of a block.", status.highest_version),
        "members": Figure("Trainers that rounds wait for.", len(status.members)),
        "waited_for_members": Figure("Members that other trainers are waiting for.", len(status.waits_for)),
        "waits_seconds": Figure("Seconds for which trainers have been waiting for the same members.", waits_s),
        "messages_total": Figure("Messages of pushes and steps since the start.", status.pushes),
        "rows_total": Figure("Pushed blocks, by outcome.", status.rows, "outcome"),
        "received_bytes_total": Figure("Bytes of gradients received.", status.received_bytes),
        "sent_bytes_total": Figure("Bytes of values sent.", status.sent_bytes),
        "streams": Figure("Open streams of trainers.", status.streams),
        "shared_streams": Figure("Open streams with values in shared memory.", status.shared_streams),
        "refused_calls_total": Figure("Calls that ended with an error, by code.", status.refused_calls, "code"),
        **_of_tables(status),
        "snapshot_copy_seconds": Figure("Seconds spent copying blocks for the newest checkpoint.", status.copied_s),
        "snapshot_write_seconds": Figure("Seconds spent writing the newest checkpoint's file.", status.written_s),
        "snapshot_bytes": Figure("Bytes of the newest checkpoint's file.", status.written_bytes),
    }
