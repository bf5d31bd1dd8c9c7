"""The checkpoints of a master: the decisions of ``domain.checkpoint``, and the orders that pservers are to be told.

Orders travel as any other call to a pserver, again and again until the file is reported: the request that orders a
snapshot is also the one that asks how far it is.

A store that fails is an alarm in ``status``, and a reason to try again later; it is never a reason for anybody to wait,
but for one: the job is not said to be done before the last checkpoint is complete, so that a pserver which dies while
the trainers read the result still comes back with it. That wait ends when the store has failed several times.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from flightedl.domain.checkpoint.checkpoints import Checkpoints
from flightedl.domain.checkpoint.values import (
    Alarm,
    Effect,
    MovePointer,
    OpenRounds,
    OrderSnapshot,
    Persist,
    Sweep,
    WriteManifest,
)
from flightedl.domain.master.effects import Kind, Outbox, StoreWork
from flightedl.messages.checkpoints import CheckpointReply
from flightedl.messages.control import SnapshotReply, SnapshotRequest


class Checkpointing:
    """Checkpoints, and who was ordered what."""

    def __init__(self, checkpoints: Checkpoints, *, is_kept: bool, outbox: Outbox) -> None:
        self.checkpoints = checkpoints
        self.is_kept = is_kept
        self._outbox = outbox
        #: index -> the order that this pserver has not answered with a file.
        self._orders: dict[int, OrderSnapshot] = {}
        self._draining: set[int] = set()

    def settled(self, index: int, generation: int, now: float) -> None:
        """A pserver serves, what it has is taken into the queue's account, and it stays."""
        if self.is_kept:
            self.perform(self.checkpoints.pserver_up(index, generation, now))

    def down(self, index: int, now: float) -> None:
        self._orders.pop(index, None)
        self._draining.discard(index)
        self.perform(self.checkpoints.pserver_down(index, now))

    def is_draining(self, index: int) -> None:
        """A pserver is about to end and wants a checkpoint first."""
        if self.is_kept and index not in self._draining:
            self._draining.add(index)
            self.checkpoints.request(f"pserver {index} is about to end")

    def epoch_finished(self, epoch: int) -> None:
        if self.is_kept:
            self.checkpoints.epoch_finished(epoch)

    @property
    def latest(self) -> int:
        """The newest complete checkpoint; 0: none."""
        latest = self.checkpoints.latest
        return 0 if latest is None else latest.number

    def age_s(self, now: float) -> float | None:
        """Since the last checkpoint was complete; None: none is kept."""
        return self.checkpoints.age_s(now) if self.is_kept else None

    def tick(self, now: float, rounds: OpenRounds | None) -> None:
        if self.is_kept:
            if self.checkpoints.latest is None and self.checkpoints.under_way is None:
                self.checkpoints.request("the first values")
            self.perform(self.checkpoints.tick(now, rounds))

    def perform(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Persist():
                    self._outbox.touch()
                case OrderSnapshot(index):
                    self._orders[index] = effect
                    self._outbox.wake(index)
                case WriteManifest() | MovePointer() | Sweep():
                    self._outbox.effects.append(StoreWork(effect, self._outbox.revision))
                case Alarm(text):
                    self._outbox.note(Kind.CHECKPOINT_TROUBLE, "", "checkpoints: %s", text, is_warning=True)

    # requests

    def request(self, reason: str, *, may_give_up: bool) -> int:
        """Order a checkpoint, and return its ticket; ``may_give_up``: as for ``reply_to``."""
        if may_give_up:
            return self.checkpoints.request_last(reason)
        return self.checkpoints.request(reason, is_waited_for=True)

    def reply_to(self, ticket: int, *, may_give_up: bool, may_wait: bool) -> CheckpointReply | None:
        """Return the reply to a request; None if it waits.

        Args:
            ticket: The ticket of the checkpoint.
            may_give_up: True if nobody waits for a store that fails again and again.
            may_wait: True if the request still has time.
        """
        is_complete = self.checkpoints.is_satisfied(ticket)
        is_hopeless = may_give_up and self.checkpoints.is_over(ticket)
        if may_wait and not is_complete and not is_hopeless:
            return None
        return CheckpointReply(
            ticket=ticket, complete=is_complete, latest=self.latest, trouble=self.checkpoints.trouble
        )

    # what a pserver is told

    def order_for(self, index: int, generation: int, plan_hash: str) -> SnapshotRequest | None:
        """The order that this process has not answered with a file; None: there is none."""
        order = self._orders.get(index)
        if order is None or order.generation != generation:
            return None
        return replace(order.snapshot, plan_hash=plan_hash)

    def answered(self, index: int, generation: int, reply: SnapshotReply, now: float) -> None:
        """How far a process is with the newest order that it has heard of."""
        order = self._orders.get(index)
        is_of_order = order is not None and (order.generation, order.snapshot.order) == (generation, reply.order)
        if is_of_order and reply.state in {"written", "failed", "refused"}:
            del self._orders[index]
        self.perform(self.checkpoints.progressed(index, generation, reply, now))
