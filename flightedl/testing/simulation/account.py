"""The account of a run: what was given out, done, stored and told, and whether that is what has to be."""

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
from flightedl.messages.tasks import (
    FinishedTask,
    ReturnedTask,
    TasksReply,
    TasksTicket,
)
from flightedl.testing.simulation.etcd import (
    pointer_in,
)
from flightedl.testing.simulation.job import plan_of, set_aside, torn, wrong
from flightedl.testing.simulation.ledger import require_sound
from flightedl.testing.simulation.row_account import require_stored_rows
from flightedl.testing.simulation.store import whole
from flightedl.testing.simulation.world import Violation

if TYPE_CHECKING:
    from flightedl.testing.simulation.cluster import Cluster
    from flightedl.testing.simulation.master import Master
    from flightedl.testing.simulation.pserver import Pserver
    from flightedl.testing.simulation.trainer import Trainer

#: A store that failed so shortly ago may have been given up.
_GIVEN_UP_S = 30.0


class Account:
    """What happens is told here; each method raises ``Violation`` for what must not happen."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        #: (lives of the job and of etcd, evaluation, attempt) -> what a trainer was given under it.
        self._attempts: dict[tuple[int, int, int, str, int], Any] = {}
        #: Lives of the job and of etcd, block -> what was there whenever a master said that all is done.
        self._results: dict[tuple[int, int, int, int], set[int]] = {}
        #: Lives of the job and of etcd -> (epoch, task) -> its batches that counted as done in a stored state.
        self._done: dict[tuple[int, int, int], dict[tuple[int, int], IntervalSet]] = {}
        #: (epoch, task, batch) of all that was ever set aside, as masters told when they did.
        self._set_aside: set[tuple[int, int, int]] = set()
        #: Members that all pservers have agreed to.
        self._admitted: set[int] = set()
        #: Members whose program has left its loop, or gone on after a push that failed.
        self.out_of_step: set[int] = set()
        #: Manifests written, results of evaluations heard, batches set aside, pservers that ended with all saved.
        self.checkpoints = self.increments = self.evaluations = self.quarantined = self.drains = 0

    def given(self, trainer: str, evaluation: str, assignment: Any) -> None:
        """A trainer is given a piece: only a successor of its name may be given this attempt again, for this piece."""
        place = (trainer, assignment.epoch, assignment.position)
        known = self._attempts.setdefault((*self._cluster.lives, evaluation, assignment.attempt), place)
        if known != place:
            raise Violation(f"attempt {assignment.attempt} was given twice: {known} and {place}")

    def watch(self, master: Master) -> None:
        """A master has a core: look at every report that counts, and at who is admitted."""
        core = master.core
        assert core.work is not None, "a master that leads has a queue"
        assert core.members is not None, "... and a membership"
        self._watch_reports(master, core.work)
        self._watch_members(master, core.members)

    def _watch_reports(self, master: Master, work: Work) -> None:
        take, queue = work.take_reports, work.queue

        def observed(ticket: TasksTicket, now: float) -> list[ReturnedTask]:
            # A trainer may report what it was given in an epoch that this queue, of an older checkpoint, has not begun.
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
                    # Of two reports of the same task, one may be old.
                    counted = current.get((report.epoch, report.position))
                    self.accepted(master, counted or report, counted is not None)
                    self._note_done(master, queue, report)
            return lost

        work.take_reports = observed  # type: ignore[method-assign]

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

    def told_member(self, master: Master, member_id: int) -> None:
        if member_id not in {0, *self._admitted}:
            raise Violation(f"{master.name} tells of member {member_id}, which not all pservers have agreed to")

    def contributed(self, member: int, round_number: int) -> None:
        """A gradient was added to the sum of a round: every block that waits for its trainer has got there, too."""
        if member in self.out_of_step:
            return
        for pserver in self._cluster.serving().values():
            for block in pserver.ordered:
                if member in block.rounds.members and block.rounds.version < round_number:
                    raise Violation(
                        f"member {member} is in round {round_number}, and block {block.number} on {pserver.name} "
                        f"waits for it in round {block.rounds.version}"
                    )

    def evaluated(self, trainer: Trainer, name: str, reply: TasksReply) -> None:
        """A trainer has the result of an evaluation: each batch is in it once."""
        counts = self._cluster.shape.evaluation
        measured = [
            self._cluster.shape.measured(task, batch) for task, count in enumerate(counts) for batch in range(count)
        ]
        mean = sum(worth for worth, _ in measured) / sum(weight for _, weight in measured)
        life = trainer.life if self._cluster.lives == (0, 0, 0) else reply.metrics.get("life")
        if reply.metrics != {"worth": mean, "life": life} or reply.failed:
            raise Violation(f"{trainer.name} hears that evaluation {name!r} has {reply.metrics}, not {mean}")
        self.evaluations += 1

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

    def _note_done(self, master: Master, queue: TaskQueue, report: FinishedTask) -> None:
        """What counts as done does so when it is stored."""
        lives, place = self._cluster.lives, (report.epoch, queue.order(report.epoch).at(report.position))
        done = IntervalSet(queue.batches(*place).done)

        def stored() -> None:
            self._done.setdefault(lives, {}).setdefault(place, IntervalSet()).update(done)

        master.after_stored(master.core.revision + 1, stored)

    def set_aside(self, master: Master, piece: FailedPiece) -> None:
        """A piece is quarantined: one batch, which failed often enough, and where nothing else fails the right one."""
        shape = self._cluster.shape
        if piece.end_batch - piece.first_batch != 1 or piece.attempts < shape.attempts_limit + shape.confirmations:
            raise Violation(f"{master.name} has set aside {piece}")
        if not self._cluster.fault_scale and (piece.task, piece.first_batch) not in shape.faulty:
            raise Violation(f"{master.name} has set aside a batch that nothing is wrong with: {piece}")
        self.quarantined += 1
        self._set_aside.add((piece.epoch, piece.task, piece.first_batch))

    def state_stored(self, master: Master) -> None:
        """A master's state was stored: its pointer names a complete checkpoint."""
        self._cluster.etcd.has_gone_back = False
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
                raise Violation(f"{why} checkpoint {number}, whose {file.name} is not there")
            if file.name not in store.rotten and store.sizes[file.name] != file.size_bytes:
                raise Violation(f"{why} checkpoint {number}, whose {file.name} is another one")
        copies = [s for shard in manifest.shards if (s := store.files[shard.name]) and shard.name not in store.rotten]
        if manifest.round is not None and any(version != manifest.round for s in copies for version in s.versions):
            raise Violation(f"checkpoint {number} is not of one round")

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
        """Whether a file, or one that it is an increment on, is not what was written, or gone."""
        store = self._cluster.store
        while name:
            if name in store.rotten or name not in store.files:
                return True
            name = store.files[name].after
        return False

    def serves(self, pserver: Pserver) -> None:
        """A pserver begins to serve, maybe what it has put together from several files."""
        blocks = [(block.number, block.values, block.slot, block.updates) for block in pserver.ordered]
        assert pserver.shard is not None, "who serves has blocks"
        self._require_exact(pserver.name, blocks, pserver.shard.protocol.applied())
        pserver.shard.require_sound_rows()

    def admitted(self, master: Master, member_id: int) -> None:
        """A master says that somebody is a member: all pservers know it, unless a later master has told them more."""
        for pserver in self._cluster.serving().values():
            assert pserver.shard is not None, "who serves has blocks"
            is_present = master.core.pservers.present.get(pserver.index) == pserver.generation
            has_heard_more = pserver.shard.newest_master > master.generation
            if is_present and not has_heard_more and member_id not in pserver.shard.protocol.members:
                raise Violation(f"{master.name} has admitted member {member_id}, and {pserver.name} has not")

    def _require_exact(
        self, name: str, blocks: Sequence[tuple[int, Sequence[int], int, int]], applied: AppliedBatches
    ) -> None:
        """Applied sets have the batches that are in the values of the blocks (number, values, slot, updates)."""
        shape = self._cluster.shape
        for number, values, slot, updates in blocks:
            require_sound(name, number, values, slot, updates)
            for batch in shape.batches():
                if not shape.has_gradient(batch, number) or not shape.records_of(batch):
                    continue
                is_marked = applied.has(number, batch)
                if is_marked == bool(values[shape.element_of(batch)]):
                    continue
                task_count = AppliedBatches.rebuilt({number: applied}).through_task_count(batch.epoch)
                if task_count is None or batch.task < task_count:  # Else its file joined when this epoch was over.
                    word = "has, and it lacks" if is_marked else "lacks, and it has"
                    raise Violation(f"{name} says that block {number} {word} {batch}")

    def file_deleted(self, name: str) -> None:
        pointer = None if self._cluster.etcd.has_gone_back else self._cluster.pointer()
        if pointer is not None and pointer in candidates(self._cluster.store.files):
            self._require_complete(pointer, None, f"{name} was deleted, while the pointer names")
        elif pointer is not None and number_of(name) == pointer:
            raise Violation(f"{name} was deleted, which the pointer names")

    def drained(self, pserver: Pserver, values: Mapping[int, Sequence[int]]) -> None:
        """A pserver that was told to end says that a checkpoint has all that it had then."""
        if self._cluster.etcd.has_gone_back:
            return
        store, number = self._cluster.store, self._cluster.pointer()
        name = "" if number is None else manifest_name(number)
        if name not in store.files:
            raise Violation(f"{pserver.name} ends as if all that it has were saved, and there is no checkpoint")
        if name in store.rotten:
            return
        shard = Manifest.decode(store.files[name]).shards[pserver.index]
        saved = whole(store.files, shard.name)
        if saved is None or self._has_rot(shard.name):
            return
        for block, kept in zip(saved.blocks, saved.values, strict=True):
            if any(now < before for now, before in zip(kept, values[block], strict=True)):
                raise Violation(f"{pserver.name} ends as if all that it has were saved: not so for block {block}")
        self.drains += 1

    def told_done(self, master: Master, pservers: Sequence[int]) -> None:
        """A master says that all is done: every pserver process that it names has every batch, and so has a checkpoint.

        What it says it has decided earlier, before that was stored: since then processes may have been replaced.
        """
        self._cluster.world.note("{} says that all is done", master.name)
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
                raise Violation(f"{master.name} says that all is done, and {key.value.name} has no values yet")
            for block in key.value.ordered:
                if block.rounds.held:
                    raise Violation(f"{master.name} says that all is done, and a round waits on {key.value.name}")
                if missing := self._wrong(block.number, block.values, master):
                    raise Violation(f"{master.name} says that all is done, but {key.value.name} lacks {missing}")
                blocks.append((block.number, block.values))
        self._require_whole(master, blocks, "what pservers have")

    def _require_saved(self, leader: Master) -> None:
        """The last checkpoint has everything, unless the store was given up.

        One that was complete as the end was decided does, also where the master has begun to make another meanwhile,
        as for a pserver that came back. None that was begun since has taken its place: the pointer moves in a write of
        the master's after the one that the answer has waited for.
        """
        if not self._cluster.scenario.keeps_checkpoints:
            return
        store, number, ticket = self._cluster.store, self._cluster.pointer(), leader.core.ending.final_ticket
        is_satisfied = ticket is not None and leader.core.checkpointing.checkpoints.is_satisfied(ticket)
        may_be_given_up = self._cluster.world.now - store.failed_s < _GIVEN_UP_S
        if may_be_given_up and (number is None or not is_satisfied):
            return
        if number is None:
            raise Violation(f"the job is over, and {leader.name} has no checkpoint of its end")
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
                    raise Violation(f"the job is over, and checkpoint {number} has not {found} of block {block}")

        self._require_whole(leader, saved, f"what checkpoint {number} has")

    def _require_whole(self, master: Master, blocks: Sequence[tuple[int, Sequence[int]]], what: str) -> None:
        """Check that what was done once is done at the end, or set aside, and that all blocks have the same batches.

        A batch that was done, lost with a pserver and repeated may fail too often then, as any other may.
        """
        work = master.core.work
        assert work is not None, "a master that leads has a queue"
        for place, batches in self._done.get(self._cluster.lives, {}).items():
            now = work.queue.batches(*place)
            lost = batches.copy()
            lost.difference_update((*now.done, *now.failed))
            if lost:
                raise Violation(f"{master.name} says that all is done, but {lost} of {place} were done, and are not")
        if found := torn(blocks, self._cluster.shape, work.queue):
            raise Violation(f"{master.name} says that all is done, but of {what} some blocks lack {found}")

    def result_read(self, trainer: Trainer, pserver: Pserver) -> None:
        """A trainer that knows of the end has read values: all that counted as done is in them."""
        for block in pserver.ordered:
            result = self._results.get((*self._cluster.lives, block.number), set())
            if missing := {element for element in result if not block.values[element]}:
                raise Violation(f"{trainer.name} takes what {pserver.name} has for the result, which lacks {missing}")

    def _wrong(self, block: int, values: Sequence[int], master: Master) -> list[int]:
        """Elements of a block that have not what they should, by this master's account of the tasks."""
        work = master.core.work
        assert work is not None, "a master that leads has a queue"
        if unknown := set_aside(work.queue) - self._set_aside:
            raise Violation(f"{master.name} counts {unknown} as set aside, which never failed")
        return wrong(values, block, self._cluster.shape, work.queue, is_stopped=master.core.training.is_stopped)

    def job_ended(self, leader: Master, serving: Mapping[int, Pserver]) -> None:
        """All is done, and faults have stopped: everything is there."""
        found = 0
        models = {block.model for p in serving.values() for block in p.ordered} - {None}
        if len(models) > 1:
            raise Violation(f"the blocks have grown from first values of several elections: {models}")
        for pserver in serving.values():
            pserver.check()
            for block in pserver.ordered:
                found += 1
                require_sound(pserver.name, block.number, block.values, block.slot, block.updates)
                if found_wrong := self._wrong(block.number, block.values, leader):
                    counts = [(element, block.values[element]) for element in found_wrong[:5]]
                    raise Violation(f"block {block.number} on {pserver.name} ends with {counts}")
        blocks = [(block.number, block.values) for pserver in serving.values() for block in pserver.ordered]
        self._require_whole(leader, blocks, "what is there at the end")
        if found != plan_of(self._cluster.pserver_count, self._cluster.shape.cut_for).block_count:
            raise Violation(f"only {found} blocks are there at the end")
        leader.core.check()


def _done_at(queue: TaskQueue, report: FinishedTask) -> object:
    """Which batches of the reported task are done."""
    return queue.batches(report.epoch, queue.order(report.epoch).at(report.position)).done
