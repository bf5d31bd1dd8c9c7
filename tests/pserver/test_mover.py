"""Blocks and buckets move between pservers over real sockets, while members push every batch twice."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.coordination.directory import Directory
from flightedl.coordination.keys import JobKeys
from flightedl.coordination.records import ServerRecord
from flightedl.domain.consistency.modes import Async, Bounded, Mode, Sync
from flightedl.domain.model.initial import Zeros
from flightedl.domain.model.optimizers import SGD
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import ShardPlan, hash_with, placed, placement_of, plan_for
from flightedl.domain.moving.values import Intent, Move, Transaction, placement_in
from flightedl.domain.tables.placement import BUCKETS, buckets_of
from flightedl.domain.tables.spec import TableSpec
from flightedl.errors import CorruptError, FlightedlError, NotReadyError, StalePlacementError, UnavailableError
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
from flightedl.messages.feed import ChangesHeader, ChangesTicket
from flightedl.messages.moving import MovedRequest
from flightedl.messages.parameters import BatchIdentity, Outcome, PushHeader
from flightedl.ports import CreatedAt, Delete, Put
from flightedl.pserver.flight import PserverFlight
from flightedl.pserver.moving.arrival import Arrival
from flightedl.pserver.moving.peers import Peers
from flightedl.pserver.service import PserverService
from flightedl.pserver.stores.building import kernels_of
from flightedl.rpc import FlightServer, ServerIdentity
from flightedl.rpc.authentication import Role
from flightedl.rpc.connector import Connector
from flightedl.rpc.identity import Caller
from flightedl.rpc.routes import Routes
from flightedl.wire.changes import CHANGES_SCHEMA, HEADER_KEY
from flightedl.wire.parts import ReceivedBlocks
from flightedl.wire.rows import Row
from flightedl.wire.table_rows import Kind, Section, decode_sections, encode_sections
from tests.support.contracts.coordinator import eventually
from tests.support.memory import MemoryCoordinator

KEYS = JobKeys("demo")
SPECS = [ParameterSpec(f"p{number}", (3 + number,)) for number in range(6)]
TABLE = TableSpec("table", 2, SGD(lr=1.0), Zeros())
IDS = np.arange(400, dtype=np.uint64)
PLACES = buckets_of(IDS, TABLE.salt)
MEMBERS = (1, 2)
PSERVERS = 4


class Process:
    """A pserver process without its main thread."""

    def __init__(self, coordinator: MemoryCoordinator, index: int) -> None:
        clock = SystemClock()
        self.index, self.ends = index, []
        self.directory = Directory(coordinator, KEYS, clock).start()
        peers = Peers(self.directory, KEYS, coordinator, Connector(Caller("pserver", "demo"), Role.SERVER))
        self.service = PserverService(
            self.directory, KEYS, self.ends.append, self.ends.append, None, clock, peers=peers
        )
        self.server = FlightServer(
            PserverFlight(self.service, clock).routes(), ServerIdentity("demo", "pserver"), clock=clock
        )
        coordinator.transact([], [Put(KEYS.pserver(index), encode(ServerRecord(address=self.server.address)))])
        entry = coordinator.get(KEYS.pserver(index))
        assert entry is not None
        self.generation = entry.create_revision
        assert self.directory.wait_until(lambda d: d.revision >= self.generation or None, 5.0)
        self.service.acquire_index(index, self.generation, lambda: True)
        self.server.start_serving(ServerIdentity("demo", "pserver", index, self.generation))
        self.directory.subscribe(self.service.look)
        self.service.look()

    def close(self) -> None:
        self.directory.close()
        self.service.close()
        self.server.stop(1.0)


class Job:
    """Four pservers, of which the first two have all blocks, and a master that stores and commits moves."""

    def __init__(self, mode: Mode) -> None:
        # Otherwise the pservers, which share this process, would wait for each other to compile.
        for load in itertools.chain(*kernels_of(SPECS, [TABLE], SGD(1.0), "")):
            load()
        self.coordinator = MemoryCoordinator(SystemClock())
        plan = plan_for(SPECS, 2, 2, [TABLE])
        placement = placement_of(plan).resized(PSERVERS)
        self.plan = placed(plan, placement)
        #: Version of each placement that has existed -> the placement.
        self.placements = {placement.version: placement}
        self.first_bucket = plan.block_count
        declaration = ModelDeclaration(
            parameters=[ParameterDeclaration(name=s.name, shape=list(s.shape), dtype=s.dtype) for s in SPECS],
            optimizer=SGD(1.0).to_json(),
            mode=mode.to_json(),
            tables=[TABLE.to_json()],
        )
        self.model = DeclaredModel(
            declaration=declaration, pservers=2, cut_for=2, plan_hash=self.plan.hash, placement=placement
        )
        self.put(KEYS.job, encode(JobDeclaration(model=self.model)))
        #: False to lose all acknowledgements.
        self.commits = True
        self._committing = threading.Lock()
        self.master = FlightServer(
            Routes(actions={"moved": self._moved}), ServerIdentity("demo", "master", 0, 1), clock=SystemClock()
        )
        self.master.start_serving(ServerIdentity("demo", "master", 0, 1))
        self.put(KEYS.master_address, encode(ServerRecord(address=self.master.address, generation=1)))
        self.processes = [Process(self.coordinator, index) for index in range(PSERVERS)]
        for process in self.processes:
            eventually(lambda p=process: p.service.is_built, timeout_s=60.0)
        self.set_view(1)
        self._initialize()
        for process in self.processes:
            eventually(lambda p=process: p.service.is_serving, timeout_s=60.0)
        self.set_view(2)

    def put(self, key: str, value: bytes) -> int:
        self.coordinator.transact([], [Put(key, value)])
        entry = self.coordinator.get(key)
        assert entry is not None
        return entry.create_revision

    def _initialize(self) -> None:
        election = self.put(KEYS.init_params, encode(ElectionRecord(trainer="t1")))
        for process in self.processes:
            shard = process.service.shard_for_init(self.plan.hash, election)
            assert shard is not None
            for number in shard.numbers:
                zeros = np.zeros(self.plan.block(number).size, np.float32)
                shard.initialize(election, Row(number, 0, memoryview(zeros).cast("B")))
            process.service.first_values_received(election)
        self.put(KEYS.init_params, encode(ElectionRecord(trainer="t1", done=True)))

    def set_view(self, serial: int) -> None:
        members = [ViewMember(trainer=f"t{m}", generation=m, member=m, first_round=0) for m in MEMBERS]
        for process in self.processes:
            if process.service.is_built:
                plan_hash = hash_with(self.plan.hash, self.placement.version)
                view = ViewRequest(plan_hash=plan_hash, master_generation=1, serial=serial, members=members)
                process.service.apply_view(view)

    # moves

    @property
    def placement(self) -> Placement:
        stored = self.coordinator.get(KEYS.placement)
        found = placement_in(self.model, None if stored is None else stored.value)
        assert found is not None
        return found

    @property
    def is_moving(self) -> bool:
        return self.coordinator.get(KEYS.moving) is not None

    def intend(self, *moves: Move) -> None:
        indexes = sorted({index for move in moves for index in (move.source, move.destination)})
        intent = Intent(1, moves, tuple((index, self.processes[index].generation) for index in indexes))
        self.put(KEYS.moving, encode(intent))

    def _moved(self, body: bytes, _: object) -> bytes:
        request = decode(body, MovedRequest)
        with self._committing:
            entry = self.coordinator.get(KEYS.moving)
            if self.commits and entry is not None and entry.create_revision == request.attempt:
                self._commit(decode(entry.value, Intent), request)
        return b"{}"

    def _commit(self, intent: Intent, request: MovedRequest) -> None:
        move = intent.move_of(request.block)
        if move is None:
            return
        assert dict(intent.generations)[move.destination] == request.generation
        rest = Intent(intent.master, tuple(each for each in intent.moves if each != move), intent.generations)
        moved = self.placement.moved([(move.blocks, move.destination)], request.attempt)
        self.placements[moved.version] = moved
        self.coordinator.transact(
            [CreatedAt(KEYS.moving, request.attempt)],
            [
                Put(KEYS.placement, encode(moved)),
                Put(KEYS.moving, encode(rest)) if rest.moves else Delete(KEYS.moving),
            ],
        )

    def move_all(self, *moves: Move) -> None:
        # On a busy machine, an attempt may take too long. The pserver then gives it up.
        while left := [move for move in moves if self.placement.owners[move.block] != move.destination]:
            self.intend(*left)
            eventually(lambda: not self.is_moving, timeout_s=60.0)
        version = self.placement.version
        for process in self.processes:
            eventually(lambda p=process: p.service.status().plan_hash.endswith(f".{version}"), timeout_s=60.0)

    # pushes

    def owned(self, index: int) -> list[range]:
        """Return the adjacent blocks, and the adjacent buckets, of a pserver."""
        numbers = self.placement.blocks_of(index)
        cuts = [at for at in range(1, len(numbers)) if numbers[at] != numbers[at - 1] + 1]
        cuts += [at for at, number in enumerate(numbers) if number == self.first_bucket and at]
        bounds = [0, *sorted(set(cuts)), len(numbers)]
        return [range(numbers[a], numbers[b - 1] + 1) for a, b in itertools.pairwise(bounds) if b > a]

    def push(self, member: int, batch: int, base: int, numbers: range, index: int) -> set[int]:
        """Push a batch to adjacent blocks or buckets. Returns the outcomes."""
        header = PushHeader(
            trainer=f"t{member}",
            generation=member,
            plan_hash=self.plan.hash,
            member=member,
            identity=BatchIdentity(epoch=0, task=member, batch=batch, batch_count=10_000),
            weight=1.0,
            rows=len(numbers),
        )
        if numbers.start >= self.first_bucket:
            there = (PLACES + self.first_bucket >= numbers.start) & (PLACES + self.first_bucket < numbers.stop)
            gradients = np.full((int(there.sum()), 2), batch + 1, np.float32)
            data = encode_sections([Section(Kind.GRADIENTS, 0, IDS[there], gradients)]).tobytes()
        else:
            data = np.full(sum(self.plan.block(n).size for n in numbers), batch + 1, np.float32).tobytes()
        shard = self.processes[index].service.shard(self.plan.hash)
        pushed = shard.push(header, [ReceivedBlocks(numbers, base, 0, memoryview(data))])
        return {each.piece.outcome for each in pushed}

    def push_everywhere(self, member: int, batch: int, base: int) -> None:
        """Push a batch to every block, twice, and repeat it until the owners have answered."""
        left = set(range(self.first_bucket + BUCKETS))
        while left:
            before = len(left)
            for index in range(PSERVERS):
                for numbers in self.owned(index):
                    if left.isdisjoint(numbers):
                        continue
                    with contextlib.suppress(StalePlacementError):
                        for _ in range(2):
                            outcomes = self.push(member, batch, base, numbers, index)
                            assert outcomes <= {Outcome.ACCEPTED, Outcome.ALREADY_APPLIED}, outcomes
                        left -= set(numbers)
            if len(left) == before:
                threading.Event().wait(0.002)

    def values(self) -> tuple[set[float], set[float]]:
        """Return the distinct elements of all blocks, and of all rows."""
        blocks: set[float] = set()
        rows: set[float] = set()
        for process in self.processes:
            shard = process.service.shard(self.plan.hash)
            for block in shard.blocks():
                blocks |= set(block.values.tolist())
            for numbers in self.owned(process.index):
                if numbers.start >= self.first_bucket:
                    there = (PLACES + self.first_bucket >= numbers.start) & (PLACES + self.first_bucket < numbers.stop)
                    asked = memoryview(encode_sections([Section(Kind.WANTED, 0, IDS[there])]).tobytes())
                    pieces, rest = shard.read(shard.lookup(ReceivedBlocks(numbers, 0, 0, asked)), 0)
                    assert not rest
                    for piece in pieces:
                        data = memoryview(piece.values).cast("B")
                        for section in decode_sections(data, np.array([2]), (Kind.ROWS,)):
                            rows |= set(np.frombuffer(section.values, np.float32).tolist())
        return blocks, rows

    def close(self) -> None:
        for process in self.processes:
            process.close()
        self.master.stop(1.0)


@contextlib.contextmanager
def job(mode: Mode) -> Iterator[Job]:
    made = Job(mode)
    try:
        yield made
    finally:
        made.close()


def halves(plan: ShardPlan, placement: Placement) -> list[Move]:
    """Return moves of the second half of each pserver's blocks and buckets to two other pservers."""
    moves = []
    first = plan.block_count
    for source in range(2):
        numbers = placement.blocks_of(source)
        for own in ([n for n in numbers if n < first], [n for n in numbers if n >= first]):
            half = own[len(own) // 2 :]
            moves.append(Move(half[0], source, source + 2, len(half)))
    return moves


@pytest.mark.parametrize("mode", [Async(), Sync(), Bounded(2)], ids=["async", "sync", "bounded"])
def test_each_batch_counts_once_while_blocks_move_from_2_to_4_pservers_and_back(mode: Mode) -> None:
    with job(mode) as moving:
        is_over, is_last = threading.Event(), threading.Event()
        counts = dict.fromkeys(MEMBERS, 0)

        def decide() -> None:
            # All members end after the same number of batches: at least three, even if the moves end earlier.
            if is_over.is_set() and min(counts.values()) > 2:
                is_last.set()

        together = threading.Barrier(len(MEMBERS), decide)
        failures: list[BaseException] = []

        def pushes(member: int) -> None:
            chance = random.Random(member)
            try:
                while True:
                    together.wait(30.0)
                    if is_last.is_set():
                        return
                    batch = counts[member]
                    moving.push_everywhere(member, batch, batch if not isinstance(mode, Async) else 0)
                    counts[member] += 1
                    threading.Event().wait(chance.random() * 0.004)
            except BaseException as error:
                failures.append(error)
                together.abort()
                raise

        threads = [threading.Thread(target=pushes, args=(member,), daemon=True) for member in MEMBERS]
        for thread in threads:
            thread.start()
        there = halves(moving.plan, moving.placement)
        moving.move_all(*there)
        assert all(moving.owned(index) for index in range(PSERVERS))
        moving.move_all(*(Move(each.block, each.destination, each.source, each.count) for each in there))
        is_over.set()
        for thread in threads:
            thread.join(30.0)
        assert not failures
        assert [moving.owned(index) for index in (2, 3)] == [[], []]
        assert counts[1] == counts[2] > 2
        total = sum(batch + 1 for batch in range(counts[1]))
        expected = -total if isinstance(mode, Sync) else -2.0 * total
        assert moving.values() == ({expected}, {expected})
        assert [process.ends for process in moving.processes] == [[]] * PSERVERS


def test_a_message_of_the_feed_names_the_placement_whose_blocks_it_contains() -> None:
    with job(Async()) as moving:
        connector = Connector(Caller("reader", "follower"), Role.READER)
        is_over, found = threading.Event(), []

        def ask(process: Process) -> None:
            identity = ServerIdentity("demo", "pserver", process.index, process.generation)
            ticket = encode(ChangesTicket(plan_hash=moving.plan.hash, wait_s=0.0))
            with connector.connect(process.server.address, identity) as connection:
                while not is_over.is_set():
                    with connection.get(ticket, timeout_s=30.0, schema=CHANGES_SCHEMA) as stream:
                        header = decode(stream.schema.metadata[HEADER_KEY], ChangesHeader)
                        assert list(stream), "the end of the message is missing"
                    found.append((process.index, header))

        threads = [threading.Thread(target=ask, args=(process,), daemon=True) for process in moving.processes]
        for thread in threads:
            thread.start()
        there = halves(moving.plan, moving.placement)
        moving.move_all(*there)
        moving.move_all(*(Move(each.block, each.destination, each.source, each.count) for each in there))
        count = len(found)
        eventually(lambda: {index for index, _ in found[count:]} == set(range(PSERVERS)), timeout_s=60.0)
        is_over.set()
        for thread in threads:
            thread.join(30.0)
        first = moving.first_bucket
        for index, header in found:
            has = [number for start, stop in header.blocks for number in range(start, stop)]
            has += [first + bucket for start, stop in header.buckets for bucket in range(start, stop)]
            assert sorted(has) == list(moving.placements[header.position.placement].blocks_of(index))
        assert {header.position.placement for _, header in found} >= {min(moving.placements), max(moving.placements)}


def test_a_unit_stays_frozen_until_the_intent_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    with job(Async()) as moving:
        moving.commits = False
        before = moving.placement
        (move, *_) = halves(moving.plan, before)
        mover = moving.processes[move.source].service._mover
        assert mover is not None
        give_up, is_reachable = mover._peers.give_up, threading.Event()

        def when_reachable(transaction: Transaction) -> None:
            if not is_reachable.is_set():
                raise UnavailableError("etcd is unreachable")
            give_up(transaction)

        monkeypatch.setattr(mover._peers, "give_up", when_reachable)
        moving.intend(move)
        eventually(lambda: mover._pinned, timeout_s=60.0)
        with pytest.raises(NotReadyError, match="about to move"):
            moving.set_view(3)
        with pytest.raises(StalePlacementError, match="are moving"):
            moving.push(1, 0, 0, range(move.block, move.block + move.count), move.source)
        is_reachable.set()
        eventually(lambda: not moving.is_moving, timeout_s=60.0)
        eventually(lambda: not mover._pinned, timeout_s=60.0)
        moving.set_view(3)
        moving.push_everywhere(1, 0, 0)
        assert moving.placement == before
        moving.commits = True
        moving.move_all(move)
        moving.push_everywhere(1, 1, 0)
        assert moving.values() == ({-3.0}, {-3.0})


def test_a_move_to_a_process_that_is_gone_is_given_up() -> None:
    with job(Async()) as moving:
        gone = moving.processes[2]
        gone.server.stop(0.1)
        (_, move, *_) = halves(moving.plan, moving.placement)
        moving.intend(move)
        moving.push_everywhere(1, 0, 0)
        eventually(lambda: not moving.is_moving, timeout_s=60.0)
        with contextlib.suppress(FlightedlError):
            moving.push_everywhere(2, 0, 0)
        assert [process.ends for process in moving.processes] == [[]] * PSERVERS


@pytest.mark.parametrize("problem", ["no memory", "other version"])
def test_a_move_that_the_destination_rejects_is_given_up_and_the_job_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, problem: str
) -> None:
    def reject(*_: object) -> None:
        raise CorruptError("not a part of a moving block: unknown tag")

    with job(Async()) as moving:
        before = moving.placement
        (_, move, *_) = halves(moving.plan, before)
        assert move.block >= moving.first_bucket
        moving.push_everywhere(1, 0, 0)
        if problem == "no memory":
            moving.processes[move.destination].service.shard(moving.plan.hash).rows._memory._limit_bytes = 1
        else:
            monkeypatch.setattr(Arrival, "add", reject)
        moving.intend(move)
        eventually(lambda: not moving.is_moving, timeout_s=60.0)
        moving.push_everywhere(2, 0, 0)
        assert moving.placement == before
        assert moving.values() == ({-2.0}, {-2.0})
        assert [process.ends for process in moving.processes] == [[]] * PSERVERS
    (warning,) = {each.getMessage() for each in caplog.records if "cannot move to pserver" in each.getMessage()}
    assert f"block {move.block} cannot move to pserver {move.destination}: " in warning
    assert {"no memory": "increase --table-memory-mb", "other version": "not a part of a moving block"}[
        problem
    ] in warning
