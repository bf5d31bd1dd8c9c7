"""Waiting: at first silent, then one line per reason, finally an error."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import msgspec
import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.client.probe import PUSH
from flightedl.client.process import TrainerProcess
from flightedl.client.waiting import Conversation, Waiting, Waits
from flightedl.coordination.directory import Directory
from flightedl.coordination.keys import JobKeys
from flightedl.coordination.records import ServerRecord
from flightedl.errors import JobFailedError, UnavailableError
from flightedl.ports import Put
from tests.support.clock import FakeClock
from tests.support.memory import MemoryCoordinator


def test_a_wait_prints_its_reason_once_after_a_while(capsys: pytest.CaptureFixture[str]) -> None:
    clock, lines = FakeClock(), list[str]()
    waiting = Waiting(clock, say_after_s=5.0, give_up_s=100.0, report=lines.append)
    waiting.because("a pserver")
    assert capsys.readouterr().err == ""
    clock.advance(6.0)
    waiting.because("a pserver")
    waiting.because("a pserver")
    waiting.because("the master")
    waiting.over()
    assert capsys.readouterr().err.splitlines() == [
        "flightedl: waiting (6 s): a pserver",
        "flightedl: waiting (6 s): the master",
    ]
    assert lines == ["a pserver", "the master", ""]


def test_a_hanging_call_is_reported_by_another_thread(capsys: pytest.CaptureFixture[str]) -> None:
    clock, lines = FakeClock(), list[str]()
    waits = Waits(clock, say_after_s=5.0, give_up_s=100.0, report=lines.append)
    waits.calls("nobody, as nobody waits")
    waiting = waits.begin()
    waits.calls("pserver 0")
    clock.advance(4.0)
    waits.look()
    assert lines == []
    clock.advance(2.0)
    waits.look()
    waits.look()
    waiting.because("pserver 0 is gone")
    waits.calls("pserver 0")
    clock.advance(3.0)
    waits.look()
    assert capsys.readouterr().err.splitlines() == [
        "flightedl: waiting (6 s): pserver 0 to answer",
        "flightedl: waiting (6 s): pserver 0 is gone",
    ]
    waiting.over()
    clock.advance(10.0)
    waits.look()
    assert lines == ["pserver 0 to answer", "pserver 0 is gone", ""]


def test_a_hanging_conversation_is_reported_until_it_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    clock, lines = FakeClock(), list[str]()
    waits = Waits(clock, say_after_s=5.0, give_up_s=100.0, report=lines.append)
    quick, slow = Conversation(0, clock.now), Conversation(1, clock.now)
    waits.watch([quick, slow])
    slow.begin(PUSH)
    clock.advance(4.0)
    quick.begin(PUSH)
    waits.look()
    assert lines == []
    clock.advance(2.0)
    waits.look()
    waits.look()
    assert capsys.readouterr().err == "flightedl: waiting (6 s): pserver 1 to answer\n"
    assert slow.waiting is not None
    assert quick.waiting is None
    slow.waiting.over()
    assert lines == ["pserver 1 to answer", ""]


def test_a_finished_attempt_no_longer_counts_as_a_wait() -> None:
    clock, lines = FakeClock(), list[str]()
    waits = Waits(clock, say_after_s=5.0, give_up_s=100.0, report=lines.append)
    waiting = waits.begin()
    for _ in range(3):
        waits.calls("pserver 0")
        clock.advance(1.0)
        waiting.because("pserver 0 broke off")
    for _ in range(20):
        waiting.because("no pserver holds index 0")
        clock.advance(1.0)
        waits.look()
    assert lines == ["no pserver holds index 0"]


def test_each_thread_has_its_own_wait() -> None:
    clock, lines = FakeClock(), list[str]()
    waits = Waits(clock, say_after_s=5.0, give_up_s=100.0, report=lines.append)
    first = waits.begin()
    waits.calls("the master")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: (waits.begin(), waits.calls("pserver 1"))).result()
    clock.advance(6.0)
    waits.look()
    assert lines[-1] == "the master to answer"
    first.over()
    assert lines[-1] == "pserver 1 to answer", "the other thread still waits"


def test_an_abandoned_wait_ends_when_its_thread_waits_again() -> None:
    clock, lines = FakeClock(), list[str]()
    waits = Waits(clock, say_after_s=5.0, give_up_s=100.0, report=lines.append)
    left = waits.begin()
    clock.advance(6.0)
    left.because("pserver 0 waits for its blocks to be allocated")
    waits.begin().over()
    waits.look()
    assert lines == ["pserver 0 waits for its blocks to be allocated", ""]


def test_an_outer_wait_is_reported_again_after_an_inner_one_but_printed_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock, lines = FakeClock(), list[str]()
    waits = Waits(clock, say_after_s=5.0, give_up_s=100.0, report=lines.append)
    outer = waits.begin()
    clock.advance(6.0)
    for _ in range(2):
        outer.patiently("another trainer to finish writing m.safetensors")
        waits.begin().over()
    outer.patiently("another trainer to finish writing m.safetensors")
    assert lines[-1] == "another trainer to finish writing m.safetensors"
    assert len(capsys.readouterr().err.splitlines()) == 1
    outer.over()
    assert lines[-1] == ""


def test_a_wait_gives_up_with_its_last_reason() -> None:
    clock = FakeClock()
    waiting = Waiting(clock, say_after_s=500.0, give_up_s=10.0, report=lambda _: None)
    waiting.because("one")
    clock.advance(10.0)
    with pytest.raises(UnavailableError, match=r"gave up after 10 s .*: two"):
        waiting.because("two")


def test_an_expected_wait_never_gives_up() -> None:
    clock = FakeClock()
    waiting = Waiting(clock, say_after_s=500.0, give_up_s=10.0, report=lambda _: None)
    for _ in range(10):
        clock.advance(9.0)
        waiting.patiently("the others")
    waiting.because("trouble begins")
    clock.advance(9.0)
    waiting.because("trouble")


def test_a_wait_for_permanently_lost_servers_ends() -> None:
    why = ""
    waits = Waits(FakeClock(), 5.0, 300.0, lambda _: None, lambda: why)
    waiting = waits.begin()
    waiting.because("a pserver")
    why = "the master ended 4 times in a row"
    with pytest.raises(JobFailedError, match="the master ended 4 times"):
        waiting.because("a pserver")


def test_an_answer_that_arrives_while_its_absence_is_reported_ends_the_report() -> None:
    clock, lines = FakeClock(), list[str]()
    slow = Conversation(0, clock.now)

    def report(text: str) -> None:
        lines.append(text)
        slow.asked_at = None

    waits = Waits(clock, say_after_s=5.0, give_up_s=100.0, report=report)
    waits.watch([slow])
    slow.begin(PUSH)
    clock.advance(6.0)
    waits.look()
    assert lines == ["pserver 0 to answer", ""]


def test_a_trainer_that_joins_while_the_job_is_scaled_down_waits_for_those_pservers_that_remain() -> None:
    coordinator, keys, clock = MemoryCoordinator(SystemClock()), JobKeys("demo"), FakeClock()
    server = msgspec.json.encode(ServerRecord(address="127.0.0.1:1"))
    coordinator.transact([], [Put(keys.ps_desired, b"2"), Put(keys.pserver(0), server)])
    waiting = Waiting(clock, 5.0, 100.0, lambda _: None)
    reasons: list[str] = []

    def because(reason: str) -> None:
        reasons.append(reason)
        coordinator.transact([], [Put(keys.ps_desired, b"1")])
        # Without the change, it would give up in time.
        clock.advance(1.0)
        Waiting.because(waiting, reason)

    with Directory(coordinator, keys, SystemClock()) as directory:
        assert directory.wait_until(lambda found: found.entry(keys.pserver(0)), 60.0)
        waits = SimpleNamespace(because=because, pause=lambda: None, over=waiting.over)
        TrainerProcess.wait_for_pservers(SimpleNamespace(directory=directory, waiting=lambda: waits), 2)
    assert set(reasons) == {"1 of 2 pservers are missing: start them with `flightedl pserver`"}
