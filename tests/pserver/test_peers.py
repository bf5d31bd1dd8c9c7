"""A pserver's access to the other processes of its job: it never talks to, or acts for, a process that was replaced."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.coordination.directory import Directory
from flightedl.coordination.keys import JobKeys
from flightedl.coordination.records import ServerRecord
from flightedl.domain.moving.values import Intent, Move, Transaction
from flightedl.errors import NotReadyError
from flightedl.messages.base import encode
from flightedl.messages.declarations import DeclaredModel, JobDeclaration, ModelDeclaration, Placement
from flightedl.ports import Delete, Put
from flightedl.pserver.moving.peers import Peers
from flightedl.rpc.authentication import Role
from flightedl.rpc.connector import Connector
from flightedl.rpc.identity import Caller, ServerIdentity
from tests.support.memory import MemoryCoordinator

KEYS = JobKeys("demo")
INTENT = encode(Intent(1, (Move(0, 0, 1, 1),), ((0, 1), (1, 1))))


class Job:
    """etcd, and one pserver's access to it."""

    def __init__(self) -> None:
        clock = SystemClock()
        self.etcd = MemoryCoordinator(clock)
        self.directory = Directory(self.etcd.another(), KEYS, clock).start()
        connector = Connector(Caller("pserver", "demo"), Role.SERVER)
        self.peers = Peers(self.directory, KEYS, self.etcd.another(), connector)

    def put(self, key: str, value: bytes) -> int:
        """Replace a key with a new one. Return its create_revision."""
        self.etcd.transact([], [Delete(key)])
        revision = self.etcd.transact([], [Put(key, value)]).revision
        assert self.directory.wait_until(lambda d: d.revision >= revision or None, 5.0)
        return revision

    def start(self, key: str, port: int = 1) -> int:
        """Let a new process hold a key. Return its generation."""
        return self.put(key, encode(ServerRecord(address=f"127.0.0.1:{port}")))


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    made.directory.close()


def test_only_the_named_generation_of_a_process_is_connected_to(job: Job) -> None:
    with pytest.raises(NotReadyError, match="there is no pserver 1"):
        job.peers.source(1)
    with pytest.raises(NotReadyError, match="pserver 1 was replaced"):
        job.peers.pserver(1, 1)
    first = job.start(KEYS.pserver(1))
    found = job.peers.pserver(1, first)
    assert found.expected == ServerIdentity("demo", "pserver", 1, first)
    # A connection is used for all messages to the same process.
    assert found is job.peers.pserver(1, first) is job.peers.source(1)
    second = job.start(KEYS.pserver(1))
    with pytest.raises(NotReadyError, match="pserver 1 was replaced"):
        job.peers.pserver(1, first)
    # The new process has the same address, but is another server.
    assert job.peers.source(1).expected == ServerIdentity("demo", "pserver", 1, second)
    other = job.start(KEYS.pserver(2))
    assert job.peers.pserver(2, other).expected == ServerIdentity("demo", "pserver", 2, other)
    assert job.peers.pserver(1, second).expected == ServerIdentity("demo", "pserver", 1, second)


def test_an_intent_is_given_up_only_by_its_own_attempt(job: Job) -> None:
    first = job.put(KEYS.moving, INTENT)
    second = job.put(KEYS.moving, INTENT)
    job.peers.give_up(Transaction(first, None))
    entry = job.etcd.get(KEYS.moving)
    assert entry is not None
    assert entry.create_revision == second
    job.peers.give_up(Transaction(second, None))
    assert job.etcd.get(KEYS.moving) is None


def test_a_standby_is_dismissed(job: Job) -> None:
    job.put(KEYS.standby(0), b"{}")
    job.put(KEYS.standby(1), b"{}")
    job.peers.dismiss_standby(1)
    assert job.etcd.get(KEYS.standby(1)) is None
    assert job.etcd.get(KEYS.standby(0)) is not None


def test_the_newest_placement_is_read_with_the_attempt_and_the_holder(job: Job) -> None:
    assert job.peers.read(0) is None
    declared, newer = (Placement(version=version, pservers=2, blocks=((version - 1, 3),)) for version in (1, 2))
    model = DeclaredModel(
        declaration=ModelDeclaration(parameters=[], optimizer={}, mode={}),
        pservers=2,
        plan_hash="p",
        placement=declared,
    )
    job.put(KEYS.job, encode(JobDeclaration(model=model)))
    found = job.peers.read(0)
    assert found is not None
    assert (found.placement, found.stored, found.holder) == (declared, None, None)
    job.put(KEYS.placement, encode(newer))
    holder, _ = job.start(KEYS.pserver(0)), job.start(KEYS.pserver(1))
    attempt = job.put(KEYS.moving, INTENT)
    found = job.peers.read(0)
    assert found is not None
    assert (found.revision, found.placement, found.holder) == (attempt, newer, holder)
    assert found.stored is not None
    assert found.stored.attempt == attempt
    assert encode(found.stored.intent) == INTENT
