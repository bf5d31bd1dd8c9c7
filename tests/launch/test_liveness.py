"""Distinction between a running job and leases in etcd that have outlived their job."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import msgspec
import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.coordination.keeper import HeldKey
from flightedl.coordination.keys import JobKeys
from flightedl.coordination.records import ServerRecord, TrainerRecord
from flightedl.errors import NotReadyError, UsageError
from flightedl.launch.liveness import Liveness
from flightedl.launch.status import is_master_answering, tool_connector
from flightedl.ports import Absent, Lease, Put
from flightedl.rpc import Call, FlightServer, Routes, ServerIdentity
from tests.support.clock import FakeClock
from tests.support.memory import MemoryCoordinator

KEYS = JobKeys("demo")
TTL_S = 5.0
#: TTL of a lease, plus a margin for etcd's own delay.
LIMIT_S = 8.0


class BusyClock(FakeClock):
    """Clock on which other processes act during each sleep."""

    def __init__(self) -> None:
        super().__init__(jumps=True)
        self.began_at = self.now()
        self.others: Callable[[float], None] = lambda _passed_s: None

    @property
    def passed_s(self) -> float:
        return self.now() - self.began_at

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self.others(self.passed_s)


class World:
    """An etcd, and a launcher that inspects it."""

    def __init__(self) -> None:
        self.clock = BusyClock()
        self.etcd = MemoryCoordinator(self.clock)
        self.messages: list[str] = []
        #: Addresses at which a master answers.
        self.answering: set[str] = set()
        self.asked: list[str] = []
        self.is_unwanted = False

    def liveness(self) -> Liveness:
        return Liveness(
            self.etcd.another(),
            KEYS,
            self.clock,
            self._is_answering,
            self.messages.append,
            lambda: self.is_unwanted,
        )

    def _is_answering(self, record: ServerRecord) -> bool:
        self.asked.append(record.address)
        return record.address in self.answering

    def leave_master(self, address: str = "10.0.0.1:7", ttl_s: float = TTL_S) -> Lease:
        """Store the lock and address of a master with one lease."""
        lease = self.etcd.grant(ttl_s)
        record = ServerRecord(address=address, generation=3, name="far", pid=12)
        keys = (KEYS.master_lock, KEYS.master_address)
        result = self.etcd.transact(
            [Absent(KEYS.master_lock)], [Put(key, msgspec.json.encode(record), lease.id) for key in keys]
        )
        assert result.committed
        return lease

    def leave_trainer(self, ttl_s: float = TTL_S) -> Lease:
        lease = self.etcd.grant(ttl_s)
        record = msgspec.json.encode(TrainerRecord(id="t", host="far", pid=13))
        self.etcd.transact([], [Put(KEYS.trainer("t"), record, lease.id)])
        return lease

    def claim(self) -> bool:
        """Return True if the name could be claimed, and release the claim."""
        held = self.liveness().claim_name(TTL_S)
        if held is not None:
            assert self.etcd.get(KEYS.launcher) is not None
            held.release()
        return held is not None


@pytest.fixture
def world() -> World:
    return World()


def test_a_free_name_is_claimed_at_once(world: World) -> None:
    assert world.claim()
    assert (world.clock.passed_s, world.messages) == (0.0, [])


def test_leases_without_a_holder_are_awaited(world: World) -> None:
    world.leave_master()
    assert world.claim()
    assert TTL_S <= world.clock.passed_s < TTL_S + 1
    assert world.messages == [
        "etcd still has leases of job demo, but its master does not answer: waiting for them to expire, at most 8 s"
    ]
    assert world.asked == ["10.0.0.1:7"], "the master is called only once"


def test_a_master_that_answers_is_alive(world: World) -> None:
    world.leave_master()
    world.answering.add("10.0.0.1:7")
    with pytest.raises(UsageError, match=r"a job named demo is already running \(its master is at 10\.0\.0\.1:7\)"):
        world.claim()
    assert (world.clock.passed_s, world.messages) == (0.0, [])


def test_an_unreachable_master_that_renews_its_lease_is_alive(world: World) -> None:
    lease = world.leave_master()
    world.clock.others = lambda _: lease.renew()
    with pytest.raises(UsageError, match=r"already running \(its master is at 10\.0\.0\.1:7, which does not answer"):
        world.claim()
    assert LIMIT_S <= world.clock.passed_s < LIMIT_S + 1


def test_the_ttl_of_the_lease_is_used_and_not_that_of_the_launcher(world: World) -> None:
    world.leave_master(ttl_s=60.0)
    assert world.claim()
    assert 60 <= world.clock.passed_s < 61
    assert "at most 63 s" in world.messages[0]


def test_a_standby_that_acquires_the_lock_is_alive(world: World) -> None:
    world.leave_master()

    def stand_by(_passed_s: float) -> None:
        if world.etcd.get(KEYS.master_lock) is None:
            world.leave_master("10.0.0.2:8")

    world.clock.others = stand_by
    with pytest.raises(UsageError, match=r"its master is at 10\.0\.0\.2:8, which does not answer"):
        world.claim()
    assert world.clock.passed_s < TTL_S + 1
    assert world.asked == ["10.0.0.1:7", "10.0.0.2:8"]


def test_a_launcher_that_has_not_started_its_master_yet_excludes_others(world: World) -> None:
    first = world.etcd.grant(TTL_S)
    record = msgspec.json.encode(ServerRecord(address="", name="far", pid=14))
    world.etcd.transact([], [Put(KEYS.launcher, record, first.id)])
    world.clock.others = lambda _: first.renew()
    with pytest.raises(UsageError, match=r"already running \(process 14 on far holds /flightedl/demo/launcher"):
        world.claim()


def test_a_name_that_another_launcher_claims_first_is_rejected(world: World) -> None:
    """Both launchers have waited for the same leases, and have seen them expire."""
    world.leave_master()
    rival = world.etcd.grant(60.0)

    def overtake(_passed_s: float) -> None:
        if world.etcd.get(KEYS.master_lock) is None:
            world.etcd.transact([Absent(KEYS.launcher)], [Put(KEYS.launcher, b"{}", rival.id)])

    world.clock.others = overtake
    with pytest.raises(UsageError, match="already running"):
        world.claim()


@pytest.mark.parametrize("leaves", [False, True], ids=["nothing left", "leases left"])
def test_only_one_of_simultaneous_launchers_starts(leaves: bool) -> None:
    clock = SystemClock()
    etcd = MemoryCoordinator(clock)
    if leaves:
        etcd.transact([], [Put(KEYS.master_lock, b"{}", etcd.grant(0.2).id)])
    together = threading.Barrier(4)
    won: list[HeldKey] = []
    refused: list[str] = []

    def launch() -> None:
        own = etcd.another()
        together.wait()
        try:
            held = Liveness(own, KEYS, clock, lambda record: record.address == "here").claim_name(TTL_S)
        except UsageError as error:
            refused.append(str(error))
        else:
            assert held is not None
            won.append(held)
            record = ServerRecord(address="here", generation=1)
            own.transact([], [Put(KEYS.master_address, msgspec.json.encode(record), held.lease_id)])

    threads = [threading.Thread(target=launch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(refused)) == (1, 3), refused
    won[0].release()


def test_an_interrupted_wait_ends(world: World) -> None:
    world.leave_master()

    def interrupt(passed_s: float) -> None:
        world.is_unwanted = passed_s > 1

    world.clock.others = interrupt
    assert not world.claim()
    assert world.clock.passed_s < 2
    assert world.etcd.get(KEYS.launcher) is None


def test_waiting_trainers_and_pservers_do_not_prevent_a_new_master(world: World) -> None:
    lease = world.leave_trainer()
    world.clock.others = lambda _: lease.renew()
    assert world.claim()
    assert world.clock.passed_s == 0.0


def test_a_job_with_any_process_cannot_be_forgotten(world: World) -> None:
    world.leave_master()
    world.leave_trainer(ttl_s=9.0)
    world.liveness().require_ended()
    assert 9 <= world.clock.passed_s < 10
    lease = world.leave_trainer()
    world.clock.others = lambda _: lease.renew()
    with pytest.raises(UsageError, match=r"job demo is running \(process 13 on far holds /flightedl/demo/trainers/t"):
        world.liveness().require_ended()


def test_an_own_claim_and_permanent_names_are_not_signs_of_life(world: World) -> None:
    world.etcd.transact([], [Put(KEYS.once + "save", b"t", world.etcd.grant(60.0).id)])
    held = world.liveness().claim_name(TTL_S)
    assert held is not None
    world.liveness().require_ended(held)
    assert world.clock.passed_s == 0.0
    held.release()


# Asking a master


def not_ready(_body: bytes, _call: Call) -> bytes:
    raise NotReadyError("it is stopping")


@pytest.mark.parametrize(
    ("action", "asked", "is_answering"),
    [
        (lambda _body, _call: b"{}", ServerIdentity("demo", "master", 0, 7), True),
        (lambda _body, _call: b"{}", ServerIdentity("demo", "master", 0, 8), False),
        (lambda _body, _call: b"{}", ServerIdentity("other", "master", 0, 7), False),
        (not_ready, ServerIdentity("demo", "master", 0, 7), False),
    ],
    ids=["this one", "another generation", "another job", "not serving"],
)
def test_only_the_recorded_master_itself_answers(
    action: Callable[[bytes, Call], bytes], asked: ServerIdentity, is_answering: bool
) -> None:
    identity = ServerIdentity("demo", "master", 0, 7)
    server = FlightServer(Routes(actions={"status": action}), identity, clock=SystemClock())
    server.start_serving(identity)
    try:
        record = ServerRecord(address=server.address, generation=asked.generation)
        assert is_master_answering(record, asked.job, tool_connector("")) is is_answering
    finally:
        server.stop(0.2)


def test_silent_and_closed_addresses_count_as_no_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert not is_master_answering(
            ServerRecord(address=address, generation=7), "demo", tool_connector(""), timeout_s=0.2
        )
    assert not is_master_answering(ServerRecord(address=address, generation=7), "demo", tool_connector(""))
    assert not is_master_answering(ServerRecord(address="no address", generation=7), "demo", tool_connector(""))


def test_a_master_that_starts_during_the_claim_prevents_it(world: World) -> None:
    liveness = world.liveness()
    grant = liveness.coordinator.grant

    def start_a_master(ttl_s: float) -> Lease:
        if world.etcd.get(KEYS.master_lock) is None:
            world.answering.add("10.0.0.1:7")
            world.leave_master(ttl_s=1000.0)
        return grant(ttl_s)

    liveness.coordinator.grant = start_a_master  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="already running"):
        liveness.claim_name(TTL_S)
    assert world.etcd.get(KEYS.launcher) is None
