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

from flightedl.testing.clock import FakeClock
from flightedl.testing.etcd_server import EtcdServer
from flightedl.testing.s3_server import S3Server

if TYPE_CHECKING:
    from flightedl.launch.forking import ForkServer

# What is imported stays: looking for garbage among it is a tenth of all the work. See ``pytest_collection_finish``.
gc.disable()

settings.register_profile(
    "fast", max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", max_examples=1000, stateful_step_count=60, deadline=None)
settings.load_profile("fast")

#: Threads that libraries keep for the life of the process.
LASTING_THREADS = ("flightedl-rows", "fsspecIO", "asyncio_", "pytest_timeout", "tqdm_monitor")
LEAK_PATIENCE_S = 5.0


#: By the text of files ``make marked`` finds those that have tests with such marks.
_NAMED = re.compile(r"mark\.(etcd|s3|faults|slow|seeds|torch)\b")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """The longest first, for every worker of pytest-xdist, so that none has a long one left when the others are done.

    How long a test may take says how long it takes. With ``--dist worksteal`` each worker begins with an equal part of
    the list, and those who are done take from the ends of others' parts.
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
    """No test has a mark by other means, which ``make marked`` would not see: it would run nowhere."""
    marked = {item.path for item in items if any(_NAMED.match(f"mark.{each.name}") for each in item.iter_markers())}
    for path in marked:
        beside = path.with_name("conftest.py")
        if not any(_NAMED.search(_text(each)) for each in (path, beside)):
            raise pytest.UsageError(f"{path}: say by pytest.mark, here or in {beside}, what its tests need")


def _limit_s(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    return 0.0 if marker is None else float(marker.args[0])


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.name.startswith(LASTING_THREADS)}


def children() -> set[psutil.Process]:
    """All below this process; where the kernel lists them, who has none is not looked for among all processes."""
    listed = [*Path("/proc/self/task").glob("*/children")]
    if listed and not any(_text(each) for each in listed):
        return set()
    return set(psutil.Process().children(recursive=True))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # None, or of a thread that has ended: its children are another's now.
        return ""


@pytest.fixture(scope="session")
def forks() -> Iterator[ForkServer]:
    """From this process those of all tests' clusters are forked: what they import is imported once."""
    from tests.launch.forked_launcher import shared_fork_server

    with shared_fork_server() as made:
        yield made


@pytest.fixture(autouse=True)
def forked_clusters(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clusters that a test starts itself use ``forks``; of ``flightedl run`` those that are a ``ForkedCommand``."""
    if any(request.node.get_closest_marker(name) is not None for name in ("etcd", "faults")):
        forks = request.getfixturevalue("forks")
        monkeypatch.setattr("flightedl.launch.cluster.fork_server", lambda _trainers: contextlib.nullcontext(forks))


@pytest.fixture(autouse=True)
def nothing_left_behind(forked_clusters: None) -> Iterator[None]:
    """Fails a test that leaves a thread or a child process. Servers of wider scope are started before and may stay."""
    threads_before, children_before = threads(), children()
    yield
    deadline = time.monotonic() + LEAK_PATIENCE_S
    while True:
        left = [str(thing) for thing in (*(threads() - threads_before), *(children() - children_before))]
        if not left:
            return
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: {', '.join(left)}")
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed does not depend on the terminal, or the lack of one, from which the tests are run."""
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.fixture
def fake_clock() -> FakeClock:
    """A clock that the test advances."""
    return FakeClock()


@pytest.fixture(scope="session")
def etcd() -> Iterator[EtcdServer]:
    """A real etcd that all tests share: take a job name of your own (``job_name``), and don't kill it."""
    with EtcdServer() as server:
        yield server


@pytest.fixture
def own_etcd() -> Iterator[EtcdServer]:
    """A real etcd of this test's own, that may be killed and frozen."""
    with EtcdServer() as server:
        yield server


@pytest.fixture
def job_name() -> str:
    """A job of this test's own."""
    return f"job-{uuid.uuid4().hex[:12]}"


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A real S3 server that all tests share."""
    with S3Server() as server:
        yield server


@pytest.fixture
def new_s3_client() -> Iterator[None]:
    """For tests with variables of their own: the client that tests share, which takes long to make, is not theirs."""
    file_system = fsspec.get_filesystem_class("s3")
    file_system.clear_instance_cache()
    yield
    file_system.clear_instance_cache()


@pytest.fixture
def s3_url(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of a new, empty bucket; the variables that S3 clients read are set."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    s3_server.make_bucket(bucket)
    return f"s3://{bucket}"
