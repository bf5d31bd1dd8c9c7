"""Trainers and pservers that share memory are killed and frozen: no record is lost, and no memory is leaked."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from flightedl.launch.forking import ForkServer

from .storm import Storm, verdict

pytestmark = [
    pytest.mark.etcd,
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux only"),
]


def _maps(process: Path, directory: Path) -> bool:
    with contextlib.suppress(OSError):
        return (process / "cwd").readlink() == directory and "memfd:flightedl-" in (process / "maps").read_text()
    return False


def _mapping(directory: Path) -> set[int]:
    """Return processes started in a directory, and thus by this test, that map shared memory."""
    return {int(each.name) for each in Path("/proc").iterdir() if each.name.isdecimal() and _maps(each, directory)}


@contextlib.contextmanager
def _watched(directory: Path) -> Iterator[set[int]]:
    """Yield the set of processes that were seen to map shared memory."""
    seen: set[int] = set()
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.5):
            seen.update(_mapping(directory))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        is_over.set()
        thread.join()


def test_kills_and_freezes_lose_no_record_and_leak_no_memory(tmp_path: Path, forks: ForkServer) -> None:
    storm = Storm(
        tmp_path, "sync", kills=4, stops=2, roles=("trainer", "pserver"), records=6_000, epochs=2, every_s=1.0, seed=3
    )
    storm.forks = forks
    with _watched(tmp_path) as seen:
        code, output = storm.run()
    assert (code, verdict(output)) == (0, (0, 0)), output
    assert sum(storm.done.values()) >= 4
    # Three trainers, two pservers, and replacements of killed ones.
    assert len(seen) >= 5
    assert not seen & _mapping(tmp_path), "dead processes must not map memory"
