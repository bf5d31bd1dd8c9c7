"""A pserver process on a thread: its key, its lease, and its end."""

from __future__ import annotations

import threading
import time
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
from flightedl.domain.moving import standby as domain_standby
from flightedl.errors import EXIT_START_AGAIN, FlightedlError, UsageError
from flightedl.messages.base import encode
from flightedl.messages.declarations import (
    DeclaredModel,
    ElectionRecord,
    JobDeclaration,
    ModelDeclaration,
    ParameterDeclaration,
)
from flightedl.ports import Delete, Entry, Put
from flightedl.pserver import service
from flightedl.pserver.main import PserverProcess
from flightedl.pserver.shard import Shard
from tests.support.contracts.coordinator import eventually
from tests.support.memory import MemoryCoordinator

KEYS = JobKeys("demo")
TTL_S = 2.0


class Running:
    """A pserver on a thread of this process: one that has acquired an index, or a standby."""

    def __init__(self, coordinator: MemoryCoordinator | None = None, *, is_standby: bool = False) -> None:
        clock = SystemClock()
        self.coordinator = coordinator or MemoryCoordinator(clock)
        self.coordinator.transact([], [Put(KEYS.ps_desired, b"1")])
        self.process = PserverProcess(
            PserverSettings(etcd="memory:1", job="demo", lease_ttl_s=TTL_S, drain_s=0.5, standby=is_standby)
        )
        self.exit_code: int | None = None
        self.error: FlightedlError | None = None
        self._directory = Directory(self.coordinator, KEYS, clock).start()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            self.exit_code = self.process._serve_index(self.coordinator, self._directory)
        except FlightedlError as error:
            self.error = error

    @property
    def key(self) -> Entry | None:
        return self.coordinator.get(KEYS.pserver(0))

    @property
    def is_waiting(self) -> bool:
        """True if the process has found no index to claim."""
        return "waiting for a free index" in self.process._health.answer("/ready")[1]

    @property
    def standby_key(self) -> Entry | None:
        return self.coordinator.get(KEYS.standby(0))

    @property
    def ttl_s(self) -> float:
        assert self.key is not None
        return self.coordinator._store.leases[self.key.lease_id][0]

    def declare(self, pservers: int = 1) -> None:
        model = ModelDeclaration(
            parameters=[ParameterDeclaration(name="w", shape=[4], dtype="float32")],
            optimizer=SGD(0.1).to_json(),
            mode=Sync().to_json(),
        )
        plan = plan_for([ParameterSpec("w", (4,))], pservers, 0)
        reply = DeclaredModel(declaration=model, pservers=pservers, plan_hash=plan.hash)
        self.coordinator.transact([], [Put(KEYS.job, encode(JobDeclaration(model=reply)))])

    def join(self) -> None:
        self._thread.join(20)
        self._directory.close()
        assert not self._thread.is_alive()


@pytest.fixture
def running() -> Iterator[Running]:
    made = Running()
    eventually(lambda: made.key)
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


@pytest.fixture
def standby(running: Running) -> Iterator[Running]:
    made = Running(running.coordinator, is_standby=True)
    eventually(lambda: running.standby_key)
    yield made
    made.process.end(0, "the test is over")
    made.join()


def test_a_standby_claims_the_index_when_it_is_free(running: Running, standby: Running) -> None:
    before, own = running.key, running.standby_key
    assert before is not None
    assert own is not None
    running.coordinator.end_lease(before.lease_id)
    after = eventually(lambda: running.key)
    assert after.create_revision > own.create_revision
    assert running.standby_key is None


def test_a_spare_leaves_an_index_to_its_standby() -> None:
    coordinator = MemoryCoordinator(SystemClock())
    coordinator.transact([], [Put(KEYS.standby(0), b"{}")])
    spare = Running(coordinator)
    eventually(lambda: spare.is_waiting)
    deleted = coordinator.transact([], [Delete(KEYS.standby(0))])
    key = eventually(lambda: spare.key)
    assert key.create_revision > deleted.revision
    spare.process.end(0, "the test is over")
    spare.join()


def test_a_standby_claims_another_index_that_stays_free(
    running: Running, standby: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(domain_standby, "UNCLAIMED_S", 1.5)
    own = running.standby_key
    assert own is not None
    running.coordinator.transact([], [Put(KEYS.ps_desired, b"2")])
    time.sleep(2.5)
    assert running.standby_key == own, "no blocks are on the free index"
    began = time.monotonic()
    running.declare(pservers=2)
    key = eventually(lambda: running.coordinator.get(KEYS.pserver(1)))
    assert key.create_revision > own.create_revision
    # The time counts from the last look at the state without a model, up to half a second before.
    assert time.monotonic() - began >= 0.9
    assert running.standby_key is None


def test_a_dismissed_standby_starts_over(running: Running, standby: Running) -> None:
    before = running.standby_key
    assert before is not None
    running.coordinator.transact([], [Delete(KEYS.standby(0))])
    after = eventually(lambda: running.standby_key)
    assert after.create_revision > before.create_revision


def test_a_standby_is_ready_unless_it_lacks_a_copy_of_values(running: Running, standby: Running) -> None:
    running.declare()
    eventually(lambda: standby.process._health.answer("/ready")[0] == 200)
    elected = encode(ElectionRecord(trainer="t1", done=True))
    running.coordinator.transact([], [Put(KEYS.init_params, elected)])
    eventually(lambda: standby.process._health.answer("/ready")[0] == 503)
    assert standby.process._health.answer("/ready")[1] == "it is waiting for a copy of a pserver's blocks"


def test_a_job_that_is_rolled_back_refuses_standbys(running: Running) -> None:
    record = running.process._record(refuses_standbys=True)
    running.coordinator.transact([], [Put(KEYS.master_address, record)])
    standby = Running(running.coordinator, is_standby=True)
    eventually(lambda: standby.error)
    assert isinstance(standby.error, UsageError)
    assert "--recovery rollback" in str(standby.error)
    assert running.standby_key is None
    standby.join()
