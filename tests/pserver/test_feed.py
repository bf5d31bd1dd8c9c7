"""Answers of a pserver's feed: each has a place and cuts of the rows, which are free again however the answer ends.

What the pserver keeps for a follower that sleeps does not depend on the time that it sleeps.
"""

from __future__ import annotations

import gc
import math
import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from flightedl.client.following.copy import FollowedModel
from flightedl.domain.consistency.modes import Async
from flightedl.domain.feed.server import ServerFeed
from flightedl.errors import BusyError, UnavailableError
from flightedl.messages.feed import ChangesTicket
from flightedl.pserver.readers.feed import _ANSWERS, _STALLED_S, PserverFeed
from flightedl.pserver.stores.interface import distinct
from flightedl.rowstore import tables
from flightedl.rowstore.cut import RowCut
from flightedl.rowstore.tables import MAX_CUTS
from flightedl.rpc.routes import Outgoing
from tests.support.clock import FakeClock
from tests.support.faults import FaultPlan
from tests.support.memory import MemoryStorage

from .test_feed_marks import Bench, content_of
from .test_rows import Pserver

CALL: Any = SimpleNamespace(deadline=math.inf, check=lambda: None, closing=threading.Event())


class Followed:
    """The feed of a pserver with rows, from which each request gets a base."""

    def __init__(self) -> None:
        self.pserver = Pserver(MemoryStorage(), Async())
        self.pserver.push(0)
        self.clock = FakeClock(100.0)
        self.feed = PserverFeed(self.pserver.shard, self.pserver.plan, 1, 1, self.clock)

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
        answers = [followed.ask() for _ in range(_ANSWERS)]
        del answers
        gc.collect()


def test_what_an_answer_that_is_never_sent_holds_is_dropped_soon(followed: Followed) -> None:
    answer = followed.ask()
    assert kept_cuts(followed.pserver) == 1
    del answer
    gc.collect()
    followed.feed.expire()
    assert (kept_cuts(followed.pserver), followed.feed._sending) == (0, [])


def test_an_answer_that_could_not_begin_holds_nothing(followed: Followed, monkeypatch: pytest.MonkeyPatch) -> None:
    for error, expected in ((MemoryError(), BusyError), (UnavailableError("lost"), UnavailableError)):
        with monkeypatch.context() as patch:
            patch.setattr(followed.pserver.shard, "values", raising(error))
            with pytest.raises(expected):
                followed.ask()
        assert kept_cuts(followed.pserver) == 0
    send_all(followed.ask())


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise error

    return fail


def kept_cuts(pserver: Pserver) -> int:
    spans = distinct(pserver.shard.rows.spans)
    return sum(not cut.is_over for span in spans for cut in span.rows._cuts.values())


def test_a_client_that_stopped_reading_loses_its_place_to_another_one(followed: Followed) -> None:
    sleeping, reading = (iter(followed.ask().messages) for _ in range(_ANSWERS))
    for answer in (sleeping, reading):
        next(answer)
    followed.clock.advance(_STALLED_S - 1)
    next(reading)
    with pytest.raises(BusyError, match="to 2 others"):
        followed.ask()
    followed.clock.advance(2)
    other = followed.ask()
    assert kept_cuts(followed.pserver) == 2
    assert list(reading)
    send_all(other)
    with pytest.raises(BusyError, match="accepted no changes for 10 s"):
        list(sleeping)
    send_all(followed.ask())


def test_an_answer_that_loses_its_place_is_not_taken_for_a_complete_one(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cut that was dropped looks like one that was read to its end, so no message may follow that moment."""
    sleeping, others = iter(followed.ask().messages), [followed.ask()]
    next(sleeping)
    followed.clock.advance(_STALLED_S + 1)
    drop = RowCut.drop

    def drop_and_read(cut: RowCut) -> None:
        drop(cut)
        with pytest.raises(BusyError, match="accepted no changes"):
            list(sleeping)

    monkeypatch.setattr(RowCut, "drop", drop_and_read)
    others.append(followed.ask())
    monkeypatch.undo()
    for each in others:
        send_all(each)


def test_a_client_that_stopped_reading_keeps_its_place_as_long_as_nobody_needs_it(followed: Followed) -> None:
    answer = iter(followed.ask().messages)
    next(answer)
    followed.clock.advance(10 * _STALLED_S)
    send_all(followed.ask())
    followed.feed.expire()
    assert list(answer)


@pytest.mark.parametrize("others", [False, True], ids=["alone", "with another follower"])
@pytest.mark.parametrize("is_marked", [False, True], ids=["changes", "marks"])
def test_what_is_kept_for_a_sleeping_follower_does_not_grow(
    others: bool, is_marked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "_MOST_REMOVED", 4_000)
    monkeypatch.setattr(ServerFeed.__init__, "__defaults__", (4_000,))
    bench = Bench()
    sleeping, awake = bench.followers
    large, small, still = list(range(2_000)), list(range(2_000, 2_500)), list(range(2_500, 2_600))
    bench.train([*large, *small, *still], 1.0)
    bench.ask(sleeping, is_marked=is_marked)
    bench.train(small, -1.0)
    found = []
    tracemalloc.start()
    try:
        for _ in range(4):
            for _ in range(15):
                bench.train(large, -0.9)
                bench.train(small, 0.1)
                # All rows are small now.
                bench.checkpoint()
                bench.train(large, 1.0)
                bench.storage.files.clear()
                bench.storage.plan = FaultPlan()
                bench.clock.advance(2.0)
                bench.feed.expire()
                if others:
                    bench.ask(awake, is_marked=is_marked)
            gc.collect()
            found.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    # The ids of the rows that are removed between two measurements take 300 kB.
    assert max(found[2:]) < found[1] + 100_000, found
    (rows,) = (span.rows for span in distinct(bench.shard.rows.spans))
    removed = bench.feed._feed._removed
    assert sum(ids.size for _, ids in rows.removed) + sum(len(each.ids) // 8 for each in removed) <= 8_000
    header = bench.ask(sleeping, is_marked=False)
    # If the other follower has received the ids, they have been dropped since. Otherwise all buckets are complete.
    assert (header.since is None) == (others and not is_marked)
    fresh = FollowedModel(bench.plan)
    bench.ask(fresh, is_marked=False)
    assert content_of(sleeping) == content_of(fresh)


@pytest.mark.parametrize("lock", ["answers", "placing"])
def test_an_answer_waits_for_the_one_in_progress_and_for_blocks_that_move(followed: Followed, lock: str) -> None:
    held: Any = followed.feed._lock if lock == "answers" else followed.pserver.shard.placing
    with ThreadPoolExecutor(1) as executor:
        with held:
            asked = executor.submit(followed.ask)
            with pytest.raises(TimeoutError):
                asked.result(0.05)
        send_all(asked.result(20.0))
