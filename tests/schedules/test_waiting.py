"""Every order in which threads wait for changes of blocks, events of a job, and keys, and write recordings."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flightedl.adapters import memory
from flightedl.coordination import directory as directories
from flightedl.coordination.directory import Directory
from flightedl.coordination.keys import JobKeys
from flightedl.domain.master.effects import Kind
from flightedl.errors import RolledBackError
from flightedl.master import journal as journals
from flightedl.master.journal import Journal
from flightedl.messages.status import EventsRequest
from flightedl.ports import Put
from flightedl.pserver.stores import changes as block_changes
from flightedl.pserver.stores.changes import Changes
from flightedl.recording import writer
from flightedl.recording.writer import BackgroundFile
from tests.support.memory import MemoryCoordinator
from tests.support.planting import Planted, bug, drops, rewrites, swaps

from .scheduler import Lock, Run, VirtualClock, explore, finds, running

KEYS = JobKeys("j")
ANNOUNCE, WAIT = "pserver.stores.changes:Changes.announce", "pserver.stores.changes:Changes.wait"
WAIT_UNTIL = "coordination.directory:Directory.wait_until"


def changing(run: Run) -> None:
    """A reader learns of every change of blocks, whichever message announces it."""
    changes, lock, versions = Changes(), Lock(), [0]

    def push() -> None:
        with lock:
            versions[0] += 1
            changes.has_news = True
        if changes.has_news:
            changes.announce()

    def read() -> None:
        seen = -1
        while True:
            seen = changes.wait(seen, 5.0)
            with lock:
                if versions[0] == 2:
                    return

    run.threads(push, push, read)
    assert run.now == 0.0, "a reader slept through a change"


def noting(run: Run) -> None:
    """A program that follows the events of a job gets each once, as soon as it is added."""
    clock: Any = VirtualClock()
    journal = Journal(1, clock)
    followed: list[str] = []

    def add() -> None:
        for number in range(2):
            journal.add(Kind.EPOCH_DONE, "", f"{number}")

    def follow() -> None:
        after = 0
        while len(followed) < 2:
            reply = journal.read(EventsRequest(generation=1, after=after, wait_s=5.0))
            assert reply.events, "a wait for events ended without one"
            followed.extend(event.text for event in reply.events)
            after = reply.events[-1].number

    run.threads(add, follow)
    assert followed == ["0", "1"]
    assert run.now == 0.0, "a wait for events was not ended by one"


def following(run: Run) -> None:
    """A thread that waits for a key continues with the change that brings it."""
    clock: Any = VirtualClock()
    coordinator = MemoryCoordinator(clock)
    with Directory(coordinator.another(), KEYS, clock) as directory:
        run.sleep(1.0)

        def put() -> None:
            coordinator.transact([], [Put(KEYS.ps_desired, b"3")])

        run.threads(lambda: directory.wait_until(Directory.ps_desired, 5.0), put)
        assert directory.ps_desired() == 3
        assert run.now < 1.1, "a thread slept through a change"


def rolled_back(run: Run) -> None:
    """A thread that waits for a key learns at once that etcd was restored from an older state."""
    clock: Any = VirtualClock()
    coordinator = MemoryCoordinator(clock)
    coordinator.transact([], [Put(KEYS.ps_desired, b"3")])
    with Directory(coordinator.another(), KEYS, clock) as directory:
        run.sleep(1.0)

        def followed(found: Directory) -> bool | None:
            found.require_followed()
            return None

        def wait() -> None:
            with pytest.raises(RolledBackError):
                directory.wait_until(followed, 5.0)

        run.threads(wait, coordinator.restore)
        assert run.now < 2.0, "a thread slept although nothing can come any more"


def closing(run: Run) -> None:
    """A thread that waits for a key continues when the directory is closed."""
    clock: Any = VirtualClock()
    with Directory(MemoryCoordinator(clock), KEYS, clock) as directory:
        run.sleep(1.0)
        run.threads(lambda: directory.wait_until(Directory.ps_desired, 5.0), directory.close)
        assert run.now < 2.0, "a thread waited for a closed directory"


def recording(run: Run) -> None:
    """Every line that was accepted is in the file once."""
    path = Path(_directory[-1]) / "recording"
    path.unlink(missing_ok=True)
    file = BackgroundFile(path)
    accepted: list[bytes] = []

    def write() -> None:
        for line in (b"1\n", b"2\n", b"3\n"):
            accepted.extend([line] if file.write(line) else [])
            run.sleep(writer._EVERY_S)

    def close() -> None:
        run.sleep(2 * writer._EVERY_S)
        file.close()

    run.threads(write, close)
    assert path.read_bytes() == b"".join(accepted), "accepted lines are missing, or there twice"


#: Directory of the current test.
_directory: list[Path] = []


@pytest.fixture(autouse=True)
def virtual_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _directory.append(tmp_path)
    monkeypatch.setattr(memory, "SystemClock", lambda: SimpleNamespace(now=lambda: running().now))


PROGRAMS: dict[str, tuple[Any, Any, int]] = {
    "changing": (changing, block_changes, 2),
    "noting": (noting, journals, 2),
    "following": (following, directories, 1),
    "rolled_back": (rolled_back, directories, 1),
    "closing": (closing, directories, 1),
    "recording": (recording, writer, 2),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_nobody_sleeps_through_a_change(name: str) -> None:
    program, module, deviations = PROGRAMS[name]
    assert explore(program, [module], deviations=deviations).is_complete


@pytest.mark.parametrize(
    ("name", "flaw"),
    [
        (
            "changing",
            bug(
                "a change during an announcement is forgotten",
                rewrites(
                    ANNOUNCE,
                    "self.has_news = False\n        with self._changed:\n            self.count += 1\n"
                    "            if self._waiting:\n                self._changed.notify_all()",
                    """
                    with self._changed:
                        self.count += 1
                        if self._waiting:
                            self._changed.notify_all()
                    self.has_news = False
                    """,
                ),
            ),
        ),
        ("changing", bug("a change before the wait is not seen", swaps(WAIT, "self.count == seen and", "True and"))),
        ("noting", bug("a new event wakes nobody", drops("master.journal:Journal.add", "self._changed.notify_all()"))),
        (
            "following",
            bug(
                "a change between the look and the wait is not seen",
                swaps(WAIT_UNTIL, "self._snapshot is seen and", "True and"),
            ),
        ),
        (
            "closing",
            bug(
                "threads are woken before they can see that the directory is closed",
                rewrites(
                    "coordination.directory:Directory.close",
                    "self._stop.set()\n        with self._condition:\n            self._condition.notify_all()",
                    """
                    with self._condition:
                        self._condition.notify_all()
                    self._stop.set()
                    """,
                ),
            ),
        ),
        (
            "recording",
            bug(
                "written lines stay in the buffer",
                swaps("recording.writer:BackgroundFile._write_kept", "self._kept, self._kept_bytes = [], 0", "pass"),
            ),
        ),
        (
            "recording",
            bug(
                "the last lines are not written",
                swaps(
                    "recording.writer:BackgroundFile._write_kept",
                    "join(self._kept)",
                    "join([] if is_last else self._kept)",
                ),
            ),
        ),
    ],
    ids=lambda value: getattr(value, "what", value),
)
def test_a_change_that_is_missed_is_found(name: str, flaw: Planted) -> None:
    program, module, deviations = PROGRAMS[name]
    finds(flaw, program, [module], deviations=deviations + 1)
