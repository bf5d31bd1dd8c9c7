"""The checkpoint store of the simulation: what a writer that dies leaves, and what its faults do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .files import SimulatedFiles, Store, set_store
from .scheduler import Process, Scheduler, set_running

DATA = b"0123456789"


class Job:
    """A process that uses a store."""

    def __init__(self, *, is_disk: bool, delay_s: float) -> None:
        self.scheduler = Scheduler(1)
        set_running(self.scheduler)
        self.store = Store(is_disk=is_disk, delay_s=delay_s)
        set_store(self.store)
        self.process = Process("writer", 1, "host")
        self.raised: list[OSError] = []

    def run(self, work: Callable[[], object]) -> None:
        """Run a function to its end, or to the death of its process."""

        def attempt() -> None:
            try:
                work()
            except OSError as error:
                self.raised.append(error)

        thread = self.scheduler.spawn(self.process, "main", attempt)
        self.scheduler.run(lambda: thread.is_done or not self.process.is_alive, 10.0)


@pytest.fixture
def local(tmp_path: Path) -> str:
    (tmp_path / "local").write_bytes(DATA)
    return str(tmp_path / "local")


@pytest.fixture
def make() -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def make(*, is_disk: bool = False, delay_s: float = 0.01) -> Job:
        made.append(Job(is_disk=is_disk, delay_s=delay_s))
        return made[-1]

    yield make
    for each in made:
        each.scheduler.abandon()
    set_running(None)
    set_store(None)


@pytest.mark.parametrize("is_disk", [False, True])
def test_a_written_file_is_listed_and_read(make: Callable[..., Job], local: str, is_disk: bool) -> None:
    job, files = make(is_disk=is_disk), SimulatedFiles()
    job.run(lambda: files.put_file(local, "simulated://a/b"))
    assert files.find("a", detail=True)["a/b"]["size"] == len(DATA)
    assert files.open("simulated://a/b").read() == DATA
    job.run(lambda: files.rm_file("a/b"))
    assert (files.find("a"), job.raised, job.store.written) == ([], [], {"a/b": DATA})


@pytest.mark.parametrize(("is_disk", "left"), [(False, DATA), (True, DATA[:5])])
def test_a_writer_that_dies(make: Callable[..., Job], local: str, is_disk: bool, left: bytes) -> None:
    """A disk keeps what was written so far; an object store carries out the request, which is under way."""
    job = make(is_disk=is_disk)

    def kill(process: Process, _: str, when: str) -> None:
        if when == "within":
            job.scheduler.kill(process)
            job.scheduler.sleep(0.0)

    job.store.watchers.append(kill)
    job.run(lambda: SimulatedFiles().put_file(local, "a/b"))
    job.scheduler.after(1.0, lambda: job.store.files.setdefault("later", b""))
    job.scheduler.run(lambda: "later" in job.store.files, 10.0)
    assert job.store.files == {"a/b": left, "later": b""}


@pytest.mark.parametrize("is_disk", [False, True])
def test_a_full_store_takes_no_file(make: Callable[..., Job], local: str, is_disk: bool) -> None:
    job = make(is_disk=is_disk)
    job.store.is_full = True
    job.run(lambda: SimulatedFiles().put_file(local, "a/b"))
    assert [error.strerror for error in job.raised] == ["No space left on device"]
    assert (job.store.written, job.store.failure_count) == ({}, 1)


def test_a_write_that_fails_may_have_been_carried_out(make: Callable[..., Job], local: str) -> None:
    job = make()
    job.store.error_chance = 1.0
    for number in range(20):
        job.run(lambda number=number: SimulatedFiles().put_file(local, f"a/{number}"))  # type: ignore[misc]
    assert len(job.raised) == 20
    assert 0 < len(job.store.files) < 20


def test_damaged_files_are_mended(make: Callable[..., Job], local: str) -> None:
    job = make()
    job.run(lambda: SimulatedFiles().put_file(local, "a/b"))
    job.store.damage("a/b", is_torn=False, place=0.5)
    assert job.store.files["a/b"] != DATA
    assert job.store.mend()
    assert job.store.files["a/b"] == DATA
    assert not job.store.mend()
