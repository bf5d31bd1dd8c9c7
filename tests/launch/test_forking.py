"""Processes that the fork server makes are children of this one, and what they were asked to be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from flightedl.config import child_environment
from flightedl.launch.forking import ForkServer
from flightedl.launch.processes import Child, Children

Until = Callable[[Callable[[], object]], None]

_PROGRAM = """
import json, os, sys
print(json.dumps({"environment": dict(os.environ), "argv": sys.argv, "parent": os.getppid(), "session": os.getsid(0)}))
print("and this to stderr", file=sys.stderr)
raise SystemExit(7)
"""
_SLEEPER = "import time\nprint('here')\ntime.sleep(60)"
_LAUNCHER = """
import sys, time
from pathlib import Path
from flightedl.config import child_environment
from flightedl.launch.forking import ForkServer
from flightedl.launch.processes import Children
with Children(Path(sys.argv[1])) as children, ForkServer(child_environment()) as forks:
    forked = forks.start("", "sleeper", [], child_environment())
    print(forked.pid, flush=True)
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("programs")
    (directory / "shows.py").write_text(_PROGRAM)
    (directory / "sleeper.py").write_text(_SLEEPER)
    return directory


@pytest.fixture
def environment(programs: Path) -> Mapping[str, str]:
    return child_environment(PYTHONPATH=str(programs))


@pytest.fixture
def forks(environment: Mapping[str, str]) -> Iterator[ForkServer]:
    with ForkServer(environment) as made:
        yield made


def start(children: Children, forks: ForkServer, module: str, *arguments: str, **variables: str) -> Child:
    forked = forks.start("", module, arguments, variables)
    assert forked is not None
    return children.take("child-0", forked)


def test_a_forked_process_is_what_it_was_asked_to_be(children: Children, forks: ForkServer) -> None:
    child = start(children, forks, "shows", "--one", "two", ONLY="1")
    assert child.wait(10.0) == 7
    shown, error = child.tail()
    found = json.loads(shown)
    assert found["environment"] == {"ONLY": "1", "PYTHONUNBUFFERED": "1"}
    assert found["argv"][1:] == ["--one", "two"]
    assert found["parent"] == os.getpid()
    assert found["session"] == child.pid
    assert error == "and this to stderr"


def test_it_is_named_by_its_own_command_line_and_ends_by_a_signal(
    children: Children, forks: ForkServer, until: Until
) -> None:
    child = start(children, forks, "sleeper")
    until(lambda: child.tail() == ("here",))
    assert psutil.Process(child.pid).cmdline()[:3] == [sys.executable, "-m", "sleeper"]
    forks.close()
    assert child.poll() is None
    child.send(signal.SIGKILL)
    assert child.wait(10.0) == -signal.SIGKILL


def test_without_a_fork_server_processes_are_started_as_programs(forks: ForkServer) -> None:
    [server] = [
        child for child in psutil.Process().children() if "flightedl.launch.fork_server" in " ".join(child.cmdline())
    ]
    server.kill()
    assert forks.start("", "shows", (), {}) is None
    assert forks.start("", "shows", (), {}) is None


def test_a_forked_process_dies_with_its_launcher(
    tmp_path: Path, environment: Mapping[str, str], until: Until, alive: Callable[[int], bool]
) -> None:
    program = [sys.executable, "-c", _LAUNCHER, str(tmp_path)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, env=environment) as launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        assert alive(pid)
        launcher.kill()
    until(lambda: not alive(pid))
