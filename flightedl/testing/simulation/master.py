"""A master of the simulated cluster: the production queue, membership, recovery and checkpoints around a modelled etcd.

Nothing that was decided is told to anybody before it is stored: one write at a time carries all that has changed. Each
write compares the lock's generation and the revision of what it overwrites; one of unknown outcome is repeated as
it was, until it is known to have happened or to be impossible.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from flightedl.domain import checkpoints_values as values
from flightedl.domain.beginnings import BeginAnew, Lacking, SendBack, next_step
from flightedl.domain.checkpoints import Checkpoints, next_number_after
from flightedl.domain.checkpoints_manifest import Manifest, candidates, checksum, examine, manifest_name
from flightedl.domain.checkpoints_replay import AppliedSummary, PserverRecovery
from flightedl.domain.checkpoints_values import OpenRounds, Pointer
from flightedl.domain.membership import Membership
from flightedl.domain.membership_values import Admitted, SendView
from flightedl.domain.membership_values import Effect as MembershipEffect
from flightedl.domain.modes import Mode, Sync
from flightedl.domain.tasks import TaskQueue
from flightedl.domain.tasks_sharing import HOLDING_CEILING
from flightedl.domain.tasks_values import EpochFinished, EpochsDone, Expired, Finished, TaskGiven
from flightedl.errors import FencedError, FlightedlError, NotReadyError, UnregisteredError
from flightedl.messages.base import Sender
from flightedl.messages.tasks import (
    Assignment,
    FinishedTask,
    JoinReply,
    JoinRequest,
    ReturnedTask,
    TasksReply,
    TasksTicket,
)
from flightedl.testing.simulation.etcd import ADDRESS, DONE, INIT, LOCK, STATE, Transaction, claimed
from flightedl.testing.simulation.job import mode_in, plan_of
from flightedl.testing.simulation.world import Action, Process, Reply

if TYPE_CHECKING:
    from flightedl.testing.simulation.cluster import Cluster

LEASE_TTL_S = 2.0
_TICK_S = 0.5


class Master(Process):
    """One process: it stands by, takes the lock, goes on from what is stored, and leads until it is deposed."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        super().__init__(cluster.world, name)
        self.cluster = cluster
        self.flaws = cluster.flaws
        self.lease = cluster.etcd.grant(self, LEASE_TTL_S)
        self.generation = 0
        self.is_leading = False
        self.queue: TaskQueue
        self.membership: Membership
        self.recovery: PserverRecovery
        self.checkpoints: Checkpoints
        #: index -> generation, as the simulation's own account of who was announced.
        self.announced_generations: dict[int, int] = {}
        self._trainers: dict[str, int] = {}
        self._revision = 0
        self._durable = 0
        self._state_revision = 0
        self._is_writing = False
        self._when_durable: list[tuple[int, Action]] = []
        self._joining: dict[str, Reply] = {}
        self._is_ready = False
        self._lacking: dict[int, Lacking] = {}
        #: What goes into etcd with the first state.
        self._first_puts: dict[str, Any] = {}
        #: index -> (generation, highest open round), as announced to this master and stored.
        self._heard: dict[int, tuple[int, int]] = {}
        #: index -> generation: announced, and in the directory.
        self._up: dict[int, int] = {}
        cluster.etcd.watch(self, self._look_around)
        self.later(0.05 * cluster.world.random.random(), self._claim)

    def end(self, why: str) -> None:
        """Exit; the supervisor starts another one."""
        if self.is_alive:
            self.world.note("{} ends: {}", self.name, why)
            self.cluster.ended(self)

    # the lock

    def _claim(self) -> None:
        if self.generation or self.lease.is_lost:
            if not self.generation:
                self.end("its lease was lost while it stood by")
            return
        if LOCK in self.directory:
            self.later(0.5, self._claim)
            return

        def answered(result: Any) -> None:
            if self.generation:
                return
            if generation := claimed(result, LOCK, self):
                self.generation = generation
                self.world.note("{} leads, generation {}", self.name, generation)
                self._recover()
            else:
                self.later(0.3, self._claim)

        etcd = self.cluster.etcd
        transaction = Transaction(created={LOCK: 0}, puts={LOCK: self}, lease=self.lease)
        self.world.call(self, etcd, etcd.transact, transaction, answered, lambda: self.end("no answer to its claim"))

    def _recover(self) -> None:
        etcd = self.cluster.etcd

        def read(found: dict[str, Any]) -> None:
            state = found[STATE]
            if state is None:
                self._begin_from_store()
            else:
                self._state_revision = state.modified
                self._begin(state.value)

        self.world.call(self, etcd, etcd.read, [STATE], read, lambda: self.later(0.2, self._recover))

    def _begin(self, stored: dict[str, bytes]) -> None:
        shape, count, now = self.cluster.shape, self.cluster.pserver_count, self.world.now
        self.queue = TaskQueue.decode(stored["queue"], shape.queue_settings)
        try:
            self.membership = Membership.restore(stored["membership"], self.generation, count, mode=mode_in(stored))
        except FencedError:
            self.end("it heard late that it has the lock; a newer one had it since")
            return
        self.recovery = PserverRecovery.restore(stored["recovery"], count, shape.recovery)  # type: ignore[arg-type]
        self.checkpoints = Checkpoints.restore(
            stored["checkpoints"], self.cluster.checkpoint_settings, self.generation, count, now
        )
        self._lead()

    def _begin_from_store(self) -> None:
        """The job's etcd is new: go on from the newest checkpoint that there is."""

        def again() -> None:
            self.later(0.2, self._begin_from_store)

        def listed(sizes: dict[str, int]) -> None:
            self._choose(candidates(sizes), sizes, [])

        self.cluster.store.list(self, listed, again)

    def _choose(self, numbers: tuple[int, ...], sizes: dict[str, int], rejected: list[int]) -> None:
        if not numbers:
            self._begin_new(None, sizes, rejected)
            return

        def read(found: tuple[bytes, bool] | None) -> None:
            result = None if found is None else examine(numbers[0], found[0], sizes, "job")
            if isinstance(result, Manifest):
                self._begin_new(result, sizes, rejected)
            else:
                self._choose(numbers[1:], sizes, [*rejected, numbers[0]])

        self.cluster.store.read(self, manifest_name(numbers[0]), read, lambda: self.later(0.2, self._begin_from_store))

    def _begin_new(self, manifest: Manifest | None, sizes: dict[str, int], rejected: list[int]) -> None:
        shape, count, now = self.cluster.shape, self.cluster.pserver_count, self.world.now
        settings = shape.queue_settings
        if manifest is None or manifest.stored_queue is None:
            self.queue = TaskQueue(settings)
        else:
            self.queue = TaskQueue.decode(manifest.stored_queue, settings)
            self._first_puts = {INIT: DONE}
            for trainer in self.queue.holders():
                self.queue.trainer_gone(trainer, now, is_graceful=True)
        mode = shape.mode if manifest is None else Mode.from_json(json.loads(bytes(manifest.declaration)))
        self.membership = Membership(self.generation, count, mode=mode)
        self.recovery = PserverRecovery(count, shape.recovery)  # type: ignore[arg-type]
        self.checkpoints = Checkpoints(
            self.cluster.checkpoint_settings,
            self.generation,
            count,
            now,
            next_number=next_number_after(list(sizes)),
            latest=None if manifest is None else Pointer(manifest.number, checksum(manifest.encode())),
            rejected=rejected,
            first=0 if manifest is None else manifest.first,
        )
        self._touch()
        self._lead()

    def _lead(self) -> None:
        self._is_ready = True
        self._touch()

        def publish() -> None:
            transaction = Transaction(
                created={LOCK: self.generation}, puts={ADDRESS: self}, lease=self.lease, writer=self.generation
            )

            def answered(result: Any) -> None:
                if result[0]:
                    self.is_leading = True
                    self._look_around()
                    self._tick()
                else:
                    self.end("the lock was lost before it led")

            etcd = self.cluster.etcd
            self.world.call(self, etcd, etcd.transact, transaction, answered, lambda: self.later(0.2, publish))

        publish()

    def _is_held(self) -> bool:
        if not self.lease.is_held() and "master without a lease" not in self.flaws:
            self.end("its lease could not be renewed")
            return False
        return True

    # durable

    def _touch(self) -> None:
        self._revision += 1
        self._write()

    def _after_stored(self, action: Action) -> None:
        """Do it when what is decided now is stored."""
        if self._durable >= self._revision or "dispatch before durable" in self.flaws:
            action()
        else:
            self._when_durable.append((self._revision, action))

    def _write(self) -> None:
        if not self._is_writing and self._durable < self._revision and self.is_alive:
            self._is_writing = True
            # Whatever is decided within this event belongs to it.
            self.later(0.0, self._write_now)

    def _write_now(self) -> None:
        self.check()
        encoded = {
            "queue": self.queue.encode(),
            "membership": self.membership.encode(),
            "recovery": self.recovery.encode(),
            "checkpoints": self.checkpoints.encode(),
            "mode": json.dumps(self.membership.mode.to_json()).encode(),
        }
        self._send_state(self._revision, encoded)

    def _send_state(self, revision: int, encoded: dict[str, bytes]) -> None:
        if not self._is_held():
            return
        etcd = self.cluster.etcd
        compared = {} if "writes are not compared" in self.flaws else {STATE: self._state_revision}
        fence = {} if "writes are not fenced" in self.flaws else {LOCK: self.generation}
        puts = {STATE: encoded} | ({} if self._state_revision else self._first_puts)
        transaction = Transaction(created=fence, modified=compared, puts=puts, writer=self.generation)

        def answered(result: Any) -> None:
            committed, at, found = result
            if committed:
                self._stored(revision, at)
                return
            lock, state = found.get(LOCK), found.get(STATE)
            if lock is None or lock.created != self.generation:
                self.end("another master holds the lock")
            elif state is not None and state.value == encoded:
                self._stored(revision, state.modified)
            else:
                self.end("somebody else wrote its state")

        def failed() -> None:
            self.later(0.1, lambda: self._send_state(revision, encoded))

        self.world.call(self, etcd, etcd.transact, transaction, answered, failed, timeout_s=1.0)

    def _stored(self, revision: int, at: int) -> None:
        self._durable = revision
        self._state_revision = at
        self._is_writing = False
        self.cluster.state_stored(self)
        ready = [action for wanted, action in self._when_durable if wanted <= revision]
        self._when_durable = [entry for entry in self._when_durable if entry[0] > revision]
        for action in ready:
            if self.is_alive:
                action()
        self._write()

    # who is there

    def _look_around(self) -> None:
        if not self._is_ready:
            if LOCK not in self.directory and not self.generation:
                self._claim()
            return
        now = self.world.now
        trainers = {k.removeprefix("trainers/"): v.created for k, v in self.directory.items() if k.startswith("train")}
        if self.is_leading:
            # What an earlier registration held goes back before the name is heard again under a new one.
            members = {member.trainer: member.generation for member in self.membership.members}
            for trainer, generation in sorted({**members, **self.queue.registrations()}.items()):
                if trainers.get(trainer) != generation:
                    self.queue.trainer_gone(trainer, now)
                    self._touch()
            for trainer, generation in sorted(members.items()):
                if trainers.get(trainer) != generation:
                    self._perform(self.membership.leave(trainer))
                    self._touch()
        self._trainers = trainers
        self._look_at_pservers()

    def _look_at_pservers(self) -> None:
        """A pserver is up when it has announced itself and the directory has it: either may come first."""
        now = self.world.now
        for index in range(self.cluster.pserver_count):
            key = self.directory.get(f"ps/{index}")
            present = 0 if key is None else key.created
            if present and "new processes are not seen" not in self.flaws:
                self.recovery.seen(index, present)
            heard, highest = self._heard.get(index, (-1, 0))
            if index in self._up and self._up[index] != present:
                del self._up[index]
                self._perform(self.membership.pserver_down(index))
                self._carry_out(self.checkpoints.pserver_down(index, now))
            if index not in self._up and present == heard:
                self._up[index] = present
                self._perform(self.membership.pserver_up(index, present, highest))
        self._roll_back()
        self._orderable()

    def announced(self, message: tuple[int, int, bytes, int | None, int, int | None], reply: Reply) -> None:
        """A pserver says what it has."""
        if not self.is_leading or not self._is_held():
            return
        index, generation, summary, checkpoint, highest, lacks = message
        if lacks is not None:
            reply(("heard",))
            self._lacking[index] = Lacking(generation, lacks)
            self._begin_anew()
            return
        queue = self.queue
        lacking = self.recovery.announced(
            index, generation, AppliedSummary.decode(summary), queue.begun_epochs, queue.epoch_size, checkpoint
        )
        if self.recovery.generation_of(index) != generation:
            reply(("past",))
            return
        if lacking is not None:
            self.announced_generations[index] = generation
            if "nothing is reopened" in self.flaws:
                lacking = {}
            if "only this epoch is reopened" in self.flaws:
                lacking = {epoch: tasks for epoch, tasks in lacking.items() if epoch == queue.epoch}
            for epoch, tasks in lacking.items():
                count = queue.reopen(epoch, tasks)
                self.world.note("{} reopens {} tasks of epoch {} for {}", self.name, count, epoch, index)
            self._touch()

        def stored() -> None:
            reply(("stored",))

        self._heard[index] = (generation, highest)
        self._after_stored(stored)
        self._look_at_pservers()

    def _begin_anew(self) -> None:
        """Pservers have lost their values and there is no checkpoint: when all have, the trainers elect again."""
        count = self.cluster.pserver_count
        present = {i: key.created for i in range(count) if (key := self.directory.get(f"ps/{i}")) is not None}
        may_be_saved = self.checkpoints.may_be_saved
        step = next_step(count, present, self._lacking, self.recovery.settled(), may_be_saved=may_be_saved)
        if isinstance(step, SendBack):
            if "only the lost ones begin anew" in self.flaws:
                step = BeginAnew(max(each.election for each in self._lacking.values()), {})
            else:
                for index, generation in step.generations.items():
                    pserver = self.directory[f"ps/{index}"].value
                    self.world.call(self, pserver, pserver.send_back, generation, lambda _: None, lambda: None)
        if not isinstance(step, BeginAnew):
            return
        self.recovery.begin_anew()
        self._touch()
        self.world.note("{} lets the model begin anew: {}", self.name, step)
        self.cluster.begun_anew += 1
        created = {LOCK: self.generation, INIT: step.election} | {f"ps/{i}": g for i, g in step.generations.items()}
        etcd = self.cluster.etcd

        def delete() -> None:
            transaction = Transaction(created=created, deletes=(INIT,))
            self.world.call(self, etcd, etcd.transact, transaction, lambda _: None, lambda: None)

        self._after_stored(delete)

    def _orderable(self) -> None:
        """Tell the checkpoints of processes that are settled and stay."""
        going = self.recovery.to_reload()
        for index, generation in self._up.items():
            if self.recovery.is_settled(index) and index not in going:
                self._carry_out(self.checkpoints.pserver_up(index, generation, self.world.now))

    def _roll_back(self) -> None:
        for index, reload in self.recovery.to_reload().items():
            key = self.directory.get(f"ps/{index}")
            self._carry_out(self.checkpoints.pserver_down(index, self.world.now))
            if key is not None and key.created == reload.generation:
                message = (reload.generation, reload.checkpoint)
                pserver = key.value
                self._after_stored(
                    lambda pserver=pserver, message=message: self.world.call(  # type: ignore[misc]
                        self, pserver, pserver.reload, message, lambda _: None, lambda: None
                    )
                )

    # work

    def _refusal(self, sender: Sender) -> FlightedlError | None:
        """Why this sender is not answered."""
        known = self._trainers.get(sender.trainer)
        if not self.is_leading:
            return NotReadyError("this master does not lead")
        if known == sender.generation:
            return None
        if known is not None and known > sender.generation:
            return UnregisteredError(f"{sender.trainer} has registered again")
        return NotReadyError(f"the master has not seen {sender.trainer} yet")

    def tasks(self, ticket: TasksTicket, reply: Reply) -> None:
        """Reports, and asks for work; answers a ``TasksReply``, or the error that refuses it."""
        if self.is_leading and not self._is_held():
            return
        if refusal := self._refusal(ticket):
            reply(refusal)
            return
        trainer, generation = ticket.trainer, ticket.generation
        queue, now = self.queue, self.world.now
        before = queue.revision
        lost = [returned for report in ticket.finished if (returned := self._take_report(ticket, report)) is not None]
        for piece in ticket.returned:
            try:
                queue.give_back(trainer, piece.epoch, piece.position, piece.attempt, now, generation=generation)
            except FencedError:
                lost.append(piece)
        lost += [
            ReturnedTask(epoch=0, position=0, attempt=attempt)
            for attempt in ticket.holding
            if not queue.is_current(trainer, attempt, generation)
        ]
        given = self._hand_out(ticket)
        if not queue.holds(trainer):
            self._perform(self.membership.leave(trainer))
        if queue.revision != before:
            self._touch()
        is_done = not given and queue.is_done
        is_ending = is_done and not self.recovery.is_all_settled and "done before settled" not in self.flaws
        outcome = "given" if given else "epochs_done" if is_done and not is_ending else "none_now"
        if outcome == "epochs_done":
            self.cluster.told_done(self)
        answer = TasksReply(
            assignments=given,
            outcome=outcome,
            retry_after_s=0.0 if given else 0.3,
            member=self.membership.member_id_of(trainer) or 0,
            pservers=[self._up.get(index, 0) for index in range(self.cluster.pserver_count)] if is_done else [],
            is_ending=is_ending,
            lost=lost,
            epoch=queue.epoch,
        )
        self._after_stored(lambda: reply(answer))

    def _take_report(self, ticket: TasksTicket, report: FinishedTask) -> ReturnedTask | None:
        """Take one report; what it was about, when it does not count."""
        queue, now, trainer = self.queue, self.world.now, ticket.trainer
        place = (report.epoch, report.position, report.attempt)
        accepts = self.recovery.accepts(report.pservers) or "no generation check" in self.flaws
        try:
            if accepts:
                is_current = queue.is_current(trainer, report.attempt, ticket.generation)
                if not is_current and "stale completion accepted" in self.flaws:
                    self._finish_anyhow(report)
                    return None
                outcome = queue.finish(trainer, *place, now, generation=ticket.generation)
                self.cluster.accepted(self, report, is_current, outcome)
                self._count(outcome.effects if isinstance(outcome, Finished) else ())
                return None
            queue.give_back(trainer, *place, now, generation=ticket.generation)
        except FencedError:
            pass
        return ReturnedTask(epoch=report.epoch, position=report.position, attempt=report.attempt)

    def _finish_anyhow(self, report: Any) -> None:
        """A planted bug: whoever holds the place now is taken to have finished."""
        for holder, pieces in self.queue.holders().items():
            for piece in pieces:
                if (piece.epoch, piece.position) == (report.epoch, report.position):
                    place = piece.epoch, piece.position, piece.attempt
                    generation = self.queue.registrations()[holder]
                    outcome = self.queue.finish(holder, *place, self.world.now, generation=generation)
                    self.cluster.accepted(self, report, False, outcome)
                    return

    def _count(self, effects: Iterable[Any]) -> None:
        self.checkpoints.tasks_finished()
        for effect in effects:
            if isinstance(effect, EpochFinished):
                self.world.note("epoch {} is finished", effect.epoch)
                self.checkpoints.epoch_finished(effect.epoch)

    def _hand_out(self, ticket: TasksTicket) -> list[Assignment]:
        given: list[Assignment] = []
        known = set(ticket.holding)
        for _ in range(ticket.want):
            answer = self.queue.request(
                ticket.trainer, self.world.now, HOLDING_CEILING, known, len(self._trainers), ticket.generation
            )
            if isinstance(answer, EpochsDone) or not isinstance(answer, TaskGiven):
                break
            a = answer.assignment
            known.add(a.attempt)
            given.append(
                Assignment(
                    epoch=a.epoch,
                    position=a.position,
                    task=a.task,
                    attempt=a.attempt,
                    first_batch=a.first_batch,
                    end_batch=a.end_batch,
                    batch_count=a.batch_count,
                    seed=self.queue.seed_of(a.epoch),
                )
            )
        return given

    def join(self, request: JoinRequest, reply: Reply) -> None:
        """A trainer with work asks to be waited for; answers a ``JoinReply``, or the error that refuses it."""
        if self.is_leading and not self._is_held():
            return
        if refusal := self._refusal(request):
            reply(refusal)
            return
        trainer, generation = request.trainer, request.generation
        if not self._holds_work(request):
            reply(JoinReply(member=0, holds_work=False))
            return
        try:
            self._perform(self.membership.join(trainer, generation))
        except FencedError as error:
            reply(error)
            return
        member = self.membership.member_id_of(trainer)
        if member is not None:
            reply(self._joined(member))
            return
        self._joining[trainer] = reply

        def over() -> None:
            if self._joining.get(trainer) is reply:
                del self._joining[trainer]
                reply(JoinReply(member=0, waiting_for=self.membership.waiting_for(trainer)))

        self.later(request.wait_s, over)

    def _holds_work(self, request: JoinRequest) -> bool:
        if request.attempt is None:
            return self.queue.holds(request.trainer)
        return self.queue.is_current(request.trainer, request.attempt, request.generation)

    def _joined(self, member: int) -> JoinReply:
        return JoinReply(member=member, mode=self.membership.mode.to_json())

    def _perform(self, effects: Iterable[MembershipEffect]) -> None:
        effects = tuple(effects)
        if effects:
            self._touch()
        for effect in effects:
            if isinstance(effect, SendView):
                self._after_stored(lambda effect=effect: self._send_view(effect))  # type: ignore[misc]
            elif isinstance(effect, Admitted):
                waiting = self._joining.pop(effect.trainer, None)
                if waiting is not None:
                    answer = self._joined(effect.member_id)
                    self._after_stored(lambda waiting=waiting, answer=answer: waiting(answer))  # type: ignore[misc]

    def change_mode(self, mode: Mode) -> None:
        """Somebody wants another mode."""
        self.world.note("{} changes the mode to {}", self.name, mode)
        self._perform(self.membership.switch(mode))

    def _send_view(self, effect: SendView) -> None:
        key = self.directory.get(f"ps/{effect.index}")
        index, generation, serial = effect.index, effect.generation, effect.view.serial

        def failed() -> None:
            self.later(0.1, lambda: self._perform(self.membership.send_failed(index, generation, serial)))

        def answered(reply: Any) -> None:
            if reply[0] == "outdated":
                self.end("a pserver has a view of a newer master")
            elif reply[0] == "taken":
                self._perform(
                    self.membership.answered(index, generation, serial, reply[1], reply[2], refuses_mode=reply[3])
                )
            else:
                failed()

        if key is None or key.created != generation:
            failed()
        else:
            self.world.call(
                self, key.value, key.value.take_view, (generation, effect.view), answered, failed, timeout_s=1.0
            )

    # checkpoints

    def _tick(self) -> None:
        if not self._is_held():
            return
        self.later(_TICK_S, self._tick)
        now = self.world.now
        before = self.queue.revision
        expired = [effect for effect in self.queue.tick(now) if isinstance(effect, Expired)]
        if self.cluster.fault_scale:
            for _ in expired:
                self.world.fault("task timeout")
        if self.queue.revision != before:
            self._touch()
        rounds = None
        if isinstance(self.membership.mode, Sync):
            rounds = OpenRounds(0, bool(self.membership.members))
        self._carry_out(self.checkpoints.tick(now, rounds))
        self._roll_back()

    def progressed(self, message: Any, reply: Reply) -> None:
        """How far a pserver is with its part of a checkpoint."""
        index, generation, progress = message
        if self.is_leading and self._is_held():
            reply(())
            self._carry_out(self.checkpoints.progressed(index, generation, progress, self.world.now))

    def _carry_out(self, effects: values.Effects) -> None:
        for effect in effects:
            if isinstance(effect, values.Persist):
                self._touch()
            elif isinstance(effect, values.OrderSnapshot):
                self._after_stored(lambda effect=effect: self._order(effect))  # type: ignore[misc]
            elif isinstance(effect, values.WriteManifest):
                self._after_stored(lambda effect=effect: self._write_manifest(effect.number))  # type: ignore[misc]
            elif isinstance(effect, values.MovePointer):
                number = effect.pointer.number
                self._after_stored(
                    lambda number=number: self._carry_out(self.checkpoints.pointer_moved(number, self.world.now))  # type: ignore[misc]
                )
            elif isinstance(effect, values.Sweep):
                self._sweep()
            else:
                self.world.note("{} alarms: {}", self.name, effect.text)

    def _order(self, effect: values.OrderSnapshot) -> None:
        if "delete before publish" in self.flaws:
            self._delete(
                tuple(n for n in self.cluster.store.files if int(n[2:].split("/")[0]) < effect.snapshot.order.number)
            )
        key = self.directory.get(f"ps/{effect.index}")
        index, generation = effect.index, effect.generation

        def failed() -> None:
            again = self.checkpoints.send_failed(index, generation, effect.snapshot.order)
            self.later(0.2, lambda: self._carry_out(again))

        def answered(reply: Any) -> None:
            if reply[0] == "progress" and reply[1] is not None:
                self._carry_out(self.checkpoints.progressed(index, generation, reply[1], self.world.now))
            else:
                failed()

        if key is None or key.created != generation:
            failed()
        else:
            self.world.call(self, key.value, key.value.take_order, (generation, effect.snapshot), answered, failed)

    def _write_manifest(self, number: int) -> None:
        if self.checkpoints.under_way != number:
            return
        count, cut_for = self.cluster.pserver_count, self.cluster.shape.cut_for
        manifest = self.checkpoints.manifest(
            "job",
            plan_of(count, cut_for).hash,
            cut_for,
            json.dumps(self.membership.mode.to_json()).encode(),
            self.queue.encode(),
            self.world.now,
        )
        data = manifest.encode()

        def done() -> None:
            self._carry_out(self.checkpoints.manifest_written(number, checksum(data)))

        def failed() -> None:
            self._carry_out(self.checkpoints.manifest_failed(number, "the store failed", self.world.now))

        if "pointer before manifest" in self.flaws:
            done()
        self.cluster.store.publish(self, manifest_name(number), data, len(data), done, failed)

    def _sweep(self) -> None:
        def listed(sizes: dict[str, int]) -> None:
            self._delete(self.checkpoints.deletable(list(sizes)))

        self.cluster.store.list(self, listed, lambda: None)

    def _delete(self, names: tuple[str, ...]) -> None:
        if names:
            rest = names[1:]
            self.cluster.store.delete(self, names[0], lambda: self._delete(rest), lambda: None)

    def check(self) -> None:
        """Assert the invariants of what it is made of."""
        self.queue.check()
        self.membership.check()
        self.checkpoints.check()
        self.recovery.check()
