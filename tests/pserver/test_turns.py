"""Taking turns on one machine: never more at a time, never for ever."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flightedl.pserver.turns import Turns


@pytest.mark.parametrize("at_once", [1, 2])
def test_no_more_than_that_have_one_at_a_time_and_all_get_one(tmp_path: Path, at_once: int) -> None:
    lock = threading.Lock()
    present, most = 0, 0

    def work(_: int) -> bool:
        nonlocal present, most
        with Turns(threading.Event(), at_once=at_once, folder=tmp_path).turn() as is_one:
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


def test_who_has_waited_long_enough_goes_on_without(tmp_path: Path) -> None:
    stop = threading.Event()
    with Turns(stop, at_once=1, folder=tmp_path).turn() as first:
        with Turns(stop, at_once=1, folder=tmp_path, patience_s=0.2).turn() as second:
            assert (first, second) == (True, False)
        stop.set()
        with Turns(stop, at_once=1, folder=tmp_path).turn() as third:
            assert not third


def test_the_turn_of_a_process_that_was_killed_is_free(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys, threading, time\n"
        "from flightedl.pserver.turns import Turns\n"
        "with Turns(threading.Event(), at_once=1, folder=pathlib.Path(sys.argv[1])).turn():\n"
        "    print(flush=True)\n"
        "    time.sleep(60)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    turns = Turns(threading.Event(), at_once=1, folder=tmp_path, patience_s=0.2)
    with turns.turn() as while_it_lives:
        assert not while_it_lives
    holder.kill()
    holder.communicate(timeout=10)
    with turns.turn() as afterwards:
        assert afterwards


def test_where_no_file_can_be_made_nobody_waits(tmp_path: Path) -> None:
    with Turns(threading.Event(), at_once=1, folder=tmp_path / "absent").turn() as is_one:
        assert not is_one
