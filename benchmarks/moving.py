"""Half of a model moves from two pservers to two new ones while trainers push: pauses, steps per second, and rate.

The model has a table of the given size (1 GB by default) and 8 MB of dense parameters. Each of two trainers sleeps for
20 ms, looks up and pushes 4,096 random rows, and pushes all dense parameters. The pservers and trainers are processes
of their own; this process stores the intent and commits each move, as a master does.

    python -m benchmarks.moving [MB] [back] [tcp]

``back``: also move everything back, and compare steps with those before.
``tcp``: processes do not share memory.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection as Pipe

import numpy as np

from flightedl.adapters.clock import SystemClock
from flightedl.adapters.etcd import EtcdCoordinator
from flightedl.adapters.etcd_access import EtcdAccess
from flightedl.client.connections import Servers
from flightedl.client.model.parameters import Parameters
from flightedl.client.waiting import Waiting
from flightedl.config import PserverSettings, child_environment
from flightedl.coordination.directory import Directory
from flightedl.coordination.keys import JobKeys
from flightedl.coordination.records import ServerRecord
from flightedl.domain.consistency.modes import Async
from flightedl.domain.model.optimizers import SGD
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import ShardPlan, placed, placement_of, plan_for
from flightedl.domain.moving.values import Intent, Move
from flightedl.domain.tables.spec import TableSpec
from flightedl.domain.trainer.batches import Batch
from flightedl.domain.trainer.membership import Begun, TrainerMembership
from flightedl.errors import NotReadyError, UnavailableError
from flightedl.messages.base import decode, encode
from flightedl.messages.control import ViewMember, ViewRequest
from flightedl.messages.declarations import (
    DeclaredModel,
    ElectionRecord,
    JobDeclaration,
    ModelDeclaration,
    ParameterDeclaration,
    Placement,
)
from flightedl.messages.moving import MovedRequest
from flightedl.messages.parameters import InitHeader
from flightedl.ports import Coordinator, CreatedAt, Delete, Put
from flightedl.rpc import FlightServer, ServerIdentity
from flightedl.rpc.authentication import Role
from flightedl.rpc.connector import Connector
from flightedl.rpc.identity import Caller
from flightedl.rpc.routes import Routes
from flightedl.wire.rows import PUSH_SCHEMA, encode_rows
from tests.support.etcd_server import EtcdServer

_KEYS = JobKeys("moving")
_SPECS = [ParameterSpec("w", (2_000_000,))]
_TABLE = TableSpec("table", 64, SGD(lr=0.01))
_ROW_BYTES = 4 * 64
_TRAINERS, _IDS, _SLEEP_S, _PSERVERS = 2, 4096, 0.02, 4
#: Dense blocks that move together.
_UNIT_BYTES = 4 << 20


class Scope:
    """Identity of a trainer that stays a member."""

    def __init__(self, member: int) -> None:
        self.trainer, self.generation = f"t{member}", member
        self.membership = TrainerMembership()
        self.membership.member = member

    def require_final(self, index: int, generation: int) -> None:
        """The job does not end."""


def train(etcd: str, member: int, rows: int, plan: ShardPlan, pipe: Pipe) -> None:
    """Fill a part of the table, then train until the pipe says so. Sends (begin, seconds) of each step."""
    clock, scope = SystemClock(), Scope(member)
    coordinator = EtcdCoordinator(EtcdAccess(etcd), clock=clock)
    with contextlib.closing(coordinator), Directory(coordinator, _KEYS, clock) as directory:
        directory.wait_until(lambda d: True if len(d.pservers()) == _PSERVERS else None, 60.0)
        servers = Servers("moving", directory, Connector(Caller("trainer", "moving"), Role.TRAINER))

        def newest(plan: ShardPlan, wait_s: float) -> ShardPlan:
            def newer(directory: Directory) -> ShardPlan | None:
                entry = directory.entry(_KEYS.placement)
                placement = None if entry is None else decode(entry.value, Placement)
                return placed(plan, placement) if placement and placement.version > plan.placement else None

            return directory.wait_until(newer, wait_s) or plan

        parameters = Parameters(
            plan,
            Async(),
            servers,
            scope,
            lambda: Waiting(clock, 5.0, 60.0, lambda _: None),
            clock,
            newest_plan=newest,
        )
        directory.subscribe(lambda: parameters.swap(newest(parameters.plan, 0.0)))
        parameters.refresh()
        chance = np.random.default_rng(member)
        gradient = {"w": np.full(2_000_000, 1e-3, np.float32)}
        step = 0

        def push(ids: np.ndarray) -> None:
            nonlocal step
            parameters.open_batch(Batch(0, 0, step // 1000, step % 1000, 1000, 1), Begun(member, step + 1))
            parameters.push_rows(0, ids, np.ones((ids.size, 64), np.float32))
            parameters.step(gradient)
            parameters.close_batch()
            step += 1

        for first in range(member - 1, rows, _TRAINERS * 100_000):
            push(np.arange(first, min(rows, first + _TRAINERS * 100_000), _TRAINERS, dtype=np.uint64))
        pipe.send("filled")
        taken = []
        while not pipe.poll():
            time.sleep(_SLEEP_S)
            began = time.monotonic()
            ids = np.unique(chance.integers(0, rows, _IDS).astype(np.uint64))
            # The lookup belongs to the step: it waits for moving buckets, too.
            parameters.look_up({0: _distinct(ids)})
            push(ids)
            taken.append((began, time.monotonic() - began))
        pipe.send(taken)
        parameters.close()


def _distinct(ids: np.ndarray) -> object:
    from flightedl.client.tables.requests import DistinctIds

    return DistinctIds(ids)


class Master:
    """The part of a master that stores intents and commits moves."""

    def __init__(self, coordinator: Coordinator, model: DeclaredModel) -> None:
        self._coordinator = coordinator
        self._model = model
        self._lock = threading.Lock()
        identity = ServerIdentity("moving", "master", 0, 1)
        self._server = FlightServer(Routes(actions={"moved": self._moved}), identity, clock=SystemClock())
        self._server.start_serving(identity)
        self.put(_KEYS.master_address, encode(ServerRecord(address=self._server.address, generation=1)))

    def put(self, key: str, value: bytes) -> int:
        self._coordinator.transact([], [Put(key, value)])
        entry = self._coordinator.get(key)
        assert entry is not None
        return entry.create_revision

    @property
    def placement(self) -> Placement:
        entry = self._coordinator.get(_KEYS.placement)
        assert self._model.placement is not None
        return self._model.placement if entry is None else decode(entry.value, Placement)

    def move(self, moves: list[Move], generations: dict[int, int]) -> None:
        """Move units and wait until all have moved, again if an attempt was given up."""
        while left := [move for move in moves if self.placement.owners[move.block] != move.destination]:
            intent = Intent(1, tuple(left), tuple(sorted(generations.items())))
            self.put(_KEYS.moving, encode(intent))
            while self._coordinator.get(_KEYS.moving) is not None:
                time.sleep(0.01)

    def _moved(self, body: bytes, _: object) -> bytes:
        request = decode(body, MovedRequest)
        with self._lock:
            entry = self._coordinator.get(_KEYS.moving)
            if entry is None or entry.create_revision != request.attempt:
                return b"{}"
            intent = decode(entry.value, Intent)
            move = intent.move_of(request.block)
            if move is not None:
                rest = Intent(1, tuple(each for each in intent.moves if each != move), intent.generations)
                moved = self.placement.moved([(move.blocks, move.destination)], request.attempt)
                left = Put(_KEYS.moving, encode(rest)) if rest.moves else Delete(_KEYS.moving)
                self._coordinator.transact(
                    [CreatedAt(_KEYS.moving, request.attempt)], [Put(_KEYS.placement, encode(moved)), left]
                )
        return b"{}"

    def close(self) -> None:
        self._server.stop(1.0)


def halves(plan: ShardPlan, placement: Placement) -> list[Move]:
    """Return the moves of half of each of the first two pservers' blocks to two others, in units."""
    moves = []
    for source in range(2):
        numbers = placement.blocks_of(source)
        buckets = [number for number in numbers if number >= plan.block_count]
        half = buckets[len(buckets) // 2 :]
        moves.append(Move(half[0], source, source + 2, len(half)))
        dense = [number for number in numbers if number < plan.block_count]
        unit: list[int] = []
        for number in dense[len(dense) // 2 :]:
            size = sum(plan.block(each).size for each in (*unit, number)) * 4
            if unit and (number != unit[-1] + 1 or size > _UNIT_BYTES):
                moves.append(Move(unit[0], source, source + 2, len(unit)))
                unit = []
            unit.append(number)
        if unit:
            moves.append(Move(unit[0], source, source + 2, len(unit)))
    return moves


@contextlib.contextmanager
def pservers(etcd: str, coordinator: Coordinator) -> Iterator[None]:
    """Run four pservers."""
    coordinator.transact([], [Put(_KEYS.ps_desired, b"4")])
    chosen = PserverSettings(job="moving", etcd=etcd, same_host="never" if "tcp" in sys.argv else "auto")
    started = [
        subprocess.Popen([sys.executable, "-m", "flightedl", "pserver"], env=child_environment(chosen))
        for _ in range(_PSERVERS)
    ]
    try:
        yield
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(20.0)


def initialize(master: Master, plan: ShardPlan, directory: Directory, connector: Connector) -> dict[int, int]:
    """Send first values and a view to all pservers. Returns their generations."""
    directory.wait_until(lambda d: True if len(d.pservers()) == _PSERVERS else None, 60.0)
    election = master.put(_KEYS.init_params, encode(ElectionRecord(trainer="t1")))
    generations = {index: record.generation for index, record in directory.pservers().items()}
    members = [ViewMember(trainer=f"t{m}", generation=m, member=m, first_round=0) for m in (1, 2)]
    view = ViewRequest(plan_hash=plan.hash, master_generation=1, serial=1, members=members)
    connections = []
    for index, record in directory.pservers().items():
        identity = ServerIdentity("moving", "pserver", index, record.generation)
        connection = connector.connect(record.address, identity)
        connections.append(connection)
        own = plan.blocks_of(index).tolist()
        header = InitHeader(trainer="t1", generation=1, plan_hash=plan.hash, election=election, rows=len(own))
        zeros = [np.zeros(plan.block(number).size, np.float32) for number in own]
        batches = [(encode_rows([number], [0], [row]), None) for number, row in zip(own, zeros, strict=True)]
        patiently(lambda c=connection, h=header, b=batches: c.put(encode(h), PUSH_SCHEMA, b, timeout_s=20.0))
    master.put(_KEYS.init_params, encode(ElectionRecord(trainer="t1", done=True)))
    for connection in connections:
        patiently(lambda c=connection: c.action("view", encode(view), timeout_s=5.0))
    return generations


def patiently(call: Callable[[], object]) -> None:
    """Repeat a call until the pserver is ready."""
    for _ in range(600):
        try:
            call()
        except (NotReadyError, UnavailableError):
            time.sleep(0.1)
        else:
            return
    raise RuntimeError("a pserver did not get ready")


def report(what: str, steps: list[tuple[float, float]], began: float, ended: float, before_s: float = 0.0) -> float:
    """Print the figures of the steps between two times. Returns their median."""
    found = [seconds for at, seconds in steps if began <= at + seconds and at <= ended]
    median = statistics.median(found)
    rate = len(found) / (ended - began)
    extra = f", longest extra pause {1e3 * (max(found) - before_s):.0f} ms" if before_s else ""
    print(f"{what}: {rate:.1f} steps/s, median {1e3 * median:.1f} ms, longest {1e3 * max(found):.0f} ms{extra}")
    return median


def main() -> None:
    """Measure, and print the figures."""
    size_mb = int(next((each for each in sys.argv[1:] if each.isdigit()), 1000))
    rows = size_mb * 1_000_000 // _ROW_BYTES
    plan = plan_for(_SPECS, 2, 2, [_TABLE])
    placement = placement_of(plan).resized(_PSERVERS)
    plan = placed(plan, placement)
    declaration = ModelDeclaration(
        parameters=[ParameterDeclaration(name="w", shape=[2_000_000], dtype="float32")],
        optimizer=SGD(0.01).to_json(),
        mode=Async().to_json(),
        tables=[_TABLE.to_json()],
    )
    model = DeclaredModel(declaration=declaration, pservers=2, cut_for=2, plan_hash=plan.hash, placement=placement)
    with EtcdServer() as etcd, contextlib.ExitStack() as stack:
        clock = SystemClock()
        coordinator = EtcdCoordinator(EtcdAccess(etcd.address), clock=clock)
        master = Master(coordinator, model)
        stack.callback(master.close)
        master.put(_KEYS.job, encode(JobDeclaration(model=model)))
        directory = stack.enter_context(Directory(coordinator, _KEYS, clock))
        stack.enter_context(pservers(etcd.address, coordinator))
        connector = Connector(Caller("master", "moving"), Role.SERVER)
        generations = initialize(master, plan, directory, connector)
        pipes = []
        spawn = multiprocessing.get_context("spawn")
        for member in range(1, _TRAINERS + 1):
            mine, theirs = spawn.Pipe()
            process = spawn.Process(target=train, args=(etcd.address, member, rows, plan, theirs), daemon=True)
            process.start()
            pipes.append(mine)
        for pipe in pipes:
            assert pipe.recv() == "filled"
        print(f"the table has {rows:,} rows, {size_mb} MB of values")
        time.sleep(1.0)
        began = time.monotonic()
        time.sleep(5.0)
        there = halves(plan, master.placement)
        spans = [(began, time.monotonic())]
        for moves in (there, [Move(m.block, m.destination, m.source, m.count) for m in there])[
            : 1 + ("back" in sys.argv)
        ]:
            at = time.monotonic()
            master.move(moves, generations)
            spans.append((at, time.monotonic()))
            time.sleep(1.0)
        at = time.monotonic()
        time.sleep(3.0)
        spans.append((at, time.monotonic()))
        steps = []
        for pipe in pipes:
            pipe.send("stop")
        for pipe in pipes:
            steps += pipe.recv()
        median = report("before", steps, *spans[0])
        for span in spans[1:-1]:
            seconds = span[1] - span[0]
            report(f"moving for {seconds:.2f} s, {size_mb / 2 / seconds:.0f} MB/s", steps, *span, before_s=median)
        report("after", steps, *spans[-1])


if __name__ == "__main__":
    main()
