"""A pserver process on a thread: its key, its lease, and its end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.config import PserverSettings
from flightedl.coordination.directory import Directory
from flightedl.coordination.keys import JobKeys
from flightedl.domain.consistency.modes import Sync
from flightedl.domain.model.optimizers import SGD
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import plan_for
from flightedl.errors import EXIT_START_AGAIN
from flightedl.messages.base import encode
from flightedl.messages.declarations import DeclaredModel, JobDeclaration, ModelDeclaration, ParameterDeclaration
from flightedl.ports import Entry, Put
from flightedl.pserver import service
from flightedl.pserver.main import PserverProcess
from flightedl.pserver.shard import Shard
from flightedl.testing.contracts.coordinator import eventually
from flightedl.testing.memory import MemoryCoordinator

KEYS = JobKeys("demo")
TTL_S = 2.0


class Running:
    """A pserver that has acquired an index, on a thread of this process."""

    def __init__(self) -> None:
        clock = SystemClock()
        self.coordinator = MemoryCoordinator(clock)
        self.coordinator.transact([], [Put(KEYS.ps_desired, b"1")])
        self.process = PserverProcess(PserverSettings(etcd="memory:1", job="demo", lease_ttl_s=TTL_S, drain_s=0.5))
        self.exit_code: int | None = None
        self._directory = Directory(self.coordinator, KEYS, clock).start()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        eventually(lambda: self.key is not None)

    def _serve(self) -> None:
        self.exit_code = self.process._serve_index(self.coordinator, self._directory)

    @property
    def key(self) -> Entry | None:
        return self.coordinator.get(KEYS.pserver(0))

    @property
    def ttl_s(self) -> float:
        assert self.key is not None
        return self.coordinator._store.leases[self.key.lease_id][0]

    def declare(self) -> None:
        model = ModelDeclaration(
            parameters=[ParameterDeclaration(name="w", shape=[4], dtype="float32")],
            optimizer=SGD(0.1).to_json(),
            mode=Sync().to_json(),
        )
        plan = plan_for([ParameterSpec("w", (4,))], 1, 0)
        reply = DeclaredModel(declaration=model, pservers=1, plan_hash=plan.hash)
        self.coordinator.transact([], [Put(KEYS.job, encode(JobDeclaration(model=reply)))])

    def join(self) -> None:
        self._thread.join(20)
        self._directory.close()
        assert not self._thread.is_alive()


@pytest.fixture
def running() -> Iterator[Running]:
    made = Running()
    yield made
    made.process.end(0, "the test is over")
    made.join()


def test_the_lease_has_a_longer_ttl_until_the_blocks_are_allocated(running: Running) -> None:
    before = running.key
    assert before is not None
    assert running.ttl_s == 4 * TTL_S
    running.declare()
    eventually(lambda: running.ttl_s == TTL_S, 30.0)
    after = running.key
    assert after is not None
    assert (after.create_revision, after.value) == (before.create_revision, before.value)


def test_the_pserver_ends_for_a_successor_when_its_key_is_lost(running: Running) -> None:
    assert running.key is not None
    running.coordinator.end_lease(running.key.lease_id)
    running.join()
    assert running.exit_code == EXIT_START_AGAIN


def test_the_pserver_releases_its_index_when_it_is_asked_to_end(running: Running) -> None:
    running.declare()
    eventually(lambda: running.ttl_s == TTL_S, 30.0)
    running.process.end(0, "terminated")
    running.join()
    assert running.exit_code == 0
    assert running.key is None
    assert not running.coordinator._store.leases


def test_the_pserver_ends_for_a_successor_when_its_blocks_are_inconsistent(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Shard] = []

    def make(*arguments: Any, **more: object) -> Shard:
        made.append(Shard(*arguments, **more))
        return made[0]

    monkeypatch.setattr(service, "Shard", make)
    running.declare()
    eventually(lambda: made, 30.0)
    with pytest.raises(ZeroDivisionError), made[0]._soundness:
        raise ZeroDivisionError
    running.join()
    assert running.exit_code == EXIT_START_AGAIN
    assert running.key is None
