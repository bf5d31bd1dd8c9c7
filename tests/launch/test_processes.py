from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from flightedl.config import child_environment
from flightedl.errors import EXIT_UNKNOWN, UsageError
from flightedl.launch.forking import ForkedProcess
from flightedl.launch.orphan_reaper import kill_group
from flightedl.launch.processes import Child, Children

Until = Callable[[Callable[[], object]], None]


def start(children: Children, program: str, name: str = "child-0") -> Child:
    return children.start(name, [sys.executable, "-c", textwrap.dedent(program)], child_environment())


def test_output_is_captured_line_by_line(tmp_path: Path) -> None:
    seen: list[tuple[str, str]] = []
    with Children(tmp_path, lambda name, texts: seen.extend((name, text) for text in texts)) as children:
        child = start(
            children,
            r"""
            import os, sys
            print("to stdout")
            print("to stderr", file=sys.stderr)
            os.write(1, b"10 %\r20 %\r30 %\n\xff is not text\nno line end")
            """,
        )
        assert child.wait(10.0) == 0
        expected = ("to stdout", "to stderr", "30 %", "\ufffd is not text", "no line end")
        assert child.tail() == expected
        assert child.tail(2) == expected[-2:]
        assert seen == [("child-0", text) for text in expected]
        assert (tmp_path / "child-0.log").read_text() == "".join(f"{text}\n" for text in expected)


def test_lines_of_a_verbose_child_are_forwarded_in_batches(tmp_path: Path) -> None:
    seen: list[Sequence[str]] = []
    with Children(tmp_path, lambda _, texts: seen.append(texts)) as children:
        child = start(children, r"import sys; sys.stdout.write(''.join(f'line {k}\n' for k in range(20_000)))")
        assert child.wait(20.0) == 0
    expected = [f"line {k}" for k in range(20_000)]
    assert [text for texts in seen for text in texts] == expected
    assert len(seen) < 200
    assert (tmp_path / "child-0.log").read_text().splitlines() == expected


def test_an_endless_line_uses_limited_memory(children: Children) -> None:
    child = start(children, "import sys; sys.stdout.write('x' * 1_000_000)")
    assert child.wait(10.0) == 0
    assert {len(line) for line in child.tail(1000)} == {64 * 1024, 1_000_000 % (64 * 1024)}


def test_the_exit_code_of_a_child_is_known(children: Children) -> None:
    ended = start(children, "raise SystemExit(7)")
    assert ended.wait(10.0) == 7
    killed = start(children, "import time; time.sleep(60)")
    assert killed.poll() is None
    killed.send(signal.SIGKILL)
    assert killed.wait(10.0) == -signal.SIGKILL
    killed.send(signal.SIGKILL)
    killed.kill()


def test_the_exit_code_of_a_child_that_was_reaped_elsewhere_is_not_zero(children: Children) -> None:
    child = start(children, "pass")
    os.waitpid(child.pid, 0)
    assert child.poll() == EXIT_UNKNOWN
    assert child.poll() == EXIT_UNKNOWN
    forked = ForkedProcess(child.pid)
    assert forked.wait() == EXIT_UNKNOWN


def test_a_child_has_exactly_the_given_environment(children: Children) -> None:
    child = children.start(
        "child-0", [sys.executable, "-c", "import os; print(sorted(os.environ))"], {"ONLY": "1", "LC_ALL": "C.UTF-8"}
    )
    assert child.wait(10.0) == 0
    assert child.tail() == ("['LC_ALL', 'ONLY', 'PYTHONUNBUFFERED']",)


def test_a_missing_program_raises_a_clear_error(children: Children, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no such program"):
        children.start("child-0", [str(tmp_path / "absent")], {})


def test_a_child_that_ignores_sigterm_is_killed_after_the_grace_time(children: Children, until: Until) -> None:
    stubborn = start(
        children,
        """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ready")
        time.sleep(60)
        """,
    )
    polite = start(
        children,
        """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
        print("ready")
        time.sleep(60)
        """,
        "child-1",
    )
    until(lambda: stubborn.tail() and polite.tail())
    children.stop([stubborn, polite], grace_s=0.5)
    assert (stubborn.poll(), polite.poll()) == (-signal.SIGKILL, 5)


GRANDPARENT = """
import subprocess, sys, time
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(grandchild.pid)
{end}
"""


@pytest.mark.parametrize("end", ["time.sleep(60)", ""])
def test_grandchildren_end_with_the_child(
    children: Children, until: Until, alive: Callable[[int], bool], end: str
) -> None:
    child = start(children, GRANDPARENT.format(end=end))
    until(child.tail)
    grandchild = int(child.tail()[0])
    child.kill() if end else None
    assert child.wait(10.0) is not None
    until(lambda: not alive(grandchild))


def test_a_frozen_child_can_be_killed(children: Children, until: Until) -> None:
    child = start(children, "import time; time.sleep(60)")
    child.send(signal.SIGSTOP)
    until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_STOPPED)
    children.stop([child], grace_s=0.1)
    assert child.poll() == -signal.SIGKILL


def test_a_running_child_cannot_be_forgotten(children: Children) -> None:
    child = start(children, "import time; time.sleep(60)")
    with pytest.raises(ValueError, match="still running"):
        children.forget(child)


def test_closing_leaves_no_processes(tmp_path: Path, alive: Callable[[int], bool]) -> None:
    adopted = tmp_path / "adopted"
    with Children(tmp_path / "logs") as children:
        child = start(children, "import time; time.sleep(60)")
        adopted.mkdir()
        (adopted / "file").write_text("x")
        children.adopt_directory(adopted)
    assert not alive(child.pid)
    assert not adopted.exists()


LAUNCHER = """
import sys, time
from pathlib import Path
from flightedl.config import child_environment
from flightedl.launch.processes import Children

here = Path(sys.argv[1])
children = Children(here / "logs")
(here / "adopted").mkdir()
children.adopt_directory(here / "adopted")
child = children.start("child-0", [sys.executable, "-c", sys.argv[2]], child_environment())
while not child.tail():
    time.sleep(0.01)
print(child.pid, child.tail()[0], flush=True)
{end}
"""


@pytest.mark.parametrize(
    "end",
    ["time.sleep(60)", "", "import os; os._exit(3)", "import os; os.abort()"],
    ids=["killed", "left", "exit", "abort"],
)
def test_nothing_survives_a_launcher_that_dies(
    tmp_path: Path, until: Until, alive: Callable[[int], bool], end: str
) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER.format(end=end), str(tmp_path), GRANDPARENT.format(end="time.sleep(60)")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with launcher:
        assert launcher.stdout is not None
        child, grandchild = (int(word) for word in launcher.stdout.readline().split())
        if "sleep" in end:
            assert alive(child)
            assert alive(grandchild)
            os.kill(launcher.pid, signal.SIGKILL)
        launcher.wait(10.0)
    until(lambda: not alive(child) and not alive(grandchild))
    until(lambda: not (tmp_path / "adopted").exists())


def test_a_group_is_killed_before_its_id_can_be_reused(children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    child, killed = start(children, "pass"), []

    def kill(group: int) -> None:
        # Raises ChildProcessError if the process was already reaped.
        assert os.waitid(os.P_PID, group, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        killed.append(group)
        kill_group(group)

    monkeypatch.setattr("flightedl.launch.processes.kill_group", kill)
    assert child.wait(10.0) == 0
    assert killed == [child.pid]


def test_the_orphan_reaper_knows_exactly_the_children_that_may_run(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would kill the processes of others that have the id of a child that is forgotten."""
    told: list[str] = []
    monkeypatch.setattr(children, "_instruct_reaper", told.append)
    child = start(children, "pass")
    assert told == [f"group {child.pid}"]
    assert child.wait(10.0) == 0
    children.forget(child)
    children.forget(child)
    assert told == [f"group {child.pid}", f"forget-group {child.pid}"]


def test_output_is_forwarded_although_its_log_cannot_be_written(tmp_path: Path) -> None:
    seen: list[str] = []
    (tmp_path / "child-0.log").symlink_to("/dev/full")
    with Children(tmp_path, lambda _, lines: seen.extend(lines)) as children:
        child = start(children, "print('one', flush=True)\nprint('two')")
        assert child.wait(10.0) == 0
        assert seen == ["one", "two"]
        assert child.tail() == ("one", "two")
