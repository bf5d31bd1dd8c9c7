"""How a process ends: in pieces of interpreter, as it is the interpreter that is left out."""

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
# One that is no daemon is waited for; one that is never ends.
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


def test_at_once_whatever_threads_do_and_says_all_that_it_had_to() -> None:
    assert ended(AT_ONCE) == (75, "all is said ", "also why")


def test_as_the_interpreter_does_it_waits_for_threads_and_what_was_registered() -> None:
    assert ended(AS_THE_INTERPRETER) == (3, "all is said by a thread taken down", "also why")


@pytest.mark.parametrize(
    ("given", "code", "said"), [(None, 0, ""), (3, 3, ""), (-1, 255, ""), ("no data", 1, "no data\n"), ("", 1, "\n")]
)
def test_what_sys_exit_is_given_is_taken_as_the_interpreter_takes_it(
    given: str | int | None, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(SystemExit(given)) == code
    assert capsys.readouterr().err == said
