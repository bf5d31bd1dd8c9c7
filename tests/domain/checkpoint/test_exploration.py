"""Exhaustive exploration of checkpoints: all orders of replies, closed rounds, lost pservers and timeouts.

The master's orders are those of ``Checkpointing``, which repeats an order until the pserver reports its file.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from flightedl.domain.checkpoint.checkpoints import Checkpoints
from flightedl.domain.checkpoint.manifest import checksum
from flightedl.domain.checkpoint.snapshot import PserverSnapshots
from flightedl.domain.checkpoint.values import CheckpointSettings, MovePointer, OpenRounds, Sweep, WriteManifest
from flightedl.domain.master.checkpointing import Checkpointing
from flightedl.domain.master.effects import Outbox, StoreWork
from tests.exploration import Explored, ViolationError, explore
from tests.support.planting import bug, planted, swaps

from .checkpoint_shell import shard_file

_PSERVERS = range(2)
#: Longer than the patience with a round and the pause after a failure, and much shorter than the time limit.
_TICK_S = 10.0


class _Pserver:
    """A process: its rounds, its newest order, and the round at which it cuts its blocks."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.snapshots = PserverSnapshots()
        self.cut: tuple[int | None] | None = None


class _World:
    """A master, its pservers and the store, with the number of faults and timeouts that may still happen."""

    def __init__(self, *, is_waited_for: bool, crashes: int, ticks: int) -> None:
        settings = CheckpointSettings(interval_s=None, patience_s=5.0, give_up_s=1e9, retry_ceiling_s=1.0)
        self.outbox = Outbox()
        self.orders = Checkpointing(Checkpoints(settings, 1, len(_PSERVERS), 0.0), is_kept=True, outbox=self.outbox)
        self.pservers: dict[int, _Pserver] = {}
        #: Highest open round of each pserver.
        self.rounds = dict.fromkeys(_PSERVERS, 5)
        self.work: list[StoreWork] = []
        self.now = 0.0
        self.crashes, self.ticks, self.generation = crashes, ticks, 9
        for index in _PSERVERS:
            self.start(index)
        self.orders.checkpoints.request("a test", is_waited_for=is_waited_for)
        self.tick(0.0)

    # events

    def events(self) -> Iterator[tuple[str, Callable[[], None]]]:
        for index in _PSERVERS:
            process = self.pservers.get(index)
            if process is None:
                yield f"start {index}", lambda index=index: self.start(index)
                continue
            if self.orders.order_for(index, process.generation, "plan") is not None:
                yield f"ask {index}", lambda index=index: self.ask(index)
            if process.cut is not None and (process.cut[0] is None or self.rounds[index] >= process.cut[0]):
                yield f"write {index}", lambda index=index: self.write(index)
            if self.rounds[index] < 6 and self.rounds[index] <= min(self.rounds.values()):
                yield f"round {index}", lambda index=index: self.open_round(index)
            if self.crashes:
                yield f"crash {index}", lambda index=index: self.crash(index)
        if self.work:
            yield "store", self.store
        if self.ticks:
            yield "tick", lambda: self.tick(_TICK_S)

    def start(self, index: int) -> None:
        self.generation += 1
        self.pservers[index] = _Pserver(self.generation)
        self.orders.settled(index, self.generation, self.now)

    def crash(self, index: int) -> None:
        self.crashes -= 1
        del self.pservers[index]
        self.orders.down(index, self.now)

    def open_round(self, index: int) -> None:
        self.rounds[index] += 1

    def ask(self, index: int) -> None:
        """Send the open order, which also asks for the progress."""
        process, version = self.pservers[index], self.rounds[index]
        order = self.orders.order_for(index, process.generation, "plan")
        if process.snapshots.take(order, [version], version):
            process.cut = (order.round,)
        self.orders.answered(index, process.generation, process.snapshots.progress, self.now)

    def write(self, index: int) -> None:
        process = self.pservers[index]
        order, process.cut = process.snapshots.progress.order, None
        process.snapshots.taken(order)
        name = f"c-{order.number}/{index}-{process.generation}-{order.serial}"
        process.snapshots.written(order, shard_file(index, process.generation, name, name.encode()))

    def tick(self, seconds: float) -> None:
        self.ticks -= bool(seconds)
        self.now += seconds
        self.orders.tick(self.now, OpenRounds(max(self.rounds.values())))

    def store(self) -> None:
        checkpoints = self.orders.checkpoints
        match self.work.pop(0).work:
            case WriteManifest(number):
                manifest = checkpoints.manifest("job", "plan", 2, b"null", None, 0.0)
                self.orders.perform(checkpoints.manifest_written(number, checksum(manifest.encode())))
            case MovePointer(pointer):
                self.orders.perform(checkpoints.pointer_moved(pointer.number, self.now))
            case Sweep():
                pass

    # invariants

    def wrong(self) -> str | None:
        checkpoints = self.orders.checkpoints
        checkpoints.check()
        work = getattr(checkpoints, "_work", None)
        if checkpoints.under_way is None or self.work or not hasattr(work, "serial"):
            return None
        for index in _PSERVERS:
            process = self.pservers.get(index)
            has_order = process and self.orders.order_for(index, process.generation, "plan") is not None
            if index not in work.files and not has_order:
                return f"checkpoint {work.number} waits for a file of pserver {index}, which has no order for it"
        return None

    def has_ended(self) -> bool:
        """True if the checkpoint is complete, or if it may need more time than there is."""
        return self.orders.checkpoints.latest is not None or not self.ticks


@dataclass(frozen=True)
class _State:
    """A world. Worlds with the same content are the same state."""

    content: str
    data: bytes = field(compare=False)
    wrong: str | None = field(compare=False)
    has_ended: bool = field(compare=False)
    is_complete: bool = field(compare=False)

    @classmethod
    def of(cls, world: _World) -> _State:
        processes = {index: (each.cut, each.snapshots.progress) for index, each in sorted(world.pservers.items())}
        known = {name: value for name, value in vars(world.orders.checkpoints).items() if name != "_chains"}
        rest = (world.rounds, world.work, world.now, world.crashes, world.ticks, world.generation)
        content = repr((known, vars(world.orders)["_orders"], processes, rest))
        return cls(content, pickle.dumps(world), world.wrong(), world.has_ended(), world.orders.latest > 0)

    @property
    def world(self) -> _World:
        found: _World = pickle.loads(self.data)
        return found


def steps(state: _State) -> Iterator[tuple[str, _State]]:
    if state.is_complete:
        return
    for number, (name, _) in enumerate(state.world.events()):
        world = state.world
        _, happen = list(world.events())[number]
        happen()
        world.work += [each for each in world.outbox.take() if isinstance(each, StoreWork)]
        world.outbox.revision = 0
        yield name, _State.of(world)


def explored(*, is_waited_for: bool) -> Explored[_State]:
    first = _World(is_waited_for=is_waited_for, crashes=1, ticks=1)
    first.outbox.take()
    return explore(_State.of(first), steps, lambda state: state.wrong, lambda state: state.has_ended)


@pytest.mark.parametrize("is_waited_for", [False, True])
def test_each_file_that_a_checkpoint_waits_for_has_an_order_at_a_live_process(is_waited_for: bool) -> None:
    found = explored(is_waited_for=is_waited_for)
    assert found.events.keys() >= {"ask", "write", "round", "crash", "start", "store", "tick"}
    assert any(state.is_complete for state in found.parents)


def test_an_order_to_a_lost_process_is_found() -> None:
    edit = swaps("domain.checkpoint.checkpoints:Checkpoints._propose", "if lost:", "if False:")
    with planted([bug("a round is proposed to a lost process", edit)]), pytest.raises(ViolationError, match="crash"):
        explored(is_waited_for=False)
