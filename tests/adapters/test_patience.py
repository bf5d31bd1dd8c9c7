"""Retries of Files and Storage when a store fails temporarily."""

from __future__ import annotations

import threading

import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.adapters.patience import PatientFiles, PatientStorage, Persistence
from flightedl.domain.retries import Patience
from flightedl.errors import DataError, NotFoundError, UnavailableError
from tests.support.memory import MemoryFiles, MemoryStorage

RESET = ConnectionResetError(104, "Connection reset by peer")
DOWN = UnavailableError("the store does not answer")


def persistence(limit_s: float = 10.0, stop: threading.Event | None = None) -> Persistence:
    return Persistence(Patience(limit_s, first_pause_s=0.001, longest_pause_s=0.01), SystemClock(), stop)


@pytest.mark.parametrize("failing_read", [1, 2, 3])
def test_a_failed_read_resumes_at_its_position(failing_read: int) -> None:
    files = MemoryFiles({"a": bytes(range(30))})
    files.plan.fail_at("file:read", failing_read, RESET)
    with PatientFiles(files, persistence()).open("a") as file:
        file.seek(5)
        assert [file.read(10), file.read(10), file.read(), file.tell()] == [
            bytes(range(5, 15)),
            bytes(range(15, 25)),
            bytes(range(25, 30)),
            30,
        ]
    assert files.plan.count("open") == 2


def test_a_failed_readinto_resumes_at_its_position() -> None:
    files = MemoryFiles({"a": bytes(range(30))})
    files.plan.fail_at("file:read", 2, RESET)
    found = bytearray(30)
    with PatientFiles(files, persistence()).open("a") as file:
        assert file.readinto(memoryview(found)[:10]) == 10  # type: ignore[attr-defined]
        assert file.readinto(memoryview(found)[10:]) == 20  # type: ignore[attr-defined]
    assert found == bytes(range(30))
    assert files.plan.count("open") == 2


def test_reopening_a_file_is_retried() -> None:
    files = MemoryFiles({"a": b"abc"})
    files.plan.fail_at("file:read", 1, RESET)
    files.plan.fail_at("open", 2, DOWN)
    files.plan.fail_at("open", 3, DOWN)
    with PatientFiles(files, persistence()).open("a") as file:
        assert file.read() == b"abc"


def test_calls_are_retried_and_the_cause_is_reported() -> None:
    files = MemoryFiles({"a": b"abc"})
    for point in ("expand", "stat", "open"):
        files.plan.fail_at(point, 1, DOWN)
    patient = PatientFiles(files, persistence())
    assert [stat.url for stat in patient.expand(["*"])] == ["a"]
    assert patient.stat("a") == files.stat("a")
    assert patient.open("a").read() == b"abc"
    assert patient.trouble == ""
    files.plan.fail_from("stat", DOWN)
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(patient.stat("a")))
    thread.start()
    while not patient.trouble:
        pass
    assert patient.trouble == "the store does not answer"
    files.plan.heal("stat")
    thread.join(10.0)
    assert (patient.trouble, found) == ("", [files.stat("a")])


def test_a_permanent_error_is_raised_at_once() -> None:
    files = MemoryFiles()
    with pytest.raises(DataError, match="there is no file a"):
        PatientFiles(files, persistence()).open("a")
    assert files.plan.count("open") == 1


@pytest.mark.parametrize("is_stopped", [True, False])
def test_retries_are_limited(is_stopped: bool) -> None:
    stop = threading.Event()
    if is_stopped:
        stop.set()
    files = MemoryFiles({"a": b""})
    files.plan.fail_from("open", DOWN)
    with pytest.raises(UnavailableError):
        PatientFiles(files, persistence(1e9 if is_stopped else 0.05, stop)).open("a")
    assert (files.plan.count("open") == 1) is is_stopped


def test_a_transient_storage_failure_is_retried() -> None:
    storage = MemoryStorage()
    for point in ("publish:end", "read", "list", "delete"):
        storage.plan.fail_at(point, 1, DOWN)
    patient = PatientStorage(storage, persistence())
    assert patient.publish("a", [b"ab", b"c"]) == 3
    assert (patient.read("a"), patient.read_range("a", 1, 2)) == (b"abc", b"bc")
    assert [file.name for file in patient.list("")] == ["a"]
    patient.delete("a")
    with pytest.raises(NotFoundError):
        patient.read("a")


def test_parts_that_can_be_read_only_once_are_published_once() -> None:
    storage = MemoryStorage()
    storage.plan.fail_at("publish:end", 1, DOWN)
    with pytest.raises(UnavailableError):
        PatientStorage(storage, persistence()).publish("a", iter([b"abc"]))
    assert storage.files == {}
