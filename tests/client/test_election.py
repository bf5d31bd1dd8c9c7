"""The election of first values: a trainer that is overtaken during its upload continues with the winner's values."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import msgspec
import numpy as np
import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.client.connections import Servers
from flightedl.client.model.election import elect_and_initialize
from flightedl.client.registration import Registration
from flightedl.client.waiting import Waiting
from flightedl.coordination.directory import Directory
from flightedl.coordination.keeper import HeldKey
from flightedl.coordination.keys import JobKeys
from flightedl.coordination.records import ServerRecord
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import plan_for
from flightedl.domain.trainer.first_values import Elected
from flightedl.errors import FencedError, NotReadyError, UnavailableError
from flightedl.messages.base import decode, encode
from flightedl.messages.declarations import ElectionRecord
from flightedl.messages.parameters import InitHeader, InitReply
from flightedl.ports import Condition, Delete, Entry, LeaseLostError, Operation, Put, TransactionResult
from flightedl.rpc import Call, Caller, Connector, FlightServer, Incoming, PutRoute, Role, Routes, ServerIdentity
from flightedl.wire.rows import PUSH_SCHEMA
from tests.support.memory import MemoryCoordinator

KEYS = JobKeys("demo")
PLAN = plan_for([ParameterSpec("w", (4,), "float32")], 1, 1)
PATIENCE_S = 10.0
#: Limit of a wait: far longer than the tests.
GIVE_UP_S = 60.0


class Job:
    """One trainer, one pserver that supports only elections, and an in-memory coordinator."""

    def __init__(self, stack: ExitStack) -> None:
        self.coordinator = MemoryCoordinator(SystemClock())
        #: Called while a pserver handles an upload.
        self.during_upload: Callable[[], None] = lambda: None
        #: Numbers of elections whose values were uploaded, in order.
        self.uploads: list[int] = []
        #: Generation of the pserver that received the newest upload.
        self.generation = 0
        #: Called before each request of the election to etcd, with the request's number.
        self.before_request: Callable[[int], object] = lambda _: None
        self._newest = 0
        self.server = FlightServer(
            Routes(puts={"init": PutRoute(PUSH_SCHEMA, self._init)}),
            ServerIdentity("demo", "pserver"),
            clock=SystemClock(),
        )
        stack.callback(self.server.stop, 5.0)
        record = ServerRecord(address=self.server.address, generation=0)
        created = self.coordinator.transact([], [Put(KEYS.pserver(0), msgspec.json.encode(record))]).revision
        self.server.start_serving(ServerIdentity("demo", "pserver", 0, created))
        self.directory = stack.enter_context(Directory(self.coordinator, KEYS, SystemClock()))
        assert self.directory.wait_until(lambda d: d.pservers() or None, PATIENCE_S)
        self.registration = Registration(self.coordinator, SystemClock(), KEYS, 60.0)
        stack.callback(self.registration.close)
        self.servers = Servers(
            "demo", self.directory, Connector(Caller("trainer", self.registration.trainer), Role.TRAINER)
        )
        stack.callback(self.servers.close)

    def replace_pserver(self) -> None:
        """Let a new process hold the pserver's index, which this trainer learns after its upload."""
        record = ServerRecord(address=self.server.address, generation=0)
        self.coordinator.transact([], [Delete(KEYS.pserver(0))])
        created = self.coordinator.transact([], [Put(KEYS.pserver(0), msgspec.json.encode(record))]).revision
        self.server.start_serving(ServerIdentity("demo", "pserver", 0, created))

    def elect(self) -> Elected:
        return elect_and_initialize(
            PLAN,
            {"w": np.zeros(4, np.float32)},
            registration=self.registration,
            coordinator=Interrupted(self),  # type: ignore[arg-type]
            keys=KEYS,
            directory=self.directory,
            servers=self.servers,
            waiting=lambda: Waiting(SystemClock(), GIVE_UP_S, GIVE_UP_S, lambda _: None),
        )

    def elected(self) -> Elected:
        """Return the stored record of the election."""
        stored = self.coordinator.get(KEYS.init_params)
        assert stored is not None
        return Elected(stored.create_revision, stored.mod_revision)

    def record(self) -> ElectionRecord:
        stored = self.coordinator.get(KEYS.init_params)
        assert stored is not None
        return decode(stored.value, ElectionRecord)

    def overtaken(self) -> None:
        """Let another trainer win a new election, because this trainer's lease has expired."""
        self.during_upload = lambda: None
        self.coordinator.end_lease(self.registration.held.lease_id)
        won = self.coordinator.transact([], [Put(KEYS.init_params, encode(ElectionRecord(trainer="other")))])
        self._newest = won.revision
        self.coordinator.transact([], [Put(KEYS.init_params, encode(ElectionRecord(trainer="other", done=True)))])

    def _init(self, descriptor: bytes, incoming: Incoming, _: Call) -> bytes:
        header = decode(descriptor, InitHeader)
        rows = sum(batch.num_rows for batch, _metadata in incoming)
        self.uploads.append(header.election)
        self.generation = self.server.identity.generation
        self.during_upload()
        return encode(InitReply(initialized=rows if header.election >= self._newest else 0, blocks=rows))


class Interrupted:
    """A job's etcd, whose state may change before any request."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._requests = itertools.count()

    def get(self, key: str) -> Entry | None:
        self._job.before_request(next(self._requests))
        return self._job.coordinator.get(key)

    def transact(self, when: Sequence[Condition], then: Sequence[Operation]) -> TransactionResult:
        self._job.before_request(next(self._requests))
        return self._job.coordinator.transact(when, then)


@pytest.fixture
def job() -> Iterator[Job]:
    with ExitStack() as stack:
        yield Job(stack)


def test_the_first_trainer_uploads_the_first_values(job: Job) -> None:
    election = job.elect()
    assert job.uploads == [election.election]
    assert election == job.elected()
    assert job.record() == ElectionRecord(trainer=job.registration.trainer, done=True)


def test_an_overtaken_trainer_uses_the_values_of_the_newer_election(job: Job) -> None:
    job.during_upload = job.overtaken
    start = time.monotonic()
    election = job.elect()
    assert election == job.elected()
    assert job.record() == ElectionRecord(trainer="other", done=True)
    assert len(job.uploads) == 1
    assert time.monotonic() - start < PATIENCE_S


def test_an_upload_ends_when_the_pserver_dies_and_another_trainer_has_won(job: Job) -> None:
    def dies() -> None:
        job.overtaken()
        job.coordinator.transact([], [Delete(KEYS.pserver(0))])
        raise UnavailableError("killed")

    job.during_upload = dies
    assert job.elect() == job.elected()
    assert job.record().trainer == "other"


def test_a_trainer_registers_again_after_its_lease_expired_unnoticed(job: Job) -> None:
    before = job.registration.generation
    job.coordinator.end_lease(job.registration.held.lease_id)
    election = job.elect()
    assert job.uploads == [election.election]
    assert job.registration.generation > before
    # The first request detects it. Everything held under the old registration may belong to another trainer.
    assert job.registration.renewed()
    assert not job.registration.renewed()


def test_a_trainer_registers_again_as_soon_as_etcd_does_not_know_its_lease(job: Job) -> None:
    def act(_: HeldKey) -> None:
        raise LeaseLostError("the lease has ended")

    before = job.registration.generation
    with pytest.raises(NotReadyError, match="registering again"):
        job.registration.under_lease(act)
    assert job.registration.renewed()
    assert job.registration.generation > before


def test_a_request_that_is_fenced_is_not_sent_again(job: Job) -> None:
    def refuse() -> None:
        raise FencedError("the shard plan is another one")

    job.during_upload = refuse
    with pytest.raises(FencedError, match="shard plan"):
        job.elect()
    assert len(job.uploads) == 1


def test_values_of_a_pserver_that_was_replaced_after_its_upload_are_sent_again(job: Job) -> None:
    """The last pserver answers although its key is gone already, so only the confirmation can detect it."""

    def is_replaced() -> None:
        if len(job.uploads) == 1:
            job.replace_pserver()

    job.during_upload = is_replaced
    election = job.elect()
    assert job.uploads == [election.election] * 2
    assert election == job.elected()


@pytest.mark.parametrize("change", ["overtaken", "pserver replaced"])
def test_whatever_changes_before_a_request_the_elected_values_are_those_that_were_received(change: str) -> None:
    """No request of an election may act on a state that was read before it."""
    changed = [-1]
    for number in itertools.count():
        with ExitStack() as stack:
            job = Job(stack)

            def before(current: int, number: int = number, job: Job = job) -> None:
                if current == number:
                    changed.append(number)
                    (job.overtaken if change == "overtaken" else job.replace_pserver)()

            job.before_request = before
            assert job.elect() == job.elected()
            if changed[-1] != number:
                break
            if change == "overtaken":
                assert job.record() == ElectionRecord(trainer="other", done=True)
                continue
            holder = job.coordinator.get(KEYS.pserver(0))
            assert holder is not None
            assert (job.uploads[-1], job.generation) == (job.elected().election, holder.create_revision)
    assert changed[-1] >= 3
