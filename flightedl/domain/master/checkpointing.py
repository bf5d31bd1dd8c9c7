"""The master's checkpoints: orders from ``domain.checkpoint`` to pservers, and the pservers' replies.

The master repeats an order until the pserver reports that it has written the file, failed or refused. Repeating the
order also queries the progress of the snapshot.

If the store fails, the master warns in ``status`` and retries later. Only the end of the job waits for the store: the
master reports the job as done only when the last checkpoint is complete. If a pserver then dies while trainers read the
final values, its successor has the same values. The master stops waiting if the store fails several times in a row.
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
    """The job's checkpoints, and the open order of each pserver."""

    def __init__(self, checkpoints: Checkpoints, *, is_kept: bool, outbox: Outbox) -> None:
        self.checkpoints = checkpoints
        self.is_kept = is_kept
        self._outbox = outbox
        #: Pserver index -> the order that the pserver has not completed yet.
        self._orders: dict[int, OrderSnapshot] = {}
        self._draining: set[int] = set()

    def settled(self, index: int, generation: int, now: float) -> None:
        """Let a pserver take part in checkpoints, because the queue has its missing tasks and it needs no reload."""
        if self.is_kept:
            self.perform(self.checkpoints.pserver_up(index, generation, now))

    def down(self, index: int, now: float) -> None:
        self._orders.pop(index, None)
        self._draining.discard(index)
        self.perform(self.checkpoints.pserver_down(index, now))

    def is_draining(self, index: int) -> None:
        if self.is_kept and index not in self._draining:
            self._draining.add(index)
            self.checkpoints.request(f"pserver {index} is shutting down")

    def epoch_finished(self, epoch: int) -> None:
        if self.is_kept:
            self.checkpoints.epoch_finished(epoch)

    @property
    def latest(self) -> int:
        latest = self.checkpoints.latest
        return 0 if latest is None else latest.number

    def age_s(self, now: float) -> float | None:
        """Return the number of seconds since the last complete checkpoint, or None if the job has no checkpoints."""
        return self.checkpoints.age_s(now) if self.is_kept else None

    def tick(self, now: float, rounds: OpenRounds | None) -> None:
        if self.is_kept:
            if self.checkpoints.latest is None and self.checkpoints.under_way is None:
                self.checkpoints.request("the initial values")
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
        """Request a checkpoint and return its ticket. ``reply_to`` describes ``may_give_up``."""
        if may_give_up:
            return self.checkpoints.request_last(reason)
        return self.checkpoints.request(reason, is_waited_for=True)

    def reply_to(self, ticket: int, *, may_give_up: bool, may_wait: bool) -> CheckpointReply | None:
        """Return the reply to a request, or None if the request must wait.

        Args:
            ticket: The ticket of the checkpoint.
            may_give_up: True to stop waiting when the store has failed several times.
            may_wait: False once the request's timeout has expired.
        """
        is_complete = self.checkpoints.is_satisfied(ticket)
        is_hopeless = may_give_up and self.checkpoints.is_over(ticket)
        if may_wait and not is_complete and not is_hopeless:
            return None
        return CheckpointReply(
            ticket=ticket, complete=is_complete, latest=self.latest, trouble=self.checkpoints.trouble
        )

    # orders to pservers

    def order_for(self, index: int, generation: int, plan_hash: str) -> SnapshotRequest | None:
        """Return the order that this process has not completed yet, or None."""
        order = self._orders.get(index)
        if order is None or order.generation != generation:
            return None
        return replace(order.snapshot, plan_hash=plan_hash)

    def answered(self, index: int, generation: int, reply: SnapshotReply, now: float) -> None:
        """Record a process's progress with the newest order that the process has received."""
        order = self._orders.get(index)
        is_of_order = order is not None and (order.generation, order.snapshot.order) == (generation, reply.order)
        if is_of_order and reply.state in {"written", "failed", "refused"}:
            del self._orders[index]
        self.perform(self.checkpoints.progressed(index, generation, reply, now))
