"""Blocks move between pservers while members push: no batch is lost or counted twice, and the values move, too."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.domain.consistency.modes import Async, Mode, Sync
from flightedl.domain.exactly_once.batches import Batch
from flightedl.domain.model.optimizers import LAMB, Adam, Optimizer
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import plan_shards
from flightedl.domain.moving.server import State
from flightedl.domain.moving.values import Release
from flightedl.domain.pserver.block_values import Unmovable
from flightedl.errors import CorruptError, MessageError, NotReadyError, StalePlacementError
from flightedl.messages.control import ViewMember, ViewRequest
from flightedl.messages.parameters import BatchIdentity, Outcome, PushHeader
from flightedl.pserver.moving.arrival import Arrival
from flightedl.pserver.moving.departure import Departure
from flightedl.pserver.moving.mover import Mover
from flightedl.pserver.shard import Shard
from flightedl.pserver.stores.interface import Pushed, Wanted
from flightedl.wire.parts import ReceivedBlocks

from .carrier import carry

SPECS = [ParameterSpec(f"p{number}", (3 + number,)) for number in range(8)]
PLAN = plan_shards(SPECS, 1)
BLOCKS = range(PLAN.block_count)
MEMBERS = (1, 2)


def shard(mode: Mode, optimizer: Optimizer, *, is_empty: bool = False) -> Shard:
    """Return a pserver's blocks under a view of two members; an empty pserver has released all blocks."""
    made = Shard(PLAN, 0, optimizer, mode, shares_memory=True)
    members = [ViewMember(trainer=f"t{m}", generation=m, member=m, first_round=0) for m in MEMBERS]
    made.set_members(ViewRequest(plan_hash="p", master_generation=1, serial=1, members=members))
    if is_empty:
        for span in list(dict.fromkeys(made.dense.spans.values())):
            assert made.freeze(span.numbers)
            made.drop(span.numbers)
            made.thaw(span.numbers)
    return made


def move(source: Shard, target: Shard, numbers: range) -> None:
    assert carry(source, target, numbers)


def push(target: Shard, member: int, batch: int, blocks: range, base: int) -> list[Pushed]:
    header = PushHeader(
        trainer=f"t{member}",
        generation=member,
        plan_hash=PLAN.hash,
        member=member,
        identity=BatchIdentity(epoch=0, task=0, batch=batch, batch_count=1000),
        weight=1.0,
        rows=len(blocks),
    )
    sizes = [PLAN.block(number).size for number in blocks]
    gradient = np.concatenate(
        [np.full(size, (batch + 1) * (number + 1)) for number, size in zip(blocks, sizes, strict=True)]
    )
    return target.push(
        header, [ReceivedBlocks(blocks, base, 0, memoryview(gradient.astype(np.float32)).cast("B"), False)]
    )


def state(shards: Sequence[Shard]) -> dict[int, tuple[int, int, bytes, list[bytes]]]:
    return {
        block.place.number: (
            block.rounds.version,
            block.updates,
            block.values.tobytes(),
            [slot.tobytes() for slot in block.slots],
        )
        for each in shards
        for block in each.blocks()
    }


@pytest.mark.parametrize("optimizer", [Adam(lr=0.1), LAMB(lr=0.1)], ids=["adam", "lamb"])
@pytest.mark.parametrize("mode", [Sync(), Async()], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(4))
def test_blocks_that_move_back_and_forth_behave_like_blocks_that_stay(
    mode: Mode, optimizer: Optimizer, seed: int
) -> None:
    chance = random.Random(seed)
    stayed, shards = shard(mode, optimizer), [shard(mode, optimizer), shard(mode, optimizer, is_empty=True)]
    size_bytes = shards[0].size_bytes_total
    for step in range(12):
        for member in MEMBERS:
            batch = 2 * step + member
            version = step if isinstance(mode, Sync) else batch - 1
            for number in BLOCKS:
                owner = next(each for each in shards if number in each.numbers)
                push(owner, member, batch, range(number, number + 1), version)
                push(stayed, member, batch, range(number, number + 1), version)
        for _ in range(chance.randrange(3)):
            source = chance.choice([each for each in shards if each.numbers])
            span = source.dense.span(chance.choice(source.numbers)).numbers
            stop = chance.randint(span.start + 1, span.stop)
            move(source, shards[source is shards[0]], range(chance.randrange(span.start, stop), stop))
    assert state(shards) == state([stayed])
    for each in shards:
        each._protocol.check()
    assert sum(each.size_bytes_total for each in shards) == pytest.approx(size_bytes, rel=0.6)
    for number in range(2, 26):
        every = {each.applied().has(block, Batch(0, 0, number - 1)) for each in shards for block in each.numbers}
        assert every == {True}


class Pace:
    """Numbers of pushed batches and of moves. Threads wait here until the others have made progress."""

    def __init__(self) -> None:
        self.pushed = self.moves = 0
        self._changed = threading.Condition()

    def advance(self, *, pushed: int = 0, moves: int = 0) -> None:
        with self._changed:
            self.pushed, self.moves = self.pushed + pushed, self.moves + moves
            self._changed.notify_all()

    def wait_until(self, is_reached: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(is_reached, 60), "the other threads have failed"


@pytest.mark.parametrize("seed", range(3))
def test_each_batch_counts_once_while_blocks_move(seed: int) -> None:
    """Two threads push every batch twice to the pserver that has the block, one thread moves blocks back and forth."""
    from flightedl.domain.model.optimizers import SGD

    mode, batches = Async(), 60
    shards = [shard(mode, SGD(lr=1.0)), shard(mode, SGD(lr=1.0), is_empty=True)]
    pace = Pace()

    def pushes(member: int) -> None:
        chance = random.Random(f"{seed} {member}")
        for batch in range(batches):
            pace.wait_until(lambda least=batch // 10: pace.moves > least)
            for number in 2 * chance.sample(BLOCKS, len(BLOCKS)):
                while True:
                    try:
                        (pushed,) = push(
                            chance.choice(shards), member, 100 * member + batch, range(number, number + 1), 0
                        )
                        break
                    except (MessageError, StalePlacementError):
                        continue
                assert pushed.piece.outcome in {Outcome.ACCEPTED, Outcome.ALREADY_APPLIED}
            pace.advance(pushed=1)

    def moving() -> None:
        chance = random.Random(seed)
        while pace.pushed < len(MEMBERS) * batches:
            source = chance.choice([each for each in shards if each.numbers])
            number = chance.choice(source.numbers)
            move(source, shards[source is shards[0]], range(number, number + 1))
            pace.advance(moves=1)
            pace.wait_until(lambda: pace.moves <= pace.pushed + 1)

    threads = [threading.Thread(target=pushes, args=(member,)) for member in MEMBERS]
    threads.append(threading.Thread(target=moving))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pace.moves > 5
    total = sum(100 * member + batch + 1 for member in MEMBERS for batch in range(batches))
    found = {block.place.number: set(block.values.tolist()) for each in shards for block in each.blocks()}
    assert found == {number: {-float(total * (number + 1))} for number in BLOCKS}


def test_memory_of_released_blocks_is_reused() -> None:
    one, other = shard(Async(), Adam(lr=0.1)), shard(Async(), Adam(lr=0.1), is_empty=True)
    move(one, other, BLOCKS)
    assert (one.numbers, one.size_bytes_total, other.numbers) == ([], 0, [*BLOCKS])
    slab = [each._arena._slab.ctypes.data for each in (one.dense, other.dense)]
    for _ in range(6):
        move(other, one, BLOCKS)
        move(one, other, BLOCKS)
    assert [each._arena._slab.ctypes.data for each in (one.dense, other.dense)] == slab


def test_readers_keep_borrowed_values_when_the_block_is_released() -> None:
    one, other = shard(Async(), Adam(lr=0.1)), shard(Async(), Adam(lr=0.1), is_empty=True)
    (lent,), _ = one.read(Wanted(BLOCKS, 0), 0)
    assert lent.values is not None
    before = lent.values.tolist()
    for batch in range(3):
        move(one, other, BLOCKS)
        push(other, 1, batch, BLOCKS, batch)
        move(other, one, BLOCKS)
    assert lent.values.tolist() == before
    with pytest.raises(MessageError, match="is not on this pserver"):
        other.read(Wanted(BLOCKS, 0), 0)


def test_damaged_blocks_are_rejected_and_change_nothing() -> None:
    one, other = shard(Async(), Adam(lr=0.1)), shard(Async(), Adam(lr=0.1), is_empty=True)
    assert one.freeze(BLOCKS)
    (state_of,) = one.states_of(BLOCKS)
    values = one.dense.blocks_of(state_of)
    for wrong in (values[1:], values[::-1], values[:1], [replace(each, values=each.values[1:]) for each in values]):
        with pytest.raises(CorruptError):
            other.dense.prepared(state_of, wrong)
    with pytest.raises(CorruptError):
        other.adopt(state_of._replace(applied=b"?"), other.dense.prepared(state_of, values))
    assert other.adopt(state_of._replace(view=(1, 2)), other.dense.prepared(state_of, values)) is Unmovable.VIEW
    assert (other.numbers, other.size_bytes_total) == ([], 0)
    assert other.adopt(state_of, other.dense.prepared(state_of, values)) is None


@pytest.mark.parametrize("later", ["source", "target"])
def test_blocks_are_not_acknowledged_by_a_pserver_with_another_view(later: str) -> None:
    """After the acknowledgement, the move may be committed, and then the target has to adopt the blocks."""
    source, target = shard(Async(), Adam(lr=0.1)), shard(Async(), Adam(lr=0.1), is_empty=True)
    view = ViewRequest(plan_hash="p", master_generation=1, serial=2, members=[])
    numbers = source.dense.span(0).numbers
    (source if later == "source" else target).set_members(view)
    departure, arrival = Departure(source, numbers), Arrival(target, numbers, 0)
    assert source.freeze(numbers)
    for parcel in departure.rest():
        arrival.add(parcel)
    departure.end()
    with pytest.raises(NotReadyError, match="different views"):
        arrival.prepare()
    if later == "source":
        target.set_members(view)
        arrival.prepare()
        arrival.drop()


def test_an_error_in_an_effect_of_a_move_ends_the_process() -> None:
    """Otherwise nobody would own the block, and the job would wait for ever."""
    reasons: list[str] = []

    def drop(_: range) -> None:
        raise KeyError("a bug")

    shard: Any = SimpleNamespace(drop=drop, placing=threading.RLock())
    peers: Any = SimpleNamespace(read=lambda _: ())
    moves = Mover(0, 1, State((0, 1)), shard, peers, SystemClock(), lambda _: None, reasons.append)
    core: Any = SimpleNamespace(state=SimpleNamespace(version=1), read=lambda: [Release(0)])
    moves._core = core
    with pytest.raises(KeyError):
        moves.look()
    assert reasons == ["a move of blocks failed: KeyError('a bug')"]
