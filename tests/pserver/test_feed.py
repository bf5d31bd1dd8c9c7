"""Answers of a pserver's feed: each has a place and cuts of the rows, which are free again however the answer ends."""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.domain.consistency.modes import Async
from flightedl.errors import BusyError
from flightedl.messages.feed import ChangesTicket
from flightedl.pserver.feed import _ANSWERS, PserverFeed
from flightedl.pserver.rows.tables import MAX_CUTS
from flightedl.rpc.routes import Outgoing
from flightedl.testing.contracts.coordinator import eventually
from flightedl.testing.memory import MemoryStorage

from .test_rows import Pserver

CALL: Any = SimpleNamespace(deadline=math.inf, check=lambda: None, closing=threading.Event())


class Followed:
    """The feed of a pserver with rows, from which each request gets a base."""

    def __init__(self) -> None:
        self.pserver = Pserver(MemoryStorage(), Async())
        self.pserver.push(0)
        self.feed = PserverFeed(self.pserver.shard, self.pserver.plan, 1, 1, SystemClock())

    def ask(self) -> Outgoing:
        self.pserver.push(self.pserver.shard.version_range()[1] + 1)
        return self.feed.changes(ChangesTicket(plan_hash=self.pserver.plan.hash, wait_s=0.0), CALL)


@pytest.fixture
def followed() -> Followed:
    return Followed()


def send_all(answer: Outgoing) -> None:
    assert list(answer.messages)


def break_off(answer: Outgoing) -> None:
    messages: Any = iter(answer.messages)
    next(messages)
    messages.close()


@pytest.mark.parametrize("end", [send_all, break_off])
def test_an_answer_that_has_ended_makes_room_for_others(followed: Followed, end: Callable[[Outgoing], None]) -> None:
    for _ in range(2 * MAX_CUTS):
        answers = [followed.ask() for _ in range(_ANSWERS)]
        with pytest.raises(BusyError, match=f"to {_ANSWERS} others"):
            followed.ask()
        for answer in answers:
            end(answer)


def test_an_answer_that_is_never_sent_makes_room_for_others(followed: Followed) -> None:
    for _ in range(2 * MAX_CUTS):
        found: list[Outgoing] = []

        def ask(found: list[Outgoing] = found) -> bool:
            gc.collect()
            with suppress(BusyError):
                found.append(followed.ask())
            return bool(found)

        eventually(ask)
        found.clear()


@pytest.mark.parametrize("lock", ["answers", "placing"])
def test_an_answer_waits_for_the_one_in_progress_and_for_blocks_that_move(followed: Followed, lock: str) -> None:
    held: Any = followed.feed._lock if lock == "answers" else followed.pserver.shard.placing
    with ThreadPoolExecutor(1) as executor:
        with held:
            asked = executor.submit(followed.ask)
            with pytest.raises(TimeoutError):
                asked.result(0.05)
        send_all(asked.result(20.0))
