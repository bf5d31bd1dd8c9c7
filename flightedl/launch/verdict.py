"""Verdict on a job whose trainers have all finished: complete, or with work left. Pure.

Exit code 0 means only that the script itself succeeded. The master's status shows the rest: tasks that were not done, a
model that never received a gradient, a checkpoint that was never written.
"""

from __future__ import annotations

from flightedl.errors import EXIT_FAILED, EXIT_INCOMPLETE, EXIT_USAGE
from flightedl.launch.failed import failed_tasks
from flightedl.launch.supervisor import Outcome
from flightedl.messages.status import StatusReply

#: Maximum number of omitted files that a message names.
_LISTED_FILES = 10
_DONE = Outcome(0)
_OWN_MODELS = (
    "each trainer trains its own model, with its share of the data: to train one model, declare it with "
    "job.parameters or fe.torch.Optimizer; if separate models are intended, save each of them under job.once"
)


def verdict(status: StatusReply | None, *, keeps_checkpoints: bool) -> Outcome:
    """Return the outcome of a job whose trainers have all finished.

    Args:
        status: The master's last status, or None if it did not answer.
        keeps_checkpoints: True if the job should have written checkpoints.
    """
    if status is None:
        return Outcome(EXIT_FAILED, "every trainer has ended, but the master does not report if all work is done")
    if missing := _untrained(status):
        return Outcome(EXIT_USAGE, missing)
    if keeps_checkpoints and status.plan_hash and (reason := _unsaved(status)):
        return Outcome(EXIT_INCOMPLETE, reason)
    if status.left_out:
        names = "; ".join(status.left_out[:_LISTED_FILES])
        return Outcome(EXIT_INCOMPLETE, f"the dataset was completed without some of its files: {names}")
    if failed_tasks(status) or status.tasks.forgotten:
        return Outcome(EXIT_INCOMPLETE)
    return Outcome(0, _OWN_MODELS) if status.own_models > 1 else _DONE


def is_finished(status: StatusReply) -> bool:
    """True if no training remains, or if a trainer has stopped the job."""
    is_past_last = status.epochs is not None and status.epoch >= status.epochs
    return status.state == "done" or is_past_last or (status.is_stopped and not status.tasks.pending)


def is_last_word(status: StatusReply) -> bool:
    """True if the job's state can no longer change. All of its trainers have ended.

    After ``job.stop``, the master first compares the pservers. The status is ``done``, or names remaining work.
    """
    if status.is_stopped and status.plan_hash:
        return status.state == "done" or bool(status.unfinished)
    # The master may still count the tasks of trainers that have just ended as pending.
    return is_finished(status) or not status.tasks.pending


def _untrained(status: StatusReply) -> str:
    if status.unfinished:
        return status.unfinished
    tasks = status.tasks
    if status.group is not None and status.state != "done":
        return (
            f"every rank has ended, but the group is not done (after {status.records:,} records): a rank has to loop "
            "until the data ends and to leave its session at the end of `with fe.connect() as job:`"
        )
    if not tasks.total and not status.is_growing:
        if status.evaluations or status.is_stopped:
            return ""
        return (
            "nothing was trained: every trainer has ended, and none has declared a dataset; "
            "call fe.connect() in the script, then job.dataset(...), and loop over it"
        )
    if not is_finished(status):
        if status.is_growing and not tasks.todo and not tasks.pending:
            return (
                "every trainer has ended, but the dataset is still followed: "
                "call data.end() when no more files will arrive, or job.stop() to end without them"
            )
        of = "" if status.epochs is None else f" of {status.epochs}"
        return (
            f"every trainer has ended, but {tasks.todo + tasks.pending} of {tasks.total} tasks of epoch "
            f"{status.epoch + 1}{of} are not done: the script left its loop early; "
            "if that is intended, call job.stop() before leaving it"
        )
    if status.plan_hash and status.batches and status.idle_batches == status.batches:
        return (
            f"the model was declared but never trained: the script worked through {status.batches:,} batches "
            "without calling model.step(gradients)"
        )
    return ""


def _unsaved(status: StatusReply) -> str:
    if status.checkpoint_alarm:
        since = f"; the last one is {status.checkpoint}" if status.checkpoint else ", nor any before it"
        return f"training is complete, but its last checkpoint was not written: {status.checkpoint_alarm}{since}"
    return "" if status.checkpoint else "training is complete, but no checkpoint was written"
