"""Reports and declarations of trainers: those of live trainers count, and only usable models are adopted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from flightedl.errors import FlightedlError, MessageError, NotFoundError, UsageError
from flightedl.messages.status import StacksRequest
from flightedl.messages.tasks import LogRequest
from flightedl.ports import Delete
from tests.support.contracts.coordinator import eventually

from .job_of_twins import KEYS, MODEL, Job, until_ready


def report(trainer: str, generation: int, **more: object) -> LogRequest:
    return LogRequest(trainer=trainer, generation=generation, records=1, batches=1, **more)  # type: ignore[arg-type]


def test_only_reports_of_live_trainers_count(make_job: Callable[..., Job]) -> None:
    job = make_job()
    master = job.start_master()
    a = job.start_trainer("a")
    progress = master.state.progress
    eventually(lambda: "a" in master.state.core.trainers)
    master.service.log(report("a", a))
    master.service.log(report("ghost", 1))
    assert progress.trainers.keys() == {"a"}
    assert progress.batches == 1
    job.coordinator.transact([], [Delete(KEYS.trainer("a"))])
    eventually(lambda: "a" not in master.state.core.trainers)
    assert not progress.trainers, "a trainer that has left is still shown"
    assert progress.batches == 1


def test_stack_traces_are_those_after_the_request(make_job: Callable[..., Job]) -> None:
    job = make_job()
    master = job.start_master()
    a = job.start_trainer("a")
    eventually(lambda: "a" in master.state.core.trainers)
    master.service.log(report("a", a, stacks="of an earlier request"))
    with ThreadPoolExecutor(1) as pool:
        request = StacksRequest(trainer="a", wait_s=10.0)
        asked = pool.submit(master.service.stacks_of_trainer, request, threading.Event())
        eventually(lambda: master.service.log(report("a", a)).wants_stacks)
        master.service.log(report("a", a, stacks="now"))
        assert asked.result(20.0).text == "now"
    assert not master.service.log(report("a", a)).wants_stacks
    with pytest.raises(NotFoundError, match="no trainer b"):
        master.service.stacks_of_trainer(StacksRequest(trainer="b"), threading.Event())


@pytest.mark.parametrize(
    "wrong", [{"mode": {"kind": "Often"}}, {"optimizer": {"kind": "Magic"}}, {"parameters": [MODEL.parameters[0]] * 2}]
)
def test_a_model_that_cannot_be_trained_is_not_adopted(make_job: Callable[..., Job], wrong: dict[str, Any]) -> None:
    job = make_job()
    master = job.start_master()
    job.start_trainer("a")
    with pytest.raises(FlightedlError) as raised:
        until_ready(lambda: master.service.declaring.model(msgspec.structs.replace(MODEL, **wrong)))
    assert isinstance(raised.value, UsageError | MessageError)
    assert until_ready(lambda: master.service.declaring.model(MODEL)).declaration == MODEL
