"""A master and the ranks of a group: starts, replaced masters, ranks that die, and the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from flightedl.domain.master.effects import Kind
from flightedl.errors import FencedError, UnregisteredError, UsageError
from flightedl.launch.failed import failed_tasks, joined, place_of
from flightedl.launch.supervisor import Outcome
from flightedl.launch.verdict import verdict
from flightedl.messages.groups import (
    GroupLeaveRequest,
    GroupPlaceReply,
    GroupPlaceRequest,
    GroupStartReply,
    GroupStartRequest,
    Piece,
)
from flightedl.messages.tasks import StopRequest
from tests.support.contracts.coordinator import eventually

from .job_of_twins import DATASET, MODEL, Job, Master, until_ready

RECORDS = 16


@dataclass
class Rank:
    job: Job
    start: str
    rank: int
    size: int = 2

    def __post_init__(self) -> None:
        self.name = f"{self.start}-{self.rank}"
        self.generation = self.job.start_trainer(self.name)
        self.incarnation = 0

    def _own(self) -> dict[str, object]:
        return {"trainer": self.name, "generation": self.generation, "job": "demo", "rank": self.rank}

    def enter(self, master: Master, token: str = "") -> GroupStartReply:
        request = GroupStartRequest(**self._own(), start=self.start, size=self.size, token=token, wait_s=0.0)  # type: ignore[arg-type]
        reply: GroupStartReply = until_ready(lambda: master.service.ask(request))
        self.incarnation = reply.incarnation
        return reply

    def at(self, master: Master, at: int, *pieces: Piece) -> bool:
        request = GroupPlaceRequest(**self._own(), incarnation=self.incarnation, at=at, end=at + 4, pieces=list(pieces))  # type: ignore[arg-type]
        return bool(until_ready(lambda: master.service.ask(request)).is_current)

    def report(self, master: Master, at: int) -> GroupPlaceReply:
        """Report a round that has not started yet, in a stopped job."""
        request = GroupPlaceRequest(**self._own(), incarnation=self.incarnation, at=at, is_stopping=True)  # type: ignore[arg-type]
        reply: GroupPlaceReply = until_ready(lambda: master.service.ask(request))
        return reply

    def leave(self, master: Master, *, is_clean: bool = True, has_finished: bool = True, error: str = "") -> None:
        told = {"is_clean": is_clean, "has_finished": has_finished, "error": error}
        request = GroupLeaveRequest(**self._own(), incarnation=self.incarnation, **told)  # type: ignore[arg-type]
        until_ready(lambda: master.service.ask(request))


def start(job: Job, master: Master, name: str, *tokens: str) -> list[Rank]:
    ranks = [Rank(job, name, rank, len(tokens)) for rank in range(len(tokens))]
    for rank, token in zip(ranks, tokens, strict=True):
        rank.enter(master, token)
    for rank, token in zip(ranks, tokens, strict=True):
        assert rank.enter(master, token).incarnation == ranks[0].generation
    return ranks


@pytest.fixture
def job(make_job: Callable[..., Job]) -> Job:
    return make_job(0, is_kept=False)


@pytest.fixture
def master(job: Job) -> Master:
    master = job.start_master()
    until_ready(lambda: master.service.declaring.dataset(DATASET))
    return master


def phase(master: Master) -> str:
    group = master.service.status().group
    assert group is not None
    return group.phase


def test_a_group_is_done_when_all_ranks_have_left_cleanly_even_after_a_takeover(job: Job, master: Master) -> None:
    zero, one = start(job, master, "a", "", "T")
    assert zero.at(master, 4, (0, 1, 0, 0, 4, 6))
    assert one.at(master, 8, (0, 1, 0, 0, 8, 10))
    status = master.service.status()
    assert (status.state, status.records, status.tasks.done) == ("training", 4, 1)
    zero.leave(master)
    successor = job.start_master()
    eventually(lambda: one.enter(successor, "T").token == "T")
    assert phase(successor) == "running"
    one.leave(successor)
    assert successor.service.status().state == "done"
    job.end_trainer(zero.name)
    job.end_trainer(one.name)
    last = job.start_master()
    status = last.service.status()
    assert (status.state, status.records) == ("done", RECORDS)


def test_the_ranks_of_a_stopped_job_end_after_the_same_round_even_after_a_takeover(job: Job, master: Master) -> None:
    zero, one = start(job, master, "a", "", "")
    stop = StopRequest(trainer=zero.name, generation=zero.generation, job="demo", reason="early")
    until_ready(lambda: master.service.ask(stop))
    status = master.service.status()
    assert (status.is_stopped, status.state) == (True, "training"), "the ranks are still at work"
    assert zero.report(master, 4).stop_after is None
    assert one.report(master, 2).stop_after == 4
    successor = job.start_master()
    eventually(lambda: one.report(successor, 4).stop_after == 4)
    assert zero.report(successor, 6).stop_after == 4
    for rank in (zero, one):
        assert successor.service.status().state != "done"
        rank.leave(successor)
    status = successor.service.status()
    assert (status.state, status.stop_reason) == ("done", "early")
    assert verdict(status, keeps_checkpoints=False) == Outcome(0)


def test_a_rank_that_dies_without_a_master_ends_its_group(job: Job, master: Master) -> None:
    zero, one = start(job, master, "a", "", "")
    job.end_master()
    job.end_trainer(one.name)
    successor = job.start_master()
    eventually(lambda: phase(successor) == "over")
    assert not zero.at(successor, 4)
    with pytest.raises(FencedError):
        zero.enter(successor)
    again = start(job, successor, "b", "T", "T")
    assert again[1].at(successor, 8)
    assert not zero.at(successor, 4)


def test_a_rank_without_a_lease_is_not_admitted(job: Job, master: Master) -> None:
    rank = Rank(job, "a", 0)
    rank.enter(master)
    job.end_trainer(rank.name)
    eventually(lambda: rank.name not in master.state.core.trainers)
    with pytest.raises(UnregisteredError):
        rank.enter(master)


def test_records_that_kill_their_rank_are_listed_as_failed(job: Job) -> None:
    master = job.start_master(attempts_limit=2)
    until_ready(lambda: master.service.declaring.dataset(DATASET))
    for name in ("a", "b"):
        zero, one = start(job, master, name, "", "")
        zero.at(master, 4, (0, 1, 0, 0, 4, 6))
        one.at(master, 4, (0, 1, 0, 0, 14, 16))
        job.end_trainer(one.name)
        eventually(lambda: phase(master) == "over")
        job.end_trainer(zero.name)
    # The basis of a later answer is stored.
    start(job, master, "c", "", "")
    successor = job.start_master(attempts_limit=2)
    _, one = start(job, successor, "d", "", "")
    assert one.enter(successor).left_out == [(0, 1, 0, 0, 14, 16)]
    status = successor.service.status()
    assert failed_tasks(status) == 1
    (piece,) = joined(status.failed)
    assert place_of(piece) == "a.parquet chunk 3, records 14-15"
    assert (piece.attempts, piece.error) == (2, "it ended without a word")


def test_starts_and_ends_are_logged(job: Job, master: Master) -> None:
    _, one = start(job, master, "a", "", "")
    job.end_trainer(one.name)
    eventually(lambda: phase(master) == "over")
    counts = master.service.journal.counts
    assert (counts[Kind.GROUP_RUNS], counts[Kind.GROUP_OVER]) == (1, 1)


def test_a_group_and_single_trainers_do_not_share_the_data(job: Job, master: Master) -> None:
    zero, _ = start(job, master, "a", "", "")
    with pytest.raises(UsageError, match="a group reads the data of this job"):
        master.ask(zero.name, zero.generation, want=1)


def test_a_job_with_parameters_has_no_groups(make_job: Callable[..., Job]) -> None:
    job = make_job(is_kept=False)
    job.start_pserver(0)
    master = job.start_master()
    master.declare(model=MODEL)
    with pytest.raises(UsageError, match="omit group="):
        Rank(job, "a", 0).enter(master)
