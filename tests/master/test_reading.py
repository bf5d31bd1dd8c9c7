"""Locations of a model for any Flight client: cuts of all pservers, and rows that several pservers hold."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from flightedl.domain.model.optimizers import SGD
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import ShardPlan, placed, plan_shards
from flightedl.domain.tables.placement import BUCKETS
from flightedl.domain.tables.spec import TableSpec
from flightedl.errors import MessageError, NotFoundError, NotReadyError, UnavailableError
from flightedl.master import reading
from flightedl.master.reading import ModelLocations
from flightedl.messages.base import decode, encode
from flightedl.messages.control import CutRequest, SnapshotReply
from flightedl.messages.declarations import Placement
from flightedl.messages.reading import ReadCommand, ReadTicket
from flightedl.rpc.routes import Endpoints
from tests.support.clock import FakeClock

LONG_S = 20.0
#: A matrix whose middle row is on both pservers.
MATRIX = np.arange(3 * 40_000, dtype=np.float32).reshape(3, -1)
WIDTH = MATRIX.shape[1]
PLAN = plan_shards([ParameterSpec("matrix", MATRIX.shape)], 2, tables=[TableSpec("users", 2, SGD(lr=1.0))])


class Job:
    """A master's view of two pservers, which answer requests as the test determines."""

    def __init__(self) -> None:
        self.clock = FakeClock(jumps=True)
        self.plan = PLAN
        self.requests: list[tuple[int, CutRequest]] = []
        self.reads: list[tuple[int, ReadTicket]] = []
        #: Number of open connections.
        self.open = 0
        self.answer: Callable[[int, CutRequest], SnapshotReply] = lambda _, request: taken(request)
        model = SimpleNamespace(plan_hash=PLAN.hash)
        core = SimpleNamespace(
            declaration=SimpleNamespace(model=model), members=None, checkpointing=SimpleNamespace(latest=0)
        )
        self.model, self.core = model, core
        self.servers = {index: SimpleNamespace(address=f"server-{index}", generation=10 + index) for index in (0, 1)}
        directory = SimpleNamespace(pservers=lambda: self.servers, master=lambda: SimpleNamespace(address="master"))
        state: Any = SimpleNamespace(core=core, clock=self.clock)
        self.locations = ModelLocations(state, "demo", 7, directory, SimpleNamespace(connect=self._connect))  # type: ignore[arg-type]

    def _connect(self, address: str, identity: Any) -> Any:
        assert identity.generation == 10 + identity.index
        assert address == f"server-{identity.index}"

        def action(verb: str, body: bytes, *, timeout_s: float) -> bytes:
            assert verb == "cut"
            request = decode(body, CutRequest)
            self.requests.append((identity.index, request))
            return encode(self.answer(identity.index, request))

        @contextmanager
        def get(body: bytes, *, timeout_s: float) -> Iterator[list[tuple[pa.RecordBatch | None, None]]]:
            ticket = decode(body, ReadTicket)
            self.reads.append((identity.index, ticket))
            values = pa.array(MATRIX.reshape(-1)[ticket.start : ticket.stop])
            yield [(None, None), (pa.record_batch([values], ["value"]), None)]

        @contextmanager
        def connected() -> Iterator[Any]:
            self.open += 1
            try:
                yield SimpleNamespace(action=action, get=get)
            finally:
                self.open -= 1

        return connected()

    def call(self) -> Any:
        closing = SimpleNamespace(wait=self.clock.sleep)
        return SimpleNamespace(deadline=self.clock.now() + 1000.0, check=lambda: None, closing=closing)

    def look_up(self, name: str = "matrix", **more: Any) -> tuple[Endpoints, list[ReadTicket]]:
        found = self.locations.endpoints(encode(ReadCommand(name=name, **more)), self.call())
        return found, [decode(each.ticket, ReadTicket) for each in found.endpoints]


def taken(request: CutRequest, state: Any = "taken", **more: Any) -> SnapshotReply:
    return SnapshotReply(order=request.order, state=state, **more)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    made = Job()
    monkeypatch.setattr(reading, "plan_of", lambda _: made.plan)
    yield made
    assert made.open == 0, "a connection to a pserver was left open"


def moved(job: Job) -> ShardPlan:
    """Move all blocks to the first pserver."""
    job.plan = placed(PLAN, Placement(version=2, pservers=2, blocks=((0, PLAN.block_count),), buckets=((0, BUCKETS),)))
    job.model.plan_hash = job.plan.hash
    return job.plan


def test_each_row_is_in_one_part_and_split_rows_are_at_the_master(job: Job) -> None:
    found, tickets = job.look_up()
    assert [each.addresses for each in found.endpoints] == [("server-0",), ("master",), ("server-1",)]
    assert [(each.start, each.stop) for each in tickets] == [(0, 1), (1, 2), (2, 3)]
    assert (found.record_count, found.size_bytes, found.is_ordered) == (3, MATRIX.nbytes, True)
    _, tickets = job.look_up(start=3)
    assert [(each.start, each.stop) for each in tickets] == [(3, 3)], "an empty range needs an endpoint for its schema"


@pytest.mark.parametrize("bounds", [(0, BUCKETS), (1, BUCKETS - 1), (BUCKETS // 2, BUCKETS // 2 + 1)])
def test_each_bucket_is_in_one_part(job: Job, bounds: tuple[int, int]) -> None:
    _, tickets = job.look_up("users", start=bounds[0], stop=bounds[1])
    assert (tickets[0].start, tickets[-1].stop) == bounds
    assert all(one.stop == other.start for one, other in pairwise(tickets))
    assert all(each.start < each.stop for each in tickets)


def test_a_split_row_is_read_from_all_its_owners_in_order(job: Job) -> None:
    ticket = ReadTicket(plan_hash=PLAN.hash, name="matrix", kind="parameter", start=1, stop=2)
    answer = job.locations.read(encode(ticket))
    assert answer.batches[0].column(0).flatten().to_pylist() == MATRIX[1].tolist()
    assert [(server, each.is_flat) for server, each in job.reads] == [(0, True), (1, True)]
    with pytest.raises(MessageError, match="single rows"):
        job.locations.read(encode(ReadTicket(plan_hash=PLAN.hash, name="matrix", kind="parameter", stop=3)))


@pytest.mark.parametrize(
    ("name", "kind", "more"),
    [("users", "table", {}), ("matrix", "parameter", {"checkpoint": 1}), ("matrix", "parameter", {"is_flat": True})],
)
def test_the_master_reads_only_split_rows_of_parameters(job: Job, name: str, kind: Any, more: dict[str, Any]) -> None:
    ticket = ReadTicket(plan_hash=PLAN.hash, name=name, kind=kind, start=1, stop=2, **more)
    with pytest.raises(MessageError, match="only rows"):
        job.locations.read(encode(ticket))
    assert not job.reads


def test_a_name_is_looked_up_among_parameters_and_tables(job: Job) -> None:
    for kind in ("", "parameter", "table"):
        with pytest.raises(NotFoundError, match="no 'unknown'"):
            job.look_up("unknown", kind=kind)
    with pytest.raises(NotFoundError, match="no 'users'"):
        job.look_up("users", kind="parameter")
    with pytest.raises(NotFoundError, match="no 'matrix'"):
        job.look_up("matrix", kind="table")


def test_a_cut_is_abandoned_when_its_caller_has_left(job: Job) -> None:
    def leave() -> None:
        raise UnavailableError("the caller has left")

    job.answer = lambda _, request: taken(request, "waiting")
    call = job.call()
    call.check = leave
    with pytest.raises(UnavailableError, match="has left"):
        job.locations.endpoints(encode(ReadCommand(name="matrix", cut="new")), call)
    call = job.call()
    call.deadline = job.clock.now() + 1.0
    with pytest.raises(NotReadyError, match="in time"):
        job.locations.endpoints(encode(ReadCommand(name="matrix", cut="new")), call)
    assert job.clock.now() < call.deadline + 1.0


def test_a_cut_is_complete_once_all_pservers_have_made_it(job: Job) -> None:
    asked = {0: 0, 1: 0}

    def answer(index: int, request: CutRequest) -> SnapshotReply:
        asked[index] += 1
        return taken(request, "taken" if asked[index] > 2 * index else "running")

    job.answer = answer
    with pytest.raises(NotFoundError):
        job.look_up(cut="kept")
    _, tickets = job.look_up(cut="new")
    assert {each.cut for each in tickets} == {(7, 1)}
    assert asked == {0: 1, 1: 3}
    assert {request.order.number for _, request in job.requests} == {1}
    assert {each.cut for each in job.look_up(cut="kept")[1]} == {(7, 1)}
    assert {each.cut for each in job.look_up(cut="new")[1]} == {(7, 2)}
    assert {each.cut for each in job.look_up(cut="kept")[1]} == {(7, 2)}
    assert {each.cut for each in job.look_up()[1]} == {None}


def test_the_parts_of_a_cut_are_where_they_were_cut(job: Job) -> None:
    before, tickets = job.look_up(cut="new")
    newer = moved(job)
    after, again = job.look_up(cut="kept")
    assert (after.endpoints, again) == (before.endpoints, tickets)
    job.locations.read(encode(tickets[1]))
    assert [server for server, _ in job.reads] == [0, 1], "a split row of a cut is read where it is now"
    assert {each.plan_hash for _, each in job.reads} == {PLAN.hash}
    now, tickets = job.look_up()
    assert [each.addresses for each in now.endpoints] == [("server-0",)]
    assert tickets[0].plan_hash == newer.hash


def test_a_cut_waits_for_the_one_in_progress(job: Job) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def answer(_: int, request: CutRequest) -> SnapshotReply:
        begun.set()
        if request.order.number == 1:
            assert go_on.wait(LONG_S)
        return taken(request)

    job.answer = answer
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(job.look_up, cut="new")
        assert begun.wait(LONG_S)
        second = pool.submit(job.look_up, cut="new")
        with pytest.raises(TimeoutError):
            second.result(0.05)
        go_on.set()
        cuts = [{each.cut for each in running.result(LONG_S)[1]} for running in (first, second)]
    assert cuts == [{(7, 1)}, {(7, 2)}]
    assert {each.cut for each in job.look_up(cut="kept")[1]} == {(7, 2)}


@pytest.mark.parametrize(("state", "error"), [("failed", UnavailableError), ("running", NotReadyError)])
def test_a_cut_that_fails_leaves_the_one_before_it(job: Job, state: str, error: type[Exception]) -> None:
    job.look_up(cut="new")
    job.answer = lambda index, request: taken(request, state if index else "taken")
    with pytest.raises(error):
        job.look_up(cut="new")
    assert {each.cut for each in job.look_up(cut="kept")[1]} == {(7, 1)}


def test_a_pserver_that_is_being_replaced_is_not_ready(job: Job) -> None:
    del job.servers[1]
    for cut in ("latest", "new"):
        with pytest.raises(NotReadyError, match="replaced"):
            job.look_up(cut=cut)


def test_a_checkpoint_is_read_by_all_pservers(job: Job) -> None:
    with pytest.raises(NotFoundError, match="checkpoint"):
        job.look_up(cut="checkpoint")
    job.core.checkpointing.latest = 4
    found, tickets = job.look_up(cut="checkpoint")
    assert [(each.start, each.stop, each.checkpoint) for each in tickets] == [(0, 1, 4), (1, 3, 4)]
    assert [each.addresses for each in found.endpoints] == [("server-0",), ("server-1",)]
