from __future__ import annotations

from typing import Any

import pytest

from flightedl.launch.supervisor import Outcome
from flightedl.launch.verdict import is_finished, is_last_word, verdict
from flightedl.messages.status import EvaluationStatus, FailedPiece, StatusReply, TaskCounts

DONE: dict[str, Any] = {
    "job": "j",
    "state": "done",
    "epoch": 2,
    "epochs": 2,
    "tasks": TaskCounts(done=8, total=8),
    "batches": 80,
    "plan_hash": "p",
    "checkpoint": "c-3",
}


def judged(keeps_checkpoints: bool = False, **more: Any) -> Outcome:
    return verdict(StatusReply(**{**DONE, **more}), keeps_checkpoints=keeps_checkpoints)


def test_a_job_that_completed_all_tasks_is_done() -> None:
    assert judged() == Outcome(0)
    assert judged(keeps_checkpoints=True) == Outcome(0)


def test_a_job_whose_master_does_not_answer_is_not_done() -> None:
    assert verdict(None, keeps_checkpoints=False).exit_code == 1


def test_remaining_tasks_are_reported() -> None:
    found = judged(state="training", epoch=0, tasks=TaskCounts(done=3, todo=4, pending=1, total=8))
    assert found.exit_code == 2
    assert "5 of 8 tasks of epoch 1 of 2 are not done" in found.reason
    assert "job.stop()" in found.reason
    endless = judged(state="training", epoch=4, epochs=None, tasks=TaskCounts(done=3, todo=5, total=8))
    assert "5 of 8 tasks of epoch 5 are not done" in endless.reason


def test_a_deliberate_end_is_not_a_failure() -> None:
    left = TaskCounts(done=3, todo=5, total=8)
    assert judged(state="done", epoch=0, tasks=left, is_stopped=True) == Outcome(0)
    # The master may need a moment for the last checkpoint.
    assert is_finished(StatusReply(**{**DONE, "state": "training", "epoch": 0, "tasks": left, "is_stopped": True}))


def test_a_job_whose_last_report_is_in_flight_is_done() -> None:
    assert judged(state="training") == Outcome(0)


def test_a_dataset_that_is_still_followed_is_reported() -> None:
    found = judged(state="waiting", epoch=1, tasks=TaskCounts(done=8, total=8), is_growing=True)
    assert found.exit_code == 2
    assert "data.end()" in found.reason


def test_a_script_without_declared_data_is_reported() -> None:
    found = judged(state="waiting", epoch=0, epochs=None, tasks=TaskCounts(), batches=0, plan_hash="")
    assert found.exit_code == 2
    assert "fe.connect()" in found.reason


def test_a_job_that_only_evaluates_is_done() -> None:
    evaluation = EvaluationStatus(name="e", is_done=True, metrics={}, tasks=TaskCounts(done=1, total=1))
    assert judged(state="waiting", epochs=None, epoch=0, tasks=TaskCounts(), evaluations=[evaluation]) == Outcome(0)


def test_trainers_with_separate_models_are_reported_once_without_failing() -> None:
    found = judged(plan_hash="", own_models=3)
    assert found.exit_code == 0
    assert found.reason.startswith("each trainer trains its own model")
    assert judged(plan_hash="", own_models=1) == Outcome(0)


def test_a_model_without_any_gradient_is_reported() -> None:
    found = judged(idle_batches=80)
    assert found.exit_code == 2
    assert "model.step" in found.reason
    assert judged(idle_batches=79) == Outcome(0)
    assert judged(idle_batches=0, batches=0) == Outcome(0)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"checkpoint": ""}, "no checkpoint was written"),
        ({"checkpoint": "", "checkpoint_alarm": "no space left"}, "no space left, nor any before it"),
        ({"checkpoint_alarm": "no space left"}, "no space left; the last one is c-3"),
    ],
)
def test_an_unsaved_model_is_reported(more: dict[str, Any], message: str) -> None:
    found = judged(keeps_checkpoints=True, **more)
    assert found.exit_code == 4
    assert message in found.reason
    assert judged(**more) == Outcome(0)
    assert judged(keeps_checkpoints=True, plan_hash="", **more) == Outcome(0)


def test_failed_tasks_set_the_exit_code() -> None:
    piece = FailedPiece(epoch=0, task=1, first_batch=0, end_batch=1, attempts=5, trainer="t", error="bad")
    assert judged(failed=[piece]) == Outcome(4)


def test_an_incomplete_stopped_job_is_reported() -> None:
    left = TaskCounts(done=3, todo=5, total=8)
    why = "the job was stopped, but no trainer repeats tasks that were lost with a pserver, at least tasks 3 of epoch 1"
    assert judged(state="training", epoch=0, tasks=left, is_stopped=True, unfinished=why) == Outcome(2, why)


def test_the_last_report_of_a_stopped_job_says_if_it_is_complete() -> None:
    left = TaskCounts(done=3, todo=5, total=8)
    stopped = DONE | {"epoch": 0, "tasks": left, "is_stopped": True, "plan_hash": "p"}
    assert not is_last_word(StatusReply(**stopped | {"state": "training"}))
    assert is_last_word(StatusReply(**stopped | {"state": "training", "unfinished": "tasks 3 of epoch 1"}))
    assert is_last_word(StatusReply(**stopped | {"state": "done"}))
    assert is_last_word(StatusReply(**stopped | {"state": "training", "plan_hash": ""})), "there is no model to verify"
