"""A trainer that dies while its request waits at the master gets no more tasks, and rounds do not wait for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import msgspec
import pyarrow as pa
import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.coordination.directory import Directory
from flightedl.coordination.keeper import HeldKey
from flightedl.coordination.records import TrainerRecord
from flightedl.domain.master.effects import Answer, Effect
from flightedl.errors import FencedError, NotReadyError
from flightedl.formats.registry import named_format
from flightedl.master.service import MasterService
from flightedl.messages.declarations import EvaluationDeclaration
from flightedl.messages.tasks import FinishedTask, JoinRequest, StopRequest, TasksReply, TasksTicket
from tests.support.contracts.coordinator import eventually
from tests.support.memory import MemoryCoordinator, MemoryFiles

from .job_of_twins import DATASET, KEYS, MODEL, LoneMaster, until_ready

WAIT_S = 20.0
Result = TypeVar("Result")


class Trainers:
    """Live trainers by name; ``die`` ends a lease."""

    def __init__(self, coordinator: MemoryCoordinator) -> None:
        self._coordinator = coordinator
        self._held: dict[str, HeldKey] = {}

    def live(self, name: str) -> int:
        """Start a new one; return its generation."""
        record = msgspec.json.encode(TrainerRecord(id=name))
        held = HeldKey.claim(self._coordinator, SystemClock(), KEYS.trainer(name), record, 20.0)
        assert held is not None
        self._held[name] = held
        return held.generation

    def die(self, name: str) -> None:
        self._held.pop(name).release()

    def close(self) -> None:
        for name in tuple(self._held):
            self.die(name)


class Master(LoneMaster):
    """Requests of trainers."""

    def work(self, trainer: str, generation: int, wait_s: float = 0.0, **more: object) -> TasksReply:
        ticket = TasksTicket(trainer=trainer, generation=generation, want=2, wait_s=wait_s, **more)  # type: ignore[arg-type]
        return self.service.tasks.exchange(ticket, threading.Event())[0]

    def join(self, trainer: str, generation: int, wait_s: float) -> int:
        return self.service.ask(JoinRequest(trainer=trainer, generation=generation, wait_s=wait_s)).member


@pytest.fixture
def coordinator() -> Iterator[MemoryCoordinator]:
    made = MemoryCoordinator(SystemClock())
    yield made
    made.close()


@pytest.fixture
def trainers(coordinator: MemoryCoordinator) -> Iterator[Trainers]:
    made = Trainers(coordinator)
    yield made
    made.close()


@pytest.fixture
def files() -> MemoryFiles:
    batches = pa.table({"k": range(8)}).to_batches(max_chunksize=4)
    return MemoryFiles({"a.parquet": b"".join(named_format("parquet").write(batches, batches[0].schema))})


@pytest.fixture
def start(coordinator: MemoryCoordinator, files: MemoryFiles) -> Iterator[Callable[[], Master]]:
    made: list[Master] = []

    def make() -> Master:
        while made:
            made.pop().close()
        made.append(Master(coordinator, files))
        return made[0]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def master(start: Callable[[], Master]) -> Master:
    made = start()
    until_ready(lambda: made.service.declaring.dataset(DATASET))
    made.service.declaring.model(MODEL)
    return made


@pytest.fixture
def beside() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def waits(future: Future[Result], master: Master) -> None:
    """Return when the call has been considered once and waits for a change."""
    state = master.service._state
    eventually(lambda: future.done() or len(state.core._waiting) == 1)
    assert not future.done()


def test_a_waiting_join_ends_with_its_trainer(master: Master, trainers: Trainers, beside: ThreadPoolExecutor) -> None:
    generation = trainers.live("a")
    until_ready(lambda: master.work("a", generation))
    joining = beside.submit(master.join, "a", generation, WAIT_S)
    waits(joining, master)
    trainers.die("a")
    with pytest.raises(FencedError, match="trainer a has no lease"):
        joining.result(WAIT_S)
    members = master.service._state.core.members
    assert members is not None
    assert members.membership.members == ()


def test_a_waiting_request_for_tasks_ends_with_its_trainer(
    master: Master, trainers: Trainers, beside: ThreadPoolExecutor
) -> None:
    busy, idle = trainers.live("busy"), trainers.live("idle")
    # One holds all tasks, the other a copy of each, so neither can get another one.
    assert len(until_ready(lambda: master.work("busy", busy)).assignments) == 2
    held: list[int] = []
    while copies := until_ready(partial(master.work, "idle", idle, holding=tuple(held))).assignments:
        held += [copy.attempt for copy in copies]
    asking = beside.submit(master.work, "idle", idle, WAIT_S, holding=held)
    waits(asking, master)
    trainers.die("idle")
    with pytest.raises(FencedError, match="trainer idle has no lease"):
        asking.result(WAIT_S)
    trainers.die("busy")
    third = trainers.live("third")
    given = eventually(lambda: until_ready(lambda: master.work("third", third)).assignments)
    assert len(given) == 2


def test_departed_and_unknown_trainers_get_an_error(master: Master, trainers: Trainers) -> None:
    generation = trainers.live("a")
    until_ready(lambda: master.work("a", generation))
    with pytest.raises(FencedError, match="no lease of generation"):
        master.work("a", generation - 1)
    with pytest.raises(NotReadyError, match="not seen trainer b"):
        master.work("b", generation + 1_000)
    with pytest.raises(FencedError, match="no lease of generation"):
        master.join("b", generation, 0.0)
    with pytest.raises(FencedError, match="no lease of generation"):
        master.work("b", generation, evaluation="e")


def test_a_trainer_that_dies_while_a_master_starts_is_removed(
    master: Master, start: Callable[[], Master], trainers: Trainers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory reports only changes after the subscription; the earlier state is read at that time."""
    generation = trainers.live("a")
    until_ready(lambda: master.work("a", generation))
    subscribe = Directory.subscribe

    def with_a_death_before(self: Directory, callback: Callable[[], None]) -> None:
        if callback.__name__ == MasterService.read_directory.__name__:
            trainers.die("a")
            eventually(lambda: "a" not in self.trainers())
        subscribe(self, callback)

    monkeypatch.setattr(Directory, "subscribe", with_a_death_before)
    successor = start()
    with pytest.raises(FencedError, match="trainer a has no lease"):
        successor.work("a", generation)


def test_a_successor_assigns_the_tasks_of_dead_trainers_to_others(
    master: Master, start: Callable[[], Master], trainers: Trainers
) -> None:
    request = EvaluationDeclaration(name="e", dataset=DATASET)
    until_ready(lambda: master.service.tasks.declare_evaluation(request))
    generation = trainers.live("a")
    held = until_ready(lambda: master.work("a", generation)).assignments
    (first, second) = master.work("a", generation, evaluation="e").assignments
    successor = start()
    trainers.die("a")
    other = trainers.live("b")
    assert len(eventually(lambda: until_ready(lambda: successor.work("b", other)).assignments)) == len(held)
    again = until_ready(lambda: successor.work("b", other, evaluation="e")).assignments
    assert [each.task for each in again] == [first.task, second.task]
    done = [FinishedTask(epoch=e.epoch, position=e.position, attempt=e.attempt) for e in again]
    assert successor.work("b", other, evaluation="e", finished=done).outcome == "epochs_done"


def test_a_trainer_that_registered_again_without_a_master_holds_nothing(
    master: Master, trainers: Trainers, start: Callable[[], Master]
) -> None:
    first = trainers.live("a")
    held = [a.attempt for a in until_ready(lambda: master.work("a", first)).assignments]
    master.close()
    trainers.die("a")
    second = trainers.live("a")
    successor = start()
    given = until_ready(lambda: successor.work("a", second))
    assert len(given.assignments) == 2
    assert not {a.attempt for a in given.assignments} & set(held), "assigned again with other attempts"


def test_the_answer_to_a_join_is_about_the_requested_attempt(master: Master, trainers: Trainers) -> None:
    """A copy that another trainer has finished does not affect later assignments."""
    generation = trainers.live("a")
    first, second = until_ready(lambda: master.work("a", generation)).assignments
    finished = FinishedTask(epoch=first.epoch, position=first.position, attempt=first.attempt, pservers=[1 << 40])
    master.work("a", generation, finished=[finished], holding=[second.attempt])

    def ask(attempt: int) -> bool:
        request = JoinRequest(trainer="a", generation=generation, attempt=attempt, wait_s=0.0)
        return master.service.ask(request).holds_work

    assert not ask(first.attempt)
    assert ask(second.attempt)


def test_a_stopped_job_remains_stopped_under_the_next_master(
    master: Master, start: Callable[[], Master], trainers: Trainers
) -> None:
    generation = trainers.live("a")
    (held, *_) = until_ready(lambda: master.work("a", generation)).assignments
    master.service.ask(StopRequest(trainer="a", generation=generation, reason="a test"))
    successor = start()
    trainers.die("a")
    other = trainers.live("b")
    assert held
    assert eventually(lambda: until_ready(lambda: successor.work("b", other)).outcome == "none_now")
    status = successor.service.status()
    assert status.is_stopped
    assert status.tasks.todo == status.tasks.total


def test_an_answer_caused_by_another_thread_is_awaited(
    master: Master, trainers: Trainers, beside: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request expires between its answer and the time at which its thread learns of it."""
    generation = trainers.live("a")
    until_ready(lambda: master.work("a", generation))
    state = master.service._state
    carry_out = state._carry_out

    def slowly(effects: list[Effect], *more: Any) -> None:
        if any(isinstance(each, Answer) for each in effects):
            time.sleep(1.0)
        carry_out(effects, *more)

    monkeypatch.setattr(state, "_carry_out", slowly)
    joining = beside.submit(master.join, "a", generation, 0.5)
    waits(joining, master)
    trainers.die("a")
    with pytest.raises(FencedError, match="trainer a has no lease"):
        joining.result(WAIT_S)
