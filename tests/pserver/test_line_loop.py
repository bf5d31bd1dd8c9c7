"""One thread serves the small steps from all lines, and hands back everything else."""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from flightedl.client.model.step_channel import StepChannel
from flightedl.domain.consistency.modes import Async, Sync
from flightedl.errors import FencedError, FlightedlError, GradientError, MessageError, NotReadyError
from flightedl.messages.base import encode
from flightedl.messages.parameters import Outcome
from flightedl.pserver.steps import conversation
from flightedl.pserver.steps.line_loop import LineLoop
from flightedl.wire.parts import STEP_END, ReceivedBlocks
from flightedl.wire.rows import OutgoingBlocks

from ..client.pserver_bench import CLOCK, Cluster
from ..rpc.rpc_support import eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="lines are offered on Linux only")

SIZE = 50


def _loops() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "flightedl-lines"]


@pytest.mark.parametrize("is_newest", [True, False])
def test_a_thread_that_ends_closes_what_is_its_own(is_newest: bool) -> None:
    """The loop may have started another thread before this one has noticed that it ends."""
    loop, poller = LineLoop(CLOCK.now), select.epoll()
    event, other = (os.eventfd(1, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(2))
    poller.register(event, select.EPOLLIN)
    loop._event = event if is_newest else other
    loop._run(poller, event)
    assert poller.closed
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.eventfd_write(event, 1)
    assert loop._event == (None if is_newest else other)
    os.close(other)


class Member:
    """A trainer that pushes ones to all blocks of a pserver on its own stream."""

    def __init__(self, cluster: Cluster, member: int) -> None:
        self.cluster, self.member = cluster, member
        self.channel = StepChannel(0, CLOCK, step_bytes=0)
        self.batch = member * 1000

    def step(
        self, value: float = 1.0, base: int = 0, size: int = SIZE, **header: object
    ) -> list[tuple[int, int, bool]]:
        """Run one step. Return the version, the outcome, and whether there are values, of each received part."""
        self.batch += 1
        who = {"trainer": f"t{self.member}", "generation": self.member, "member": self.member}
        numbers = self.cluster.shards[0].numbers
        blocks = range(numbers[0], numbers[-1] + 1)
        pieces = [OutgoingBlocks(blocks, base, 0, np.full(size, value, np.float32), ())]
        stream = self.channel.begin(self.cluster.connections[0], timeout_s=10.0)
        found: list[tuple[int, int, bool]] = []
        try:
            stream.send(pieces, encode(self.cluster.header(self.batch, **(who | header))), checksums=False)
            said = b""
            while said != STEP_END:
                parts, said = stream.receive()
                found += [(part.version, part.outcome, bool(part.data)) for part in parts]
        except BaseException as error:
            self.channel.end(stream, error)
            raise
        self.channel.end(stream)
        return found


@pytest.fixture
def alone() -> Iterator[Member]:
    with Cluster({"w": (SIZE,)}, Async()) as cluster:
        member = Member(cluster, 1)
        yield member
        member.channel.close_idle()


@pytest.fixture
def two() -> Iterator[tuple[Member, Member]]:
    with Cluster({"w": (SIZE,)}, Sync(), members=2) as cluster:
        members = Member(cluster, 1), Member(cluster, 2)
        yield members
        for member in members:
            member.channel.close_idle()


def _round(members: tuple[Member, ...], base: int) -> list[list[tuple[int, int, bool]]]:
    with ThreadPoolExecutor(len(members)) as pool:
        return [done.result() for done in [pool.submit(member.step, base=base) for member in members]]


def test_steps_of_all_streams_are_answered_by_one_thread_that_ends_with_the_last(
    two: tuple[Member, Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    for base in range(6):
        for answers in _round(two, base):
            assert answers[0][1] == Outcome.ACCEPTED
            assert answers[-1][::2] == (base + 1, True)
    assert len(_loops()) == 1
    eventually(lambda: two[0].cluster.servers[0].running_calls == 2, "both streams are kept")
    for member in two:
        member.channel.close_idle()
    eventually(lambda: not _loops(), "the loop ends")
    for answers in _round(two, 6):
        assert answers[-1][0] == 7


def test_a_step_whose_round_stays_open_ends_at_its_deadline_without_values(two: tuple[Member, Member]) -> None:
    _round(two, 0)
    _round(two, 1)
    began = time.monotonic()
    assert two[0].step(base=2, wait_s=0.3) == [(2, Outcome.ACCEPTED, False)]
    assert 0.25 < time.monotonic() - began < 5.0
    assert two[1].step(base=2) == [(3, Outcome.ACCEPTED, True)]


@pytest.mark.parametrize("by_tcp", [False, True])
def test_a_waiting_step_is_answered_when_another_stream_closes_its_round(
    two: tuple[Member, Member], by_tcp: bool
) -> None:
    _round(two, 0)
    _round(two, 1)
    cluster = two[0].cluster
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(two[0].step, base=2, wait_s=5.0)
        time.sleep(0.1)
        assert not waits.done()
        began = time.monotonic()
        if by_tcp:
            ones = memoryview(np.ones(SIZE, np.float32)).cast("B")
            header = cluster.header(5, trainer="t2", generation=2, member=2)
            cluster.shards[0].push(header, [ReceivedBlocks(range(len(cluster.shards[0].numbers)), 2, 0, ones)])
            assert waits.result(5.0)[-1] == (3, Outcome.NONE, True)
        else:
            cluster.view(1, serial=2)
            assert waits.result(5.0)[-1][::2] == (3, True), "the round still waits for the removed member"
        assert time.monotonic() - began < 4.5


def test_small_and_large_steps_take_turns_on_one_stream(alone: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    for base in range(12):
        monkeypatch.setattr(conversation, "SMALL_STEP_BYTES", (1 << 20, 10)[base // 2 % 2])
        assert alone.step(base=base) == [(base + 1, Outcome.ACCEPTED, True)]
    assert alone.cluster.servers[0].running_calls == 1
    assert (alone.cluster.shards[0].blocks()[0].values == -12).all()


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"plan_hash": "0" * 32}, FencedError),
        ({"rows": 0}, MessageError),
        ({"value": np.nan}, GradientError),
        ({"size": SIZE - 1}, MessageError),
    ],
    ids=["plan", "rows", "nan", "size"],
)
def test_the_client_receives_errors_on_the_stream(
    alone: Member, wrong: dict[str, object], error: type[FlightedlError]
) -> None:
    for base in range(3):
        alone.step(base=base)
    with pytest.raises(error):
        alone.step(base=3, **wrong)  # type: ignore[arg-type]
    assert alone.step(base=3) == [(4, Outcome.ACCEPTED, True)]
    assert sum(alone.cluster.servers[0].refusals.values()) == 1


def test_a_step_is_rejected_after_the_lease_has_ended(alone: Member) -> None:
    for base in range(3):
        alone.step(base=base)
    alone.cluster.services[0].has_lease = False
    with pytest.raises(FencedError, match="the lease is over"):
        alone.step(base=3)


def test_a_stopping_server_does_not_wait_for_idle_streams(alone: Member) -> None:
    for base in range(3):
        alone.step(base=base)
    began = time.monotonic()
    assert alone.cluster.servers[0].stop(grace_s=5.0)
    assert time.monotonic() - began < 4.5
    eventually(lambda: not _loops(), "the loop ends")


def test_a_waiting_step_fails_when_the_server_stops(two: tuple[Member, Member]) -> None:
    _round(two, 0)
    _round(two, 1)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(two[0].step, base=2, wait_s=8.0)
        time.sleep(0.1)
        assert two[0].cluster.servers[0].stop(grace_s=5.0)
        assert isinstance(waits.exception(5.0), NotReadyError)


def test_a_trainer_that_disconnects_during_a_waiting_step_leaves_nothing_behind(two: tuple[Member, Member]) -> None:
    _round(two, 0)
    _round(two, 1)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(two[0].step, base=2, wait_s=8.0)
        time.sleep(0.1)
        two[0].cluster.connections[0].abort_calls()
        assert isinstance(waits.exception(5.0), FlightedlError)
    eventually(lambda: two[0].cluster.servers[0].running_calls == 0, "both streams end")
    eventually(lambda: not _loops(), "the loop ends")
