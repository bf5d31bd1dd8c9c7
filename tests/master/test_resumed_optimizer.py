"""A resumed job may give its optimizer other settings, by the first declaration of its model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from flightedl.domain.model.optimizers import SGD, Adagrad, Adam, Optimizer, RMSprop
from flightedl.domain.model.schedules import Cosine
from flightedl.domain.tables.spec import TableSpec
from flightedl.errors import DeclarationError, NotReadyError, UnavailableError, UsageError
from flightedl.master import resuming
from flightedl.messages.base import decode, encode
from flightedl.messages.checkpoints import CheckpointRequest
from flightedl.messages.declarations import DeclaredModel, JobDeclaration, ModelDeclaration, ParameterDeclaration
from flightedl.messages.tasks import ModeRequest
from flightedl.ports import Put
from tests.support.contracts.coordinator import eventually

from .job_of_twins import KEYS, MODEL, TASKS, Job, Master

MakeJob = Callable[..., Job]


def model_of(optimizer: Optimizer, **changes: Any) -> ModelDeclaration:
    return msgspec.structs.replace(MODEL, optimizer=optimizer.to_json(), **changes)


def resumed(job: Job, declared: ModelDeclaration = MODEL) -> Master:
    """Return a job of this model, as ``resuming.begin`` writes it to etcd, with the master that continues it."""
    job.start_master().declare(model=declared)
    job.end_master()
    entry = job.coordinator.get(KEYS.job)
    assert entry is not None
    declaration = resuming.former(decode(entry.value, JobDeclaration))
    job.coordinator.transact([], [Put(KEYS.job, encode(declaration))])
    return job.start_master()


def stored(job: Job) -> DeclaredModel:
    """Return the declaration that pservers read."""
    entry = job.coordinator.get(KEYS.job)
    assert entry is not None
    model = decode(entry.value, JobDeclaration).model
    assert model is not None
    return model


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (SGD(lr=0.1), SGD(lr=0.001)),
        (SGD(lr=0.1), SGD(lr=Cosine(0.1, updates=100))),
        (Adam(), Adam(lr=0.1, beta1=0.5, beta2=0.9, eps=1e-4, weight_decay=0.1, clip_value=1.0, clip_norm=2.0)),
        (Adam(overrides={"w": {"lr": 1.0}}), Adam()),
        (Adam(), Adam(overrides={"w": {"lr": 1.0}})),
        (SGD(lr=0.1), SGD(lr=0.1)),
    ],
)
def test_a_resumed_job_may_have_other_settings(make_job: MakeJob, before: Optimizer, now: Optimizer) -> None:
    job = make_job()
    master = resumed(job, model_of(before))
    assert stored(job).is_former, "no pserver uses the former settings"
    reply = master.service.declaring.model(model_of(now))
    assert Optimizer.from_json(reply.declaration.optimizer) == now
    assert stored(job) == reply, "stored before it is answered"
    assert not reply.is_former


@pytest.mark.parametrize(
    ("before", "now", "changes", "text"),
    [
        (
            SGD(lr=0.1),
            Adam(lr=0.1),
            {},
            r"optimizer.kind is 'SGD', not 'Adam'. Only the optimizer's settings may change",
        ),
        (Adam(), Adam(amsgrad=True), {}, "to average, square_average, largest_square_average, which is not possible"),
        (
            RMSprop(momentum=0.9),
            RMSprop(),
            {},
            "the optimizer's slots of parameter 'w' would change from square_average, velocity to",
        ),
        (SGD(lr=0.1), SGD(lr=0.2), {"mode": {"kind": "Async"}}, r"mode.kind is 'Sync', not 'Async'. Only the"),
        (SGD(lr=0.1), SGD(lr=0.2), {"wire": "bfloat16"}, r"wire is '', not 'bfloat16'. Only the optimizer's settings"),
        (
            SGD(lr=0.1),
            SGD(lr=0.2),
            {"parameters": [ParameterDeclaration(name="w", shape=[5], dtype="float32")]},
            r"parameters\.w\.shape\[0\] is 4, not 5. Only the optimizer's settings may change",
        ),
    ],
)
def test_other_changes_are_refused(
    make_job: MakeJob, before: Optimizer, now: Optimizer, changes: dict[str, Any], text: str
) -> None:
    job = make_job()
    master = resumed(job, model_of(before))
    with pytest.raises(DeclarationError, match=text):
        master.service.declaring.model(model_of(now, **changes))
    assert stored(job).is_former, "another trainer may still declare it correctly"
    master.service.declaring.model(model_of(before))
    assert not stored(job).is_former


def _table(optimizer: Optimizer, name: str = "users", dim: int = 4, **changes: Any) -> list[dict[str, Any]]:
    return [TableSpec(name, dim, optimizer, **changes).to_json()]


def test_the_optimizer_of_a_table_may_have_other_settings_too(make_job: MakeJob) -> None:
    job = make_job()
    master = resumed(job, model_of(SGD(lr=0.1), tables=_table(Adagrad(lr=0.1))))
    refused = [
        (_table(Adagrad(lr=0.1, initial_accumulator=1.0)), "the optimizer's slots of table 'users' would change"),
        (_table(SGD(lr=0.1)), "tables.users.optimizer.kind is 'Adagrad', not 'SGD'"),
        (_table(Adagrad(lr=0.1), seed=3), "tables.users.seed is 0, not 3"),
        ([], "tables.users is"),
    ]
    for tables, text in refused:
        with pytest.raises(DeclarationError, match=text):
            master.service.declaring.model(model_of(SGD(lr=0.1), tables=tables))
    now = model_of(SGD(lr=0.1), tables=_table(Adagrad(lr=0.5), first_rows="s3://b/rows.parquet"))
    assert master.service.declaring.model(now).declaration == now


@pytest.mark.parametrize("name", ["my_optimizer", "my.optimizer", "tables.optimizer", "optimizer"])
def test_the_shape_of_a_table_with_any_name_must_not_change(make_job: MakeJob, name: str) -> None:
    master = resumed(make_job(), model_of(SGD(lr=0.1), tables=_table(SGD(lr=0.1), name)))
    with pytest.raises(DeclarationError, match=f"tables.{name}.dim is 4, not 8"):
        master.service.declaring.model(model_of(SGD(lr=0.1), tables=_table(SGD(lr=0.1), name, 8)))
    now = model_of(SGD(lr=0.1), tables=_table(SGD(lr=0.2), name))
    assert master.service.declaring.model(now).declaration == now


def test_a_pattern_without_matches_is_refused(make_job: MakeJob) -> None:
    master = resumed(make_job())
    with pytest.raises(UsageError, match="matches none of the 1 parameters"):
        master.service.declaring.model(model_of(SGD(lr=0.1, overrides={"v": {"lr": 1.0}})))


def test_a_later_declaration_of_the_former_settings_is_refused(make_job: MakeJob) -> None:
    job = make_job()
    master = resumed(job, model_of(SGD(lr=0.1)))
    master.service.declaring.model(model_of(SGD(lr=0.001)))
    for each in (master, job.start_master()):
        with pytest.raises(DeclarationError, match=r"optimizer.lr is 0.001, not 0.1\. Declare the same"):
            each.service.declaring.model(model_of(SGD(lr=0.1)))
        assert each.service.declaring.model(model_of(SGD(lr=0.001))) == stored(job)


def test_a_job_that_was_not_resumed_keeps_its_settings(make_job: MakeJob) -> None:
    master = make_job().start_master()
    master.declare(model=model_of(SGD(lr=0.1)))
    with pytest.raises(DeclarationError, match=r"optimizer.lr is 0.1, not 0.2\. Declare the same"):
        master.service.declaring.model(model_of(SGD(lr=0.2)))


def test_a_master_that_dies_before_storing_the_settings_leaves_the_choice(make_job: MakeJob) -> None:
    job = make_job()
    master = resumed(job)
    job.master_coordinator.disconnect()
    with pytest.raises((NotReadyError, UnavailableError)):
        master.service.declaring.model(model_of(SGD(lr=0.5)))
    master.service.close()  # Before ``start_master`` reconnects it, so that it cannot store them after all.
    assert stored(job).is_former
    successor = job.start_master()
    assert successor.service.declaring.model(model_of(SGD(lr=0.25))).declaration.optimizer["lr"] == 0.25


def test_the_mode_may_be_changed_before_the_model_is_declared(make_job: MakeJob) -> None:
    job = make_job()
    master = resumed(job)
    master.service.ask(ModeRequest(mode={"kind": "Async"}, wait_s=0.0))
    reply = master.service.declaring.model(model_of(SGD(lr=0.5)))
    assert reply.present_mode["kind"] == "Async"


def test_a_model_that_was_not_declared_again_is_not_saved(make_job: MakeJob) -> None:
    master = resumed(make_job())
    with pytest.raises(NotReadyError, match="no trainer has declared the model"):
        master.service.ask(CheckpointRequest(reason="a test", wait_s=0.0))


def test_a_finished_job_ends_although_no_trainer_declares_the_model(make_job: MakeJob) -> None:
    job = make_job(is_kept=False)
    master = resumed(job)
    pserver = job.start_pserver(0, {0: range(TASKS)})
    a = job.start_trainer("a")
    for each in range(TASKS):
        (given,) = master.work("a", a, want=1).assignments
        assert stored(job).is_former, f"task {each} is still to be done"
        master.report("a", a, given, by=[pserver.generation])
    assert eventually(lambda: master.says_done("a", a))
    assert not stored(job).is_former, "pservers load it and announce their applied batches"
