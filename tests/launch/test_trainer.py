from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flightedl.errors import UsageError
from flightedl.launch import trainer
from flightedl.launch.trainer import check_target
from flightedl.process.ending import is_of_library, print_error


def run(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the trainer's outermost frame to its end."""
    return subprocess.run(
        [sys.executable, "-m", "flightedl.launch.trainer", *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def write(directory: Path, name: str, program: str) -> str:
    path = directory / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(program)
    return name


def test_a_script_runs_as_python_would_run_it(tmp_path: Path) -> None:
    write(tmp_path, "scripts/beside.py", "VALUE = 42\n")
    script = write(
        tmp_path, "scripts/program.py", "import sys, beside\nprint(__name__, __file__, sys.argv, beside.VALUE)\n"
    )
    done = run(tmp_path, script, "--rate", "1")
    assert done.stdout.split(" ", 2)[0] == "__main__"
    assert done.stdout.rstrip().endswith(f"{script} ['{script}', '--rate', '1'] 42")
    assert (done.returncode, done.stderr) == (0, "")


def test_printed_output_is_flushed_at_each_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    pieces = """
sys.{0}.write("a line ")
os.write({1}, b"from elsewhere\\n")
print("as", "a", "whole", file=sys.{0})
"""
    program = "import os, sys" + pieces.format("stdout", 1) + pieces.format("stderr", 2)
    done = run(tmp_path, write(tmp_path, "program.py", program + 'sys.stdout.write("no end")'))
    assert done.stderr == "from elsewhere\na line as a whole\n"
    assert done.stdout == done.stderr + "no end"


def test_a_module_runs_as_python_would_run_it(tmp_path: Path) -> None:
    write(tmp_path, "package/__init__.py", "")
    write(tmp_path, "package/program.py", "import sys\nprint(__name__, __package__, sys.argv[1:])\n")
    done = run(tmp_path, "package.program", "x")
    assert (done.stdout, done.returncode) == ("__main__ package ['x']\n", 0)


@pytest.mark.parametrize(
    ("program", "code", "last"),
    [
        ("def f():\n    1 / 0\nf()\n", 1, "ZeroDivisionError: division by zero"),
        ("from flightedl.errors import GradientError as E\nraise E('w is NaN')\n", 2, "GradientError: w is NaN"),
        ("from flightedl.errors import JobFailedError as E\nraise E('lost')\n", 3, "JobFailedError: lost"),
        ("from flightedl.errors import FencedError as E\nraise E('late')\n", 75, "FencedError: late"),
        ("import sys\nsys.exit('enough')\n", 1, "enough"),
        ("import sys\nsys.exit(9)\n", 9, ""),
        ("raise KeyboardInterrupt\n", 130, ""),
    ],
)
def test_the_exit_code_reflects_how_the_script_ended(tmp_path: Path, program: str, code: int, last: str) -> None:
    done = run(tmp_path, write(tmp_path, "program.py", program))
    assert done.returncode == code
    assert done.stderr.rstrip().endswith(last)


def test_a_traceback_starts_in_the_script(tmp_path: Path) -> None:
    script = write(tmp_path, "program.py", "def f():\n    1 / 0\nf()\n")
    lines = run(tmp_path, script).stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1] == f'  File "{script}", line 3, in <module>'
    assert "runpy" not in "".join(lines)


def test_a_syntax_error_names_its_location(tmp_path: Path) -> None:
    done = run(tmp_path, write(tmp_path, "program.py", "x = = 1\n"))
    assert done.returncode == 1
    assert 'program.py", line 1' in done.stderr
    assert "runpy" not in done.stderr


@pytest.mark.parametrize("target", ["absent.py", "some/where", "absent_package", "json.absent", "not-a-name"])
def test_a_missing_script_or_module_raises_one_sentence(tmp_path: Path, target: str) -> None:
    done = run(tmp_path, target)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert target in done.stderr


def test_a_missing_import_inside_a_package_is_not_blamed_on_the_package(tmp_path: Path) -> None:
    write(tmp_path, "package/__init__.py", "import absent_dependency\n")
    done = run(tmp_path, "package.program")
    assert done.returncode == 1
    assert "No module named 'absent_dependency'" in done.stderr


def test_without_a_target_the_usage_is_shown(tmp_path: Path) -> None:
    assert run(tmp_path).returncode == 2


def test_sigterm_lets_the_script_clean_up(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "program.py",
        "import time\ntry:\n    print('ready', flush=True)\n    time.sleep(60)\nfinally:\n    print('cleaned up')\n",
    )
    with subprocess.Popen(
        [sys.executable, "-m", "flightedl.launch.trainer", script], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal.SIGTERM)
        assert process.stdout.readline() == "cleaned up\n"
        assert process.wait(10) == 143


def test_targets_are_checked_without_importing_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    write(tmp_path, "program.py", "raise AssertionError\n")
    write(tmp_path, "package/__init__.py", "raise AssertionError\n")
    check_target("program.py")
    check_target("package.anything")
    for target in ("absent.py", "absent_package.x", "a b"):
        with pytest.raises(UsageError):
            check_target(target)


def test_the_library_is_recognized_through_links(tmp_path: Path) -> None:
    """Otherwise errors would show the library's line instead of the user's line that called it."""
    package = Path(trainer.__file__).parent.parent
    (tmp_path / "linked").symlink_to(package)
    assert is_of_library(str(tmp_path / "linked" / "rpc" / "client.py"))
    assert not is_of_library(str(tmp_path / "linked" / "examples" / "digits.py"))
    assert not is_of_library(str(tmp_path / "train.py"))


_HOLDS_A_LOCK = """
import atexit, sys, threading, time

lock = threading.Lock()
atexit.register(print, "registered")

class Needs:
    def __del__(self):
        with lock:
            pass

def hold():
    with lock:
        held.set()
        time.sleep(60)

held = threading.Event()
threading.Thread(target=hold, daemon=True).start()
held.wait()
sys.needs = Needs()
threading.Thread(target=lambda: (time.sleep(0.1), print("a thread of its own"))).start()
print("the script", end=" ")
"""


@pytest.mark.parametrize(
    ("end", "code", "output"),
    [("", 0, ""), ("sys.exit(4)", 4, ""), ("sys.exit()", 0, ""), ("sys.exit('enough')", 1, "enough\n")],
)
def test_a_process_ends_with_its_script_even_if_a_stopped_thread_holds_a_lock(
    end: str, code: int, output: str, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(_HOLDS_A_LOCK + end)
    done = run(tmp_path, "script.py")
    assert (done.returncode, done.stderr) == (code, output)
    assert done.stdout.splitlines() == ["the script a thread of its own", "registered"]


@pytest.mark.parametrize("directory", ["", "site-packages"], ids=["script", "installed script"])
def test_an_error_names_the_line_of_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], directory: str
) -> None:
    """Neither that of a generated constructor, nor that of a package that the script uses."""
    script = tmp_path / write(tmp_path, f"{directory or '.'}/program.py", "import framework\nframework.declare()\n")
    write(tmp_path, "site-packages/framework.py", "import flightedl as fe\ndef declare(): fe.SGD(lr=-1.0)\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    monkeypatch.delitem(sys.modules, "framework", raising=False)
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    with pytest.raises(UsageError) as caught:
        runpy.run_path(str(script), run_name="__main__")
    # Without the frame of this test.
    assert caught.value.__traceback__ is not None
    print_error(caught.value.with_traceback(caught.value.__traceback__.tb_next))
    line = f"{script}, line 2" if not directory else f"{tmp_path}/site-packages/framework.py, line 2"
    assert capsys.readouterr().err.startswith(f"{line}: UsageError: SGD: lr is -1")
