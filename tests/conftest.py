"""Shared fixtures: clocks, real servers, and the check that a test leaves nothing behind."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import fsspec
import psutil
import pytest
from hypothesis import HealthCheck, settings

from tests.simulation.client import Simulation
from tests.support.clock import FakeClock
from tests.support.etcd_server import EtcdServer
from tests.support.s3_server import S3Server

if TYPE_CHECKING:
    from flightedl.launch.forking import ForkServer

# Imported objects are never garbage, and scanning them costs a tenth of the run. See ``pytest_collection_finish``.
gc.disable()

settings.register_profile(
    "fast", max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", max_examples=1000, stateful_step_count=60, deadline=None)
settings.load_profile("fast")

#: Threads that libraries keep for the life of the process.
LASTING_THREADS = ("flightedl-rows", "fsspecIO", "asyncio_", "pytest_timeout", "tqdm_monitor")
#: Names of the threads that follow keys in etcd, our own and gRPC's.
OF_CONNECTIONS = re.compile(r"flightedl-directory|flightedl-etcd-watch|Thread-\d+ \(_run\)")
LEAK_PATIENCE_S = 5.0


#: Pattern by which ``make marked`` finds files with such tests.
_NAMED = re.compile(r"mark\.(etcd|s3|faults|slow|seeds|torch)\b")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write the files of expected texts instead of comparing")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Run the longest tests first in every worker of pytest-xdist, so that none is left with a long test at the end.

    A test's timeout serves as the estimate of its duration. With ``--dist worksteal`` each worker begins with an equal
    part of the list, and idle workers steal from the ends of others' parts.
    """
    _require_named_marks(items)
    yield
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    long = sorted((item for item in items if _limit_s(item)), key=_limit_s, reverse=True)
    others = [item for item in items if not _limit_s(item)]
    ordered: list[pytest.Item] = []
    for worker in range(workers):
        size = (len(items) - len(ordered)) // (workers - worker)
        own = long[worker::workers]
        count = size - len(own) if worker < workers - 1 else len(others)
        ordered += own + others[: max(count, 0)]
        others = others[max(count, 0) :]
    items[:] = ordered


def _require_named_marks(items: list[pytest.Item]) -> None:
    """Require that marks are visible in the text of files: ``make marked`` would never run other marked tests."""
    marked = {item.path for item in items if any(_NAMED.match(f"mark.{each.name}") for each in item.iter_markers())}
    for path in marked:
        shared = path.with_name("conftest.py")
        if not any(_NAMED.search(_text(each)) for each in (path, shared)):
            raise pytest.UsageError(f"{path}: apply pytest.mark in this file or in {shared}")


def _limit_s(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    return 0.0 if marker is None else float(marker.args[0])


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.name.startswith(LASTING_THREADS)}


def new_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    """Return the threads that have started since, except those with which a launcher or directory reads etcd.

    A launcher or directory that outlives the test may open a connection at any time.
    """
    now = threads()
    may_connect = any(thread.name in {"flightedl-desired", "flightedl-directory"} for thread in now & before)
    return [thread for thread in now - before if not (may_connect and OF_CONNECTIONS.fullmatch(thread.name))]


def children() -> set[psutil.Process]:
    """Return all descendants of this process. Skips the scan of all processes if the kernel lists no children."""
    listed = [*Path("/proc/self/task").glob("*/children")]
    if listed and not any(_text(each) for each in listed):
        return set()
    return set(psutil.Process().children(recursive=True))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # No such file, or its thread has ended and another thread has inherited the children.
        return ""


@pytest.fixture(scope="session")
def forks() -> Iterator[ForkServer]:
    """Fork server for the processes of all tests' clusters, so that modules are imported once."""
    from tests.launch.forked_launcher import shared_fork_server

    with shared_fork_server() as made:
        yield made


@pytest.fixture(autouse=True)
def forked_clusters(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use ``forks`` for clusters that a test starts itself, and for ``flightedl run`` as a ``ForkedCommand``."""
    if any(request.node.get_closest_marker(name) is not None for name in ("etcd", "faults")):
        forks = request.getfixturevalue("forks")
        monkeypatch.setattr("flightedl.launch.cluster.fork_server", lambda _trainers: contextlib.nullcontext(forks))


@pytest.fixture(autouse=True)
def nothing_left_behind(forked_clusters: None) -> Iterator[None]:
    """Fail a test that leaves a thread or a child process. Servers of a wider scope start earlier and may remain."""
    threads_before, children_before = threads(), children()
    yield
    deadline = time.monotonic() + LEAK_PATIENCE_S
    while True:
        left = [str(thing) for thing in (*new_threads(threads_before), *(children() - children_before))]
        if not left:
            return
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: {', '.join(left)}")
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make printed output independent of the terminal, or lack of one, in which the tests run."""
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.fixture
def fake_clock() -> FakeClock:
    """A clock that the test advances."""
    return FakeClock()


@pytest.fixture(scope="session")
def simulation() -> Iterator[Simulation]:
    """A warm process that simulates jobs of the product's own processes. It starts within three seconds."""
    made = Simulation()
    yield made
    made.close()


@pytest.fixture(scope="session")
def etcd() -> Iterator[EtcdServer]:
    """A real etcd shared by all tests: use your own job name (``job_name``), and don't kill the server."""
    with EtcdServer() as server:
        yield server


@pytest.fixture
def own_etcd() -> Iterator[EtcdServer]:
    """A real etcd for one test, which may kill and freeze it."""
    with EtcdServer() as server:
        yield server


@pytest.fixture
def job_name() -> str:
    """Unique job name."""
    return f"job-{uuid.uuid4().hex[:12]}"


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A real S3 server shared by all tests."""
    with S3Server() as server:
        yield server


@pytest.fixture
def new_s3_client() -> Iterator[None]:
    """Use a new S3 client in tests that set environment variables. Other tests share one, which is slow to create."""
    file_system = fsspec.get_filesystem_class("s3")
    file_system.clear_instance_cache()
    yield
    file_system.clear_instance_cache()


@pytest.fixture
def s3_url(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of a new, empty bucket. The environment variables that S3 clients read are set."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    s3_server.make_bucket(bucket)
    return f"s3://{bucket}"
