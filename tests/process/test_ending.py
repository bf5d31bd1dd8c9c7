"""The end of a process, tested in child interpreters, because ending at once bypasses the interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


ENDS = """
import atexit, sys
from flightedl.process.ending import script_error, watch_exits

exit_before = sys.exit
watch_exits()
watch_exits()
assert script_error() is None
atexit.register(lambda: print(repr(script_error()), end=""))
"""


@pytest.mark.parametrize(
    ("end", "code", "known"),
    [
        ("", 0, "None"),
        ("sys.exit()", 0, "SystemExit()"),
        ("sys.exit(3)", 3, "SystemExit(3)"),
        ("1 / 0", 1, "ZeroDivisionError('division by zero')"),
        ("import argparse; argparse.ArgumentParser().error('odd')", 2, "SystemExit(2)"),
        ("import threading; thread = threading.Thread(target=sys.exit, args=(3,)); thread.start()", 0, "None"),
        # Only this one leaves no trace.
        ("raise SystemExit(3)", 3, "None"),
    ],
)
def test_exit_functions_know_how_the_script_has_ended(end: str, code: int, known: str) -> None:
    done = subprocess.run([sys.executable, "-c", ENDS + end], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (code, known), done.stderr


@pytest.mark.parametrize(
    ("error", "code"), [("LostDataError('2 batches')", 4), ("UsageError('wrong')", 2), ("InternalError('a bug')", 1)]
)
def test_an_error_that_ends_a_script_is_one_sentence_and_gives_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str, code: int
) -> None:
    script = tmp_path / "train.py"
    imports = "import flightedl as fe\nfrom flightedl.errors import *\nfe.SGD\n"
    script.write_text(f"{HEAD}{imports}raise {error}", "utf-8")
    name, _, text = error.removesuffix("')").partition("('")
    sentence = f"{script}, line {len(script.read_text().splitlines())}: {name}: {text}\n"

    def shown(**variables: str) -> str:
        for variable, value in variables.items():
            monkeypatch.setenv(variable, value)
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout) == (code, "all is said taken down")
        return done.stderr

    is_bug = name == "InternalError"
    assert ("Traceback" in shown()) == is_bug
    assert is_bug or shown().endswith(sentence)
    assert is_bug or shown(RANK="3").endswith(f"rank 3: {name}: {text}\n")
    assert "Traceback" in shown(FLIGHTEDL_DEBUG="1")
