"""A trainer's part in a job: what it loses with its registration, and what it learns from the master's replies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from flightedl.client.participation import Participation
from flightedl.client.waiting import Waiting
from flightedl.domain.trainer.feed import Ask, Reports
from flightedl.errors import MessageError, UnavailableError
from flightedl.messages.base import decode, encode
from flightedl.messages.tasks import Assignment, TasksReply, TasksTicket
from tests.support.clock import FakeClock


class Trainer:
    """A trainer whose registration, membership and master the test determines."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.is_news: list[bool | Exception] = []
        self.sent: list[TasksTicket] = []
        self.reply = TasksReply(assignments=[], outcome="none_now", retry_after_s=0.1)
        self.is_held = True
        registration: Any = SimpleNamespace(
            trainer="t", generation=4, witness="slot-1", renewed=self._renewed, held=SimpleNamespace(is_held=True)
        )
        self.registration = registration
        servers: Any = SimpleNamespace(master=lambda: SimpleNamespace(address="m:1"), life=3)
        membership: Any = SimpleNamespace(
            member=6,
            lost=lambda: self.calls.append("membership lost"),
            all_done=lambda: self.calls.append("all done"),
            tasks_answered=lambda member, _: self.calls.append(f"answered {member}"),
        )
        end: Any = SimpleNamespace(replied=lambda _: self.calls.append("end"))
        self.participation = Participation(
            registration,
            servers,
            lambda: Waiting(FakeClock(jumps=True), 60.0, 60.0, lambda _: None),
            lambda: self.calls.append("tasks dropped"),
            lambda _records, _is_idle: None,
            lambda: self.requests,
            membership,
            end,
        )
        self.requests: Any = SimpleNamespace(ask=self._ask, close_idle=lambda: self.calls.append("closed"))

    def _renewed(self) -> bool:
        found = self.is_news.pop(0) if self.is_news else False
        if isinstance(found, Exception):
            raise found
        return found

    def _ask(self, _master: object, body: bytes, *, timeout_s: float) -> bytes:
        self.sent.append(decode(body, TasksTicket))
        return encode(self.reply)

    def fetch(self, evaluation: str = "") -> TasksReply:
        return self.participation.fetch(self.requests, Ask(Reports(), (), 1, 0.0, 0), evaluation)


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()


def test_membership_and_tasks_are_lost_with_the_registration_before_the_next_request(trainer: Trainer) -> None:
    trainer.is_news = [True]
    trainer.fetch()
    assert trainer.calls == ["membership lost", "tasks dropped", "end", "answered 6"]
    trainer.calls.clear()
    trainer.fetch()
    assert trainer.calls == ["end", "answered 6"]
    assert {(each.trainer, each.generation) for each in trainer.sent} == {("t", 4)}


def test_nothing_is_requested_without_a_registration(trainer: Trainer) -> None:
    trainer.is_news = [UnavailableError("etcd is away")]
    with pytest.raises(UnavailableError):
        trainer.fetch()
    assert not trainer.sent


def test_the_end_of_all_epochs_is_learned_from_training_and_not_from_evaluations(trainer: Trainer) -> None:
    trainer.reply = msgspec.structs.replace(trainer.reply, outcome="epochs_done")
    trainer.fetch("an evaluation")
    assert trainer.calls == ["answered 6"]
    assert trainer.sent[0].life == 3
    trainer.fetch()
    assert trainer.calls[1:] == ["end", "all done", "answered 6"]
    assert trainer.sent[1].life == 0


def test_a_task_without_places_of_its_records_is_rejected(trainer: Trainer) -> None:
    given = Assignment(
        epoch=0, position=0, task=0, attempt=1, first_batch=0, end_batch=1, batch_count=1, seed=None, chunks=[]
    )
    trainer.reply = msgspec.structs.replace(trainer.reply, assignments=[given], outcome="given")
    with pytest.raises(MessageError, match="no file positions"):
        trainer.fetch()


def test_a_lost_lease_is_renewed_only_while_there_is_no_model(trainer: Trainer) -> None:
    trainer.registration.held.is_held = False
    trainer.is_news = [UnavailableError("not yet"), True]
    trainer.participation.require_lease()
    assert trainer.calls == ["membership lost", "tasks dropped"]
    trainer.calls.clear()
    trainer.is_news = [True]
    trainer.participation._parameters = object()  # type: ignore[assignment]
    trainer.participation.require_lease()
    assert not trainer.calls
    assert trainer.is_news == [True]
