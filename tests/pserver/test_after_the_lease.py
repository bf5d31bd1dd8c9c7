"""A pserver without a lease rejects every change, whichever verb it comes by and at any point of a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import SimpleQueue

import numpy as np
import pytest

from flightedl.coordination.directory import Directory
from flightedl.coordination.keys import JobKeys
from flightedl.domain.consistency.modes import Async
from flightedl.domain.model.optimizers import SGD
from flightedl.errors import FencedError
from flightedl.messages.base import encode
from flightedl.messages.declarations import DeclaredModel, JobDeclaration, ModelDeclaration, ParameterDeclaration
from flightedl.messages.parameters import InitHeader, Outcome
from flightedl.ports import Put
from flightedl.pserver.service import PserverService
from flightedl.wire.parts import STEP_SCHEMA
from flightedl.wire.rows import PUSH_SCHEMA, OutgoingBlocks, encode_rows
from tests.support.memory import MemoryCoordinator

from ..client.pserver_bench import CLOCK, Cluster
from ..wire.encoded import encode_parts

SIZE = 16
NUMBERS = [0, 1]


class Bench:
    """Two blocks at 0 on one pserver, with SGD of rate 1; every gradient is -1."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.connection = cluster.connections[0]
        self.batch = 0

    def end_lease(self) -> None:
        self.cluster.services[0].has_lease = False

    def values(self) -> list[float]:
        return [float(block.values[0]) for block in self.cluster.shards[0].blocks()]

    def header(self, verb: str) -> bytes:
        self.batch += 1
        return encode(self.cluster.header(self.batch, verb=verb))

    def rows(self, value: float = -1.0) -> object:
        return encode_rows(NUMBERS, [0, 0], [np.full(SIZE, value, np.float32)] * 2)

    def push(self) -> None:
        self.connection.put(self.header("push"), PUSH_SCHEMA, [(self.rows(), None)], timeout_s=10.0)

    def init(self) -> None:
        header = InitHeader(trainer="t1", generation=1, plan_hash=self.cluster.plan.hash, election=2, rows=len(NUMBERS))
        self.connection.put(encode(header), PUSH_SCHEMA, [(self.rows(5.0), None)], timeout_s=10.0)

    def step(self, between: Callable[[], None] = lambda: None) -> None:
        """Push one message for each block."""
        pieces = [OutgoingBlocks(range(n, n + 1), 0, Outcome.NONE, np.full(SIZE, -1, np.float32), ()) for n in NUMBERS]
        with self.connection.exchange(b'{"verb": "step"}', STEP_SCHEMA, timeout_s=10.0) as exchange:
            exchange.write(*encode_parts(pieces[:1], self.header("step")))
            exchange.answer()
            between()
            exchange.write(*encode_parts(pieces[1:]))
            exchange.answer()
            exchange.done_writing()
            assert exchange.read() is None


@pytest.fixture
def bench() -> Iterator[Bench]:
    with Cluster({"a": (SIZE,), "b": (SIZE,)}, Async(), pservers=1) as cluster:
        yield Bench(cluster)


@pytest.mark.parametrize("verb", ["init", "push", "step"])
def test_every_call_that_changes_values_is_rejected_without_a_lease(bench: Bench, verb: str) -> None:
    bench.end_lease()
    with pytest.raises(FencedError, match="lease"):
        getattr(bench, verb)()
    assert bench.values() == [0, 0]


@pytest.mark.parametrize(("verb", "values"), [("init", [5, 5]), ("push", [1, 1]), ("step", [1, 1])])
def test_every_call_that_changes_values_is_accepted_with_a_lease(bench: Bench, verb: str, values: list[float]) -> None:
    getattr(bench, verb)()
    assert bench.values() == values


def test_a_step_in_progress_is_rejected_when_the_lease_ends(bench: Bench) -> None:
    with pytest.raises(FencedError, match="lease"):
        bench.step(between=bench.end_lease)
    assert bench.values() == [1, 0]


def test_the_service_checks_its_lease_for_each_write() -> None:
    held = True
    with Directory(MemoryCoordinator(CLOCK), JobKeys("demo"), CLOCK) as directory:
        ends: list[str] = []
        service = PserverService(directory, JobKeys("demo"), pytest.fail, ends.append, None, CLOCK)
        with pytest.raises(FencedError):
            service.require_lease()
        service.acquire_index(0, 1, lambda: held)
        service.require_lease()
        held = False
        for _ in range(2):
            with pytest.raises(FencedError, match="pserver 0 has expired"):
                service.require_lease()
        assert len(ends) == 1, "the process must be asked to end once"


@pytest.mark.parametrize(
    ("is_held_later", "expected"), [(True, ("fail", "different shard plan")), (False, ("start again", "lease"))]
)
def test_a_replaced_pserver_does_not_fail_the_job(is_held_later: bool, expected: tuple[str, str]) -> None:
    """The pserver cannot serve the declared model. Once it was replaced, it must not report this."""
    model = ModelDeclaration(
        parameters=[ParameterDeclaration(name="w", shape=[4], dtype="float32")],
        optimizer=SGD(0.1).to_json(),
        mode=Async().to_json(),
    )
    declared = JobDeclaration(model=DeclaredModel(declaration=model, pservers=1, plan_hash="another"))
    coordinator, keys = MemoryCoordinator(CLOCK), JobKeys("demo")
    coordinator.transact([], [Put(keys.job, encode(declared))])
    with Directory(coordinator, keys, CLOCK) as directory:
        assert directory.wait_until(lambda d: d.entry(keys.job), 5.0)
        said: SimpleQueue[tuple[str, str]] = SimpleQueue()
        service = PserverService(
            directory,
            keys,
            lambda why: said.put(("fail", why)),
            lambda why: said.put(("start again", why)),
            None,
            CLOCK,
        )
        # It is asked first when it begins to build, then when it has found out.
        is_held = iter([True])
        service.acquire_index(0, 1, lambda: next(is_held, is_held_later))
        service.look()
        what, why = said.get(timeout=10.0)
        service.close()
    assert what == expected[0]
    assert expected[1] in why
    assert said.empty()
