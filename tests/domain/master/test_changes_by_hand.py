"""Requests of people to a running job: another mode, a checkpoint, and the replies while they wait."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flightedl.domain.checkpoint.values import CheckpointSettings, WriteManifest
from flightedl.domain.consistency.modes import Async, Sync
from flightedl.domain.master import effects as out
from flightedl.domain.master import events
from flightedl.domain.master.core import MasterCore
from flightedl.domain.master.members import waiting_for_mode
from flightedl.domain.master.state import CoreSettings
from flightedl.domain.queue.values import QueueSettings
from flightedl.errors import NotReadyError, UsageError
from flightedl.messages.checkpoints import CheckpointRequest
from flightedl.messages.declarations import DatasetDeclaration, DeclaredDataset
from flightedl.messages.tasks import FinishedTask, ModeRequest, StopRequest, TasksReply

from .test_core import PSERVER, A, B, Bench, save


def by_hand(effects: list[out.Effect]) -> list[out.Note]:
    return [each for each in effects if isinstance(each, out.Note) and each.kind is out.Kind.CHANGED_BY_HAND]


def asked(bench: Bench, mode: Any, **more: Any) -> tuple[list[out.Note], Any]:
    bench.calls += 1
    effects = bench.apply(events.Asked(bench.calls, ModeRequest(mode=mode, wait_s=0.0, **more)))
    return by_hand(effects), bench.reply(bench.calls)


# the mode


@pytest.mark.parametrize("mode", [None, Sync().to_json()])
def test_requesting_no_mode_or_the_current_mode_changes_nothing(mode: Any) -> None:
    bench = Bench()
    bench.serve()
    before = bench.core.revision
    notes, reply = asked(bench, mode)
    assert not notes
    assert reply.is_agreed
    assert bench.core.revision == before


def test_another_mode_is_proposed_once_and_the_reply_names_the_missing_pservers() -> None:
    bench = Bench()
    bench.serve()
    notes, reply = asked(bench, Async().to_json())
    assert [note.values for note in notes] == [(Sync(), Async())]
    assert not reply.is_agreed
    members = bench.core.members
    assert members is not None
    assert waiting_for_mode(members.membership).startswith("pserver 0 to begin Async")
    assert not asked(bench, Async().to_json())[0], "it is pending"
    bench.serve()
    assert waiting_for_mode(members.membership) == ""


def test_a_mode_with_far_shorter_pushes_than_requested_is_rejected_unless_it_is_permitted() -> None:
    bench = Bench()
    bench.serve()
    dataset = DeclaredDataset(
        index_hash="",
        task_count=10,
        record_count=30,
        schema="",
        declaration=DatasetDeclaration(urls=["a"], batch_size=1),
        task_batches=[(3, 10)],
    )
    bench.core._declarations.known = msgspec.structs.replace(bench.core.declaration, dataset=dataset)
    mode = Async(push_every=7).to_json()
    notes, reply = asked(bench, mode)
    text = "with push_every=7, a push has 3.0 batches on average"
    assert isinstance(reply, UsageError)
    assert str(reply) == f"{text}: choose a lower --push-every, or permit it with --short-pushes"
    assert not notes
    _, reply = asked(bench, mode, short_pushes=True)
    assert reply.pushes == text
    assert asked(bench, None)[1].pushes == text
    assert asked(bench, Sync().to_json())[1].pushes == ""


def test_without_a_model_there_is_no_mode_to_change() -> None:
    core = MasterCore(CoreSettings(generation=5, pserver_count=1), 0.0)
    (answer,) = core.apply(events.Asked(1, ModeRequest(mode=Async().to_json())), 0.0)
    assert isinstance(answer, out.Answer)
    assert isinstance(answer.reply, NotReadyError)


# a checkpoint


@pytest.mark.parametrize("is_last", [True, False])
def test_the_last_checkpoint_is_retried_at_once_after_a_failure_of_the_store(is_last: bool) -> None:
    settings = CheckpointSettings(interval_s=None, at_epoch_end=False, retry_floor_s=50.0)
    bench = Bench(keeps_checkpoints=True, checkpoints=settings)
    bench.serve()
    bench.apply(events.TimePassed())
    bench.serve()
    bench.apply(events.ManifestFailed(1, "no space"))
    effects = bench.apply(events.Asked(1, CheckpointRequest(wait_s=2.0), is_last))
    assert [each.work for each in effects if isinstance(each, out.StoreWork)] == [WriteManifest(1)] * is_last
    assert 1 not in bench.answers, "the request waits"


# an evaluation


def evaluated(bench: Bench, **report: Any) -> tuple[TasksReply, int]:
    """Return the reply to a request for tasks, and the revision that must be stored before the reply is sent."""
    call = bench.ask(evaluation="e", **report)
    return bench.reply(call), bench.answers[call].revision


def test_assignments_of_an_evaluation_are_stored_and_its_result_is_returned_at_its_end() -> None:
    bench = Bench()
    declared = DeclaredDataset(
        index_hash="i",
        task_count=1,
        record_count=1,
        schema="",
        declaration=DatasetDeclaration(urls=["file:///x"], batch_size=1),
    )
    bench.apply(events.EvaluationIndexed("e", declared, QueueSettings(1, lambda _: 1)))
    before = bench.core.revision
    reply, revision = evaluated(bench)
    assert revision == bench.core.revision == before + 1
    assert (len(reply.assignments), reply.metrics) == (1, {})
    nothing, _ = evaluated(bench, holding=[reply.assignments[0].attempt])
    assert not nothing.assignments
    assert bench.core.revision == revision, "nothing has changed"
    report = FinishedTask(
        epoch=0, position=0, attempt=reply.assignments[0].attempt, pservers=[PSERVER], metrics={"loss": (6.0, 2.0)}
    )
    done, revision = evaluated(bench, finished=[report])
    assert (done.outcome, done.metrics) == ("epochs_done", {"loss": 3.0})
    assert revision == bench.core.revision > before + 1


# a deterministic run


def test_members_of_a_deterministic_epoch_remain_until_the_next_one_begins() -> None:
    bench = Bench(Sync(deterministic=True), tasks=2, epochs=2, trainer_count=1)
    bench.serve()
    first = bench.take()
    joining = bench.join()
    bench.serve()
    member = bench.reply(joining).member
    assert member
    reply = bench.finish(first, want=1)
    assert reply.member == member, "the epoch is running"
    (second,) = reply.assignments
    assert second.epoch == 0
    (third,) = bench.finish(second, want=1).assignments
    assert third.epoch == 1
    assert bench.core.members is not None
    assert not bench.core.members.member_of("a")


@pytest.mark.parametrize(("wait_s", "is_answered"), [(0.0, True), (0.5, False)])
def test_a_checkpoint_request_waits_until_its_timeout(wait_s: float, is_answered: bool) -> None:
    bench = Bench(Async(), keeps_checkpoints=True)
    assert (bench.call(CheckpointRequest(wait_s=wait_s)) in bench.answers) == is_answered


def test_a_last_checkpoint_is_requested_again_by_its_ticket() -> None:
    bench = Bench(Async(), keeps_checkpoints=True)
    bench.serve()
    bench.apply(events.Asked(1, CheckpointRequest(wait_s=0.0), is_last=True))
    save(bench)
    bench.apply(events.Asked(2, CheckpointRequest(ticket=bench.reply(1).ticket, wait_s=0.0), is_last=True))
    assert (bench.reply(1).complete, bench.reply(2).complete) == (False, True)


def test_a_trainer_of_a_stopped_deterministic_run_joins_alone() -> None:
    """If one of two trainers has finished, the other one need not wait for it."""
    bench = Bench(Sync(deterministic=True), trainer_count=2)
    bench.serve()
    bench.ask("a", A, wait_s=2.0)
    (given,) = bench.reply(bench.ask("b", B)).assignments
    bench.call(StopRequest(trainer="b", generation=B, reason="enough"))
    joining = bench.join("b", B, attempt=given.attempt)
    bench.serve()
    assert bench.reply(joining).member
