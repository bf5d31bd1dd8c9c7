"""Checks a run's invariants against a record of everything that was assigned, done, stored and reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flightedl.domain.checkpoint.manifest import Manifest, candidates, checksum, manifest_name, number_of
from flightedl.domain.checkpoint.pointer import latest_of
from flightedl.domain.consistency.membership_values import Admitted
from flightedl.domain.consistency.membership_values import Effect as MembershipEffect
from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.exactly_once.intervals import IntervalSet
from flightedl.domain.master.members import Members
from flightedl.domain.master.work import Work
from flightedl.domain.queue.tasks import TaskQueue
from flightedl.domain.queue.values import FailedPiece
from flightedl.errors import CorruptError
from flightedl.messages.moving import CopyId
from flightedl.messages.tasks import (
    FinishedTask,
    ReturnedTask,
    TasksReply,
    TasksTicket,
)
from tests.simulation.cores.etcd import placement_read, pointer_in
from tests.simulation.cores.job import set_aside, torn, wrong
from tests.simulation.cores.ledger import require_sound
from tests.simulation.cores.row_account import require_stored_rows
from tests.simulation.cores.store import whole
from tests.simulation.cores.world import Violation

if TYPE_CHECKING:
    from tests.simulation.cores.cluster import Cluster
    from tests.simulation.cores.master import Master
    from tests.simulation.cores.pserver import Pserver
    from tests.simulation.cores.trainer import Trainer

#: A master may stop waiting for the store if the store failed less than this many seconds ago.
_GIVEN_UP_S = 30.0


class Account:
    """Receives the events of a run. A method raises ``Violation`` if its event breaks an invariant."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        #: (lives of the job and of etcd, evaluation, attempt) -> (trainer, epoch, position) of the assignment.
        self._attempts: dict[tuple[int, int, int, str, int], Any] = {}
        #: (lives of the job and of etcd, block) -> elements that the block had when a master reported the job as done.
        self._results: dict[tuple[int, int, int, int], set[int]] = {}
        #: Lives of the job and of etcd -> (epoch, task) -> batches that counted as done in a stored state.
        self._done: dict[tuple[int, int, int], dict[tuple[int, int], IntervalSet]] = {}
        #: (epoch, task, batch) of all batches that masters have ever reported as quarantined.
        self._set_aside: set[tuple[int, int, int]] = set()
        #: Members that all pservers have admitted.
        self._admitted: set[int] = set()
        #: Members whose program has left its loop or has continued after a failed push.
        self.out_of_step: set[int] = set()
        #: Numbers of manifests, their increments, evaluation results, quarantined batches, and completed drains.
        self.checkpoints = self.increments = self.evaluations = self.quarantined = self.drains = 0
        #: Number of units of blocks that have moved to another pserver.
        self.moves = 0
        #: Number of standbys that have taken over the blocks of their pserver.
        self.takeovers = 0

    def given(self, trainer: str, evaluation: str, assignment: Any) -> None:
        """Record an assignment. Only a trainer of the same name may get the attempt again, for the same piece."""
        place = (trainer, assignment.epoch, assignment.position)
        known = self._attempts.setdefault((*self._cluster.lives, evaluation, assignment.attempt), place)
        if known != place:
            raise Violation(f"attempt {assignment.attempt} was assigned twice: {known} and {place}")

    def watch(self, master: Master) -> None:
        """Observe all reports that count, and all admissions, in a new master's core."""
        core = master.core
        assert core.work is not None, "a master that leads has a queue"
        assert core.members is not None, "... and a membership"
        self._watch_reports(master, core.work)
        self._watch_members(master, core.members)

    def _watch_reports(self, master: Master, work: Work) -> None:
        take, queue = work.apply_reports, work.queue

        def observed(ticket: TasksTicket, now: float) -> list[ReturnedTask]:
            # A queue from an older checkpoint may not have begun the epoch that a report names.
            reports = [each for each in ticket.finished if each.epoch < queue.begun_epochs]
            current = {
                (each.epoch, each.position): each
                for each in reports
                if queue.is_current(ticket.trainer, each.attempt, ticket.generation)
            }
            before = [_done_at(queue, each) for each in reports]
            lost = take(ticket, now)
            for report, done in zip(reports, before, strict=True):
                if _done_at(queue, report) != done:
                    # One of two reports of the same task may be outdated.
                    counted = current.get((report.epoch, report.position))
                    self.accepted(master, counted or report, counted is not None)
                    self._note_done(master, queue, report)
            return lost

        work.apply_reports = observed  # type: ignore[method-assign]

    def _watch_members(self, master: Master, members: Members) -> None:
        perform = members.perform
        known = members.membership.members
        self._admitted |= {each.member_id for each in known if each.is_admitted}

        def observed(effects: Sequence[MembershipEffect]) -> None:
            for each in effects:
                if isinstance(each, Admitted):
                    self._admitted.add(each.member_id)
                    self.admitted(master, each.member_id)
            perform(effects)

        members.perform = observed  # type: ignore[method-assign]

    def check_member(self, master: Master, member_id: int) -> None:
        if member_id not in {0, *self._admitted}:
            raise Violation(f"{master.name} names member {member_id}, which not all pservers have accepted")

    def contributed(self, member: int, round_number: int) -> None:
        """Check a gradient that is added to a round: all blocks that wait for its trainer are at the same round."""
        if member in self.out_of_step:
            return
        for pserver in self._cluster.serving().values():
            for block in pserver.ordered:
                if member in block.rounds.members and block.rounds.version < round_number:
                    raise Violation(
                        f"member {member} is in round {round_number}, and block {block.number} on {pserver.name} "
                        f"waits for it in round {block.rounds.version}"
                    )

    def updated(self, pserver: Pserver, numbers: range) -> None:
        """Check an update of adjacent blocks: according to etcd, the pserver owns them."""
        etcd = self._cluster.etcd
        placement = placement_read(etcd.keys)
        if placement is None or etcd.has_gone_back or pserver.etcd_life != etcd.life:
            return
        owners = {placement.owners[number] for number in numbers}
        if owners != {pserver.index}:
            raise Violation(f"{pserver.name} updates blocks {numbers}, which pservers {owners} own")

    def evaluated(self, trainer: Trainer, name: str, reply: TasksReply) -> None:
        """Check an evaluation's result that a trainer received: it contains each batch once."""
        counts = self._cluster.shape.evaluation
        measured = [
            self._cluster.shape.measured(task, batch) for task, count in enumerate(counts) for batch in range(count)
        ]
        mean = sum(worth for worth, _ in measured) / sum(weight for _, weight in measured)
        life = trainer.life if self._cluster.lives == (0, 0, 0) else reply.metrics.get("life")
        if reply.metrics != {"worth": mean, "life": life} or reply.failed:
            raise Violation(f"{trainer.name} gets {reply.metrics} as the result of evaluation {name!r}, not {mean}")
        self.evaluations += 1

    def accepted(self, master: Master, report: FinishedTask, is_current: bool) -> None:
        """Check a report that counted: it belongs to a current attempt, and names no old generation."""
        if not is_current:
            raise Violation(f"{master.name} accepted a report of attempt {report.attempt}, which is not current")
        settled = master.core.pservers.settled()
        for index, generation in enumerate(report.pservers):
            if 0 < generation < settled.get(index, 0):
                raise Violation(
                    f"{master.name} accepted a report of pserver {index}, generation {generation}, which is gone"
                )

    def _note_done(self, master: Master, queue: TaskQueue, report: FinishedTask) -> None:
        """Record which batches count as done, once the master's state is stored."""
        lives, place = self._cluster.lives, (report.epoch, queue.order(report.epoch).at(report.position))
        done = IntervalSet(queue.batches(*place).done)

        def stored() -> None:
            self._done.setdefault(lives, {}).setdefault(place, IntervalSet()).update(done)

        master.after_stored(master.core.revision + 1, stored)

    def set_aside(self, master: Master, piece: FailedPiece) -> None:
        """Check a quarantined piece: a single batch that failed often enough, and is faulty if nothing else fails."""
        shape = self._cluster.shape
        if piece.end_batch - piece.first_batch != 1 or piece.attempts < shape.attempts_limit + shape.confirmations:
            raise Violation(f"{master.name} has quarantined {piece}")
        if not self._cluster.fault_scale and (piece.task, piece.first_batch) not in shape.faulty:
            raise Violation(f"{master.name} has quarantined a sound batch: {piece}")
        self.quarantined += 1
        self._set_aside.add((piece.epoch, piece.task, piece.first_batch))

    def state_stored(self, master: Master) -> None:
        """Check the stored state of a master: its pointer names a complete checkpoint."""
        latest = master.core.checkpointing.checkpoints.latest
        stored = pointer_in(self._cluster.etcd.keys)
        if stored is not None:
            pointer = latest_of(stored)
            if pointer is not None and (latest is None or pointer.number >= latest.number):
                self._require_complete(pointer.number, pointer.manifest_checksum, "the pointer names")

    def _require_complete(self, number: int, expected: str | None, why: str) -> None:
        store, name = self._cluster.store, manifest_name(number)
        data = store.files.get(name)
        if data is None:
            raise Violation(f"{why} checkpoint {number}, which has no manifest")
        if name in store.rotten:
            return
        if expected is not None and checksum(data) != expected:
            raise Violation(f"{why} another manifest of checkpoint {number}")
        try:
            manifest = Manifest.decode(data)
        except CorruptError as error:
            raise Violation(f"{why} checkpoint {number}: {error}") from None
        for file in (file for shard in manifest.shards for file in shard.chain):
            if file.name not in store.files:
                raise Violation(f"{why} checkpoint {number}, whose {file.name} is missing")
            if file.name not in store.rotten and store.sizes[file.name] != file.size_bytes:
                raise Violation(f"{why} checkpoint {number}, whose {file.name} has another size")
        copies = [s for shard in manifest.shards if (s := store.files[shard.name]) and shard.name not in store.rotten]
        if manifest.round is not None and any(version != manifest.round for s in copies for version in s.versions):
            raise Violation(f"checkpoint {number} has blocks of several rounds")

    def file_written(self, name: str) -> None:
        number = number_of(name)
        if number is None or name != manifest_name(number):
            store = self._cluster.store
            shard = whole(store.files, name)
            if shard is not None and not self._has_rot(name):
                blocks = list(zip(shard.blocks, shard.values, shard.slots, shard.updates, strict=True))
                self._require_exact(name, blocks, AppliedBatches.decode(shard.applied, shard.blocks))
                require_stored_rows(name, self._cluster.shape.table, shard)
            return
        self.checkpoints += 1
        if name not in self._cluster.store.rotten:
            shards = Manifest.decode(self._cluster.store.files[name]).shards
            self.increments += sum(bool(shard.links) for shard in shards)
        kept = self._cluster.pointer()
        if kept is None or number > kept:
            self._require_complete(number, None, "a manifest was written for")

    def _has_rot(self, name: str) -> bool:
        """True if a file, or a file on which it is based as an increment, is damaged or missing."""
        store = self._cluster.store
        while name:
            if name in store.rotten or name not in store.files:
                return True
            name = store.files[name].after
        return False

    def serves(self, pserver: Pserver) -> None:
        """Check a pserver's values, which may come from several files, when it begins to serve."""
        blocks = [(block.number, block.values, block.slot, block.updates) for block in pserver.ordered]
        assert pserver.shard is not None, "a pserver that serves has blocks"
        self._require_exact(pserver.name, blocks, pserver.shard.protocol.applied())
        pserver.shard.require_sound_rows()

    def took_over(self, pserver: Pserver, copy: CopyId) -> None:
        """Check a standby that serves a copy: the copied process was the last one to hold the index."""
        self.takeovers += 1
        *before, own = self._cluster.etcd.holders.get(pserver.index, [0])
        if own == pserver.generation and before and before[-1] != copy.source:
            raise Violation(f"{pserver.name} takes over {copy}, but {before[-1]} has held the index since")

    def admitted(self, master: Master, member_id: int) -> None:
        """Check an admitted member: all pservers know it, unless a later master has sent them a newer view."""
        model = master.core.declaration.model
        assert model is not None, "members have a model"
        for pserver in self._cluster.serving().values():
            assert pserver.shard is not None, "a pserver that serves has blocks"
            is_counted = model.placement is None or pserver.index < model.placement.pservers
            is_present = is_counted and master.core.pservers.present.get(pserver.index) == pserver.generation
            has_heard_more = pserver.shard.newest_master > master.generation
            if is_present and not has_heard_more and member_id not in pserver.shard.protocol.members:
                raise Violation(f"{master.name} has admitted member {member_id}, but {pserver.name} has not")

    def _require_exact(
        self, name: str, blocks: Sequence[tuple[int, Sequence[int], int, int]], applied: AppliedBatches
    ) -> None:
        """Check that the applied sets match the blocks' values. Each block is (number, values, slot, updates)."""
        shape = self._cluster.shape
        for number, values, slot, updates in blocks:
            require_sound(name, number, values, slot, updates)
            for batch in shape.batches():
                if not shape.has_gradient(batch, number) or not shape.records_of(batch):
                    continue
                is_marked = applied.has(number, batch)
                if is_marked == bool(values[shape.element_of(batch)]):
                    continue
                task_count = AppliedBatches.rebuilt({number: applied}).completed_task_count(batch.epoch)
                if task_count is None or batch.task < task_count:  # Otherwise, its file was added after this epoch.
                    word = "names, but lacks" if is_marked else "has, but does not name"
                    raise Violation(f"{name}: block {number} {word} {batch}")

    def file_deleted(self, name: str) -> None:
        pointer = None if self._cluster.etcd.has_gone_back else self._cluster.pointer()
        if pointer is not None and pointer in candidates(self._cluster.store.files):
            self._require_complete(pointer, None, f"{name} was deleted, while the pointer names")
        elif pointer is not None and number_of(name) == pointer:
            raise Violation(f"{name} was deleted, which the pointer names")

    def drained(self, pserver: Pserver, values: Mapping[int, Sequence[int]]) -> None:
        """Check a draining pserver's report that a checkpoint has everything it had when it was asked to end."""
        if self._cluster.etcd.has_gone_back:
            return
        store, number = self._cluster.store, self._cluster.pointer()
        name = "" if number is None else manifest_name(number)
        if name not in store.files:
            raise Violation(f"{pserver.name} ends as if everything were saved, but there is no checkpoint")
        if name in store.rotten:
            return
        # Blocks may have moved to other pservers since.
        for shard in Manifest.decode(store.files[name]).shards:
            saved = whole(store.files, shard.name)
            if saved is None or self._has_rot(shard.name):
                continue
            for block, kept in zip(saved.blocks, saved.values, strict=True):
                if any(now < before for now, before in zip(kept, values.get(block, ()), strict=False)):
                    raise Violation(f"{pserver.name} ends as if everything were saved, but block {block} is not")
        self.drains += 1

    def check_done(self, master: Master, pservers: Sequence[int]) -> None:
        """Check a report that the job is done: each pserver process that it names, and a checkpoint, has every batch.

        The master decided this before it stored its state. Processes may have been replaced since the decision.
        """
        self._cluster.world.note("{} reports the job as done", master.name)
        self._require_saved(master)
        blocks: list[tuple[int, Sequence[int]]] = []
        nothing = [0] * self._cluster.shape.element_count
        for number in range(self._cluster.shape.block_count):
            result = set(self._wrong(number, nothing, master))
            known = self._results.setdefault((*self._cluster.lives, number), result)
            known &= result
        for index, generation in enumerate(pservers):
            key = master.directory.get(f"ps/{index}")
            if key is None or key.created != generation or not key.value.is_alive:
                continue
            if not key.value.is_serving:
                raise Violation(f"{master.name} reports the job as done, but {key.value.name} has no values yet")
            for block in key.value.ordered:
                if block.rounds.held:
                    raise Violation(f"{master.name} reports the job as done, but a round waits on {key.value.name}")
                if missing := self._wrong(block.number, block.values, master):
                    raise Violation(f"{master.name} reports the job as done, but {key.value.name} lacks {missing}")
                blocks.append((block.number, block.values))
        self._require_whole(master, blocks, "the pservers")

    def _require_saved(self, leader: Master) -> None:
        """Check that the last checkpoint contains everything, unless the master stopped waiting for the store.

        The checkpoint that was complete when the master decided contains everything, even if the master has begun
        another one since, for example for a restarted pserver. No later checkpoint can have replaced it, because the
        answer waited for an earlier write than the one that moves the pointer.
        """
        if not self._cluster.scenario.keeps_checkpoints:
            return
        store, number, ticket = self._cluster.store, self._cluster.pointer(), leader.core.ending.final_ticket
        is_satisfied = ticket is not None and leader.core.checkpointing.checkpoints.is_satisfied(ticket)
        may_be_given_up = self._cluster.world.now - store.failed_s < _GIVEN_UP_S
        if may_be_given_up and (number is None or not is_satisfied):
            return
        if number is None:
            raise Violation(f"the job is over, but {leader.name} has no checkpoint of its end")
        name = manifest_name(number)
        if self._cluster.etcd.has_gone_back or name in store.rotten:
            return
        saved: list[tuple[int, Sequence[int]]] = []
        for file in Manifest.decode(store.files[name]).shards:
            shard = whole(store.files, file.name)
            if shard is None or self._has_rot(file.name):
                continue
            saved += zip(shard.blocks, shard.values, strict=True)
            for block, values in zip(shard.blocks, shard.values, strict=True):
                if found := self._wrong(block, values, leader):
                    raise Violation(f"the job is over, but checkpoint {number} lacks {found} of block {block}")

        self._require_whole(leader, saved, f"checkpoint {number}")

    def _require_whole(self, master: Master, blocks: Sequence[tuple[int, Sequence[int]]], what: str) -> None:
        """Check that at the end all finished work is done or quarantined, and all blocks have the same batches.

        A batch that was done, lost with a pserver and repeated may fail too often, like any other batch.
        """
        work = master.core.work
        assert work is not None, "a master that leads has a queue"
        for place, batches in self._done.get(self._cluster.lives, {}).items():
            now = work.queue.batches(*place)
            lost = batches.copy()
            lost.difference_update((*now.done, *now.failed))
            if lost:
                raise Violation(f"{master.name} reports the job as done, but {lost} of {place} were done and are not")
        if found := torn(blocks, self._cluster.shape, work.queue):
            raise Violation(f"{master.name} reports the job as done, but some blocks of {what} lack {found}")

    def result_read(self, trainer: Trainer, pserver: Pserver) -> None:
        """Check values that a trainer reads after the end of the job: they contain everything that counted as done."""
        for block in pserver.ordered:
            result = self._results.get((*self._cluster.lives, block.number), set())
            if missing := {element for element in result if not block.values[element]}:
                raise Violation(f"{trainer.name} reads the result from {pserver.name}, which lacks {missing}")

    def _wrong(self, block: int, values: Sequence[int], master: Master) -> list[int]:
        """Return the elements of a block that are wrong according to this master's queue."""
        work = master.core.work
        assert work is not None, "a master that leads has a queue"
        if unknown := set_aside(work.queue) - self._set_aside:
            raise Violation(f"{master.name} counts {unknown} as quarantined, which never failed")
        return wrong(values, block, self._cluster.shape, work.queue, is_stopped=master.core.training.is_stopped)

    def job_ended(self, leader: Master, serving: Mapping[int, Pserver]) -> None:
        """Check that nothing is missing at the end of a run, when the job is done and faults have stopped."""
        found = 0
        models = {block.model for p in serving.values() for block in p.ordered} - {None}
        if len(models) > 1:
            raise Violation(f"the blocks descend from first values of several elections: {models}")
        for pserver in serving.values():
            pserver.check()
            for block in pserver.ordered:
                found += 1
                require_sound(pserver.name, block.number, block.values, block.slot, block.updates)
                if found_wrong := self._wrong(block.number, block.values, leader):
                    counts = [(element, block.values[element]) for element in found_wrong[:5]]
                    raise Violation(f"block {block.number} on {pserver.name} ends with {counts}")
        blocks = [(block.number, block.values) for pserver in serving.values() for block in pserver.ordered]
        self._require_whole(leader, blocks, "the pservers at the end")
        if found != self._cluster.shape.block_count:
            raise Violation(f"there are only {found} blocks at the end")
        leader.core.check()


def _done_at(queue: TaskQueue, report: FinishedTask) -> object:
    """Return the batches of the reported task that are done."""
    return queue.batches(report.epoch, queue.order(report.epoch).at(report.position)).done
