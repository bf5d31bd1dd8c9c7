"""Requests of the master over a real socket: a pserver only accepts those for its own shard plan."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.coordination.directory import Directory
from flightedl.coordination.keys import JobKeys
from flightedl.coordination.records import ServerRecord
from flightedl.domain.checkpoint.manifest import Skipped
from flightedl.domain.consistency.modes import Sync
from flightedl.domain.model.optimizers import SGD
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import plan_for
from flightedl.domain.pserver.life_values import Facts, State
from flightedl.errors import FencedError, NotReadyError, UnavailableError
from flightedl.kernels.compiled import Update
from flightedl.master import resuming
from flightedl.messages.base import decode, encode
from flightedl.messages.control import (
    AppliedReply,
    AppliedRequest,
    OrderNumber,
    ReloadRequest,
    SealRequest,
    SnapshotRequest,
    ViewMember,
    ViewReply,
    ViewRequest,
)
from flightedl.messages.declarations import DeclaredModel, JobDeclaration, ModelDeclaration, ParameterDeclaration
from flightedl.messages.parameters import BatchIdentity, PushHeader
from flightedl.ports import Put
from flightedl.pserver.flight import PserverFlight
from flightedl.pserver.service import PserverService
from flightedl.rpc import Connection, FlightServer, ServerIdentity
from flightedl.testing.memory import MemoryCoordinator
from flightedl.wire.rows import decode_batch, encode_rows

KEYS = JobKeys("demo")
PLAN = plan_for([ParameterSpec("w", (4,))], 1, 0)


def orders(plan_hash: str) -> dict[str, msgspec.Struct]:
    """Return one of each request of a master."""
    member = ViewMember(trainer="t", generation=1, member=1, first_round=0)
    return {
        "view": ViewRequest(plan_hash=plan_hash, master_generation=1, serial=1, members=[member]),
        "snapshot": SnapshotRequest(OrderNumber(1, 1, 1), None, "c-1/shard", plan_hash=plan_hash),
        "seal": SealRequest(plan_hash=plan_hash, master_generation=1, epochs=[(0, 1)]),
        "applied": AppliedRequest(plan_hash=plan_hash),
        "reload": ReloadRequest(plan_hash=plan_hash, master_generation=1),
    }


class Served:
    """A pserver that waits for the first values of a declared model."""

    def __init__(self, directory: Directory) -> None:
        clock = self.clock = SystemClock()
        self.directory = directory
        #: Reasons for which a new start of the process was requested.
        self.ends: list[str] = []
        self.service = PserverService(directory, KEYS, pytest.fail, self.ends.append, None, clock)
        self.server = FlightServer(
            PserverFlight(self.service, clock).routes(), ServerIdentity("demo", "pserver"), clock=clock
        )
        self.service.refusals = lambda: self.server.refusals
        identity = ServerIdentity("demo", "pserver", 0, 1)
        self.service.acquire_index(0, 1, lambda: True)
        self.server.start_serving(identity)
        self.connection = Connection(self.server.address, expected=identity)

    def send(self, verb: str, message: msgspec.Struct) -> bytes:
        return self.connection.action(verb, encode(message), timeout_s=5.0)

    def await_blocks(self, timeout_s: float) -> None:
        """Wait until the service's builder thread has allocated the blocks."""
        deadline = self.clock.now() + timeout_s
        while not self.service.status().blocks:
            assert self.clock.now() < deadline
            self.clock.sleep(0.01)

    def close(self) -> None:
        self.connection.close()
        self.service.close()
        self.server.stop(1.0)


@pytest.fixture
def declared() -> MemoryCoordinator:
    model = ModelDeclaration(
        parameters=[ParameterDeclaration(name="w", shape=[4], dtype="float32")],
        optimizer=SGD(0.1).to_json(),
        mode=Sync().to_json(),
    )
    coordinator = MemoryCoordinator(SystemClock())
    reply = DeclaredModel(declaration=model, pservers=1, plan_hash=PLAN.hash)
    coordinator.transact([], [Put(KEYS.job, encode(JobDeclaration(model=reply)))])
    return coordinator


@pytest.fixture
def served(declared: MemoryCoordinator) -> Iterator[Served]:
    with Directory(declared, KEYS, SystemClock()) as directory:
        assert directory.wait_until(lambda d: d.entry(KEYS.job), 5.0)
        served = Served(directory)
        try:
            served.service.look()
            served.await_blocks(30.0)
            yield served
        finally:
            served.close()


def test_requests_for_another_plan_are_rejected_counted_and_change_nothing(served: Served) -> None:
    for verb, message in orders("0" * 32).items():
        with pytest.raises(FencedError, match="different shard plan"):
            served.send(verb, message)
    status = served.service.status()
    assert status.refused_calls == {"fenced": 5}
    assert status.members == []
    assert not served.ends


def test_requests_for_the_same_plan_are_processed(served: Served) -> None:
    right = orders(PLAN.hash)
    assert not decode(served.send("view", right["view"]), ViewReply).outdated
    assert served.service.status().members == [1]
    for verb in ("snapshot", "seal", "applied"):
        with pytest.raises(NotReadyError, match="no values yet"):
            served.send(verb, right[verb])
    served.send("reload", right["reload"])
    served.send("reload", right["reload"])
    assert ["newest checkpoint" in why for why in served.ends] == [True]
    with pytest.raises(NotReadyError, match="is ending"):
        served.send("view", right["view"])


@pytest.mark.parametrize("verb", ["reload", "seal"])
def test_requests_of_an_older_master_are_rejected(served: Served, verb: str) -> None:
    view = msgspec.structs.replace(orders(PLAN.hash)["view"], master_generation=2)
    served.send("view", view)
    with pytest.raises(FencedError, match="deposed"):
        served.send(verb, orders(PLAN.hash)[verb])
    assert not served.ends
    assert decode(served.send("view", orders(PLAN.hash)["view"]), ViewReply).outdated


def test_a_master_deposed_in_etcd_cannot_reload_a_pserver(served: Served, declared: MemoryCoordinator) -> None:
    leader = ServerRecord(address="127.0.0.1:1", generation=2)
    declared.transact([], [Put(KEYS.master_address, encode(leader))])
    assert served.directory.wait_until(lambda d: d.master(), 5.0)
    with pytest.raises(FencedError, match="deposed"):
        served.send("reload", orders(PLAN.hash)["reload"])
    assert not served.ends
    served.send("reload", msgspec.structs.replace(orders(PLAN.hash)["reload"], master_generation=2))
    assert len(served.ends) == 1


def test_an_interrupted_push_ends_the_process(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    served.send("view", orders(PLAN.hash)["view"])
    shard = served.service.shard_for_init(PLAN.hash, 1)
    header = PushHeader(
        trainer="t",
        generation=1,
        plan_hash=PLAN.hash,
        member=1,
        identity=BatchIdentity(epoch=0, task=0, batch=0, batch_count=1),
        weight=1.0,
        rows=1,
    )
    rows = decode_batch(encode_rows([0], [0], [np.ones(4, np.float32)]))
    monkeypatch.setattr(Update, "__call__", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        shard.push_rows(header, rows)
    assert ["ZeroDivisionError" in why for why in served.ends] == [True]
    with pytest.raises(NotReadyError, match="is ending"):
        served.send("view", orders(PLAN.hash)["view"])


def test_a_resumed_job_waits_until_a_trainer_declares_the_model_again(
    declared: MemoryCoordinator,
) -> None:
    entry = declared.get(KEYS.job)
    assert entry is not None
    former = resuming.former(decode(entry.value, JobDeclaration))
    assert former.model is not None
    declared.transact([], [Put(KEYS.job, encode(former))])
    with Directory(declared, KEYS, SystemClock()) as directory:
        assert directory.wait_until(lambda d: d.entry(KEYS.job), 5.0)
        served = Served(directory)
        try:
            served.service.look()
            served.service.prepare()
            assert served.service._builder is None
            with pytest.raises(NotReadyError, match="has not read the model's declaration"):
                served.service.shard_for_init(PLAN.hash, 1)
            with pytest.raises(NotReadyError):
                served.send("view", orders(PLAN.hash)["view"])
            now = msgspec.structs.replace(former.model.declaration, optimizer=SGD(0.5).to_json())
            again = msgspec.structs.replace(former.model, declaration=now, is_former=False)
            written = encode(JobDeclaration(model=again))
            declared.transact([], [Put(KEYS.job, written)])
            assert directory.wait_until(
                lambda d: ((found := d.entry(KEYS.job)) and found.value == written) or None, 5.0
            )
            served.service.look()
            served.await_blocks(30.0)
            served.send("view", orders(PLAN.hash)["view"])
            shard = served.service.shard_for_init(PLAN.hash, 1)
            (span,) = set(shard.dense.spans.values())
            span.update(span.values, np.ones(4, np.float32), span.slots, 0, 1.0, 1.0)
            assert span.values.tolist() == [-0.5] * 4
        finally:
            served.close()


def test_requests_before_the_declaration_are_answered_with_not_ready() -> None:
    coordinator = MemoryCoordinator(SystemClock())
    with Directory(coordinator, KEYS, SystemClock()) as directory:
        served = Served(directory)
        try:
            for verb, message in orders(PLAN.hash).items():
                with pytest.raises(NotReadyError, match="is waiting for the model"):
                    served.send(verb, message)
        finally:
            served.close()


def test_the_master_learns_which_checkpoints_could_not_be_loaded(served: Served) -> None:
    life = served.service._life
    life.state, life.checkpoint = State.SERVING, 3
    life.skipped = (Skipped(5, "torn"), Skipped(4, "c-4/shard is missing"))
    reply = decode(served.send("applied", AppliedRequest(plan_hash=PLAN.hash)), AppliedReply)
    assert (reply.checkpoint, reply.rejected) == (3, [5, 4])
    assert reply.skipped == ["checkpoint 5: torn", "checkpoint 4: c-4/shard is missing"]


def test_the_state_of_etcd_is_read_and_applied_under_one_lock(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a thread could apply an older state after another thread has applied a newer one."""
    service = served.service
    facts, is_locked = service._facts, []

    def read() -> Facts:
        is_locked.append(service._lock.locked())
        return facts()

    monkeypatch.setattr(service, "_facts", read)
    service.look()
    assert is_locked == [True]


@pytest.mark.parametrize("answer", [True, False, UnavailableError("etcd is away")])
def test_a_checkpoint_is_chosen_only_after_catching_up_with_etcd(answer: bool | Exception) -> None:
    def catch_up(key: str, _timeout_s: float) -> bool:
        assert key == KEYS.checkpoint_latest
        if isinstance(answer, Exception):
            raise answer
        return answer

    service: Any = SimpleNamespace(_directory=SimpleNamespace(catch_up=catch_up), _keys=KEYS)
    assert PserverService._has_caught_up(service) is (answer is True)
