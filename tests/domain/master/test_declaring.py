"""Declarations as events: the first one wins, and a different one is refused."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from flightedl.domain.consistency.modes import Async, Sync
from flightedl.domain.master import effects as out
from flightedl.domain.master import events
from flightedl.domain.master.core import MasterCore
from flightedl.domain.master.state import CoreSettings, StoredState
from flightedl.domain.model.optimizers import SGD, Adam
from flightedl.domain.queue.values import QueueSettings
from flightedl.errors import DeclarationError, UsageError
from flightedl.messages.declarations import (
    DatasetDeclaration,
    DeclaredDataset,
    DeclaredModel,
    Drawing,
    EvaluationDeclaration,
    JobDeclaration,
    ModelDeclaration,
    ParameterDeclaration,
)

DATA = DatasetDeclaration(urls=["/d/*"], batch_size=4, seed=1, shuffle=True)
REPLY = DeclaredDataset(index_hash="i", task_count=2, record_count=8, schema="", declaration=DATA)
TASKS = QueueSettings(2, lambda _: 1, seed=1, shuffle=True)
MODEL = ModelDeclaration(
    parameters=[ParameterDeclaration(name="w", shape=[3], dtype="float32")],
    optimizer=SGD(lr=0.1).to_json(),
    mode=Sync().to_json(),
)


def core_of(stored: StoredState | None = None, tasks: QueueSettings | None = None) -> MasterCore:
    return MasterCore(
        CoreSettings(generation=5, pserver_count=1, keeps_checkpoints=False), 0.0, stored or StoredState(), tasks
    )


def reply(core: MasterCore, event: events.Event) -> Any:
    (answer,) = [each for each in core.apply(event, 0.0) if isinstance(each, out.Answer)]
    core.check()
    return answer.reply


def notes(effects: list[out.Effect]) -> list[str]:
    return [each.text for each in effects if isinstance(each, out.Note)]


def test_a_dataset_is_declared_when_its_tasks_are_known() -> None:
    core = core_of()
    assert isinstance(reply(core, events.Asked(1, DATA)), out.Undeclared)
    core.apply(events.DatasetIndexed(REPLY, TASKS), 0.0)
    assert reply(core, events.Asked(2, DATA)) is REPLY
    assert core.work is not None
    assert core.work.queue.counts().total == 2


def test_the_first_dataset_wins() -> None:
    core = core_of()
    core.apply(events.DatasetIndexed(REPLY, TASKS), 0.0)
    revision = core.revision
    other = replace(DATA, urls=["/e/*"])
    core.apply(events.DatasetIndexed(replace(REPLY, declaration=other), TASKS), 0.0)
    assert core.revision == revision
    refused = reply(core, events.Asked(1, other))
    assert isinstance(refused, DeclarationError)
    assert "/e/*" in str(refused)


def test_a_job_of_an_older_version_goes_on_with_its_tasks() -> None:
    """The declaration of that version has no ``shuffle_bytes``."""
    now = replace(DATA, shuffle_bytes=5)
    drawn = replace(REPLY, declaration=now, drawing=Drawing(seed=1, size_bytes=5, version=1))
    for known, declared, is_same in ((REPLY, now, True), (drawn, now, True), (drawn, DATA, False)):
        core = core_of()
        core.apply(events.DatasetIndexed(known, TASKS), 0.0)
        answer = reply(core, events.Asked(1, declared))
        assert (answer is known) == is_same
        assert is_same or "shuffle_bytes is 5, not 0" in str(answer)


def resumed() -> MasterCore:
    """Settings of a job that had two tasks and one epoch."""
    first = core_of()
    first.apply(events.DatasetIndexed(REPLY, TASKS), 0.0)
    queue, failures = first.encode()["queue"], first.encode()["failures"]
    declaration = JobDeclaration(dataset=REPLY, is_resumed=True)
    return core_of(StoredState(declaration=declaration, queue=queue, failures=failures, is_resumed=True), TASKS)


def test_a_resumed_job_adopts_the_order_of_the_next_declaration() -> None:
    core = resumed()
    again = replace(DATA, seed=2, epochs=3)
    assert reply(core, events.Asked(1, again)).declaration is again
    assert core.work is not None
    assert core.work.queue.settings.epochs == 3
    assert isinstance(reply(core, events.Asked(2, DATA)), DeclarationError)


@pytest.mark.parametrize(
    ("again", "said"),
    [
        (DATA, []),
        (replace(DATA, epochs=3), ["epochs changed before=%s now=%s"]),
        (replace(DATA, seed=2), ["order changed shuffle=%s seed=%d first_epoch=%d"]),
    ],
)
def test_changes_of_a_resumed_job_are_noted(again: DatasetDeclaration, said: list[str]) -> None:
    assert notes(resumed().apply(events.Asked(1, again), 0.0)) == said


def test_a_dataset_grows_until_its_growth_ends() -> None:
    declared = replace(DATA, follow=True)
    core = core_of()
    indexed = events.DatasetIndexed(
        replace(REPLY, declaration=declared), QueueSettings(2, lambda _: 1, seed=1, shuffle=True, follow=True)
    )
    core.apply(indexed, 0.0)
    core.apply(events.FilesJoined(5, lambda task: 1 + task // 2), 0.0)
    assert core.work is not None
    assert core.work.queue.settings.batch_counts(4) == 3
    with pytest.raises(UsageError, match="Do not remove files"):
        core.apply(events.FilesJoined(4, lambda _: 1), 0.0)
    core.apply(events.GrowthEnded(), 0.0)
    assert not core.work.queue.is_growing
    assert core.work.queue.task_count == 5


def deduplicates(core: MasterCore) -> bool:
    assert core.work is not None
    return core.work.queue.settings.is_deduplicated


def test_a_task_has_two_holders_only_in_a_job_with_a_model() -> None:
    core = core_of()
    core.apply(events.DatasetIndexed(REPLY, TASKS), 0.0)
    assert not deduplicates(core)
    core.apply(events.ModelPlanned(MODEL, "p", 1), 0.0)
    assert deduplicates(core)
    queue, failures = core.encode()["queue"], core.encode()["failures"]
    for is_former in (False, True):
        model = DeclaredModel(declaration=MODEL, pservers=1, plan_hash="p", is_former=is_former)
        stored = StoredState(declaration=JobDeclaration(model=model), queue=queue, failures=failures)
        successor = core_of(stored, TASKS)
        assert deduplicates(successor) != is_former
        reply(successor, events.Asked(1, MODEL))
        assert deduplicates(successor)


def test_a_model_may_be_declared_before_the_dataset() -> None:
    core = core_of()
    core.apply(events.ModelPlanned(MODEL, "p", 1), 0.0)
    core.apply(events.DatasetIndexed(REPLY, TASKS), 0.0)
    assert deduplicates(core)


def test_a_model_is_declared_when_it_has_a_plan() -> None:
    core = core_of()
    assert isinstance(reply(core, events.Asked(1, MODEL)), out.Undeclared)
    assert core.members is None
    said = notes(core.apply(events.ModelPlanned(MODEL, "p", 1), 0.0))
    assert said == ["model declared parameters=%d blocks=%d tables=%d"]
    assert core.members is not None
    declared = reply(core, events.Asked(2, MODEL))
    assert (declared.declaration, declared.plan_hash, declared.pservers) == (MODEL, "p", 1)
    assert not notes(core.apply(events.ModelPlanned(replace(MODEL, mode=Async().to_json()), "q", 1), 0.0))
    assert core.declaration.model is not None
    assert core.declaration.model.plan_hash == "p"


def test_a_resumed_model_may_have_other_settings_of_its_optimizer() -> None:
    former = DeclaredModel(declaration=MODEL, pservers=1, plan_hash="p", is_former=True)
    core = core_of(StoredState(declaration=JobDeclaration(model=former)))
    adam = replace(MODEL, optimizer=Adam(lr=0.1).to_json())
    assert isinstance(reply(core, events.Asked(1, adam)), DeclarationError)
    slower = replace(MODEL, optimizer=SGD(lr=0.01).to_json())
    effects = core.apply(events.Asked(2, slower), 0.0)
    (answer,) = [each for each in effects if isinstance(each, out.Answer)]
    assert len(notes(effects)) == 1
    assert isinstance(answer.reply, DeclaredModel)
    assert answer.reply.declaration is slower
    assert not answer.reply.is_former


def test_an_unchanged_resumed_model_is_not_noted() -> None:
    former = DeclaredModel(declaration=MODEL, pservers=1, plan_hash="p", is_former=True)
    core = core_of(StoredState(declaration=JobDeclaration(model=former)))
    assert not notes(core.apply(events.Asked(1, MODEL), 0.0))
    assert not core.has_former_model


def test_an_evaluation_is_declared_when_its_tasks_are_known() -> None:
    core = core_of()
    assert isinstance(reply(core, events.Asked(1, EvaluationDeclaration(name="e", dataset=DATA))), out.Undeclared)
    core.apply(events.EvaluationIndexed("e", REPLY, TASKS), 0.0)
    assert reply(core, events.Asked(2, EvaluationDeclaration(name="e", dataset=DATA))) is REPLY
    refused = reply(core, events.Asked(3, EvaluationDeclaration(name="e", dataset=replace(DATA, batch_size=5))))
    assert isinstance(refused, DeclarationError)
    assert "evaluation 'e'" in str(refused)
