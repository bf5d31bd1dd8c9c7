"""Processes made by the fork server are children of this process, with the requested environment."""

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

from flightedl.launch import forking
from flightedl.launch.forking import ForkServer
from flightedl.launch.processes import Child, Children

Until = Callable[[Callable[[], object]], None]

_PROGRAM = """
import json, os, sys
print(json.dumps({"environment": dict(os.environ), "argv": sys.argv,
    "parent": os.getppid(), "session": os.getsid(0),
    "directory": os.getcwd()}))
print("and this to stderr", file=sys.stderr)
raise SystemExit(7)
"""
_SLEEPER = "import time\nprint('here')\ntime.sleep(60)"
_LAZY = """
import importlib.abc, importlib.util, sys
class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path, target=None):
        return importlib.util.spec_from_loader(fullname, self) if fullname == "lazily.moves" else None
    def exec_module(self, module):
        module.VALUE = 7
sys.meta_path.append(Finder())
"""
_LEAVES_ONE_BEHIND = """
import subprocess, sys
program = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
print(subprocess.Popen(program, stdout=subprocess.DEVNULL).pid)
"""
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
    return {"PYTHONPATH": str(programs)}


@pytest.fixture
def forks(environment: Mapping[str, str]) -> Iterator[ForkServer]:
    with ForkServer(environment) as made:
        yield made


@pytest.fixture
def start(children: Children, forks: ForkServer, environment: Mapping[str, str]) -> Callable[..., Child]:
    def forked(module: str, *arguments: str, **variables: str) -> Child:
        made = forks.start("", module, arguments, {**environment, **variables})
        assert made is not None
        return children.adopt("child-0", made)

    return forked


def test_a_forked_process_has_the_requested_environment(
    start: Callable[..., Child],
    environment: Mapping[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    forks: ForkServer,
) -> None:
    # The fork server was started in another directory.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside.py").write_text("")
    child = start("shows", "--one", "two", ONLY="1")
    assert child.wait(10.0) == 7
    shown, error = child.tail()
    found = json.loads(shown)
    assert found["environment"] == {**environment, "ONLY": "1", "PYTHONUNBUFFERED": "1"}
    assert found["argv"][1:] == ["--one", "two"]
    assert found["parent"] == os.getpid()
    assert found["session"] == child.pid
    assert found["directory"] == str(tmp_path)
    assert error == "and this to stderr"
    # Modules are imported from this directory, as in a program.
    assert start("beside").wait(10.0) == 0


def test_a_forked_process_keeps_the_finders_of_packages_that_were_imported_before(
    tmp_path: Path, children: Children
) -> None:
    """Like six.moves, which finders of the package make: if they are lost, its modules cannot be imported."""
    (tmp_path / "lazily").mkdir()
    (tmp_path / "lazily" / "__init__.py").write_text("")
    (tmp_path / "lazily" / "core.py").write_text(_LAZY)
    (tmp_path / "uses.py").write_text("import sys, lazily.core\nimport lazily.moves\nprint(lazily.moves.VALUE)\n")
    environment = {"PYTHONPATH": str(tmp_path)}
    with ForkServer(environment) as forks:
        made = forks.start("lazily.core", "uses", (), environment)
        assert made is not None
        child = children.adopt("child-0", made)
        assert (child.wait(10.0), child.tail()) == (0, ("7",))


def test_a_forked_process_shows_its_command_line_and_ends_by_a_signal(
    start: Callable[..., Child], forks: ForkServer, until: Until
) -> None:
    child = start("sleeper")
    until(lambda: child.tail() == ("here",))
    assert psutil.Process(child.pid).cmdline()[:3] == [sys.executable, "-m", "sleeper"]
    forks.close()
    assert child.poll() is None
    child.send(signal.SIGKILL)
    assert child.wait(10.0) == -signal.SIGKILL


def test_a_command_line_that_is_not_text_is_shown(start: Callable[..., Child], until: Until) -> None:
    """Python has such names in a Latin-1 locale."""
    child = start("sleeper", "\udcfc.py")
    until(lambda: child.tail() == ("here",))
    assert os.fsencode("\udcfc.py") in Path(f"/proc/{child.pid}/cmdline").read_bytes()
    child.send(signal.SIGKILL)


def server_process(forks: ForkServer) -> psutil.Process:
    assert forks._process is not None
    return psutil.Process(forks._process.pid)


def test_processes_of_some_kinds_are_forked_from_a_second_server(
    children: Children, environment: Mapping[str, str], until: Until, alive: Callable[[int], bool]
) -> None:
    with ForkServer(environment, (), ("other",)) as forks:
        first = server_process(forks)
        for kind in ("", "other", "other"):
            made = forks.start(kind, "shows", (), environment)
            assert made is not None
            child = children.adopt("child-0", made)
            assert child.wait(10.0) == 7
            assert json.loads(child.tail()[0])["parent"] == os.getpid()
        assert forks._second is not None
        second = server_process(forks._second)
        assert second.pid != first.pid
        # Whoever ends does not take the other along.
        second.kill()
        assert forks.start("other", "shows", (), environment) is None
        made = forks.start("", "shows", (), environment)
        assert made is not None
        assert children.adopt("child-0", made).wait(10.0) == 7
    until(lambda: not alive(first.pid) and not alive(second.pid))


def test_without_a_fork_server_processes_are_started_as_programs(
    forks: ForkServer, environment: Mapping[str, str]
) -> None:
    server_process(forks).kill()
    assert forks.start("", "shows", (), environment) is None
    assert forks.start("", "shows", (), environment) is None
    with ForkServer(environment, (), ("other",)) as two:
        server_process(two).kill()
        for kind in ("", "other"):
            assert two.start(kind, "shows", (), environment) is None


def test_a_fork_server_that_does_not_answer_is_not_used(
    start: Callable[..., Child],
    forks: ForkServer,
    environment: Mapping[str, str],
    until: Until,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert start("shows").wait(10.0) == 7
    monkeypatch.setattr(forking, "_ANSWER_S", 0.05)
    server = server_process(forks)
    server.suspend()
    until(lambda: server.status() == psutil.STATUS_STOPPED)
    assert forks.start("", "shows", (), environment) is None
    assert not server.is_running()


def test_variables_already_read_by_libraries_prevent_forking(
    start: Callable[..., Child], forks: ForkServer, environment: Mapping[str, str]
) -> None:
    for name in ("PYTHONPATH", "LD_PRELOAD", "MALLOC_ARENA_MAX", "GRPC_VERBOSITY"):
        assert forks.start("", "shows", (), {**environment, name: "other"}) is None
    assert start("shows").wait(10.0) == 7


def test_a_launcher_with_a_fork_server_adopts_no_other_orphans(
    start: Callable[..., Child], tmp_path: Path, alive: Callable[[int], bool], until: Until
) -> None:
    """The user's own processes that lose their parent are adopted as usual, even while a fork server exists."""
    child = start("sleeper")
    program = [sys.executable, "-S", "-c", _LEAVES_ONE_BEHIND]
    pid = int(subprocess.run(program, stdout=subprocess.PIPE, check=True).stdout)
    try:
        until(lambda: psutil.Process(pid).ppid() != os.getpid(), 2.0)
    finally:
        os.kill(pid, signal.SIGKILL)
    child.kill()
    child.wait(10.0)


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


def test_a_process_that_cannot_be_forked_leaves_no_descriptor(
    forks: ForkServer, environment: Mapping[str, str]
) -> None:
    before = len([*Path("/proc/self/fd").iterdir()])
    for _ in range(3):
        assert forks.start("", "shows", (), {**environment, "LD_PRELOAD": "other"}) is None
    assert len([*Path("/proc/self/fd").iterdir()]) == before
