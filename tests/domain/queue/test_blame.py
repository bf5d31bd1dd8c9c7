"""Whom a failure convicts: the piece, the trainer, the script, or nobody."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from flightedl.domain.queue.tasks import TaskQueue
from flightedl.domain.queue.values import NoTaskNow, Quarantined, QueueSettings, TaskGiven
from flightedl.errors import JobFailedError, TrainerFailedError
from flightedl.messages.tasks import Assignment

K, STAND_STILL_S = 5, 600.0
#: Returns the fault of a trainer's failure at a batch, or an empty string if the trainer can process it.
Fault = Callable[[str, int], str]


class Job:
    """Trainers that take turns, one second each, until the queue is done."""

    def __init__(self, tasks: int = 20, batches: int = 1, epochs: int = 1, limit: int = K) -> None:
        self.settings = QueueSettings(
            tasks, lambda _: batches, epochs, attempts_limit=limit, stand_still_s=STAND_STILL_S
        )
        self.queue = TaskQueue(self.settings)
        self.now = 0.0
        self.errors: dict[str, Exception] = {}
        self.done: list[tuple[str, int]] = []

    def ask(self, name: str) -> Assignment | None:
        try:
            answer = self.queue.request(f"{name}-id", self.now, witness=name)
        except (JobFailedError, TrainerFailedError) as error:
            self.errors[name] = error
            return None
        return answer.assignment if isinstance(answer, TaskGiven) else None

    def turn(self, name: str, fault: Fault) -> None:
        """Let a trainer ask for a piece, and report it as finished or failed."""
        if name in self.errors or (given := self.ask(name)) is None:
            return
        place = f"{name}-id", given.epoch, given.position, given.attempt, self.now
        for batch in range(given.first_batch, given.end_batch):
            if kind := fault(name, given.task):
                self.queue.fail(*place, error=f"{kind} failed", fault=kind, batch=batch, place="train.py:7")
                return
        self.done.append((name, given.task))
        self.queue.finish(*place)

    def run(self, names: str, fault: Fault, until_s: float = 10_000.0) -> None:
        while self.now < until_s and not self.queue.is_done:
            self.now += 1.0
            for name in names:
                self.turn(name, fault)
            self.queue.check()

    def restart(self) -> None:
        """Let another master continue from the stored state."""
        self.queue = TaskQueue.decode(self.queue.encode(), self.settings)

    @property
    def set_aside(self) -> set[int]:
        return {piece.task for piece in self.queue.failed.details}


@pytest.fixture
def make() -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def job(*arguments: int, **more: int) -> Job:
        jobs.append(Job(*arguments, **more))
        return jobs[-1]

    yield job
    for each in jobs:
        each.queue.check()


def test_a_trainer_without_the_mount_convicts_no_piece(make) -> None:
    job = make(100)
    job.run("abc", lambda name, _: "store" if name == "a" else "")
    assert job.set_aside == set()
    assert {task for _, task in job.done} == set(range(100))
    assert not job.errors


@pytest.mark.parametrize("fault", ["store", "code", "machine"])
def test_a_trainer_that_always_fails_ends_alone_after_the_stand_still(make, fault: str) -> None:
    job = make(2000)
    job.run("abc", lambda name, _: fault if name == "a" else "", until_s=STAND_STILL_S - 5)
    assert not job.errors
    assert set(job.queue.blame.in_doubt) == {"a"}
    job.run("abc", lambda name, _: fault if name == "a" else "")
    assert isinstance(job.errors.pop("a"), TrainerFailedError)
    assert not job.errors
    assert (job.set_aside, len(job.done)) == (set(), 2000)


def test_a_trainer_in_doubt_pauses_longer_and_longer(make) -> None:
    job = make(100)
    tries: list[float] = []

    def fault(name: str, _: int) -> str:
        if name == "a":
            tries.append(job.now)
        return "store" if name == "a" else ""

    job.now = 0.0
    for _ in range(70):
        job.now += 1.0
        job.turn("b", lambda *_: "")
        job.turn("a", fault)
    assert [round(after - before) for before, after in itertools.pairwise(tries)] == [
        1,
        1,
        1,
        1,
        1,
        2,
        4,
        8,
        16,
        30,
    ]
    assert "this trainer has failed" in job.queue.blame.waits_for("a-id")
    assert job.queue.blame.waits_for() == "", "the others work"


def test_the_queue_stands_still_while_the_store_refuses_everybody(make) -> None:
    job = make(100)
    expired = lambda *_: "store" if 10 < job.now < 20 else ""  # noqa: E731
    job.run("abc", expired, until_s=19.0)
    assert job.queue.blame.waits_for() == "the data: store failed"
    job.run("abc", expired)
    assert (job.set_aside, len(job.done)) == (set(), 100)
    assert job.queue.blame.waits_for() == ""


@pytest.mark.parametrize(("tasks", "names"), [(1, "a"), (1, "abc"), (3, "a"), (3, "ab"), (40, "abc")])
def test_an_outage_of_seconds_burns_no_epoch(make, tasks: int, names: str) -> None:
    job = make(tasks, 4, epochs=4)
    job.run(names, lambda *_: "store" if 2 < job.now < 8 else "")
    assert job.set_aside == set()
    assert job.queue.is_done


def test_a_job_whose_data_never_comes_ends_with_nothing_set_aside(make) -> None:
    job = make(100)
    job.run("abc", lambda *_: "store", until_s=2 * STAND_STILL_S)
    assert job.set_aside == set()
    assert {type(error) for error in job.errors.values()} == {JobFailedError}
    assert "store failed" in str(job.errors["a"])
    assert job.now >= STAND_STILL_S


def test_an_error_of_the_script_at_the_first_batches_of_all_trainers_ends_the_job_at_once(make) -> None:
    job = make(100)
    job.run("abc", lambda *_: "code", until_s=10.0)
    assert {type(error) for error in job.errors.values()} == {JobFailedError}
    assert "the same error at the first 5 batches, in every trainer: code failed (train.py:7)" in str(job.errors["a"])
    assert job.set_aside == set()


def test_a_script_that_fails_only_in_one_trainer_does_not_end_the_job(make) -> None:
    job = make(100)
    job.run("abc", lambda name, _: "code" if name == "a" else "")
    assert (job.errors, job.set_aside, len(job.done)) == ({}, set(), 100)


@pytest.mark.parametrize("names", ["a", "ab", "abc"])
@pytest.mark.parametrize("fault", ["code", "machine", "store", "decoder", ""])
def test_a_batch_at_which_all_trainers_fail_is_set_aside(make, names: str, fault: str) -> None:
    job = make(20)

    def fails(_: str, task: int) -> str:
        return (fault or "unknown") if task == 7 else ""

    # The store may only be out for a while, so the last batch has to wait.
    job.run(names, fails, until_s=STAND_STILL_S + 100 if fault == "store" else 300.0)
    assert job.set_aside == {7}
    assert len(job.done) == 19


def test_what_the_decoder_calls_corrupt_needs_no_second_witness(make) -> None:
    job = make(1)
    job.run("a", lambda *_: "decoder", until_s=20.0)
    assert job.set_aside == {0}


def test_a_suspect_is_left_to_trainers_that_are_no_witnesses(make) -> None:
    job = make(3)
    job.turn("b", lambda *_: "")
    for _ in range(30):
        job.now += 1.0
        job.turn("a", lambda _, task: "machine" if task == 1 else "")
        job.queue.request("b-id", job.now, holding_limit=0, witness="b")
    assert job.ask("a") is None
    job.run("b", lambda *_: "")
    assert (job.set_aside, job.queue.is_done) == (set(), True)


@pytest.mark.parametrize("fault", ["code", "store"])
def test_the_last_batch_of_a_job_is_set_aside_after_the_stand_still_by_a_single_witness(make, fault: str) -> None:
    job = make(2)
    job.run("a", lambda _, task: fault if task == 1 else "", until_s=STAND_STILL_S - 20)
    assert (job.set_aside, job.errors) == (set(), {})
    job.run("a", lambda _, task: fault if task == 1 else "", until_s=STAND_STILL_S + 100)
    assert (job.set_aside, job.errors) == ({1}, {})


def test_a_witness_that_never_processed_anything_convicts_nothing(make) -> None:
    job = make(1)
    job.run("ab", lambda *_: "store", until_s=3 * STAND_STILL_S)
    assert job.set_aside == set()
    assert job.errors.keys() == {"a", "b"}


def test_repeated_failures_of_one_name_are_one_witness_also_for_new_processes(make) -> None:
    queue = make(2).queue
    for number in range(40):
        answer = queue.request(f"process-{number}", 100.0 * number, witness="a")
        if isinstance(answer, TaskGiven):
            given = answer.assignment
            place = given.epoch, given.position, given.attempt
            effects = queue.fail(f"process-{number}", *place, 100.0 * number, error="no mount", fault="machine")
            assert not any(isinstance(each, Quarantined) for each in effects)
        queue.trainer_departed(f"process-{number}", 100.0 * number)


def test_a_new_master_knows_the_witnesses_against_suspects(make) -> None:
    def fails(_: str, task: int) -> str:
        return "machine" if task == 0 else ""

    kept, restarted = make(12), make(12)
    for step in range(300):
        for job in (kept, restarted):
            job.now += 1.0
            job.turn("a", fails)
        assert restarted.set_aside == kept.set_aside, f"after {step} steps"
        if rows := restarted.queue.blame.rows(restarted.queue.suspects()):
            restarted.restart()
            assert restarted.queue.blame.rows(restarted.queue.suspects()) == rows
    assert kept.set_aside == {0}


def test_at_most_k_witnesses_are_stored_with_a_piece(make) -> None:
    job = make(1)
    for number in range(20):
        answer = job.queue.request(f"p{number}", 0.0, witness=f"name-{number}")
        assert isinstance(answer, TaskGiven)
        given = answer.assignment
        job.queue.fail(f"p{number}", 0, 0, given.attempt, 0.0, error="", fault="machine")
    ((_, witnesses),) = job.queue.blame.rows(job.queue.suspects())
    assert len(witnesses) == K


def test_a_process_in_place_of_one_that_had_to_end_gets_another_chance(make) -> None:
    job = make(5000)
    job.run("ab", lambda name, _: "machine" if name == "a" else "", until_s=STAND_STILL_S + 60)
    assert job.errors.keys() == {"a"}
    assert job.queue.blame.ended == ["a"]
    assert isinstance(job.queue.request("other", job.now, witness="a"), TaskGiven)
    assert job.queue.blame.ended == []


def test_trainers_in_doubt_wait_at_most_a_second_for_an_answer(make) -> None:
    job = make(100)
    job.turn("b", lambda *_: "")
    for _ in range(9):
        job.turn("a", lambda *_: "store")
    answer = job.queue.request("a-id", job.now, witness="a")
    assert isinstance(answer, NoTaskNow)
    assert 0 < answer.retry_after_s <= 1


@pytest.mark.parametrize("names", ["a", "ab"])
def test_a_limit_of_one_attempt_sets_a_single_bad_batch_aside(make, names: str) -> None:
    job = make(limit=1)
    job.run(names, lambda _, task: "code" if task == 7 else "")
    assert job.set_aside == {7}
    assert len(job.done) == 19
    assert not job.errors
