"""A master's events, and what their followers get."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.domain.master.effects import Kind
from flightedl.master.journal import Journal
from flightedl.messages.status import EventsRequest
from tests.support.contracts.coordinator import eventually

from .job_of_twins import Job


@pytest.fixture
def journal() -> Journal:
    journal = Journal(7, SystemClock(), kept=3)
    journal.add(Kind.MASTER_LEADS, "master", "a master leads")
    journal.add(Kind.TRAINER_CAME, "t", "trainer registered", is_warning=False)
    return journal


def numbers(journal: Journal, **request: float) -> list[int]:
    return [event.number for event in journal.read(EventsRequest(**request)).events]  # type: ignore[arg-type]


def test_a_follower_gets_each_event_once(journal: Journal) -> None:
    assert numbers(journal) == [1, 2]
    assert numbers(journal, after=2, generation=7) == []
    journal.add(Kind.TRAINER_GONE, "t", "trainer is gone")
    assert numbers(journal, after=2, generation=7) == [3]


def test_a_follower_of_another_master_gets_all_events(journal: Journal) -> None:
    assert numbers(journal, after=900, generation=6) == [1, 2]


def test_forgotten_events_are_counted(journal: Journal) -> None:
    for _ in range(4):
        journal.add(Kind.EPOCH_DONE, "", "x" * 9999)
    reply = journal.read(EventsRequest(after=1, generation=7))
    assert [event.number for event in reply.events] == [4, 5, 6]
    assert reply.forgotten == 2
    assert len(reply.events[0].text) == 500
    assert journal.counts["epoch_done"] == 4
    assert journal.counts["job_done"] == 0


def test_a_waiting_reader_is_woken_by_the_next_event(journal: Journal) -> None:
    threading.Timer(0.02, journal.add, (Kind.EPOCH_DONE, "", "epoch is done")).start()
    assert numbers(journal, after=2, generation=7, wait_s=10.0) == [3]


def test_readers_do_not_wait_for_a_closing_master(journal: Journal) -> None:
    closing = threading.Event()
    closing.set()
    assert journal.read(EventsRequest(after=2, generation=7, wait_s=10.0), closing).events == []


def test_events_of_a_pserver_name_its_process(make_job: Callable[..., Job]) -> None:
    job = make_job(is_kept=False)
    generation = job.start_pserver(0).generation
    master = job.start_master()
    job.end_pserver(0)
    kinds = {Kind.PSERVER_CAME.value, Kind.PSERVER_GONE.value}

    def texts() -> list[str]:
        return [event.text for event in master.service.journal.read(EventsRequest()).events if event.kind in kinds]

    eventually(lambda: len(texts()) == 2)
    tail = f"index=0 generation={generation} process=pserver-3"
    assert texts() == [f"pserver registered {tail}", f"pserver is gone {tail}"]
