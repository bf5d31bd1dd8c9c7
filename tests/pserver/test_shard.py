"""The effects of a push on a block's values, version and answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest

from flightedl.domain.consistency.modes import Async, Bounded, Mode, Sync
from flightedl.domain.model.optimizers import SGD
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import plan_shards
from flightedl.errors import GradientError, MessageError
from flightedl.messages.control import ViewMember, ViewRequest
from flightedl.messages.parameters import BatchIdentity, Outcome, PushHeader
from flightedl.pserver.shard import Shard
from flightedl.pserver.stores.interface import Wanted
from flightedl.wire.parts import ReceivedBlocks
from flightedl.wire.rows import OutgoingBlocks, Row, Rows

SIZE = 16
ZEROS = memoryview(np.zeros(SIZE, np.float32)).cast("B")


class Bench:
    """A shard with one block, and members that push to it."""

    def __init__(self, mode: Mode) -> None:
        plan = plan_shards([ParameterSpec("w", (SIZE,))], 1)
        self.shard = Shard(plan, 0, SGD(lr=1.0), mode)
        self.serial = 0
        self.shard.initialize(1, Row(0, 0, ZEROS))

    def view(self, *members: int, first_round: int = 0) -> tuple[int, ...]:
        self.serial += 1
        messages = [ViewMember(trainer=f"t{m}", generation=m, member=m, first_round=first_round) for m in members]
        request = ViewRequest(plan_hash="p", master_generation=1, serial=self.serial, members=messages)
        return tuple(self.shard.set_members(request).refused)

    def change(self, mode: Mode, at_round: int, *members: int) -> bool:
        """Apply a view that changes the mode. Return False if it was rejected."""
        self.serial += 1
        messages = [ViewMember(trainer=f"t{m}", generation=m, member=m, first_round=at_round) for m in members]
        request = ViewRequest(
            plan_hash="p",
            master_generation=1,
            serial=self.serial,
            members=messages,
            mode=mode.to_json(),
            switch_round=at_round,
        )
        return not self.shard.set_members(request).refuses_mode

    def push(
        self, member: int, batch: int, gradient: float | None, base: int = 0, weight: float = 1.0
    ) -> OutgoingBlocks:
        header = PushHeader(
            trainer=f"t{member}",
            generation=member,
            plan_hash=self.shard.plan_hash,
            member=member,
            identity=BatchIdentity(epoch=0, task=0, batch=batch, batch_count=100),
            weight=weight,
            rows=1,
        )
        array = np.empty(0, np.float32) if gradient is None else np.full(SIZE, gradient, np.float32)
        (pushed,) = self.shard.push_rows(header, one_row(0, base, memoryview(array).cast("B")))
        return pushed.piece

    def values(self) -> tuple[int, float]:
        (read,), rest = self.shard.read(Wanted(range(1), 0), 0)
        assert not rest
        assert read.values is not None
        assert len(set(read.values.tolist())) == 1
        return read.version, float(read.values[0])


def one_row(block: int, version: int, values: memoryview) -> Rows:
    return Rows([block], [version], [0], [0, len(values)], values)


@pytest.fixture
def synchronous() -> Iterator[Bench]:
    bench = Bench(Sync(reduce="sum"))
    yield bench
    bench.shard._protocol.check()


@pytest.fixture
def asynchronous() -> Bench:
    return Bench(Async())


def test_a_round_closes_when_all_members_have_arrived(synchronous: Bench) -> None:
    synchronous.view(1, 2)
    assert synchronous.push(1, batch=0, gradient=-1).outcome == Outcome.ACCEPTED
    assert synchronous.values() == (0, 0.0)
    assert synchronous.push(2, batch=1, gradient=-2).outcome == Outcome.ACCEPTED
    assert synchronous.values() == (1, 3.0)


def test_the_mean_is_weighted_by_records() -> None:
    bench = Bench(Sync())
    bench.view(1, 2)
    bench.push(1, batch=0, gradient=-1, weight=30)
    bench.push(2, batch=1, gradient=-5, weight=10)
    assert bench.values() == (1, 2.0)


def test_a_repeated_push_counts_once(synchronous: Bench) -> None:
    synchronous.view(1)
    synchronous.push(1, batch=0, gradient=-1)
    assert synchronous.push(1, batch=0, gradient=-1).outcome == Outcome.ALREADY_APPLIED
    assert synchronous.values() == (1, 1.0)


def test_a_batch_already_pushed_by_another_trainer_arrives_without_weight(synchronous: Bench) -> None:
    synchronous.view(1, 2)
    synchronous.push(1, batch=0, gradient=-1)
    synchronous.view(2)
    assert synchronous.values() == (0, 0.0), "the round still waits for member 2"
    synchronous.push(2, batch=0, gradient=-1)
    assert synchronous.values() == (1, 1.0)


def test_a_member_that_leaves_no_longer_holds_up_the_round(synchronous: Bench) -> None:
    synchronous.view(1, 2)
    synchronous.push(1, batch=0, gradient=-1)
    synchronous.view(1)
    assert synchronous.values() == (1, 1.0)


def test_an_arrival_without_gradient_closes_the_round_without_an_update(synchronous: Bench) -> None:
    synchronous.view(1)
    assert synchronous.push(1, batch=0, gradient=None).outcome == Outcome.ACCEPTED
    assert synchronous.values() == (1, 0.0)
    assert synchronous.push(1, batch=0, gradient=-1, base=1).outcome == Outcome.ALREADY_APPLIED


def test_a_push_of_a_stranger_changes_nothing(synchronous: Bench) -> None:
    synchronous.view(1)
    assert synchronous.push(2, batch=0, gradient=-1).outcome == Outcome.NOT_MEMBER
    assert synchronous.push(1, batch=0, gradient=-1).outcome == Outcome.ACCEPTED, "the batch was not marked"
    assert synchronous.values() == (1, 1.0)


def test_an_old_base_version_is_stale_and_the_batch_is_not_marked(synchronous: Bench) -> None:
    synchronous.view(1)
    synchronous.push(1, batch=0, gradient=-1)
    assert synchronous.push(1, batch=1, gradient=-1, base=0).outcome == Outcome.STALE
    assert synchronous.push(1, batch=1, gradient=-1, base=1).outcome == Outcome.ACCEPTED
    assert synchronous.values() == (2, 2.0)


def test_a_member_cannot_join_at_a_past_round(synchronous: Bench) -> None:
    synchronous.view(1)
    synchronous.push(1, batch=0, gradient=-1)
    assert synchronous.view(1, 2, first_round=0) == (2,)


def test_a_read_with_a_lost_membership_is_rejected(synchronous: Bench) -> None:
    synchronous.view(1)
    (read,), _ = synchronous.shard.read(Wanted(range(1), 0), 2)
    assert (read.outcome, read.values) == (Outcome.NOT_MEMBER, None)


def test_async_applies_a_push_on_arrival_and_returns_the_new_values(asynchronous: Bench) -> None:
    asynchronous.view(1, 2)
    pushed = asynchronous.push(1, batch=0, gradient=-1)
    assert pushed.values is not None
    assert (pushed.version, pushed.values[0]) == (1, 1.0)
    asynchronous.push(2, batch=1, gradient=-1, base=0)
    assert asynchronous.values() == (2, 2.0)
    assert asynchronous.push(2, batch=0, gradient=-1).outcome == Outcome.ALREADY_APPLIED


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_not_finite_is_rejected_before_the_mark(synchronous: Bench, bad: float) -> None:
    synchronous.view(1)
    with pytest.raises(GradientError, match="'w'"):
        synchronous.push(1, batch=0, gradient=bad)
    assert synchronous.push(1, batch=0, gradient=-1).outcome == Outcome.ACCEPTED


def test_wrong_sizes_unknown_blocks_and_future_base_versions_are_rejected(synchronous: Bench) -> None:
    synchronous.view(1)
    header = PushHeader(
        trainer="t1",
        generation=1,
        plan_hash="",
        member=1,
        identity=BatchIdentity(epoch=0, task=0, batch=0, batch_count=1),
        weight=1,
        rows=1,
    )
    with pytest.raises(MessageError, match="64 bytes, not 60"):
        synchronous.shard.push_rows(header, one_row(0, 0, memoryview(bytes(60))))
    with pytest.raises(MessageError, match="block 7"):
        synchronous.shard.push_rows(header, one_row(7, 0, memoryview(bytes(64))))
    with pytest.raises(MessageError, match="future"):
        synchronous.push(1, batch=0, gradient=-1, base=3)
    assert synchronous.values() == (0, 0.0)


def test_first_values_of_a_newer_election_replace_those_of_an_older_one(synchronous: Bench) -> None:
    ones = memoryview(np.ones(SIZE, np.float32)).cast("B")
    synchronous.shard.initialize(5, Row(0, 0, ones))
    synchronous.shard.initialize(3, Row(0, 0, memoryview(np.full(SIZE, 9, np.float32)).cast("B")))
    assert synchronous.values() == (0, 1.0)
    assert synchronous.shard.initialized_count(5) == 1


def test_a_finished_epoch_needs_no_memory(asynchronous: Bench) -> None:
    asynchronous.view(1)
    for batch in range(100):
        asynchronous.push(1, batch, 1.0)
    before = len(asynchronous.shard.applied().encode())
    asynchronous.shard.set_task_counts([(0, 1)])
    sealed = asynchronous.shard.applied()
    assert sealed.completed_task_count(0) == 1
    assert len(sealed.encode()) <= before
    assert asynchronous.push(1, 5, 1.0).outcome == Outcome.ALREADY_APPLIED
    with pytest.raises(MessageError):
        asynchronous.shard.set_task_counts([(1, 0)])


class TestChangesOfTheMode:
    """Earlier pushes count by the old mode's rules, later ones by those of the new mode."""

    def test_an_open_round_closes_in_the_old_mode_first(self) -> None:
        bench = Bench(Sync(reduce="mean"))
        bench.view(1, 2)
        bench.push(1, 0, -2.0, weight=10)
        assert not bench.change(Async(), 0, 3)
        # Refusing has removed the members, and so closed the round.
        assert bench.values() == (1, 2.0)
        assert bench.change(Async(), 4, 5)
        assert bench.values() == (4, 2.0)
        assert bench.push(1, 1, -1.0).outcome == Outcome.NOT_MEMBER
        assert bench.push(5, 1, -1.0, base=4).outcome == Outcome.ACCEPTED
        assert bench.push(5, 0, -2.0, base=5).outcome == Outcome.ALREADY_APPLIED
        assert bench.values() == (5, 3.0)

    def test_blocks_with_different_versions_start_rounds_together(self) -> None:
        bench = Bench(Async())
        bench.view(1)
        for batch in range(3):
            bench.push(1, batch, -1.0)
        assert not bench.change(Sync(reduce="sum"), 2, 2)
        assert bench.change(Sync(reduce="sum"), 7, 3, 4)
        assert bench.values() == (7, 3.0)
        bench.push(3, 3, -1.0, base=7)
        assert bench.values() == (7, 3.0)
        bench.push(4, 4, -1.0, base=7)
        assert bench.values() == (8, 5.0)

    def test_a_sum_is_accepted_only_in_modes_with_sums(self) -> None:
        bench = Bench(Bounded(1))
        bench.view(1)
        header = PushHeader(
            trainer="t1",
            generation=1,
            plan_hash=bench.shard.plan_hash,
            member=1,
            identity=BatchIdentity(epoch=0, task=0, batch=0, batch_count=100),
            further=[BatchIdentity(epoch=0, task=0, batch=1, batch_count=100)],
            weight=1.0,
            rows=1,
        )
        array = np.full(SIZE, -1, np.float32)
        with pytest.raises(MessageError, match="accepts no sums"):
            bench.shard.push_rows(header, one_row(0, 0, memoryview(array).cast("B")))
        assert bench.change(Async(), 1, 2)
        header = msgspec.structs.replace(header, trainer="t2", generation=2, member=2)
        bench.shard.push_rows(header, one_row(0, 0, memoryview(array).cast("B")))
        assert bench.push(2, 1, -1.0).outcome == Outcome.ALREADY_APPLIED
        assert bench.values() == (2, 1.0)

    def test_the_first_view_sets_the_mode(self) -> None:
        bench = Bench(Sync())
        assert bench.change(Async(), 9, 1)
        assert bench.push(1, 0, -1.0).outcome == Outcome.ACCEPTED
        assert bench.values() == (1, 1.0)

    def test_ordered_contributions_are_added_before_the_mode_changes(self) -> None:
        bench = Bench(Sync(reduce="sum", deterministic=True))
        bench.view(1, 2)
        bench.push(1, 0, -1.0)
        assert bench.change(Bounded(0), 1, 3)
        assert bench.values() == (1, 1.0)


def test_values_sent_as_16_bit_floats_are_always_checked_for_finiteness() -> None:
    specs = [ParameterSpec("a", (3,)), ParameterSpec("b", (4,), "float64")]
    shard = Shard(plan_shards(specs, 1), 0, SGD(lr=1.0), Async(), "bfloat16")
    (number,) = (each for each in shard.numbers if shard.dense.span(each).values.dtype == np.float64)
    message = np.zeros(6 + 4 * 8, np.uint8)
    message[6:] = np.array([1.0, np.nan, 1.0, 1.0]).view(np.uint8)
    assert np.isfinite(message[:36].view(np.float32)).all(), "read as float32 words, the message looks finite"
    span = shard.dense.span(number)
    with pytest.raises(GradientError, match="'b' has NaN"):
        shard.dense.gradient(span, span.numbers, message[6:].data, is_finite=True)


#: Name of an operation -> the operation.
OPERATIONS: dict[str, Callable[[Bench], object]] = {
    "apply a view": lambda bench: bench.view(1),
    "set an initial value": lambda bench: bench.shard.initialize(
        2, Row(0, 0, memoryview(np.zeros(SIZE, np.float32)).cast("B"))
    ),
    "push": lambda bench: bench.push(1, 0, 1.0),
    "read": lambda bench: bench.values(),
    "lend values": lambda bench: bench.shard.values(range(1)),
    "freeze": lambda bench: bench.shard.freeze(range(1)),
    "drop": lambda bench: bench.shard.drop(range(1)),
    "begin a snapshot": lambda bench: bench.shard.copying.begin(lambda *_: None),
    "report": lambda bench: bench.shard.waits_for(),
    "list the applied batches": lambda bench: bench.shard.applied(),
    "seal": lambda bench: bench.shard.set_task_counts([(0, 1)]),
}
OF_SPANS = [name for name in OPERATIONS if name not in {"list the applied batches", "seal"}]
OF_PROTOCOL = ["apply a view", "set an initial value", "push", "drop", "list the applied batches", "seal"]


@pytest.mark.parametrize(
    ("lock", "name"), [("span", name) for name in OF_SPANS] + [("protocol", name) for name in OF_PROTOCOL]
)
def test_an_operation_waits_for_the_one_in_progress(lock: str, name: str) -> None:
    """A push holds the lock of its span, and another lock while the protocol decides about all blocks."""
    bench = Bench(Async())
    bench.view(1)
    if name == "drop":
        assert bench.shard.freeze(range(1))
    held = bench.shard.dense.span(0).lock if lock == "span" else bench.shard._deciding
    with ThreadPoolExecutor(1) as executor:
        with held:
            running = executor.submit(OPERATIONS[name], bench)
            with pytest.raises(TimeoutError):
                running.result(0.05)
        running.result(20.0)


def test_waiting_readers_are_woken_although_the_last_block_of_a_message_has_no_news() -> None:
    plan = plan_shards([ParameterSpec("v", (SIZE,)), ParameterSpec("w", (SIZE,))], 1)
    shard = Shard(plan, 0, SGD(lr=1.0), Sync())
    members = [ViewMember(trainer=f"t{m}", generation=m, member=m, first_round=0) for m in (1, 2)]
    shard.set_members(ViewRequest(plan_hash="p", master_generation=1, serial=1, members=members))

    def push(member: int, *numbers: int) -> None:
        header = PushHeader(
            trainer=f"t{member}",
            generation=member,
            plan_hash=plan.hash,
            member=member,
            identity=BatchIdentity(epoch=0, task=0, batch=member, batch_count=3),
            weight=1.0,
            rows=len(numbers),
        )
        shard.push(header, [ReceivedBlocks(range(n, n + 1), 0, 0, ZEROS, False) for n in numbers])

    push(1, 0)
    before = shard.changes.count
    push(2, 0, 1)
    assert [block.rounds.version for block in shard.blocks()] == [1, 0]
    assert shard.changes.count == before + 1
