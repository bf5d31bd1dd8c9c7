"""Masters, pservers, an etcd and a store that carry out effects of checkpoints, and can stop after any step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from flightedl.domain.checkpoint.checkpoints import Checkpoints
from flightedl.domain.checkpoint.manifest import Manifest, ShardFile, candidates, checksum, examine, manifest_name
from flightedl.domain.checkpoint.pointer import latest_of
from flightedl.domain.checkpoint.snapshot import PserverSnapshots, SnapshotCut
from flightedl.domain.checkpoint.values import (
    Alarm,
    CheckpointSettings,
    MovePointer,
    OpenRounds,
    OrderSnapshot,
    Persist,
    Pointer,
    Sweep,
    WriteManifest,
)

SETTINGS = CheckpointSettings(interval_s=10.0, keep=2, patience_s=5.0, give_up_s=50.0, retry_floor_s=1.0)


class CrashError(Exception):
    """The master dies at this point."""


@dataclass
class World:
    pserver_count: int = 2
    settings: CheckpointSettings = SETTINGS
    store: dict[str, bytes] = field(default_factory=dict)
    etcd: bytes | None = None
    now: float = 0.0
    generation: int = 0
    version: int = 5
    #: Number of steps until the master dies; None if it does not.
    crash_in: int | None = None
    steps: int = 0
    #: Steps at which the store fails.
    store_fails_at: frozenset[int] = frozenset()
    alarms: list[str] = field(default_factory=list)
    has_members: bool = True
    has_rounds: bool = True

    def __post_init__(self) -> None:
        self.pservers = {i: (100 + i, PserverSnapshots()) for i in range(self.pserver_count)}
        self.cuts: dict[int, SnapshotCut] = {}
        self.start_master()

    def start_master(self) -> None:
        self.generation += 1
        if self.etcd is None:
            self.master = Checkpoints(self.settings, self.generation, self.pserver_count, self.now)
        else:
            self.master = Checkpoints.restore(self.etcd, self.settings, self.generation, self.pserver_count, self.now)
        for index, (generation, _) in self.pservers.items():
            self.perform(self.master.pserver_up(index, generation, self.now))

    def step(self) -> None:
        self.steps += 1
        if self.steps == self.crash_in:
            raise CrashError

    def perform(self, effects) -> None:
        queue = deque(effects)
        while queue:
            self.master.check()
            self.check()
            effect = queue.popleft()
            self.step()
            queue.extend(self.carry_out(effect))
            self.check()

    def carry_out(self, effect):
        master, now = self.master, self.now
        if isinstance(effect, Persist):
            self.etcd = master.encode()
        elif isinstance(effect, OrderSnapshot):
            return self.order(effect)
        elif isinstance(effect, WriteManifest):
            manifest = master.manifest("job", "plan", self.pserver_count, b'{"model":null}', b'{"queue":1}', 1.0)
            if self.steps in self.store_fails_at:
                return master.manifest_failed(effect.number, "the store is away", now)
            data = manifest.encode()
            self.store[manifest_name(effect.number)] = data
            self.step()
            return master.manifest_written(effect.number, checksum(data))
        elif isinstance(effect, MovePointer):
            assert latest_of(self.etcd) == effect.pointer
            return master.pointer_moved(effect.pointer.number, now)
        elif isinstance(effect, Sweep):
            for name in master.deletable(list(self.store)):
                self.step()
                if self.steps in self.store_fails_at:
                    break
                del self.store[name]
                self.check()
        else:
            assert isinstance(effect, Alarm)
            self.alarms.append(effect.text)
        return ()

    def order(self, effect: OrderSnapshot):
        generation, snapshots = self.pservers[effect.index]
        if generation != effect.generation:
            return ()
        self.cuts.pop(effect.index, None)
        if snapshots.take(effect.snapshot, [self.version] * 2, self.version):
            self.cuts[effect.index] = SnapshotCut(range(2), effect.snapshot.round)
            self.advance_to(effect.index)
        return self.master.progressed(effect.index, generation, snapshots.progress, self.now)

    def advance_to(self, index: int) -> None:
        """Cut the due blocks and write the file."""
        generation, snapshots = self.pservers[index]
        cut = self.cuts.get(index)
        if cut is None:
            return
        for block in range(2):
            if cut.is_due(block, self.version):
                cut.cut((block,), self.version, ())
        if not cut.is_complete:
            return
        order = snapshots.progress.order
        del self.cuts[index]
        assert snapshots.taken(order)
        self.step()
        if self.steps in self.store_fails_at:
            snapshots.failed(order, "the store is full")
            return
        name = f"c-{order.number}/shard-{index}-of-{self.pserver_count}-{generation}-{order.serial}.arrow"
        assert name not in self.store, "a name is written twice"
        self.store[name] = content = f"{name} at {cut.versions}".encode()
        snapshots.written(order, shard_file(index, generation, name, content, cut.versions))

    def train(self, rounds: int = 1) -> None:
        self.version += rounds
        for index in self.pservers:
            self.advance_to(index)

    def poll(self) -> None:
        for index, (generation, snapshots) in self.pservers.items():
            if snapshots.progress is not None:
                self.perform(self.master.progressed(index, generation, snapshots.progress, self.now))

    def tick(self, seconds: float = 1.0) -> None:
        self.now += seconds
        rounds = OpenRounds(self.version, self.has_members) if self.has_rounds else None
        self.perform(self.master.tick(self.now, rounds))

    def run(self, seconds: int) -> None:
        """Continue training; a master that dies is replaced."""
        for _ in range(seconds):
            try:
                self.train()
                self.poll()
                self.tick()
            except CrashError:
                self.crash_in = None
                self.start_master()

    def replace_pserver(self, index: int) -> None:
        self.generation += 1
        self.cuts.pop(index, None)
        self.pservers[index] = (1000 + self.generation, PserverSnapshots())
        self.perform(self.master.pserver_up(index, 1000 + self.generation, self.now))

    def check(self) -> None:
        """Invariant: the pointer names a complete checkpoint, and manifests name complete files."""
        sizes = {name: len(data) for name, data in self.store.items()}
        for number in candidates(self.store):
            found = examine(number, self.store[manifest_name(number)], sizes, "job")
            assert isinstance(found, Manifest), found
            for shard in found.shards:
                assert checksum(self.store[shard.name]) == shard.hash
                if found.round is not None:
                    assert shard.lowest_version == shard.highest_version == found.round
        pointer = None if self.etcd is None else latest_of(self.etcd)
        if pointer is not None:
            assert checksum(self.store[manifest_name(pointer.number)]) == pointer.manifest_checksum

    @property
    def stored_pointer(self) -> Pointer | None:
        return None if self.etcd is None else latest_of(self.etcd)


def shard_file(index, generation, name, content, versions=(5, 5)) -> ShardFile:
    return ShardFile(
        index=index,
        generation=generation,
        name=name,
        size_bytes=len(content),
        hash=checksum(content),
        blocks=2,
        lowest_version=min(versions),
        highest_version=max(versions),
    )
