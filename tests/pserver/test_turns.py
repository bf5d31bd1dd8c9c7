"""Turns on one machine: their number is limited, and no process waits forever."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from flightedl.pserver.turns import Turns


@pytest.fixture
def purpose() -> str:
    return uuid.uuid4().hex


@pytest.mark.parametrize("at_once", [1, 2])
def test_the_number_of_simultaneous_turns_is_limited_and_all_processes_get_one(purpose: str, at_once: int) -> None:
    lock = threading.Lock()
    present, most = 0, 0

    def work(_: int) -> bool:
        nonlocal present, most
        with Turns(threading.Event(), at_once=at_once, purpose=purpose).turn() as is_one:
            with lock:
                present += 1
                most = max(most, present)
            time.sleep(0.02)
            with lock:
                present -= 1
        return is_one

    with ThreadPoolExecutor(5) as pool:
        assert all(pool.map(work, range(5)))
    assert most == at_once


def test_a_process_continues_without_a_turn_after_its_patience(purpose: str) -> None:
    stop = threading.Event()
    with Turns(stop, at_once=1, purpose=purpose).turn() as first:
        with Turns(stop, at_once=1, purpose=purpose, patience_s=0.2).turn() as second:
            assert (first, second) == (True, False)
        stop.set()
        with Turns(stop, at_once=1, purpose=purpose).turn() as third:
            assert not third


def test_the_turn_of_a_killed_process_becomes_free(purpose: str) -> None:
    program = (
        "import sys, threading, time\n"
        "from flightedl.pserver.turns import Turns\n"
        "with Turns(threading.Event(), at_once=1, purpose=sys.argv[1]).turn():\n"
        "    print(flush=True)\n"
        "    time.sleep(60)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", program, purpose], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    turns = Turns(threading.Event(), at_once=1, purpose=purpose, patience_s=0.2)
    with turns.turn() as while_it_lives:
        assert not while_it_lives
    holder.kill()
    holder.communicate(timeout=10)
    with turns.turn() as afterwards:
        assert afterwards


def test_processes_do_not_wait_on_systems_without_abstract_names(purpose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("socket.AF_UNIX")
    with Turns(threading.Event(), at_once=1, purpose=purpose).turn() as is_one:
        assert not is_one
