"""Marks of rarely taken paths: counted in a process, and kept by processes that are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from flightedl.marks import counting, sometimes
from tests.support.marks import all_marks, left_in, report


def test_marks_are_counted_only_while_somebody_counts() -> None:
    sometimes("before")
    with counting() as outer:
        sometimes("one")
        with counting() as inner:
            sometimes("two")
        sometimes("one")
    sometimes("after")
    assert (outer, inner) == ({"one": 2, "two": 1}, {"two": 1})


def test_a_killed_process_leaves_its_marks(tmp_path: Path) -> None:
    program = (
        "import os; from flightedl.marks import sometimes\n"
        "sometimes('it began'); sometimes('it began'); sometimes('it ended')\n"
        "os.kill(os.getpid(), 9)"
    )
    environment = {**os.environ, "FLIGHTEDL_MARKS": str(tmp_path)}
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", program], env=environment, check=False)
        assert done.returncode == -signal.SIGKILL
    assert left_in(tmp_path) == {"it began": 2, "it ended": 2}


def test_a_directory_that_is_gone_does_no_harm(tmp_path: Path) -> None:
    environment = {**os.environ, "FLIGHTEDL_MARKS": str(tmp_path / "gone")}
    program = "from flightedl.marks import sometimes; sometimes('it began')"
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)


def test_the_report_lists_marks_that_were_never_reached() -> None:
    marks = all_marks()
    assert len(marks) > 30
    lines = report({"a checkpoint was abandoned": 3}).splitlines()
    assert len(lines) == len(marks)
    assert lines[-1] == "       3  a checkpoint was abandoned"
    assert all(line.startswith("   never  ") for line in lines[:-1])
