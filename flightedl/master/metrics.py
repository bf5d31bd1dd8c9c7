"""What the master's Prometheus page shows, taken from the status that everybody can ask for."""

from __future__ import annotations

from flightedl.messages.status import StatusReply
from flightedl.process.metrics_page import Figures


def figures(status: StatusReply) -> Figures:
    """Name -> (help, value)."""
    tasks = status.tasks
    latest = status.checkpoint.removeprefix("c-")
    return {
        "epoch": ("Epoch, from 0.", status.epoch),
        "tasks_todo": ("Tasks of the epoch that wait.", tasks.todo),
        "tasks_pending": ("Tasks that trainers have.", tasks.pending),
        "tasks_done": ("Tasks of the epoch that are done.", tasks.done),
        "tasks_failed": ("Tasks that were given up.", tasks.failed),
        "records": ("Records of all finished tasks.", status.records),
        "records_per_second": ("Records that trainers report per second.", status.records_per_s),
        "trainers": ("Trainers whose lease is alive.", len(status.trainers)),
        "pservers": ("Pservers whose lease is alive.", len(status.pservers)),
        "pservers_desired": ("Pservers that the job has.", status.pservers_desired),
        "checkpoint": ("Number of the newest complete checkpoint.", int(latest) if latest else None),
        "checkpoint_age_seconds": ("Since the newest checkpoint was complete.", status.checkpoint_age_s),
        "checkpoint_trouble": (
            "1: checkpoints cannot be completed; status tells why.",
            None if status.checkpoint_age_s is None else float(bool(status.checkpoint_alarm)),
        ),
    }
