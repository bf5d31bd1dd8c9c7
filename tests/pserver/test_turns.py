"""Turns on one machine: their number is limited, and no process waits forever."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from flightedl.domain.model.optimizers import SGD
from flightedl.kernels.compiled import compiling_begins
from flightedl.pserver import service as services
from flightedl.pserver.service import PserverService
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


def test_kernels_that_another_process_compiles_come_last(purpose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise all processes would walk one list in one order, and one at a time would compile."""
    stop, loaded = threading.Event(), list[int]()
    service: Any = object.__new__(PserverService)
    service._kernels_lock, service._is_closing, service._has_compiled = threading.Lock(), stop, True
    declared = SimpleNamespace(parameters=[], tables=[], optimizer=SGD(lr=1.0).to_json(), wire="")
    model: Any = SimpleNamespace(declaration=declared)
    other = contextlib.ExitStack()

    def load(number: int) -> None:
        compiling_begins.get()()
        loaded.append(number)
        if len(loaded) == 2:
            # The other process has compiled its kernel.
            other.close()

    monkeypatch.setattr(services, "kernels_of", lambda *_: ([partial(load, number) for number in (1, 2, 3)], []))
    monkeypatch.setattr(services, "parameters_of", lambda _: ())
    monkeypatch.setattr(services, "tables_of", lambda _: ())
    own_turns = lambda *given, **more: Turns(*given, **more | {"purpose": purpose + more["purpose"]})  # noqa: E731
    monkeypatch.setattr(services, "Turns", own_turns)
    other.enter_context(Turns(stop, at_once=1, purpose=f"{purpose}kernel-1").turn())
    service._load_kernels(model)
    assert loaded == [2, 3, 1]


def test_kernels_that_a_first_batch_does_not_need_are_loaded_between_effects(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, work = list[int](), queue.SimpleQueue[str]()
    service: Any = object.__new__(PserverService)
    service._kernels_lock, service._is_closing, service._work = threading.Lock(), threading.Event(), work
    declared = SimpleNamespace(parameters=[], tables=[], optimizer=SGD(lr=1.0).to_json(), wire="")

    def load(number: int) -> None:
        loaded.append(number)
        if number in {2, 3}:
            work.put(f"after {number}")

    first, *later = (partial(load, number) for number in (1, 2, 3))
    monkeypatch.setattr(services, "kernels_of", lambda *_: ([first], later))
    monkeypatch.setattr(services, "parameters_of", lambda _: ())
    monkeypatch.setattr(services, "tables_of", lambda _: ())
    service._load_kernels(SimpleNamespace(declaration=declared))
    assert loaded == [1]
    assert service._next_effect() == "after 2"
    assert loaded == [1, 2]
    assert service._next_effect() == "after 3"
