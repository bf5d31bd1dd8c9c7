"""The end of a process, tested in child interpreters, because ending at once bypasses the interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest

from flightedl.process.ending import code_of

HEAD = """
import atexit, sys, threading, time
from flightedl.process.ending import end_at_once, end_process

atexit.register(print, "taken down", end="")
sys.stdout.write("all is said ")
sys.stderr.write("also why")
"""
AT_ONCE = """
threading.Thread(target=threading.Event().wait).start()
end_at_once(75)
"""
# The interpreter waits for threads that are not daemons. The daemon thread here never ends.
AS_THE_INTERPRETER = """
def later():
    time.sleep(0.05)
    sys.stdout.write("by a thread ")

threading.Thread(target=later).start()
threading.Thread(target=threading.Event().wait, daemon=True).start()
end_process(3)
"""


def ended(program: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", HEAD + program], capture_output=True, text=True, timeout=30, check=False
    )
    return done.returncode, done.stdout, done.stderr


def test_ending_at_once_flushes_output_and_ignores_threads() -> None:
    assert ended(AT_ONCE) == (75, "all is said ", "also why")


def test_ending_normally_waits_for_threads_and_runs_exit_handlers() -> None:
    assert ended(AS_THE_INTERPRETER) == (3, "all is said by a thread taken down", "also why")


@pytest.mark.parametrize(
    ("given", "code", "message"), [(None, 0, ""), (3, 3, ""), (-1, 255, ""), ("no data", 1, "no data\n"), ("", 1, "\n")]
)
def test_arguments_of_sys_exit_mean_the_same_as_in_the_interpreter(
    given: str | int | None, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(SystemExit(given)) == code
    assert capsys.readouterr().err == message
