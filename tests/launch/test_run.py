from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flightedl.config import CommonSettings
from flightedl.errors import UsageError
from flightedl.launch.cluster import LocalCluster
from flightedl.launch.policy import Role, Slot
from flightedl.launch.run import (
    RunOptions,
    _report,
    job_name,
    may_be_resumed,
    new_output_directory,
    run_job,
    summary,
    too_few_tasks,
)
from flightedl.launch.supervisor import Outcome
from flightedl.messages.status import FailedPiece, StatusReply, TaskCounts


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("flightedl.examples.flights", "flights"),
        ("my_script.py", "my-script"),
        ("dir/My Script (2).py", "my-script-2"),
        ("train", "train"),
        ("./scripts/train", "train"),
        ("__.py", "job"),
        ("x" * 100 + ".py", "x" * 63),
    ],
)
def test_a_job_is_named_after_its_script(target: str, name: str) -> None:
    assert job_name(target) == name
    CommonSettings(job=name)


def test_each_run_has_its_own_output_directory(tmp_path: Path) -> None:
    parent = tmp_path / "runs"
    assert [new_output_directory("flights", parent).name for _ in range(3)] == ["flights", "flights-2", "flights-3"]
    assert all(path.is_absolute() for path in [new_output_directory("x", parent)])


def test_the_summary_of_a_finished_job_shows_its_figures() -> None:
    status = StatusReply(
        job="j", state="done", epoch=1, epochs=2, tasks=TaskCounts(done=40, total=40), records=1000, records_per_s=1.0
    )
    assert summary(Outcome(0), status, 0, 12.34, Path("/out")) == (
        "done in 12.3 s, 2 epochs, 1,000 records, 40 of 40 tasks of the last epoch done, 0 tasks failed",
        "output and logs are in /out",
    )


def test_the_summary_names_failed_tasks() -> None:
    piece = FailedPiece(
        epoch=0,
        task=3,
        first_batch=0,
        end_batch=1,
        attempts=5,
        trainer="t",
        error="bad",
        url="f.parquet",
        chunk=2,
        first_record=40,
        records=10,
    )
    status = StatusReply(job="j", state="training", tasks=TaskCounts(done=1, total=2), failed=[piece])
    lines = summary(Outcome(130), status, 1, 1.0, Path("/out"))
    assert lines[0] == "failed: epoch 1 task 3, f.parquet chunk 2, records 40-49: bad"
    assert lines[1].startswith("ended in 1.0 s, 0 records, 1 of 2 tasks")


def test_the_summary_works_without_a_status() -> None:
    assert summary(Outcome(1), None, 0, 1.0, Path("/out"))[0] == "ended in 1.0 s"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"job": "a/b"}, "job name 'a/b' is not usable"),
        ({"job": ""}, "job name '' is not usable"),
        ({"output": Path("/proc/nope")}, "the output directory /proc/nope/logs cannot be created"),
        ({"checkpoint": "nope://bucket"}, "nope://bucket/job cannot be opened: Protocol not known"),
        (
            {"checkpoint": "ftp://127.0.0.1:1/x"},
            "checkpoints cannot be stored: ftp://127.0.0.1:1/x/job cannot be reached",
        ),
        ({"more": {"log_level": "LOUD"}}, "log_level is 'LOUD'"),
    ],
    ids=str,
)
def test_errors_in_the_command_are_reported_before_anything_starts(
    options: dict[str, Any], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text("")
    with pytest.raises(UsageError) as caught:
        run_job(RunOptions(target="script.py", **{"job": "job", **options}), Console(quiet=True))
    assert text in str(caught.value)


def test_an_output_directory_that_is_a_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="Not a directory"):
        LocalCluster(output_dir=tmp_path / "file").start()


@pytest.mark.parametrize(
    ("outcome", "status", "may"),
    [
        (Outcome(130), {"checkpoint": "c-3"}, True),
        (Outcome(1), {"checkpoint": "c-3"}, True),
        (Outcome(130), {"checkpoint": ""}, True),
        (Outcome(0), {"checkpoint": "c-3"}, False),
        (Outcome(0), {"checkpoint": "c-3", "is_stopped": True}, True),
        (Outcome(4), {"checkpoint": "c-3"}, False),
    ],
)
def test_the_summary_says_how_to_resume_an_unfinished_job(outcome: Outcome, status: dict[str, Any], may: bool) -> None:
    assert may_be_resumed(outcome, StatusReply(job="j", state="training", **status)) is may
    assert not may_be_resumed(outcome, None)


def test_the_reason_why_a_job_ended_is_printed_last(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=300)
    outcome = Outcome(2, "trainer-1 ended: exit code 2", Slot(Role.TRAINER, 1), ("loading", "train.py, line 3: no"))
    status = StatusReply(job="j", state="training", checkpoint="c-2")
    assert _report(console, outcome, status, 1.0, tmp_path, "checkpoint c-2 has 1 of 2 tasks") == 2
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines()[-4:] == [
        "flightedl: checkpoint c-2 has 1 of 2 tasks",
        "flightedl: trainer-1 ended: exit code 2",
        "trainer-1 | loading",
        "trainer-1 | train.py, line 3: no",
    ]


@pytest.mark.parametrize(
    ("total", "trainers", "is_growing", "text"),
    [
        (1, 2, False, "an epoch has 1 task, fewer than the 2 trainers"),
        (3, 4, False, "an epoch has 3 tasks, fewer than the 4 trainers"),
        (4, 4, False, ""),
        (0, 4, False, ""),
        (1, 4, True, ""),
    ],
)
def test_fewer_tasks_than_trainers_are_reported(total: int, trainers: int, is_growing: bool, text: str) -> None:
    status = StatusReply(job="j", state="training", tasks=TaskCounts(total=total), is_growing=is_growing)
    hint = too_few_tasks(status, trainers)
    assert hint.startswith(text)
    assert bool(hint) == bool(text)
    # Text files are not divided by number of records.
    assert not hint or "for Parquet, job.dataset(..., records_per_task=) also helps" in hint
