"""Trainers and pservers that share memory are killed and frozen meanwhile: nothing is lost, and nothing is left."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from .storm import Storm, verdict

pytestmark = [
    pytest.mark.etcd,
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux only"),
]


def _maps_of(process: Path) -> int:
    with contextlib.suppress(OSError):
        return (process / "maps").read_text().count("memfd:flightedl-")
    return 0


def _mapping() -> set[int]:
    """Processes that map such memory."""
    return {int(each.name) for each in Path("/proc").iterdir() if each.name.isdecimal() and _maps_of(each)}


@contextlib.contextmanager
def _watched() -> Iterator[set[int]]:
    """Processes that were seen to map memory meanwhile."""
    seen: set[int] = set()
    before, is_over = _mapping(), threading.Event()

    def watch() -> None:
        while not is_over.wait(0.5):
            seen.update(_mapping() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        is_over.set()
        thread.join()


def test_kills_and_freezes_in_the_midst_of_it(tmp_path: Path) -> None:
    storm = Storm(
        tmp_path, "sync", kills=4, stops=2, roles=("trainer", "pserver"), records=6_000, epochs=2, every_s=1.0, seed=3
    )
    with _watched() as seen:
        code, output = storm.run()
    assert (code, verdict(output)) == (0, (0, 0)), output
    assert sum(storm.done.values()) >= 4
    # Three trainers and two pservers, and those that took the place of killed ones.
    assert len(seen) >= 5
    assert not seen & _mapping(), "whoever is dead has nothing"
