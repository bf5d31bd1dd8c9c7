"""JSON from unknown senders changes no job: a request that acts names its target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.errors import MessageError, NotFoundError, UnregisteredError
from flightedl.master.flight import MasterFlight
from flightedl.messages.tasks import StopRequest
from flightedl.ports import Put
from flightedl.pserver.flight import PserverFlight
from flightedl.rpc.call import Call
from flightedl.rpc.identity import Caller
from tests.calls import call_of
from tests.support.contracts.coordinator import eventually

from .job_of_twins import KEYS, Job, Master

#: Actions that only return something.
TELLING = {"status", "stacks", "events"}
STRANGE = [b"", b"{}", b"[]", b"null", b"7", b'"stop"', b'{"nope": 1}', b'{"nope": {}, "more": []}', b"\xff"]


class Unasked:
    """A service that fails the test if it is called."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: pytest.fail(f"{name} was called")


def call() -> Call:
    return call_of("action", Caller("stranger", "s"))


@pytest.fixture
def master(make_job: Callable[..., Job]) -> Master:
    job = make_job()
    job.start_pserver(0)
    master = job.start_master()
    master.declare()
    job.start_trainer("a")
    eventually(lambda: master.state.core.pservers.is_everybody_settled)
    return master


def actions(master: Master) -> dict[str, Callable[[bytes, Call], bytes]]:
    return dict(MasterFlight(master.service).routes().actions)


@pytest.mark.parametrize("body", STRANGE, ids=repr)
def test_a_master_ignores_strange_json(master: Master, body: bytes) -> None:
    refused = set()
    for verb, action in actions(master).items():
        before = master.state.core.encode()
        try:
            action(body, call())
        except MessageError:
            refused.add(verb)
        assert master.state.core.encode() == before, verb
    assert set(actions(master)) - refused <= TELLING


@pytest.mark.parametrize("body", STRANGE, ids=repr)
def test_a_pserver_ignores_strange_json(body: bytes) -> None:
    routes = PserverFlight(cast("Any", Unasked()), SystemClock()).routes()
    for verb in set(routes.actions) - TELLING:
        with pytest.raises(MessageError):
            routes.actions[verb](body, call())


@pytest.mark.parametrize(
    "verb", ["set_mode", "checkpoint", "retry_failed", "drop_failed", "end_growth", "stop"], ids=str
)
@pytest.mark.parametrize("named", [{}, {"job": ""}, {"job": "another"}], ids=str)
def test_a_request_that_changes_a_job_names_it(master: Master, verb: str, named: dict[str, str]) -> None:
    sender: dict[str, object] = {"trainer": "a", "generation": 1} if verb in {"end_growth", "stop"} else {}
    more = {"reason": "a test"} if verb == "stop" else {}
    with pytest.raises(MessageError, match="names another job"):
        actions(master)[verb](msgspec.json.encode({**sender, **more, **named}), call())
    assert not master.service.status().is_stopped


def test_a_request_that_names_its_job_is_handled(master: Master) -> None:
    with pytest.raises(NotFoundError):
        actions(master)["drop_failed"](b'{"job": "demo"}', call())
    assert actions(master)["set_mode"](b'{"job": "demo", "wait_s": 0}', call())


def test_only_a_registered_trainer_stops_a_job_and_the_status_names_it(make_job: Callable[..., Job]) -> None:
    job = make_job()
    job.start_pserver(0)
    master = job.start_master()
    master.declare()
    generation = job.start_trainer("a")
    master.work("a", generation, want=0)
    request = StopRequest(job="demo", trainer="a", generation=generation, reason="good enough", name="trainer-0")
    for stranger in ({"trainer": "b"}, {"generation": generation - 1}):
        with pytest.raises(UnregisteredError):
            actions(master)["stop"](msgspec.json.encode(msgspec.structs.replace(request, **stranger)), call())
    with pytest.raises(MessageError):
        actions(master)["stop"](msgspec.json.encode(msgspec.structs.replace(request, reason="")), call())
    assert not master.service.status().is_stopped
    actions(master)["stop"](msgspec.json.encode(request), call())
    told = master.service.status()
    assert (told.is_stopped, told.stopped_by, told.stop_reason) == (True, "trainer-0", "good enough")
    job.end_master()
    told = job.start_master().service.status()
    assert (told.is_stopped, told.stopped_by, told.stop_reason) == (True, "trainer-0", "good enough")


def test_a_stop_stored_by_an_older_version_still_counts(make_job: Callable[..., Job]) -> None:
    job = make_job()
    job.start_master().declare()
    job.end_master()
    job.coordinator.transact([], [Put(KEYS.stopped, b"{}")])
    told = job.start_master().service.status()
    assert (told.is_stopped, told.stopped_by) == (True, "a trainer")
