"""A whole simulated job: who runs, who starts them again, and what must hold. ``strikes`` is what is done to them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from random import Random
from typing import Any

from flightedl.domain.checkpoint.manifest import Manifest, candidates, checksum, manifest_name, number_of
from flightedl.domain.checkpoint.pointer import latest_of, loadable_of
from flightedl.domain.checkpoint.values import CheckpointSettings
from flightedl.domain.consistency.modes import Async, Bounded, Mode, Sync
from flightedl.errors import CorruptError
from flightedl.messages.tasks import FinishedTask
from flightedl.testing.simulation.etcd import STATE, Etcd
from flightedl.testing.simulation.job import JobShape, plan_of, wrong
from flightedl.testing.simulation.master import Master
from flightedl.testing.simulation.pserver import Block, Pserver
from flightedl.testing.simulation.store import Store
from flightedl.testing.simulation.strikes import Strikes
from flightedl.testing.simulation.trainer import Trainer
from flightedl.testing.simulation.world import NetworkFaults, Process, Violation, World

#: Simulated seconds that a job may take, with and without faults.
_FAULTY_S = 90.0
_CALM_S = 300.0
_MASTERS = 2
#: So long after it was mended a pserver may still find a checkpoint damaged.
_MENDED_S = 5.0
_MANY_TASKS_SHARE = 0.2
_GROWING_SHARE = 0.25
_STOPPED_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run was like."""

    seed: int
    events: int
    simulated_s: float
    faults: dict[str, int]
    mode: str
    checkpoints: int
    begun_anew: int = 0


class Cluster:
    """One run. Everything about it follows from the seed, the planted flaws and ``fault_scale``."""

    def __init__(
        self, seed: int, flaws: Collection[str] = (), fault_scale: float = 1.0, mode: str = "", recovery: str = ""
    ) -> None:
        self.world = world = World(seed)
        self.flaws = frozenset(flaws)
        random = world.random
        self.pserver_count = random.choice((1, 2, 2, 3))
        #: Of its own, so that what is drawn from it changes nothing else.
        self._habits = Random(seed)  # noqa: S311 - repeatable on purpose
        #: Likewise. Mostly few tasks, of which nobody may hold more than two; else many, of one batch each.
        self._holding = Random(f"holding {seed}")  # noqa: S311 - likewise
        self._many = self._holding.randint(12, 24) if self._holding.random() < _MANY_TASKS_SHARE else 0
        modes: dict[str, Mode] = {"async": Async(), "bounded": Bounded(random.randrange(3))}
        #: Whether the mode is changed now and then.
        self.changes_modes = not mode
        self.mode_name = mode or random.choice(("sync", "sync", "async", "bounded"))
        batch_counts = (1,) * self._many or tuple(random.choice((1, 1, 2, 3)) for _ in range(random.randint(2, 5)))
        #: Likewise.
        self.fates = Random(f"fates {seed}")  # noqa: S311 - likewise
        grows = self.fates.random() < _GROWING_SHARE
        sync = self.fates.choice((Sync(), Sync(), Sync(backup=1), Sync(deterministic=True)))
        self.shape = JobShape(
            mode=sync if self.mode_name == "sync" else modes[self.mode_name],
            batch_counts=batch_counts,
            epochs=random.randint(1, 3),
            seed=seed,
            shuffle=random.random() < 0.7,
            cut_for=self.pserver_count,
            recovery=recovery or random.choice(("replay", "replay", "replay", "rollback")),
            first_count=self.fates.randrange(len(batch_counts)) if grows else len(batch_counts),
        )
        #: Tasks whose files are there.
        self.joined = self.shape.first_count
        #: Whether somebody may end the job before its end.
        self.may_be_stopped = self.fates.random() < _STOPPED_SHARE
        self.checkpoint_settings = CheckpointSettings(
            interval_s=random.choice((0.7, 2.0, 5.0)),
            interval_tasks=self.fates.choice((None, None, 1, 3)),
            keep=random.randint(1, 3),
            keep_every=random.choice((None, None, 4)),
            patience_s=2.0,
            give_up_s=8.0,
            retry_floor_s=0.3,
            retry_ceiling_s=2.0,
        )
        self.trainer_count = random.randint(1, 3)
        self.fault_scale = fault_scale
        self.break_rate = 0.08 * fault_scale * random.random()
        world.network = NetworkFaults(
            drop=0.10 * fault_scale * random.random(),
            duplicate=0.12 * fault_scale * random.random(),
            delay=0.25 * fault_scale * random.random(),
            longest_delay_s=random.choice((0.05, 0.5, 3.0)),
        )
        self.store = Store(world)
        self.store.error_rate = 0.15 * fault_scale * random.random()
        self.store.written = self._file_written
        self.store.deleted = self._file_deleted
        self.etcd = Etcd(world)
        self.processes: list[Process] = []
        #: (life of the job, attempt) -> what a trainer was given under it.
        self._attempts: dict[tuple[int, int], Any] = {}
        self._life = 0
        self._names = 0
        self.checkpoints = 0
        #: Checkpoint -> when it was last seen to be damaged.
        self._damaged: dict[int | None, float] = {}
        #: How often a master let the model begin anew.
        self.begun_anew = 0
        self._boot()
        self._look_at_leases()
        strikes = Strikes(self)
        strikes.plan_fates()
        if fault_scale:
            strikes.plan()

    # who runs

    def _boot(self) -> None:
        for _ in range(_MASTERS):
            self._start(Master(self, self._name("master")))
        for _ in range(self.pserver_count):
            self.start_pserver()
        for number in range(self.trainer_count):
            self._start(Trainer(self, f"trainer-{number}"))

    def _name(self, role: str) -> str:
        self._names += 1
        return f"{role}-{self._names}"

    def push_every(self) -> int:
        """How many batches a trainer adds up."""
        return self._habits.choice((1, 2, 2, 3))

    def cover_s(self) -> float:
        """How long the work that a trainer holds should last."""
        return self._holding.choice((0.0, 0.3, 1.0, 3.0)) if self._many else 0.0

    def start_pserver(self) -> None:
        """One more pserver."""
        self._start(Pserver(self, self._name("pserver")))

    def _start(self, process: Process) -> None:
        self.processes.append(process)

    def ended(self, process: Process) -> None:
        """A process has ended by itself: its lease goes at once, as far as etcd can be reached; another one starts."""
        lease = process.lease  # type: ignore[attr-defined]
        self.revoke_for(process)
        if lease in self.etcd._leases and self.world.random.random() < 0.7 and not self.etcd.is_down:  # noqa: SLF001
            self.etcd.revoke(lease)
        self.etcd.review()

    def gave_up(self, pserver: Pserver, why: str) -> None:
        """A pserver ends the job, because no checkpoint can be loaded: it is right, and somebody mends the store."""
        self.world.note("{} gives the job up: {}", pserver.name, why)
        loadable, now = self.loadable(), self.world.now
        # What was mended for another one a moment ago may still have been read as it was.
        self._damaged |= {number_of(name): now for name in self.store.rotten}
        if loadable is None or all(now - self._damaged.get(number, -_MENDED_S) >= _MENDED_S for number in loadable):
            raise Violation(f"{pserver.name} gives the job up, and no checkpoint is damaged: {why}")
        self.store.mend()
        self.ended(pserver)

    def revoke_for(self, process: Process) -> None:
        """Dead; the supervisor starts another one of its kind."""
        if not process.is_alive:
            return
        process.die()
        self.processes.remove(process)
        life = self._life

        def start() -> None:
            if life != self._life:
                return
            if isinstance(process, Master):
                self._start(Master(self, self._name("master")))
            elif isinstance(process, Pserver):
                self.start_pserver()
            else:
                self._start(Trainer(self, process.name))

        self.world.after(0.1 + self.world.random.random(), start)

    def _look_at_leases(self) -> None:
        """Every process looks at its own lease once a second, also when nobody talks to it."""
        for process in tuple(self.processes):
            # A trainer registers again when it asks the master next.
            looks = process.is_alive and not process.is_frozen and not isinstance(process, Trainer)
            if looks and not process.lease.is_held():  # type: ignore[attr-defined]
                process.end("its lease was lost")  # type: ignore[attr-defined]
        self.world.after(1.0, self._look_at_leases)

    @property
    def life(self) -> int:
        """How often the whole job was started anew."""
        return self._life

    def loadable(self) -> range | None:
        """The checkpoints that may be loaded, as etcd names them."""
        state = self.etcd.keys.get(STATE)
        return None if state is None else loadable_of(state.value["checkpoints"])

    def pointer(self) -> int | None:
        """The checkpoint that etcd names."""
        loadable = self.loadable()
        return None if loadable is None else loadable[-1]

    def start_anew(self) -> None:
        """All processes and etcd's data are gone; the job is started anew, maybe on other pservers, from the store."""
        self._life += 1
        for process in tuple(self.processes):
            process.die()
        self.processes.clear()
        self.etcd.die()
        self.etcd = Etcd(self.world)
        self.pserver_count = self.world.random.choice((1, 2, 3))
        self.world.note("the whole job starts anew, with {} pservers", self.pserver_count)
        self._boot()

    # what must hold

    def given(self, trainer: Trainer, assignment: Any) -> None:
        """A trainer was given a piece: only a successor of its name may be given this attempt again, for this piece."""
        place = (trainer.name, assignment.epoch, assignment.position)
        known = self._attempts.setdefault((self._life, assignment.attempt), place)
        if known != place:
            raise Violation(f"attempt {assignment.attempt} was given twice: {known} and {place}")

    def accepted(self, master: Master, report: FinishedTask, is_current: bool) -> None:
        """A report counted: it is of a current attempt, and of no past generation."""
        if not is_current:
            raise Violation(f"{master.name} took the report of attempt {report.attempt}, which is not current")
        settled = master.core.pservers.settled()
        for index, generation in enumerate(report.pservers):
            if 0 < generation < settled.get(index, 0):
                raise Violation(
                    f"{master.name} took a report of pserver {index}, generation {generation}, which is gone"
                )

    def state_stored(self, master: Master) -> None:
        """A master's state was stored: its pointer names a complete checkpoint."""
        latest = master.core.checkpointing.checkpoints.latest
        state = self.etcd.keys.get(STATE)
        if state is not None:
            pointer = latest_of(state.value["checkpoints"])
            if pointer is not None and (latest is None or pointer.number >= latest.number):
                self._require_complete(pointer.number, pointer.manifest_checksum, "the pointer names")

    def _require_complete(self, number: int, expected: str | None, why: str) -> None:
        name = manifest_name(number)
        data = self.store.files.get(name)
        if data is None:
            raise Violation(f"{why} checkpoint {number}, which has no manifest")
        if name in self.store.rotten:
            return
        if expected is not None and checksum(data) != expected:
            raise Violation(f"{why} another manifest of checkpoint {number}")
        try:
            manifest = Manifest.decode(data)
        except CorruptError as error:
            raise Violation(f"{why} checkpoint {number}: {error}") from None
        for shard in manifest.shards:
            if shard.name not in self.store.files:
                raise Violation(f"{why} checkpoint {number}, whose {shard.name} is not there")
            if shard.name not in self.store.rotten and self.store.sizes[shard.name] != shard.size_bytes:
                raise Violation(f"{why} checkpoint {number}, whose {shard.name} is another one")
        whole = [
            s
            for shard in manifest.shards
            if (s := self.store.files[shard.name]) and shard.name not in self.store.rotten
        ]
        if manifest.round is not None and any(version != manifest.round for s in whole for version in s.versions):
            raise Violation(f"checkpoint {number} is not of one round")

    def _file_written(self, name: str) -> None:
        number = number_of(name)
        if number is None or name != manifest_name(number):
            return
        self.checkpoints += 1
        kept = self.pointer()
        if kept is None or number > kept:
            self._require_complete(number, None, "a manifest was written for")

    def _file_deleted(self, name: str) -> None:
        pointer = self.pointer()
        if pointer is not None and pointer in candidates(self.store.files):
            self._require_complete(pointer, None, f"{name} was deleted, while the pointer names")
        elif pointer is not None and number_of(name) == pointer:
            raise Violation(f"{name} was deleted, which the pointer names")

    def told_done(self, master: Master) -> None:
        """A master says that all is done: every pserver process that it knows of has every batch."""
        self.world.note("{} says that all is done", master.name)
        for index in range(self.pserver_count):
            key = master.directory.get(f"ps/{index}")
            if key is None or not key.value.is_alive or not key.value.is_serving:
                continue
            for block in key.value.ordered:
                waiting = {self.shape.element_of(batch) for batch in block.rounds.held_batches}
                if missing := set(self._wrong(block, master)) - waiting:
                    raise Violation(f"{master.name} says that all is done, but {key.value.name} lacks {missing}")

    def _wrong(self, block: Block, master: Master) -> list[int]:
        """Elements of a block that do not have their batch exactly once, by this master's account of the tasks."""
        work = master.core.work
        assert work is not None, "a master that leads has a queue"
        return wrong(block.values, self.shape, work.queue, is_stopped=master.core.is_stopped)

    # the run

    def run(self) -> Outcome:
        """Run until the job is done and everything is in.

        Raises:
            Violation: what the run found.
        """
        world = self.world
        next_look_s = 0.0
        limit_s = _FAULTY_S
        #: Until when faults go on at least, also if the job is done: what is lost then has to come back too.
        linger_s = world.random.choice((0.0, 0.0, 5.0, 20.0))
        while world.step():
            if world.now < next_look_s:
                continue
            next_look_s = world.now + 0.5
            self._look_at_audit()
            if world.are_faults_on and (world.now > _FAULTY_S or (world.now > linger_s and self._is_done())):
                self._calm()
                limit_s = world.now + _CALM_S
            elif not world.are_faults_on and self._is_done() and self._is_quiet():
                break
            elif world.now > limit_s:
                raise Violation("the job does not end: " + self.describe())
        self._check_end()
        return Outcome(
            world.seed, world.events, world.now, dict(world.faults), self.mode_name, self.checkpoints, self.begun_anew
        )

    def _look_at_audit(self) -> None:
        """What counts as done is there: the audit mends what is not, and would hide it."""
        leader = self.leader()
        if leader is not None and (count := leader.core.pservers.missing_count):
            raise Violation(f"{leader.name} finds {count} tasks missing that counted as done")

    def _calm(self) -> None:
        self.world.note("no more faults")
        self.world.calm()
        self.joined = len(self.shape.batch_counts)
        self.store.error_rate = 0.0
        self.etcd.review()

    def leader(self) -> Master | None:
        """The master that leads, by its own word and etcd's."""
        return next((p for p in self.processes if isinstance(p, Master) and p.is_leading and p.lease.is_held()), None)

    def _is_done(self) -> bool:
        leader = self.leader()
        return leader is not None and leader.core.ending.may_end

    def _is_quiet(self) -> bool:
        """Whether all pservers are there and nothing waits in an accumulator."""
        serving = self._serving()
        return len(serving) == self.pserver_count and all(
            not block.rounds.held for pserver in serving.values() for block in pserver.ordered
        )

    def _serving(self) -> dict[int, Pserver]:
        keys = self.etcd.keys
        return {
            p.index: p
            for p in self.processes
            if isinstance(p, Pserver) and p.is_serving and (k := keys.get(f"ps/{p.index}")) is not None and k.value is p
        }

    def _check_end(self) -> None:
        found = 0
        leader = self.leader()
        assert leader is not None, "a run ends under a master"
        models = {block.model for p in self._serving().values() for block in p.ordered} - {None}
        if len(models) > 1:
            raise Violation(f"the blocks have grown from first values of several elections: {models}")
        for pserver in self._serving().values():
            pserver.check()
            for block in pserver.ordered:
                found += 1
                if found_wrong := self._wrong(block, leader):
                    counts = [(element, block.values[element]) for element in found_wrong[:5]]
                    raise Violation(f"block {block.number} on {pserver.name} ends with {counts}")
        if found != plan_of(self.pserver_count, self.shape.cut_for).block_count:
            raise Violation(f"only {found} blocks are there at the end")
        leader.core.check()

    def describe(self) -> str:
        """Who waits for whom."""
        lines = []
        for process in self.processes:
            if isinstance(process, Trainer):
                lines.append(process.describe())
            elif isinstance(process, Pserver):
                versions = [(b.number, b.rounds.version, b.rounds.waits_for()) for b in process.ordered]
                lines.append(f"{process.name} index {process.index} serving {process.is_serving} {versions}")
            elif isinstance(process, Master) and process.is_leading:
                core = process.core
                counts = None if core.work is None else core.work.queue.counts()
                members = None if core.members is None else core.members.membership.members
                lines.append(
                    f"{process.name} {counts} members {members} settled {core.pservers.is_everybody_settled} "
                    f"may end {core.ending.may_end} trouble {core.checkpointing.checkpoints.trouble!r} "
                    f"durable {process._durable}/{core.revision}"  # noqa: SLF001
                )
        return "; ".join(lines)
