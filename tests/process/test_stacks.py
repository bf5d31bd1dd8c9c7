"""A process's report of the stacks of its threads."""

from __future__ import annotations

import threading
from pathlib import Path

from flightedl.process.host import host_facts
from flightedl.process.stacks import stacks


def stand_still(here: threading.Event, go_on: threading.Event) -> None:
    here.set()
    go_on.wait(10)


def test_every_thread_is_listed_with_its_functions_only() -> None:
    here, go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=stand_still, args=(here, go_on), name="waits")
    thread.start()
    assert here.wait(10)
    try:
        report = stacks()
    finally:
        go_on.set()
        thread.join()
    parts = report.split("\n\n")
    (waiting,) = [part for part in parts if part.startswith("thread waits\n")]
    assert "process/test_stacks.py:" in waiting
    assert waiting.splitlines()[-2].endswith(" stand_still") or " stand_still" in waiting
    assert parts[-1].startswith("thread MainThread")
    assert str(Path(__file__).parents[2]) not in report
    assert "go_on" not in report


def test_a_process_knows_its_machine() -> None:
    facts = host_facts()
    assert facts.version
    assert facts.cores >= 1
    assert facts.memory_bytes > 1 << 20
    assert facts.memory_limit_bytes > facts.memory_bytes
    assert facts.wall_s > 1e9
