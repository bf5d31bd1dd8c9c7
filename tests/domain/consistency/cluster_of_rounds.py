"""A whole job in one process: one membership, pservers with rounds and applied sets, trainers, and a bad network.

Everything random comes from one seed. ``flaws`` plant bugs by name, to show that the run finds them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from flightedl.domain.consistency.membership import Membership
from flightedl.domain.consistency.membership_values import Admitted, Effect, Persist, SendView
from flightedl.domain.consistency.modes import Async, Bounded, Mode, Sync
from flightedl.domain.consistency.rounds import BlockRounds
from flightedl.domain.consistency.rounds_values import Accumulate, Apply, Arrived, NotMember, Pull, Repeated, Stale
from flightedl.domain.consistency.views import PserverView, View
from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.exactly_once.batches import Batch
from flightedl.errors import FencedError

FLAWS = (
    "no dedupe",
    "no mark",
    "snapshot with marks of open rounds",
    "contributions leave with their member",
    "no close without a view",
    "close early",
    "admit anywhere",
    "pulls of the removed wait",
    "no rejoin after a restart",
    "accumulator not overwritten",
)
#: Of runs in which the mode changes.
FLAWS_OF_CHANGES = (
    "open rounds are lost",
    "modes begin anywhere",
    "old members stay",
    "trainers keep the old mode",
)
MODES = (Sync(), Sync(backup=1), Async(), Bounded(staleness=0), Bounded(staleness=2))


class BlockWithFlaws(BlockRounds):
    """The production rounds, unless a flaw is planted."""

    def __init__(self, mode: Mode, version: int, flaws: frozenset[str]) -> None:
        super().__init__(mode, version)
        self.flaws = flaws

    def closable(self):
        if "close early" in self.flaws and self._arrived:
            self._missing = 0
        if "no close without a view" in self.flaws and not self.members:
            return False
        return super().closable()

    def can_admit(self, first_round):
        return "admit anywhere" in self.flaws or super().can_admit(first_round)

    def change(self, admit, remove):
        remove = list(remove)
        super().change(admit, remove)
        if "contributions leave with their member" in self.flaws:
            for member in remove:
                self._contributors.pop(member, None)
            if not self._contributors:
                self._held.clear()

    def pull(self, member, min_version):
        result = super().pull(member, min_version)
        if result is Pull.NOT_MEMBER and "pulls of the removed wait" in self.flaws:
            return Pull.READY if self.version >= min_version else Pull.WAIT
        return result


@dataclass
class Block:
    rounds: BlockWithFlaws
    #: How often each batch is in the values.
    values: Counter = field(default_factory=Counter)
    accumulator: list[Batch] = field(default_factory=list)
    #: The test's own account of who is due, and who arrived in the open round.
    first_rounds: dict[int, int] = field(default_factory=dict)
    arrived: set[int] = field(default_factory=set)


class Pserver:
    def __init__(self, world: World, index: int, generation: int, stored) -> None:
        self.world, self.index, self.generation = world, index, generation
        # What it was told when it started may be old: the first view has it right.
        mode = world.random.choice(MODES) if world.changes else world.mode
        self.view = PserverView(mode)
        if stored is None:
            self.applied = AppliedBatches(world.blocks)
            stored = [(None, Counter(), 0)] * world.blocks
        else:
            sources = [(AppliedBatches.decode(data), i) for i, (data, _, _) in enumerate(stored)]
            self.applied = AppliedBatches.rebuilt(sources)
        self.blocks = [Block(BlockWithFlaws(mode, v, world.flaws), values.copy()) for _, values, v in stored]

    def highest(self) -> int:
        return max(block.rounds.position for block in self.blocks)

    def snapshot_block(self, i: int):
        """What a checkpoint keeps of one block: its values and its applied set, without what waits in the round."""
        block, applied = self.blocks[i], self.applied.copy()
        if "snapshot with marks of open rounds" not in self.world.flaws:
            for batch in block.rounds.held_batches:
                applied.unmark(i, batch, self.world.batch_count(batch))
        applied.check()
        return applied.encode(), block.values.copy(), block.rounds.version

    def take_view(self, view: View):
        flaws = self.world.flaws
        if (mode := self.view.begins_in(view)) is not None:
            for block in self.blocks:
                block.rounds = BlockWithFlaws(mode, block.rounds.version, flaws)
        verdict = self.view.consider(
            view,
            lambda first: all(b.rounds.can_admit(first) for b in self.blocks),
            lambda at: "modes begin anywhere" in flaws or all(b.rounds.can_switch(at) for b in self.blocks),
        )
        if verdict.is_outdated:
            return None
        admit = {member.member_id: member.first_round for member in verdict.admit}
        for block in self.blocks:
            if verdict.switch is not None:
                self.switch(block, verdict)
            block.rounds.change(admit, verdict.remove)
            for member in verdict.remove:
                block.first_rounds.pop(member, None)
            block.first_rounds.update(admit)
            self.settle(block)
        if verdict.refuses_mode:
            return verdict.refused, max(block.rounds.version for block in self.blocks), True
        return verdict.refused, self.highest(), False

    def switch(self, block: Block, verdict) -> None:
        flaws = self.world.flaws
        if "open rounds are lost" in flaws:
            block.accumulator = []
        if "old members stay" not in flaws:
            block.rounds.change({}, verdict.remove)
            for member in verdict.remove:
                block.first_rounds.pop(member, None)
            self.settle(block)
        at = block.rounds.version if "modes begin anywhere" in flaws else verdict.switch_round
        block.rounds.switch(verdict.switch, at)
        self.settle(block)
        assert block.rounds.mode == verdict.switch, "a mode has not begun"
        assert block.rounds.version == at, "a mode has begun elsewhere"

    def push(self, i: int, member: int, base: int, weight: float, batch: Batch, step: int):
        world, block = self.world, self.blocks[i]
        has = self.applied.has(i, batch)
        version = block.rounds.version
        is_foretold = block.rounds.may_update(member, base)
        outcome = block.rounds.arrive(
            member, base, weight, already_applied=has and "no dedupe" not in world.flaws, batch=batch, step=step
        )
        if isinstance(outcome, Apply) or block.rounds.closable():
            assert is_foretold or world.flaws, "the optimizer runs and nobody was ready for it"
        if not isinstance(outcome, Stale | NotMember) and base == version:
            block.arrived.add(member)
        if isinstance(outcome, Accumulate | Arrived | Apply) and "no mark" not in world.flaws:
            assert self.applied.mark(i, batch, world.batch_count(batch)) != has
        if isinstance(outcome, Accumulate):
            world.check_lock_step(member, version)
            if outcome.is_first and "accumulator not overwritten" not in world.flaws:
                block.accumulator = []
            block.accumulator.append(batch)
        if isinstance(outcome, Apply):
            block.values[batch] += 1
        self.settle(block)
        return outcome

    def settle(self, block: Block) -> None:
        rounds = block.rounds
        while rounds.closable():
            version = rounds.version
            due = {member for member, first in block.first_rounds.items() if first <= version}
            late = due - block.arrived
            backup = rounds.mode.backup if isinstance(rounds.mode, Sync) else 0
            assert len(late) <= backup, f"round {version} closed without {late}"
            assert not backup or not due or due - late, "a round closed without any due member"
            closing = rounds.close()
            assert closing.round == version
            if closing.has_update:
                assert len(block.accumulator) >= len(closing.contributors)
                block.values.update(block.accumulator)
            else:
                block_is_behind = rounds._switch is not None or (
                    rounds.version > version and min(block.first_rounds.values(), default=rounds.version) > version
                )
                assert due & block.arrived or block_is_behind, "a round closed for nothing"
            assert rounds.version > version
            block.arrived = set()
        rounds.check()


class Trainer:
    """One process: it takes a task, joins, pulls, and pushes batch after batch."""

    def __init__(self, world: World, name: str, generation: int) -> None:
        self.world, self.name, self.generation = world, name, generation
        #: That its membership began under.
        self.mode = world.mode
        self.task: tuple[int, int] | None = None
        self.member = 0
        #: Batches begun under the membership held last.
        self.step, self.member_before = 0, 0
        self.places = [(p, b) for p in range(world.pserver_count) for b in range(world.blocks)]
        self.versions = dict.fromkeys(self.places, 0)
        self.token = 0
        self.wanted: dict[tuple[int, int], int] = {}
        self.unanswered: set[tuple[int, int]] = set()
        self.phase = "idle"
        self.batch = 0

    def act(self) -> None:
        getattr(self, "act_" + self.phase)()

    def act_gone(self) -> None:
        """Its registration has ended: whatever it asks of the master is refused."""

    def act_idle(self) -> None:
        self.task = self.world.fetch(self)
        if self.task is not None:
            self.batch = 0
            self.start_batch()

    def start_batch(self) -> None:
        """Open the batch: be a member, then push; after a lost or refused one with fresh values."""
        if self.task not in self.world.held.get((self.name, self.generation), ()):
            self.phase = "idle"
        elif not self.member:
            self.phase = "join"
        else:
            self.begin_push()

    def act_join(self) -> None:
        world = self.world
        if self.task not in world.held.get((self.name, self.generation), ()):
            self.phase = "idle"
            return
        try:
            world.perform(world.master.join(self.name, self.generation))
        except FencedError:
            self.phase = "gone"
            return
        member = world.master.member_id_of(self.name)
        if member is not None:
            if member != self.member_before:
                self.member_before, self.step = member, 0
            self.member = member
            if "trainers keep the old mode" not in world.flaws:
                self.mode = world.master.mode if world.changes else world.mode
            self.begin_pull(dict.fromkeys(self.places, 0), "push")

    def begin_pull(self, wanted, then: str) -> None:
        self.token += 1
        self.wanted, self.then, self.phase = dict(wanted), then, "pull"

    def act_pull(self) -> None:
        for place, version in sorted(self.wanted.items()):
            self.world.send(
                lambda p=place, v=version, t=self.token, m=self.member: self.world.at_pull(self, p, m, v, t)
            )

    def pulled(self, place, token: int, state: Pull, version: int) -> None:
        if token != self.token or place not in self.wanted:
            return
        if state is Pull.NOT_MEMBER:
            self.repeat()
        elif state is Pull.READY:
            assert version >= self.wanted.pop(place)
            self.versions[place] = version
            if not self.wanted:
                if self.then == "push":
                    self.begin_push()
                else:
                    self.next_batch()

    def begin_push(self) -> None:
        self.token += 1
        self.step += 1
        self.phase, self.unanswered = "push", set(self.places)
        #: One base for all blocks: see the rule for backup in rounds.
        lowest = min(self.versions.values())
        has_one_base = isinstance(self.mode, Sync) and self.mode.backup
        self.base = {place: lowest if has_one_base else v for place, v in self.versions.items()}

    def act_push(self) -> None:
        places = sorted(self.unanswered)
        self.world.random.shuffle(places)
        batch = Batch(*self.task, self.batch)
        for place in places:
            weight = 0.0 if self.world.is_without_gradient(place, batch) else 1.0
            base = self.base[place]
            self.world.send(
                lambda p=place, v=base, t=self.token, m=self.member, w=weight, s=self.step: self.world.at_push(
                    self, p, m, v, w, batch, s, t
                )
            )

    def pushed(self, place, token: int, outcome) -> None:
        if token != self.token or place not in self.unanswered:
            return
        if isinstance(outcome, Stale | NotMember):
            self.repeat()
            return
        self.unanswered.remove(place)
        if not self.unanswered:
            step = 1 if isinstance(self.mode, Sync) else 0
            wanted = {place: self.base[place] + step for place in self.places}
            if self.batch + 1 == self.world.batch_count(Batch(*self.task, 0)):
                # The last batch of a task is reported without waiting for its round.
                self.world.finished(self)
                self.task = self.world.fetch(self)
                self.batch = -1
                if self.task is None:
                    self.phase, self.member = "gone" if self.phase == "gone" else "idle", 0
                    return
            self.begin_pull(wanted, "next")

    def next_batch(self) -> None:
        self.batch += 1
        self.start_batch()

    def repeat(self) -> None:
        """Give up this push; compute the same batch anew, as a member again. Nothing of it is lost or doubled."""
        self.member = 0
        self.batch = max(self.batch, 0)
        self.token += 1
        self.start_batch()


class World:
    def __init__(
        self, seed: int, mode: Mode, flaws=frozenset(), *, faults: int = 25, tasks: int = 6, changes: bool = False
    ) -> None:
        self.random = random.Random(seed)
        self.mode, self.flaws, self.changes = mode, frozenset(flaws), changes
        self.pserver_count, self.blocks = self.random.choice([(1, 2), (2, 1), (2, 2), (3, 1)])
        self.counts = {(0, t): self.random.randint(1, 3) for t in range(tasks)}
        self.generation = 10
        self.network: list[Callable[[], None]] = []
        self.todo = list(self.counts)
        self.done: set[tuple[int, int]] = set()
        self.held: dict[tuple[str, int], dict[tuple[int, int], list[int]]] = {}
        self.faults = faults
        #: Generations of trainers whose lease has ended.
        self.expired: set[int] = set()
        begun = mode if changes else Sync()
        self.master = Membership(self.new_generation(), self.pserver_count, mode=begun)
        self.stored_membership = self.master.encode()
        self.pservers: list[Pserver | None] = [
            Pserver(self, i, self.new_generation(), None) for i in range(self.pserver_count)
        ]
        self.stored = [[p.snapshot_block(i) for i in range(self.blocks)] for p in self.pservers if p]
        for i in range(self.pserver_count):
            self.announce(i)
        #: The living ones; zombies come after them in ``trainers``.
        self.trainer_count = self.random.randint(1, 4)
        self.trainers = [Trainer(self, f"t{i}", self.new_generation()) for i in range(self.trainer_count)]

    def new_generation(self) -> int:
        self.generation += 1
        return self.generation

    def batch_count(self, batch: Batch) -> int:
        return self.counts[batch.epoch, batch.task]

    def is_without_gradient(self, place, batch: Batch) -> bool:
        """Some batches have nothing for some blocks: the user pushed other parameters."""
        return (place[0] + place[1] + batch.task + batch.batch) % 5 == 0

    # network

    def send(self, message: Callable[[], None]) -> None:
        if self.random.random() < 0.9 or not self.faults:
            self.network.append(message)

    def at_pull(self, trainer: Trainer, place, member: int, version: int, token: int) -> None:
        pserver = self.pservers[place[0]]
        if pserver is not None:
            rounds = pserver.blocks[place[1]].rounds
            state = rounds.pull(member, version)
            found = rounds.version
            self.send(lambda: trainer.pulled(place, token, state, found))

    def at_push(self, trainer: Trainer, place, member, base, weight, batch: Batch, step: int, token: int) -> None:
        pserver = self.pservers[place[0]]
        if pserver is not None:
            outcome = pserver.push(place[1], member, base, weight, batch, step)
            assert isinstance(outcome, Accumulate | Apply | Arrived | Repeated | Stale | NotMember)
            self.send(lambda: trainer.pushed(place, token, outcome))

    # master

    def perform(self, effects: list[Effect]) -> None:
        self.master.check()
        for effect in effects:
            if isinstance(effect, Persist):
                if self.random.random() < 0.8:
                    self.stored_membership = self.master.encode()
            elif isinstance(effect, SendView):
                self.network.append(lambda e=effect, m=self.master: self.at_view(e, m))
            else:
                assert isinstance(effect, Admitted)
                assert self.master.member_id_of(effect.trainer) == effect.member_id

    def at_view(self, effect: SendView, master: Membership) -> None:
        pserver = self.pservers[effect.index]
        is_lost = self.faults > 0 and self.random.random() < 0.2
        answer = None
        if (
            pserver is not None
            and pserver.generation == effect.generation
            and not (is_lost and self.random.random() < 0.5)
        ):
            answer = pserver.take_view(effect.view)
        failed = answer is None or is_lost

        def reply() -> None:
            if master is not self.master:
                return
            if failed:
                self.perform(master.send_failed(effect.index, effect.generation, effect.view.serial))
            else:
                refused, highest, refuses_mode = answer
                serial = effect.view.serial
                self.perform(
                    master.answered(
                        effect.index, effect.generation, serial, refused, highest, refuses_mode=refuses_mode
                    )
                )

        self.network.append(reply)

    def announce(self, index: int) -> None:
        def up() -> None:
            pserver = self.pservers[index]
            if pserver is not None:
                if "no rejoin after a restart" in self.flaws:
                    self.master._pservers.pop(index, None)
                self.perform(self.master.pserver_up(index, pserver.generation, pserver.highest()))

        self.network.append(up)

    # queue: exact and immediate, since it is not what is tested here

    def fetch(self, trainer: Trainer):
        if trainer.generation in self.expired:
            trainer.phase = "gone"
            return None
        mine = self.held.setdefault((trainer.name, trainer.generation), {})
        pending = sorted({task for tasks in self.held.values() for task in tasks} - self.done - set(mine))
        task = None
        if self.todo:
            task = self.todo.pop(self.random.randrange(len(self.todo)))
        elif pending and self.random.random() < 0.2:
            task = self.random.choice(pending)
        if task is None:
            self.perform(self.master.leave(trainer.name, trainer.generation))
            return None
        mine[task] = self.generations()
        return task

    def generations(self) -> list[int]:
        return [0 if p is None else p.generation for p in self.pservers]

    def finished(self, trainer: Trainer) -> None:
        generations = self.held.get((trainer.name, trainer.generation), {}).pop(trainer.task, None)
        if generations is None or trainer.task in self.done:
            return
        if generations == self.generations() and 0 not in generations:
            self.done.add(trainer.task)
            for tasks in self.held.values():
                tasks.pop(trainer.task, None)
            self.todo = [task for task in self.todo if task != trainer.task]
        elif trainer.task not in self.todo:
            self.todo.append(trainer.task)

    def give_back(self, name: str, generation: int) -> None:
        for task in self.held.pop((name, generation), {}):
            if (
                task not in self.done
                and not any(task in tasks for tasks in self.held.values())
                and task not in self.todo
            ):
                self.todo.append(task)

    # faults

    def kill_trainer(self, i: int, *, is_zombie: bool) -> None:
        """The lease ends some time later; a zombie goes on until it is refused."""
        old = self.trainers[i]
        self.trainers[i] = Trainer(self, old.name, self.new_generation())
        if is_zombie:
            self.trainers.append(old)

        def expired() -> None:
            self.perform(self.master.leave(old.name, old.generation))
            self.give_back(old.name, old.generation)
            self.expired.add(old.generation)

        self.network.append(expired)

    def restart_master(self) -> None:
        self.master = Membership.restore(self.stored_membership, self.new_generation(), self.pserver_count)
        # A new master compares the stored members with the leases that there are.
        for member in self.master.members:
            if member.generation in self.expired:
                self.perform(self.master.leave(member.trainer, member.generation))
        for i in range(self.pserver_count):
            self.announce(i)

    def restart_pserver(self, index: int) -> None:
        self.pservers[index] = None

        def back() -> None:
            self.pservers[index] = new = Pserver(self, index, self.new_generation(), self.stored[index])
            for epoch, task in sorted(self.done):
                if new.applied.missing_batches(epoch, task, self.counts[epoch, task]):
                    self.done.discard((epoch, task))
                    self.todo.append((epoch, task))
            self.announce(index)

        if self.random.random() < 0.5:
            self.perform(self.master.pserver_down(index))
        self.network.append(back)

    def fault(self) -> None:
        self.faults -= 1
        kind = self.random.randrange(10)
        if kind <= 2:
            self.kill_trainer(self.random.randrange(self.trainer_count), is_zombie=self.random.random() < 0.3)
        elif kind == 3:
            self.restart_master()
        elif kind <= 6:
            p = self.random.randrange(self.pserver_count)
            if (pserver := self.pservers[p]) is not None:
                block = self.random.randrange(self.blocks)
                self.stored[p][block] = pserver.snapshot_block(block)
        elif kind == 7:
            p = self.random.randrange(self.pserver_count)
            if self.pservers[p] is not None:
                self.restart_pserver(p)
        elif self.network:
            # A message comes twice; or a task times out and is given to somebody else as well.
            if kind == 8:
                self.network.append(self.random.choice(self.network))
            elif self.held:
                name, generation = self.random.choice(sorted(self.held))
                self.give_back(name, generation)

    def change_mode(self) -> None:
        self.faults -= 1
        self.perform(self.master.switch(self.random.choice(MODES)))

    # the run

    def check_lock_step(self, member: int, round_number: int) -> None:
        """Nobody contributes to a round before every block that knows it has closed the round before."""
        if self.changes or not isinstance(self.mode, Sync) or self.mode.backup:
            return
        for pserver in self.pservers:
            for block in pserver.blocks if pserver is not None else ():
                if member in block.rounds.members:
                    assert block.rounds.version >= round_number, "a member is ahead of a block"

    def is_over(self) -> bool:
        quiet = (
            not self.network
            and not self.faults
            and not self.master.members
            and all(p is not None for p in self.pservers)
        )
        return quiet and len(self.done) == len(self.counts) and all(t.phase in {"idle", "gone"} for t in self.trainers)

    def run(self, limit: int = 20_000) -> None:
        rate = self.random.choice([0.02, 0.05, 0.2])
        for _ in range(limit):
            if self.is_over():
                break
            if self.faults and self.random.random() < rate:
                is_change = self.changes and self.random.random() < 0.3
                self.change_mode() if is_change else self.fault()
            elif self.network and self.random.random() < 0.85:
                self.network.pop(self.random.randrange(len(self.network)))()
            else:
                self.random.choice(self.trainers).act()
        else:
            raise AssertionError("the job does not end: " + self.describe())
        for task in list(self.held):
            self.give_back(*task)
        everything = {Batch(e, t, b): 1 for (e, t), count in self.counts.items() for b in range(count)}
        for p, pserver in enumerate(self.pservers):
            pserver.applied.check()
            assert pserver.applied.done_tasks(0) == list(range(len(self.counts)))
            for b, block in enumerate(pserver.blocks):
                without = {batch for batch in everything if self.is_without_gradient((p, b), batch)}
                wanted = {batch: 1 for batch in everything if batch not in without}
                wrong = {k: block.values[k] for k in wanted | block.values if block.values[k] != wanted.get(k, 0)}
                assert not wrong, f"pserver {p}, block {b}: wrong counts {wrong}"

    def describe(self) -> str:
        blocks = [
            (p.index, b.rounds.version, b.rounds.members, b.rounds.waits_for())
            for p in self.pservers
            if p
            for b in p.blocks
        ]
        trainers = [(t.name, t.generation, t.phase, t.member, t.task, t.wanted, t.unanswered) for t in self.trainers]
        return (
            f"done {sorted(self.done)}, todo {self.todo}, trainers {trainers}, blocks {blocks}, {self.master.members}"
        )
