"""What the master's Prometheus page shows: what it measures, and the status that everybody can ask for."""

from __future__ import annotations

from flightedl.messages.status import StatusReply
from flightedl.ports import Measure
from flightedl.process.metrics_page import Figure, Figures

_TIMES_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)

REQUEST_SECONDS = Measure(
    "request_seconds",
    "From a request to its answer, in etcd, where it did not have to wait for what others do.",
    _TIMES_S,
    "request",
    ("work", "join", "mode", "checkpoint", "failed_work", "stop", "model", "dataset", "evaluation"),
)
COMMIT_SECONDS = Measure("commit_seconds", "To write the master's state to etcd.", _TIMES_S)
COMMITTED_BYTES = Measure("committed_bytes", "Bytes of the master's state that were written to etcd.")
MEASURES = (REQUEST_SECONDS, COMMIT_SECONDS, COMMITTED_BYTES)


def figures(status: StatusReply) -> Figures:
    """Name -> figure."""
    tasks = status.tasks
    latest = status.checkpoint.removeprefix("c-")
    return {
        "epoch": Figure("Epoch, from 0.", status.epoch),
        "tasks_todo": Figure("Tasks of the epoch that wait.", tasks.todo),
        "tasks_pending": Figure("Tasks that trainers have.", tasks.pending),
        "tasks_done": Figure("Tasks of the epoch that are done.", tasks.done),
        "tasks_failed": Figure("Tasks that were given up.", tasks.failed),
        "attempts_total": Figure("Whole tasks and parts that were handed out, since the job began.", tasks.attempts),
        "copies_total": Figure("Those of them that another trainer was at, too.", tasks.copies),
        "reports_total": Figure("Reports of trainers' work, since this master began.", status.reports, "kind"),
        "records": Figure("Records of all finished tasks.", status.records),
        "records_per_second": Figure("Records that trainers report per second.", status.records_per_s),
        "batches_total": Figure("Batches that trainers worked through, since this master began.", status.batches),
        "trainers": Figure("Trainers whose lease is alive.", len(status.trainers)),
        "members": Figure("Trainers that rounds wait for.", sum(bool(each.member) for each in status.trainers)),
        "waiting_trainers": Figure("Trainers that wait.", sum(bool(each.waiting_for) for each in status.trainers)),
        "pservers": Figure("Pservers whose lease is alive.", len(status.pservers)),
        "pservers_desired": Figure("Pservers that the job has.", status.pservers_desired),
        "missing_tasks_total": Figure("Tasks that counted as done and were not.", status.missing_tasks),
        "events_total": Figure("What happened, by kind, since this master began.", status.events, "kind"),
        "checkpoint": Figure("Number of the newest complete checkpoint.", int(latest) if latest else None),
        "checkpoint_age_seconds": Figure("Since the newest checkpoint was complete.", status.checkpoint_age_s),
        "checkpoint_trouble": Figure(
            "1: checkpoints cannot be completed; status tells why.",
            None if status.checkpoint_age_s is None else float(bool(status.checkpoint_alarm)),
        ),
    }
