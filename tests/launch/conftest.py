from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from flightedl.launch.processes import Children

Until = Callable[[Callable[[], object]], None]


@pytest.fixture
def until() -> Until:
    """Function that polls a condition until it holds, and fails the test after ten seconds."""

    def wait(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "the condition was not met in time"
            time.sleep(0.01)

    return wait


def is_alive(pid: int) -> bool:
    """True if a process is running. A zombie is not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def alive() -> Callable[[int], bool]:
    return is_alive


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Children]:
    with Children(tmp_path / "logs") as made:
        yield made
