"""A simulated job: its processes, and the supervisor that restarts them. ``strikes`` injects faults."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from flightedl.domain.checkpoint.manifest import candidates, number_of
from flightedl.domain.checkpoint.pointer import loadable_of
from flightedl.recording.writer import Recorder
from tests.simulation.cores.account import Account
from tests.simulation.cores.etcd import Etcd, desired_in, pointer_in
from tests.simulation.cores.master import Master
from tests.simulation.cores.pserver import Pserver
from tests.simulation.cores.recorded import RunRecorder
from tests.simulation.cores.scenario import Scenario, drawn
from tests.simulation.cores.store import Store
from tests.simulation.cores.strikes import Strikes
from tests.simulation.cores.trainer import Trainer
from tests.simulation.cores.world import Process, Violation, World

#: Simulated seconds for which a job may run, with faults and after they end. Hundreds of jobs took less than 12 s.
_FAULTY_S = 90.0
_CALM_S = 100.0
#: After the repair of a checkpoint, a pserver may still find it damaged for this time.
_MENDED_S = 5.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Statistics of a run that found no violations."""

    seed: int
    events: int
    simulated_s: float
    faults: dict[str, int]
    mode: str
    checkpoints: int
    #: Number of increments in complete checkpoints.
    increments: int
    begun_anew: int
    quarantined: int
    evaluations: int
    #: Number of units of blocks that have moved to another pserver.
    moves: int
    #: Number of standbys that have taken over the blocks of their pserver.
    takeovers: int
    #: Marks in the product's code that the run has reached.
    marks: Mapping[str, int] = field(default_factory=dict)


class Cluster:
    """A run that is determined by the seed, the planted bugs and ``fault_scale``."""

    def __init__(
        self,
        seed: int,
        flaws: Collection[str] = (),
        fault_scale: float = 1.0,
        mode: str = "",
        recovery: str = "",
        record: Path | None = None,
        *,
        has_rows: bool = False,
        has_moves: bool = False,
        has_standbys: bool = False,
        scenario: Scenario | None = None,
    ) -> None:
        """``record`` is the directory for recordings of the processes. ``scenario`` replaces the seed's scenario."""
        self.world = world = World(seed)
        self._recordings = None if record is None else RunRecorder(record, world)
        self.flaws = frozenset(flaws)
        self.scenario = scenario = scenario or drawn(
            seed, fault_scale, mode, recovery, has_rows=has_rows, has_moves=has_moves, has_standbys=has_standbys
        )
        self.shape = scenario.shape
        self.fault_scale, self.break_rate = scenario.fault_scale, scenario.break_rate
        self.pserver_count = scenario.pserver_count
        #: Number of tasks whose files have been created so far.
        self.joined = self.shape.first_count
        # Separate generators, so that the draws from one do not change those from another.
        self._holding, self.fates = (Random(f"{kind} {seed}") for kind in ("holding", "fates of"))
        world.network = scenario.network
        self.account = Account(self)
        self.store = Store(world)
        self.store.error_rate = scenario.store_error_rate
        self.store.written = self.account.file_written
        self.store.deleted = self.account.file_deleted
        self.etcd = Etcd(world, 0)
        self._etcd_count = 1
        #: Number of times that etcd has been restored from a backup.
        self.rewinds = 0
        #: True to resume from checkpoints if etcd has no state for the job, or only older state.
        self.is_resumed = False
        self._is_operator_called = False
        self.processes: list[Process] = []
        #: Number of times that the whole job has been restarted.
        self.life = 0
        self._names = 0
        #: Checkpoint -> last time at which it was known to be damaged.
        self._damaged: dict[int | None, float] = {}
        #: Number of times that the model has started over.
        self.begun_anew = 0
        #: Trainers that have finished a batch since the last report to a master.
        self.progressed: set[str] = set()
        self._boot()
        self._look_at_leases()
        strikes = Strikes(self)
        strikes.plan_fates()
        if self.fault_scale:
            strikes.plan()

    def recorder(self, process: str, name: str) -> Recorder | None:
        """Return a recorder for a process that is starting, or None if nothing is recorded."""
        return None if self._recordings is None else self._recordings.recorder(process, name)

    def close(self) -> None:
        if self._recordings is not None:
            self._recordings.close()

    # processes
    def _boot(self) -> None:
        for _ in range(1 + self.scenario.standby_masters):
            self._start(Master(self, self._name("master")))
        for _ in range(self.desired + self.scenario.spare_pservers):
            self.start_pserver()
        for number in range(self.scenario.trainer_count):
            self._start(Trainer(self, f"trainer-{number}"))

    def _name(self, role: str) -> str:
        self._names += 1
        return f"{role}-{self._names}"

    def cover_s(self) -> float:
        """Return the target duration, in seconds, of a trainer's tasks."""
        return self._holding.choice((0.0, 0.3, 1.0, 3.0)) if self.scenario.has_many_tasks else 0.0

    @property
    def desired(self) -> int:
        """Number of pserver processes that the job needs."""
        return desired_in(self.etcd.keys) or self.pserver_count

    def _lacks_pservers(self) -> bool:
        count = sum(isinstance(process, Pserver) for process in self.processes)
        return count < self.desired + self.scenario.spare_pservers

    def start_pserver(self) -> None:
        self._start(Pserver(self, self._name("pserver")))

    def _start(self, process: Process) -> None:
        self.processes.append(process)

    def ended(self, process: Process) -> None:
        """Restart a process that has exited by itself. Its lease usually ends immediately if etcd is reachable."""
        lease = process.lease  # type: ignore[attr-defined]
        self.revoke_for(process)
        if lease in self.etcd._leases and self.world.random.random() < 0.7 and not self.etcd.is_down:
            self.etcd.revoke(lease)
        self.etcd.review()

    def gave_up(self, pserver: Pserver, why: str) -> None:
        """Handle a pserver that ends the job because it cannot load any checkpoint.

        Repairs the store as an operator would. Raises Violation if no checkpoint is damaged.
        """
        self.world.note("{} ends the job: {}", pserver.name, why)
        loadable, now = self.loadable(), self.world.now
        # The pserver may have read a file just before its repair.
        self._damaged |= {number_of(name): now for name in self.store.rotten}
        if self.etcd.has_gone_back:
            self.ended(pserver)
            return
        if loadable is None or all(now - self._damaged.get(number, -_MENDED_S) >= _MENDED_S for number in loadable):
            raise Violation(f"{pserver.name} ends the job, but no checkpoint is damaged: {why}")
        self.store.mend()
        self.ended(pserver)

    def revoke_for(self, process: Process) -> None:
        """Kill a process. The supervisor starts another process of the same kind."""
        if not process.is_alive:
            return
        process.die()
        self.processes.remove(process)
        life = self.life

        def start() -> None:
            if life != self.life:
                return
            if isinstance(process, Master):
                self._start(Master(self, self._name("master")))
            elif isinstance(process, Pserver):
                if not self.scenario.has_moves or self._lacks_pservers():
                    self.start_pserver()
            else:
                self._start(Trainer(self, process.name))

        self.world.after(0.1 + self.world.random.random(), start)

    def _look_at_leases(self) -> None:
        """Let every process check its own lease once per second."""
        for process in tuple(self.processes):
            # A trainer registers again at its next call to the master.
            looks = process.is_alive and not process.is_frozen and not isinstance(process, Trainer)
            if looks and not process.lease.is_held():  # type: ignore[attr-defined]
                process.end("its lease was lost")
        while self.scenario.has_moves and self._lacks_pservers():
            self.start_pserver()
        self.world.after(1.0, self._look_at_leases)

    def loadable(self) -> range | None:
        pointer = pointer_in(self.etcd.keys)
        return None if pointer is None else loadable_of(pointer)

    def pointer(self) -> int | None:
        loadable = self.loadable()
        return None if loadable is None else loadable[-1]

    @property
    def lives(self) -> tuple[int, int, int]:
        """Lives of the job and of etcd. Counts start again from zero in each life."""
        return self.life, self.rewinds, self.etcd.life

    def next_etcd(self) -> int:
        self._etcd_count += 1
        return self._etcd_count - 1

    def refused(self, master: Master, why: str) -> None:
        """End a master that rejects etcd's state. Some time later an operator restarts the whole job."""
        master.end(f"it refuses the state in etcd: {why}")

        def see_to_it() -> None:
            self._is_operator_called = False
            self.restart_job(keeps_etcd=bool(candidates(self.store.files)))

        if not self._is_operator_called:
            self._is_operator_called = True
            self.world.after(1.0 + 3.0 * self.world.random.random(), see_to_it)

    def restart_job(self, *, keeps_etcd: bool = False) -> None:
        """Kill all processes. Restart the job from the store, with an empty etcd and a different number of pservers.

        If ``keeps_etcd`` is true, keep the number of pservers, and etcd's data, which was restored from a backup.
        """
        self.life += 1
        for process in tuple(self.processes):
            process.die()
        self.processes.clear()
        self.is_resumed = True
        if not keeps_etcd:
            self.etcd.die()
            self.etcd = Etcd(self.world, self.next_etcd())
            self.pserver_count = self.world.random.choice((1, 2, 3))
        # Let the leases of dead processes expire.
        self.etcd.review()
        self.world.note("the whole job is restarted with {} pservers", self.desired)
        self._boot()

    # the run

    def run(self) -> Outcome:
        """Run until the job is done, and return the statistics.

        Raises:
            Violation: The run has found an error.
        """
        world = self.world
        next_look_s = 0.0
        limit_s = _FAULTY_S
        #: Time for which faults continue, even after the job is done: work that is lost then must be repeated, too.
        linger_s = world.random.choice((0.0, 0.0, 5.0, 20.0))
        while world.step():
            if world.now < next_look_s:
                continue
            next_look_s = world.now + 0.5
            self._look_at_audit()
            if world.are_faults_on and (world.now > _FAULTY_S or (world.now > linger_s and self.is_done)):
                self._calm()
                limit_s = world.now + _CALM_S
            elif not world.are_faults_on and self.is_done and self._is_quiet():
                break
            elif world.now > limit_s:
                raise Violation("the job does not end: " + self.describe())
        leader = self.leader()
        assert leader is not None, "a run ends under a master"
        self.account.job_ended(leader, self.serving())
        return Outcome(
            seed=world.seed,
            events=world.events,
            simulated_s=world.now,
            faults=dict(world.faults),
            mode=self.scenario.mode_name,
            checkpoints=self.account.checkpoints,
            increments=self.account.increments,
            begun_anew=self.begun_anew,
            quarantined=self.account.quarantined,
            evaluations=self.account.evaluations,
            moves=self.account.moves,
            takeovers=self.account.takeovers,
        )

    def _look_at_audit(self) -> None:
        """Raise Violation if an audit found finished work missing. The audit repeats that work, hiding the error."""
        leader = self.leader()
        if leader is not None and (count := leader.core.pservers.missing_count):
            raise Violation(f"{leader.name} finds that {count} tasks are missing that counted as done")

    def _calm(self) -> None:
        self.world.note("no more faults")
        self.world.calm()
        self.joined = len(self.shape.batch_counts)
        self.store.error_rate = 0.0
        self.etcd.review()

    def leader(self) -> Master | None:
        """Return the master that is the leader both in its own view and in etcd."""
        return next((p for p in self.processes if isinstance(p, Master) and p.is_leading and p.lease.is_held()), None)

    @property
    def is_done(self) -> bool:
        leader = self.leader()
        return leader is not None and leader.core.ending.may_end

    def _is_quiet(self) -> bool:
        """True if all pservers serve, no accumulator contains gradients, and no evaluation is running."""
        serving, leader = self.serving(), self.leader()
        assert leader is not None, "a job that is done has a master"
        if leader.core.moves.is_moving or not all(each.is_done for each in leader.core.evaluations.status()):
            return False
        return len(serving) >= leader.core.pservers.count and all(
            not block.rounds.held for pserver in serving.values() for block in pserver.ordered
        )

    def serving(self) -> dict[int, Pserver]:
        """Return the pservers that hold their index and have values."""
        keys = self.etcd.keys
        return {
            p.index: p
            for p in self.processes
            if isinstance(p, Pserver) and p.is_serving and (k := keys.get(f"ps/{p.index}")) is not None and k.value is p
        }

    def describe(self) -> str:
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
                    f"durable {process.durable}/{core.revision}"
                )
        return "; ".join(lines)
