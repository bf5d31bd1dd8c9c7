"""The master's Prometheus metrics: its own measurements, and values from the status."""

from __future__ import annotations

from flightedl.messages.status import StatusReply
from flightedl.ports import Measure
from flightedl.process.metrics_page import Figure, Figures

_TIMES_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)

REQUEST_SECONDS = Measure(
    "request_seconds",
    "Seconds from a request to its durable answer, for requests that did not wait for others.",
    _TIMES_S,
    "request",
    ("work", "join", "mode", "checkpoint", "failed_work", "stop", "model", "dataset", "evaluation", "scale"),
)
COMMIT_SECONDS = Measure("commit_seconds", "Seconds to write the master's state to etcd.", _TIMES_S)
COMMITTED_BYTES = Measure("committed_bytes", "Bytes of the master's state written to etcd.")
MEASURES = (REQUEST_SECONDS, COMMIT_SECONDS, COMMITTED_BYTES)


def figures(status: StatusReply) -> Figures:
    """Return the metrics in a status, by name."""
    tasks = status.tasks
    latest = status.checkpoint.removeprefix("c-")
    return {
        "epoch": Figure("Epoch, from 0.", status.epoch),
        "tasks_todo": Figure("Tasks of the epoch that are not assigned.", tasks.todo),
        "tasks_pending": Figure("Tasks assigned to trainers.", tasks.pending),
        "tasks_done": Figure("Done tasks of the epoch.", tasks.done),
        "tasks_failed": Figure("Tasks with quarantined batches.", tasks.failed),
        "attempts_total": Figure("Assigned tasks and parts of tasks since the job began.", tasks.attempts),
        "copies_total": Figure("Assigned copies of pieces that another trainer held.", tasks.copies),
        "reports_total": Figure("Trainers' reports by outcome since this master started.", status.reports, "kind"),
        "records": Figure("Records of all finished tasks.", status.records),
        "records_per_second": Figure("Records per second, as reported by trainers.", status.records_per_s),
        "batches_total": Figure("Batches processed by trainers since this master started.", status.batches),
        "trainers": Figure("Trainers whose lease is alive.", len(status.trainers)),
        "members": Figure("Trainers for which rounds wait.", sum(bool(each.member) for each in status.trainers)),
        "waiting_trainers": Figure("Waiting trainers.", sum(bool(each.waiting_for) for each in status.trainers)),
        "pservers": Figure("Pservers whose lease is alive.", len(status.pservers)),
        "pservers_desired": Figure("Configured number of pservers.", status.pservers_desired),
        "missing_tasks_total": Figure("Tasks reported as done that pservers lacked.", status.missing_tasks),
        "events_total": Figure("Events by kind since this master started.", status.events, "kind"),
        "checkpoint": Figure("Number of the newest complete checkpoint.", int(latest) if latest else None),
        "checkpoint_age_seconds": Figure("Seconds since the newest checkpoint completed.", status.checkpoint_age_s),
        "checkpoint_trouble": Figure(
            "1 if the last checkpoint failed; the status contains the reason.",
            None if status.checkpoint_age_s is None else float(bool(status.checkpoint_alarm)),
        ),
    }
