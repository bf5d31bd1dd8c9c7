"""A pserver whose lease is over takes nothing any more, whichever way it comes and wherever it is in a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from flightedl.coordination.directory import Directory
from flightedl.coordination.keys import JobKeys
from flightedl.domain.consistency.modes import Async
from flightedl.errors import FencedError
from flightedl.messages.base import encode
from flightedl.messages.parameters import InitHeader, Outcome
from flightedl.pserver.service import PserverService
from flightedl.testing.memory import MemoryCoordinator
from flightedl.wire.parts import STEP_SCHEMA, encode_parts
from flightedl.wire.rows import PUSH_SCHEMA, OutgoingBlocks, encode_rows

from ..client.pserver_bench import CLOCK, Cluster

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
        """One message for each block."""
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
def test_every_way_to_change_values_is_closed(bench: Bench, verb: str) -> None:
    bench.end_lease()
    with pytest.raises(FencedError, match="lease"):
        getattr(bench, verb)()
    assert bench.values() == [0, 0]


@pytest.mark.parametrize(("verb", "values"), [("init", [5, 5]), ("push", [1, 1]), ("step", [1, 1])])
def test_and_is_open_before(bench: Bench, verb: str, values: list[float]) -> None:
    getattr(bench, verb)()
    assert bench.values() == values


def test_a_step_that_is_under_way_goes_no_further(bench: Bench) -> None:
    with pytest.raises(FencedError, match="lease"):
        bench.step(between=bench.end_lease)
    assert bench.values() == [1, 0]


def test_the_service_asks_its_key_each_time() -> None:
    held = True
    with Directory(MemoryCoordinator(CLOCK), JobKeys("demo"), CLOCK) as directory:
        ends: list[str] = []
        service = PserverService(directory, JobKeys("demo"), pytest.fail, ends.append, None, CLOCK)
        with pytest.raises(FencedError):
            service.require_lease()
        service.take_index(0, 1, lambda: held)
        service.require_lease()
        held = False
        for _ in range(2):
            with pytest.raises(FencedError, match="pserver 0 is over"):
                service.require_lease()
        assert len(ends) == 1, "the process is told to end, once"
