"""Random faults in a simulated cluster, one after another until they are stopped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import TYPE_CHECKING, Any

from flightedl.domain.checkpoint.manifest import candidates, manifest_name, number_of
from flightedl.domain.checkpoint.pointer import decode_pointer, latest_of
from flightedl.domain.consistency.modes import Bounded, Mode, Sync
from flightedl.messages.scaling import ScaleRequest
from tests.simulation.cores.etcd import LOCK, STATE, Key, pointer_in, pservers_in, standbys_in
from tests.simulation.cores.job import some_async
from tests.simulation.cores.pserver import Pserver
from tests.simulation.cores.trainer import Trainer
from tests.simulation.cores.world import Process

if TYPE_CHECKING:
    from tests.simulation.cores.cluster import Cluster


_LOST_WRITES = 30


class Strikes:
    """Injects faults in proportion to their weights: on average, ``fault_scale`` faults every two seconds."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._world = cluster.world
        #: Random generators for events in programs and changes of the pservers. They are separate, so that their draws
        #: do not affect other faults.
        self._programs, self._moves, self._standbys = (
            Random(f"{kind} {cluster.world.seed}") for kind in ("programs", "moves", "deaths")
        )

    def plan_fates(self) -> None:
        """Plan events other than faults: new files in the dataset, and maybe an early stop of the job."""
        cluster, fates = self._cluster, self._cluster.fates

        def join() -> None:
            if cluster.joined < len(cluster.shape.batch_counts):
                cluster.joined += 1
                self._world.note("files join: {} tasks", cluster.joined)
                self._world.after(fates.expovariate(0.3), join)

        def stop() -> None:
            leader = cluster.leader()
            if leader is not None and not leader.is_frozen:
                self._world.note("the job is stopped")
                leader.stop()

        self._world.after(fates.expovariate(0.3), join)
        if cluster.scenario.may_be_stopped:
            self._world.after(fates.uniform(1.0, 20.0), stop)

        if cluster.scenario.has_moves:
            self._plan_moves()
        if cluster.scenario.has_standbys and cluster.fault_scale:
            self._plan_deaths()

    def _plan_moves(self) -> None:
        """Plan a series of changes of the pservers."""

        def change() -> None:
            if self._world.are_faults_on:
                self._change_pservers()
                self._plan_moves()

        self._world.after(self._moves.expovariate(0.5), change)

    def _change_pservers(self) -> None:
        leader, random = self._cluster.leader(), self._moves
        count, is_cancelled = random.choice((1, 2, 3, 4)), random.random() < 0.1
        drained = [random.randrange(count)] if count > 1 and random.random() < 0.3 else []
        if leader is None or leader.is_frozen:
            return
        request = ScaleRequest(job="job", is_cancelled=True)
        if not is_cancelled:
            request = ScaleRequest(job="job", pservers=count, drain=drained)
        self._world.note("the pservers are asked to change: {}", request)
        leader.scale(request, lambda reply: self._world.note("the answer is {}", reply))

    def _plan_deaths(self) -> None:
        """Plan a series of deaths of pservers that have standbys."""

        def strike() -> None:
            if self._world.are_faults_on:
                keys = self._cluster.etcd.keys
                followed = [key.value for index, key in pservers_in(keys).items() if index in standbys_in(keys)]
                if followed and (pserver := self._standbys.choice(followed)).is_alive:
                    self._kill_process(pserver)
                self._plan_deaths()

        self._world.after(self._standbys.expovariate(0.2), strike)

    def plan(self) -> None:
        self._plan()
        self._plan_for_programs()

    def _plan_for_programs(self) -> None:
        """Plan a series of events in trainers' programs."""
        pause_s = self._programs.expovariate(1.0) * 3.0 / self._cluster.fault_scale

        def strike() -> None:
            if self._world.are_faults_on:
                self._strike_program()
                self._plan_for_programs()

        self._world.after(pause_s, strike)

    def _strike_program(self) -> None:
        trainers = [p for p in self._cluster.processes if isinstance(p, Trainer) and not p.is_frozen]
        kinds: tuple[tuple[int, str, Callable[[Trainer], None]], ...] = (
            (4, "left its loop", lambda trainer: trainer.leave_loop(is_begun_again=False, raises=False)),
            (4, "raised", lambda trainer: trainer.leave_loop(is_begun_again=False, raises=True)),
            (8, "began another loop", lambda trainer: trainer.leave_loop(is_begun_again=True, raises=False)),
            (4, "raised and went on", lambda trainer: trainer.leave_loop(is_begun_again=True, raises=True)),
            (8, "swallowed an error", Trainer.swallow_error),
            (6, "lost its registration", self._take_registration),
        )
        ((_, name, strike),) = self._programs.choices(kinds, [weight for weight, _, _ in kinds])
        if trainers:
            trainer = self._programs.choice(trainers)
            self._world.fault(name)
            self._world.note("{} {}", trainer.name, name)
            # A push may have reached only some of the blocks.
            self._cluster.account.out_of_step.add(trainer.membership.member)
            strike(trainer)

    def _take_registration(self, trainer: Trainer) -> None:
        """Delete a trainer's key. The trainer continues, notices later, and registers again with the same name."""
        self._cluster.etcd.steal(f"trainers/{trainer.name}")
        delay_s = 2.0 * self._programs.random()
        self._world.after(delay_s, lambda: trainer.deliver(trainer.lose_registration))

    def _plan(self) -> None:
        """Plan a series of faults."""
        pause_s = self._world.random.expovariate(1.0) * 2.0 / self._cluster.fault_scale

        def strike() -> None:
            if self._world.are_faults_on:
                self._strike()
                self._plan()

        self._world.after(pause_s, strike)

    def _strike(self) -> None:
        random = self._world.random
        kinds: tuple[tuple[int, Any], ...] = (
            (24, self._kill),
            (8, self._request_end),
            (16, self._freeze),
            (12, self._part),
            (6, self._steal),
            (6, self._etcd_down),
            (4, self._etcd_frozen),
            (3, self._etcd_goes_back),
            (6, self._store_down),
            (8, self._rot),
            (2, self._lose_everything),
            (8 if self._cluster.scenario.changes_modes else 0, self._change_mode),
        )
        (strike,) = random.choices([kind for _, kind in kinds], [weight for weight, _ in kinds])
        strike()

    def _any(self) -> Process:
        return self._world.random.choice(self._cluster.processes)

    def _kill(self) -> None:
        if self._cluster.processes:
            self._kill_process(self._any())

    def _kill_process(self, process: Process) -> None:
        self._world.fault("killed")
        self._world.note("kill -9 {}", process.name)
        self._cluster.revoke_for(process)
        self._cluster.etcd.review()

    def _request_end(self) -> None:
        """SIGTERM."""
        if self._cluster.processes:
            process = self._any()
            self._world.fault("told to end")
            self._world.note("{} is told to end", process.name)
            if isinstance(process, Trainer):
                self._cluster.account.out_of_step.add(process.membership.member)
            process.deliver(process.drain)  # type: ignore[attr-defined]

    def _freeze(self) -> None:
        if not self._cluster.processes:
            return
        process = self._any()
        if process.is_frozen:
            return
        self._world.fault("frozen")
        seconds = self._world.random.choice((0.3, 1.0, 3.0, 6.0))
        self._world.note("{} freezes for {} s", process.name, seconds)
        process.freeze()
        self._cluster.etcd.review()

        def wake() -> None:
            if process.is_alive:
                self._world.note("{} wakes", process.name)
                if process.lease.is_ended:  # type: ignore[attr-defined]
                    self._world.fault("zombie")
                process.is_frozen = False
                self._cluster.etcd.review()
                process.wake()

        self._world.after(seconds, wake)

    def _part(self) -> None:
        """Cut one process off from another, from etcd, or from everything."""
        if not self._cluster.processes:
            return
        one = self._any()
        other = self._world.random.choice(("", "etcd", self._any().name))
        self._world.fault("parted")
        self._world.note("{} is cut off from {}", one.name, other or "all")
        mend = self._world.cut(one.name, other)
        self._cluster.etcd.review()

        def mended() -> None:
            mend()
            self._cluster.etcd.review()

        self._world.after(self._world.random.choice((0.3, 1.0, 3.0, 6.0)), mended)

    def _steal(self) -> None:
        """Delete a key as an operator would. The key's owner continues, and notices some time later."""
        keys = sorted(key for key in self._cluster.etcd.keys if not key.startswith(STATE))
        if not keys or self._cluster.etcd.is_down:
            return
        key = self._world.random.choice(keys)
        if key.startswith("master/addr"):
            key = LOCK
        found = self._cluster.etcd.keys.get(key)
        if found is None or found.lease is None:
            return
        owner = found.lease.owner
        self._world.fault("key stolen")
        self._world.note("the key {} of {} is deleted", key, owner.name)
        self._cluster.etcd.steal(key)
        if isinstance(owner, Pserver):
            # The old process keeps running until it notices that it has been replaced.
            self._cluster.start_pserver()

        def notice() -> None:
            if isinstance(owner, Trainer):
                owner.lose_registration()
            elif owner.is_alive:
                self._cluster.ended(owner)

        self._world.after(0.5 + 3.0 * self._world.random.random(), lambda: owner.deliver(notice))

    def _etcd_down(self) -> None:
        if self._cluster.etcd.is_down:
            return
        self._world.fault("etcd down")
        self._world.note("etcd goes down")
        self._cluster.etcd.is_down = True
        self._cluster.etcd.review()

        def up() -> None:
            self._world.note("etcd is back")
            self._cluster.etcd.is_down = False
            self._cluster.etcd.review()

        self._world.after(self._world.random.choice((0.5, 2.0, 5.0)), up)

    def _etcd_frozen(self) -> None:
        etcd = self._cluster.etcd
        if etcd.is_frozen or etcd.is_down:
            return
        self._world.fault("etcd frozen")
        self._world.note("etcd freezes")
        etcd.freeze()
        etcd.review()

        def wake() -> None:
            self._world.note("etcd wakes")
            etcd.wake()
            etcd.review()

        self._world.after(self._world.random.choice((0.5, 2.0, 4.0)), wake)

    def _etcd_goes_back(self) -> None:
        """Restore etcd from an older backup as another cluster, or make it lose its last writes in a power failure."""
        cluster, etcd, random = self._cluster, self._cluster.etcd, self._world.random
        has_lost_writes = random.random() < 0.5
        # Not guaranteed to be detected, because etcd may already be past the revision that a process last saw.
        may_miss_it = self._world.is_parted or any(process.is_frozen for process in cluster.processes)
        if etcd.is_down or etcd.is_frozen or len(etcd.history) < _LOST_WRITES or (has_lost_writes and may_miss_it):
            return
        writes_ago = random.randint(5, _LOST_WRITES) if has_lost_writes else random.randint(1, len(etcd.history))
        if self._names_deleted_key(etcd.history[-writes_ago][1]):
            return
        self._world.fault("etcd went back")
        self._world.note("etcd loses its last {} writes", writes_ago)
        cluster.rewinds += 1
        # Detection is not guaranteed if the manifest cannot be read.
        cluster.store.mend()
        etcd.restore(etcd.history[-writes_ago], etcd.cluster_number if has_lost_writes else cluster.next_etcd())

    def _names_deleted_key(self, keys: Mapping[str, Key]) -> bool:
        """True if a backup made after the order for the newest checkpoint nevertheless names a deleted checkpoint.

        Such a backup does not look older than the newest checkpoint, but no pserver can find the one that it names.
        """
        pointer, files = pointer_in(keys), self._cluster.store.files
        latest = None if pointer is None else latest_of(pointer)
        if pointer is None or latest is None or manifest_name(latest.number) in files:
            return False
        return decode_pointer(pointer).next_number > max(candidates(files), default=0)

    def _store_down(self) -> None:
        if self._cluster.store.is_down:
            return
        self._world.fault("store down")
        self._cluster.store.is_down = True

        def up() -> None:
            self._cluster.store.is_down = False

        self._world.after(self._world.random.choice((0.5, 2.0, 6.0)), up)

    def _change_mode(self) -> None:
        leader = self._cluster.leader()
        if leader is None or leader.is_frozen:
            return
        self._world.fault("mode changed")
        sums = () if self._cluster.shape.is_patchy else (Sync(push_every=2),)
        choices: tuple[Mode, ...] = (
            self._cluster.fates.choice((Sync(), Sync("sum"), Sync(backup=1), *sums)),
            some_async(self._cluster.fates),
            some_async(self._cluster.fates),
            Bounded(self._world.random.randrange(3)),
        )
        leader.change_mode(self._world.random.choice(choices))

    def _rot(self) -> None:
        """Damage a stored file."""
        if self._cluster.etcd.has_gone_back:
            return
        random, pointer = self._world.random, self._cluster.pointer()
        names = sorted(self._cluster.store.files)[-6:]
        if pointer is not None and random.random() < 0.5:
            # The files that will be loaded next.
            names = [name for name in sorted(self._cluster.store.files) if number_of(name) == pointer] or names
        if names:
            name = random.choice(names)
            self._world.fault("file torn")
            self._world.note("{} is damaged", name)
            self._cluster.store.rot(name, self._world.random.random() < 0.5)
            pservers = [process for process in self._cluster.processes if isinstance(process, Pserver)]
            if pservers and self._cluster.is_done:
                # At this moment only the pservers have the trained values, so kill one of them.
                self._kill_process(self._world.random.choice(pservers))

    def _lose_everything(self) -> None:
        self._world.fault("whole job restarted")
        self._cluster.restart_job()
