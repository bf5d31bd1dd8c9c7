"""Changes to a job's pservers during training: which blocks move, and when.

A change has a target: a number of pservers, some of which may be *drained*, that is, have no blocks. The master adds
the new pservers to the placement once all of their processes are present. It then stores one intent after another, each
with some of the moves, until the blocks are distributed equally. Finally, it removes surplus pservers. Between two
intents, checkpoints and audits that are due take place.

While there is no such change, blocks may move away from busy pservers (``domain.moving.rebalancing``). A new master
does not continue these moves, but measures the loads again.

``domain.moving`` describes the protocol. Only one transaction is in progress at a time, and its outcome returns as a
``MovesRead`` event. No calls to pservers begin during a transaction, because the answers of pservers with different
placements must not be combined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from flightedl.domain.master.effects import Kind, Outbox, StoreMoves, pserver_named
from flightedl.domain.model.sharding import ShardPlan, placed
from flightedl.domain.moving.balance import next_moves
from flightedl.domain.moving.director import Director
from flightedl.domain.moving.rebalancing import Rebalancing, Relief
from flightedl.domain.moving.values import NONE, Acknowledged, Move, StoredIntent, Transaction
from flightedl.errors import NotReadyError, UsageError
from flightedl.messages.declarations import Placement
from flightedl.messages.scaling import ScaleRecord, ScaleReply, ScaleRequest
from flightedl.messages.status import PserverStatusReply

#: An intent without progress for this many seconds is cancelled.
_STALLED_S = 120.0
#: Number of consecutive failed intents after which the change is abandoned.
_FAILURES_LIMIT = 20
_RELIEF_FAILURES_LIMIT = 6
_RETRY_S = 0.5
#: Maximum number of steps in the calculation of a change's moves.
_STEPS_LIMIT = 1000


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about the job that decide whether blocks may move."""

    #: Index -> generation of the current process, and of the last settled process.
    present: Mapping[int, int]
    settled: Mapping[int, int]
    #: True if all pservers have answered the newest view.
    is_quiet: bool
    is_audit_open: bool
    is_checkpoint_open: bool


class Moves:
    """State of the job's moves.

    Args:
        generation: Generation of the master.
        record: Target of a predecessor's change; None if there was none.
        outbox: Receives transactions and notes.
        rebalance_s: Seconds that a pserver must be busy before its blocks move; 0: never.
    """

    def __init__(self, generation: int, record: ScaleRecord | None, outbox: Outbox, rebalance_s: float = 0.0) -> None:
        self._generation = generation
        self._outbox = outbox
        self.record = record
        #: None until a model with a stored placement is declared.
        self.director: Director | None = None
        self._plan: ShardPlan | None = None
        #: First block of a unit -> its acknowledgement.
        self._acknowledged: dict[int, Acknowledged] = {}
        self._progressed_at = self._not_before = 0.0
        self._failures = 0
        self._waiting_for = ""
        self._rebalancing = Rebalancing(rebalance_s) if rebalance_s else None
        #: Moves away from busy pservers that are due or in progress.
        self._relief: Relief | None = None

    def begin(self, plan: ShardPlan, placement: Placement, stored: StoredIntent | None) -> None:
        """Start with a declared model and the stored placement and intent."""
        self._plan = plan
        self.director = Director(self._generation, placement, stored)

    @property
    def is_moving(self) -> bool:
        """True while an intent may exist. No audit begins and no checkpoint is ordered during this time."""
        return self.director is not None and self.director.is_moving

    @property
    def is_storing(self) -> bool:
        """True while a transaction is in progress."""
        return self.director is not None and self.director.pending is not None

    @property
    def desired(self) -> int | None:
        """Number of pserver processes that the job needs; None if it has never been changed.

        The number decreases before pservers leave the placement, so that the ending processes are not replaced.
        """
        if self.record is None or self.director is None:
            return None
        return max(self.record.pservers, self.director.newest.pservers)

    # requests

    def scale(self, request: ScaleRequest, now: float) -> None:
        """Change the target.

        Raises:
            NotReadyError: no model is declared yet.
            UsageError: the change is impossible, or another one is in progress.
        """
        director, plan = self.director, self._plan
        if director is None or plan is None:
            raise NotReadyError("the pservers cannot change before a trainer has declared the model: try again")
        if request.leaving:
            self._leave(director, request, now)
            return
        record = self.record
        if request.is_cancelled:
            if record is not None and not record.is_done and request.change in {0, record.change}:
                self._end("the change was cancelled")
            return
        count = request.pservers or (director.placement.pservers if record is None else record.pservers)
        drained = sorted(set(request.drain))
        if record is not None and not record.is_done:
            if (record.pservers, record.drained) == (count, drained):
                return
            raise UsageError(f"a change to {_described(record)} is in progress: wait until it is done, or cancel it")
        self._require_possible(count, drained, plan.block_count + plan.bucket_count)
        target = record or ScaleRecord(pservers=count, is_done=True)
        self._begin(replace(target, pservers=count, drained=drained), now)

    def _leave(self, director: Director, request: ScaleRequest, now: float) -> None:
        """Move the blocks of processes that will end, or stop doing so. A change in progress continues with the others.

        Raises:
            UsageError: no pserver would keep blocks.
        """
        record = self.record or ScaleRecord(pservers=director.placement.pservers, is_done=True)
        others = [each for each in record.leaving if each not in request.leaving]
        leaving = others if request.is_cancelled else sorted([*others, *request.leaving])
        if leaving != record.leaving:
            self._begin(replace(record, leaving=leaving), now)

    def _begin(self, target: ScaleRecord, now: float) -> None:
        """Start a change. Raises UsageError if no pserver would keep blocks."""
        if not _wanted(target):
            raise UsageError("at least one pserver must keep the blocks, and the others are about to end")
        self._relief = None
        if self._rebalancing is not None:
            self._rebalancing.forget()
        moved = 0 if target.is_done else target.moved
        target = replace(target, is_done=False, given_up="", moved=moved, change=target.change + target.is_done)
        self.record = replace(target, total=moved + self._distance(target))
        self._failures, self._not_before, self._waiting_for = 0, now, ""
        text = "the pservers change: %s blocks_to_move=%d"
        self._outbox.note(Kind.CHANGED_BY_HAND, "", text, _described(target), self.record.total)
        self._outbox.touch()

    def _require_possible(self, count: int, drained: list[int], block_count: int) -> None:
        if unknown := [index for index in drained if index >= count]:
            raise UsageError(f"there is no pserver {unknown[0]}: the job has pservers 0 to {count - 1}")
        if len(drained) >= count:
            raise UsageError("at least one pserver must keep the blocks: drain fewer pservers")
        if count - len(drained) > block_count:
            raise UsageError(
                f"the model has only {block_count} block{'s' * (block_count > 1)}, so at most {block_count} "
                f"pserver{'s' * (block_count > 1)} can share it: choose a lower number"
            )

    def reply(self) -> ScaleReply:
        """Return the progress of the newest change."""
        count = 0 if self.director is None else self.director.placement.pservers
        record = self.record
        if record is None:
            return ScaleReply(wanted=count, pservers=count)
        return ScaleReply(
            wanted=record.pservers,
            pservers=count,
            drained=record.empty,
            total=record.total,
            moved=min(record.moved, record.total),
            is_done=record.is_done,
            waiting_for=record.given_up or self._waiting_for,
            is_given_up=bool(record.given_up),
            change=record.change,
        )

    def acknowledged(self, attempt: int, block: int, generation: int) -> None:
        """Record that a destination has staged a frozen unit."""
        stored = None if self.director is None else self.director.stored
        if stored is None or stored.attempt != attempt or (move := stored.intent.move_of(block)) is None:
            return
        if stored.intent.generation_of(move.destination) == generation:
            self._acknowledged[block] = Acknowledged(attempt, block)

    # the stored state

    def read(self, placement: Placement, stored: StoredIntent | None, now: float) -> None:
        """Process the stored placement and intent, as read after a transaction or after a pserver changed them."""
        director = self.director
        assert director is not None, "blocks move without a model"
        before, was_storing = director.placement, director.pending is not None
        had = director.stored
        director.read(placement, stored)
        moved = sum(one != other for one, other in zip(before.owners, placement.owners, strict=True))
        if moved:
            self._progressed_at, self._failures = now, 0
            if self.record is not None and self._relief is None:
                self.record = replace(self.record, moved=self.record.moved + moved)
            if self._relief is not None:
                # Do not repeat the other moves, because the loads change with each move.
                self._relief = None if stored is None else self._relief._replace(moves=[])
        elif had is not None and stored is None:
            self._failed(now, "an attempt to move blocks has failed, and is repeated")
        elif had is None and stored is not None:
            self._progressed_at = now
        elif was_storing and placement.version == before.version and stored is None:
            self._not_before = now + _RETRY_S
        attempt = 0 if stored is None else stored.attempt
        self._acknowledged = {block: each for block, each in self._acknowledged.items() if each.attempt == attempt}
        self._outbox.touch()

    def _failed(self, now: float, text: str) -> None:
        self._failures += 1
        self._not_before = now + min(10.0, _RETRY_S * self._failures)
        if (relief := self._relief) is not None and (self._failures >= _RELIEF_FAILURES_LIMIT or not relief.moves):
            outcome = "blocks stay on pserver %d, because attempts to move them have failed attempts=%d"
            values = relief.busiest, self._failures
            self._outbox.note(Kind.REBALANCED, pserver_named(relief.busiest), outcome, *values)
            self._relief, self._failures = None, 0
        if self.record is not None and not self.record.is_done:
            self._waiting_for = text
            if self._failures >= _FAILURES_LIMIT:
                self._end(f"{self._failures} attempts to move blocks have failed in a row; see the pservers' logs")

    def _end(self, given_up: str) -> None:
        assert self.record is not None, "no change is in progress"
        director = self.director
        least = 1 if director is None else max(director.placement.holders) + 1
        self.record = replace(self.record, pservers=least, drained=[], leaving=[], is_done=True, given_up=given_up)
        self._outbox.note(Kind.CHANGED_BY_HAND, "", "the change of the pservers ends: %s", given_up, is_warning=True)
        self._outbox.touch()

    # the next transaction

    def may_look(self, *, may_begin: bool) -> bool:
        """True if ``look`` may find something to do."""
        director = self.director
        if director is None or director.pending is not None:
            return False
        is_due = self.record is not None or self._relief is not None
        return director.stored is not None or (may_begin and is_due)

    @property
    def _is_changing(self) -> bool:
        """True while a user's change is in progress."""
        return self.record is not None and not self.record.is_done

    def status_received(
        self, replies: Sequence[PserverStatusReply | None], present: Mapping[int, int], now: float
    ) -> None:
        """Measure the loads of the pservers. If one of them has been busy for a while, some of its blocks will move."""
        director, plan, rebalancing = self.director, self._plan, self._rebalancing
        if rebalancing is None or director is None or plan is None or self._relief is not None:
            return
        drained = [] if self.record is None else self.record.empty
        wanted = [index for index in range(self._least_count(director.placement)) if index not in drained]
        seen = {index: reply for index, reply in enumerate(replies) if reply is not None and index in wanted}
        if self._is_changing or self.is_moving or not len(wanted) == len(seen.keys() & present.keys()) > 1:
            return
        version = director.placement.version
        measured = rebalancing.measured(version, {index: present[index] for index in wanted}, seen, now)
        if measured is not None:
            self._relief = rebalancing.relief(placed(plan, director.placement), measured)

    def look(self, facts: Facts, now: float, *, may_begin: bool) -> None:
        """Begin the next transaction if one is due.

        Args:
            facts: Facts about the job.
            now: The time.
            may_begin: True if an intent may begin. Checkpoints and audits that are due have begun before.
        """
        director = self.director
        if director is None or director.pending is not None:
            return
        transaction = director.cancel_if_failed(facts.present)
        if transaction is None and director.stored is not None:
            if facts.is_quiet and not facts.is_audit_open:
                transaction = director.commit(self._acknowledged.values())
            is_wanted = self._is_changing or self._relief is not None
            if transaction is None and (not is_wanted or now - self._progressed_at > _STALLED_S):
                transaction = director.cancel()
        if transaction is None and director.stored is None and may_begin and now >= self._not_before:
            self._welcome(facts, now)
            transaction = self._next(director, facts)
        if transaction is not None:
            director.pending = transaction
            if transaction.placement is not None and transaction.attempt == NONE:
                self._outbox.touch()
            # A new intent depends on facts that must be stored first, such as which pservers are settled.
            revision = self._outbox.revision if transaction.attempt == NONE else 0
            self._outbox.effects.append(StoreMoves(transaction, revision))

    def _welcome(self, facts: Facts, now: float) -> None:
        """Give blocks to the settled successors of processes that have left."""
        record = self.record
        if record is None or not record.leaving:
            return
        leaving = [each for each in record.leaving if facts.settled.get(each[0], each[1]) == each[1]]
        if leaving != record.leaving:
            self._begin(replace(record, leaving=leaving), now)

    def _next(self, director: Director, facts: Facts) -> Transaction | None:
        """Return the transaction that begins the next part of the change, or None."""
        if self._plan is None:
            return None
        count, moves = self._due(self._plan, director.placement)
        is_audit_open, is_checkpoint_open = facts.is_audit_open, facts.is_checkpoint_open
        left = [] if self.record is None else self.record.left
        try:
            if moves:
                begun = director.begin(
                    moves,
                    facts.present,
                    facts.settled,
                    is_audit_open=is_audit_open,
                    is_checkpoint_open=is_checkpoint_open,
                )
            elif count != director.placement.pservers:
                begun = director.resize(
                    count,
                    _without(facts.present, left),
                    facts.settled,
                    is_audit_open=is_audit_open,
                    is_checkpoint_open=is_checkpoint_open,
                )
            else:
                self._finish()
                return None
        except NotReadyError as error:
            self._waiting_for = str(error)
            return None
        self._waiting_for = ""
        if moves:
            self._note_relief()
        elif self.record is not None:
            leaving = [each for each in facts.present.items() if each[0] >= count]
            self.record = replace(self.record, left=[*(each for each in left if each[0] < count), *leaving])
        return begun

    def _due(self, plan: ShardPlan, placement: Placement) -> tuple[int, list[Move]]:
        """Return the number of pservers that the job should have now, and the moves that are due."""
        record, count = self.record, placement.pservers
        if self._relief is not None:
            return count, self._relief.moves
        if record is None or record.is_done:
            return self._least_count(placement), []
        if record.pservers > count:
            return record.pservers, []
        moves = next_moves(placed(plan, placement), _wanted(record))
        return count if moves else record.pservers, moves

    def _least_count(self, placement: Placement) -> int:
        """Return the number of pservers without those that were added for an abandoned change and have no blocks."""
        record = self.record
        return placement.pservers if record is None else max(record.pservers, max(placement.holders) + 1)

    def _note_relief(self) -> None:
        if (relief := self._relief) is not None:
            targets = ", ".join(str(index) for index in sorted({move.destination for move in relief.moves}))
            text = "pserver %d has %.0f%% of the load of all pservers: blocks move to pserver %s blocks=%d"
            values = relief.busiest, 100 * relief.share, targets, sum(move.count for move in relief.moves)
            self._outbox.note(Kind.REBALANCED, pserver_named(relief.busiest), text, *values)

    def _finish(self) -> None:
        if (record := self.record) is not None and not record.is_done:
            self.record = replace(record, is_done=True, moved=record.total)
            text = "the pservers have changed: %s"
            self._outbox.note(Kind.CHANGED_BY_HAND, "", text, _described(record))
            self._outbox.touch()

    def _distance(self, target: ScaleRecord) -> int:
        """Return the number of blocks and buckets that the change will move. A block that moves twice counts twice."""
        assert self.director is not None, "blocks move without a model"
        assert self._plan is not None, "blocks move without a plan"
        placement = self.director.placement
        placement = placement.resized(max(target.pservers, placement.pservers))
        total = 0
        for _ in range(_STEPS_LIMIT):
            moves = next_moves(placed(self._plan, placement), _wanted(target))
            if not moves:
                break
            total += sum(move.count for move in moves)
            placement = placement.moved([(move.blocks, move.destination) for move in moves], 1)
        return total


def _without(present: Mapping[int, int], left: Sequence[tuple[int, int]]) -> dict[int, int]:
    return {index: generation for index, generation in present.items() if (index, generation) not in left}


def _wanted(record: ScaleRecord) -> list[int]:
    return [index for index in range(record.pservers) if index not in record.empty]


def _described(record: ScaleRecord) -> str:
    if not record.empty:
        return f"{record.pservers} pserver{'s' * (record.pservers != 1)}"
    return f"{record.pservers} pservers, without blocks on pserver {', '.join(map(str, record.empty))}"
