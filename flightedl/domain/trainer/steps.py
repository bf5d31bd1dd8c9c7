"""A trainer's messages to the pservers for each call of the user's code, from opening to settling a batch.

A method of :class:`Steps` that needs the servers returns an effect. The driver carries it out and calls ``answered`` or
``failed``. Each returns the next effect, until the result is :class:`Done`. Only one operation is in progress at a
time; beginning another one ends it.

Rules:

* Every block answers for every batch. A block for which the user's code pushed no gradient receives the batch's
  *arrival* (a push of weight zero), because rounds wait for it.
* A push that fails may have reached only some blocks. The whole batch is then repeated, even if the user's code handles
  the error; a batch never arrives at a round without its gradient. If the error is permanent, the task is given up, and
  the error is raised again when the batch is closed. This ends the loop over the data.
* A batch whose gradient was rejected (``CurrentBatch.rejection``) is handed out again, unless another ``step`` succeeds
  before the batch is closed. If a sum is rejected, each of its batches is handed out again and pushed alone.
* In sync mode, the values after a batch are those of its round: a pull waits until each block has closed that round.
  With backup members, all blocks are pushed with the same base version, the lowest that the trainer has
  (``domain.consistency.rounds``).
* With ``push_every=n``, n batches are pushed as one sum (``sums``). With ``Async(pull_every=m)``, only every m-th step
  pulls. Batches in an unpushed sum are repeated if their membership or mode ends.

The driver keeps the gradients. The sum's ``identity`` is the key for the gradients of a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from flightedl.domain.consistency.modes import Async, Bounded, Mode, Sync
from flightedl.domain.trainer.batches import Batch, BatchState, CurrentBatch, Pushed
from flightedl.domain.trainer.joined import joined_answers
from flightedl.domain.trainer.sums import BatchSums
from flightedl.domain.trainer.transfers import OVER, Answer, ShardTransfer, Transfer, TransferState, Verdict
from flightedl.errors import FlightedlError, GradientError


class PrepareSum(msgspec.Struct, frozen=True):
    """Prepare the push of a sum. The next transfer sends the sum with this identity.

    If the sum cannot be pushed, call ``failed`` with a GradientError.
    """

    batch: Pushed
    #: Parameter -> divisor of its sum. Empty if the sum is not divided.
    divisors: Mapping[str, int]
    identity: int


class FindPlacement(msgspec.Struct, frozen=True):
    """Look up the current owners of the blocks and call ``Steps.place``, because a pserver lacked requested blocks."""

    error: FlightedlError


Effect = Transfer | PrepareSum | FindPlacement


class Done(msgspec.Struct, frozen=True, omit_defaults=True):
    """The operation is over."""

    #: Error for the caller; None if there is none.
    error: BaseException | None = None
    #: True if the trainer must join again before the next batch.
    is_member_lost: bool = False
    #: Batches that the user's code has finished and whose state has changed, for the loop.
    batches: tuple[BatchState, ...] = ()


class Added(msgspec.Struct, frozen=True):
    """Multiply the gradients by ``weight``, and add them to the sum with this identity."""

    weight: int
    identity: int


Next = Effect | Done
_DONE = Done()


def carried_out(steps: Steps, step: Next, carry_out: Callable[[Effect], object]) -> Done:
    """Carry out an operation of ``steps`` to its end, starting with ``step``."""
    while not isinstance(step, Done):
        try:
            carry_out(step)
        except BaseException as error:  # noqa: BLE001 - the steps decide about any error
            step = steps.failed(error)
        else:
            step = steps.answered()
    return step


@dataclass(frozen=True, slots=True)
class _Continuation:
    """The part of an operation that follows the current effect."""

    kind: Literal["settle", "close", "pulled", "pull"]
    current: CurrentBatch
    #: Block -> lowest version that the pull accepts.
    wanted: Mapping[int, int] | None = None


@dataclass(frozen=True, slots=True)
class _SumPush:
    """The push of a sum. The driver prepares the sum, then it is transferred."""

    sums: BatchSums
    together: CurrentBatch
    pull: bool
    #: True if an error is raised in the user's code when the sum cannot be pushed.
    raises: bool


def _overlap(one: range, other: range) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)


class Steps:
    """The steps of one trainer.

    Args:
        shards: Blocks of each pserver.
        mode: The job's mode.
        buckets: Of each pserver, the buckets of tables that are represented by the block with the first one's number.
        placement: Version of the placement; 0 if none is stored.
    """

    def __init__(
        self, shards: Sequence[Collection[int]], mode: Mode, buckets: Sequence[range] = (), placement: int = 0
    ) -> None:
        self._own(shards, buckets, placement)
        #: Block -> version of the values that this trainer has.
        self.versions: dict[int, int] = dict.fromkeys(sorted(self._blocks), 0)
        #: The open batch.
        self.current: CurrentBatch | None = None
        #: None if each batch is pushed alone.
        self.sums: BatchSums | None = None
        self._sum_identity = 0
        #: The effect in progress.
        self._transfer: TransferState | None = None
        self._taking: _SumPush | None = None
        self._serial = 0
        #: Parts of the operation in progress that remain, in reverse order.
        self._left: list[_Continuation] = []
        self._is_member_lost = False
        #: Closed batches whose state has changed since they were last reported.
        self._changed: dict[int, CurrentBatch] = {}
        self._set_mode(mode)

    def _own(self, shards: Sequence[Collection[int]], buckets: Sequence[range], placement: int) -> None:
        self._placement = placement
        self._shards = [frozenset(blocks) for blocks in shards]
        self._buckets = tuple(buckets) or (range(0),) * len(self._shards)
        self._blocks = frozenset[int]().union(*self._shards)

    def place(self, shards: Sequence[Collection[int]], buckets: Sequence[range] = (), placement: int = 0) -> None:
        """Set new owners of the blocks. Called between two operations, or in response to ``FindPlacement``.

        Rows count as no newer than the oldest rows of their previous owners. A batch is pushed again to pservers whose
        buckets have changed; a pserver that already has the batch answers "already applied".
        """
        transfer = self._transfer
        assert transfer is None or transfer.is_finding, "a transfer is in progress"
        batches = [self.current, None if transfer is None else transfer.current]
        answered = [each.answered for each in batches if each is not None]
        old = {each: self.versions.pop(each.start) for each in self._buckets if each}
        self._own(shards, buckets, placement)
        gone = old.keys() - set(self._buckets)
        for each in gone:
            old[each] = min([old[each], *(bases.pop(each.start) for bases in answered if each.start in bases)])
        changed: dict[int, list[int]] = {each.start: [] for each in gone}
        for each in filter(None, self._buckets):
            before = [other for other in old if _overlap(each, other)]
            self.versions[each.start] = min(old[other] for other in before)
            for other in gone.intersection(before):
                changed[other.start].append(each.start)
        if transfer is not None:
            transfer.place(self._shards, changed)

    def _set_mode(self, mode: Mode) -> None:
        #: The mode of the job, as far as this trainer knows.
        self.mode = mode
        self._is_synchronous = isinstance(mode, Sync)
        #: True if other trainers may have to wait until this trainer's batch arrives at a block.
        self._others_wait = isinstance(mode, Sync | Bounded)
        self._has_one_base = isinstance(mode, Sync) and mode.backup > 0
        self._pull_every = mode.pull_every if isinstance(mode, Async) else 1
        self._steps_since_pull = 0
        if self.sums is not None:
            self._sum_identity = self.sums.identity + 1
        self.sums = None
        if isinstance(mode, Async | Sync) and mode.push_every > 1:
            is_mean, keeps_shares = mode.reduce == "mean", isinstance(mode, Async)
            identity = self._sum_identity
            self.sums = BatchSums(mode.push_every, is_mean=is_mean, keeps_shares=keeps_shares, identity=identity)

    @property
    def is_synchronous(self) -> bool:
        return self._is_synchronous

    @property
    def round(self) -> int:
        """The newest round in sync mode whose values this trainer has; 0 in other modes."""
        return max(self.versions.values(), default=0) if self._is_synchronous else 0

    @property
    def pushing(self) -> CurrentBatch | None:
        """The batch, or sum of batches, that the current transfer pushes."""
        return None if self._transfer is None else self._transfer.current

    def change_mode(self, mode: Mode) -> None:
        """Change the job's mode before the next batch. Batches in a sum of the old mode are repeated."""
        self._give_up_sum()
        self._set_mode(mode)

    # an operation in progress

    def handle_answers(
        self,
        serial: int,
        index: int,
        generation: int,
        answers: Sequence[Answer],
        error: BaseException | None = None,
    ) -> Verdict:
        """Handle a pserver's answers. Return how the transfer with this pserver continues.

        Args:
            serial: Number of the transfer.
            index: Index of the pserver.
            generation: Generation of the process that answered.
            answers: Answers for blocks and buckets.
            error: The error that ended the exchange, if any.
        """
        transfer = self._transfer
        if transfer is None or transfer.serial != serial:
            return OVER
        if answers and self._buckets[index]:
            answers = joined_answers(answers, self._buckets[index])
        return transfer.handle(index, generation, answers, error)

    def give_up_transfer(self) -> None:
        """Stop the current transfer: no pserver is called again, and answers that arrive later are ignored."""
        if self._transfer is not None:
            self._transfer.is_given_up = True

    @property
    def is_misplaced(self) -> bool:
        """True if the rest of the current transfer must go to other pservers."""
        return self._transfer is not None and self._transfer.misplaced is not None

    def answered(self) -> Next:
        transfer = self._transfer
        if transfer is not None and transfer.is_finding:
            transfer.is_finding = False
            return self._begin(None, 0, (), {}, left=transfer) or _DONE
        if transfer is not None and (error := transfer.misplaced) is not None and not transfer.must_repeat:
            transfer.misplaced, transfer.is_finding = None, True
            return FindPlacement(error)
        self._transfer = None
        taking, self._taking = self._taking, None
        step: Next | None = None
        if transfer is not None:
            if transfer.must_repeat:
                self._is_member_lost = True
                if transfer.current is not None:
                    transfer.current.must_repeat = True
            if taking is not None:
                self._note(taking.sums.members)
                taking.sums.settle(taking.together, transfer.refusals)
                step = self._catch_up(taking.together)
        elif taking is not None:
            self._taking = taking
            step = self._begin(taking.together, taking.together.member, self._blocks, {}, pull=taking.pull)
        return step or (self._go_on() if self._left or self._changed or self._is_member_lost else _DONE)

    def failed(self, error: BaseException) -> Next:
        return self._go_on() if self._end(error) else self._done(error)

    def drop(self) -> bool:
        """End the effect in progress as if it had been interrupted. False if there is none."""
        is_under_way = self._transfer is not None or self._taking is not None
        if is_under_way:
            self._end(KeyboardInterrupt())
        return is_under_way

    def check(self) -> None:
        if self.sums is not None:
            self.sums.check()

    def _end(self, error: BaseException) -> bool:
        """End the effect in progress with an error. True if the operation continues."""
        transfer, self._transfer = self._transfer, None
        taking, self._taking = self._taking, None
        if transfer is not None and transfer.current is not None:
            if not transfer.current.answered.keys() >= transfer.pushes:
                transfer.current.push_failed(error)
            if taking is not None:
                self._note(taking.sums.members)
                taking.sums.push_failed(error)
        elif taking is not None and isinstance(error, GradientError):
            self._note(taking.sums.members)
            taking.sums.split(error)
            if not taking.raises:
                return True
        self._left.clear()
        return False

    def _go_on(self) -> Next:
        """Return the next step of the operation in progress."""
        while self._left:
            left, step = self._left.pop(), None
            match left.kind:
                case "settle":
                    step = self._catch_up(left.current)
                case "close":
                    step = self._close(left.current)
                case "pull":
                    step = self._pull(left.current, left.wanted or {})
                case "pulled":
                    self._steps_since_pull = 0
            if step is not None:
                return step
        return self._done() if self._changed or self._is_member_lost else _DONE

    def _done(self, error: BaseException | None = None) -> Done:
        is_lost, self._is_member_lost = self._is_member_lost, False
        changed, self._changed = self._changed, {}
        return Done(error, is_lost, tuple(map(BatchState.of, changed.values())))

    def _note(self, batches: Iterable[CurrentBatch]) -> None:
        """Record that the batches of a sum have changed. Closed batches are reported to the loop."""
        self._changed.update({id(batch): batch for batch in batches if batch is not self.current})

    # opening and closing a batch

    def joined(self, member: int, mode: Mode | None = None) -> Next:
        """Pull values as a new member, and adopt this mode if one is given."""
        self.drop()
        if mode is not None:
            self.change_mode(mode)
        return self._refresh(member) or self._go_on()

    def open_batch(self, batch: Batch, member: int, step: int) -> Next:
        """Open a batch for the user's code, as batch number ``step`` of membership ``member``."""
        if self._transfer is not None or self._taking is not None:
            self.drop()
        self.current = current = CurrentBatch.of(batch, member, step)
        if self.sums is not None and self.sums.belongs_to_another_sum(current):
            # The open sum is a repeated sum, whose other batches were pushed alone in another mode.
            return self._push_sum(self.sums, pull=self._is_synchronous)
        return _DONE

    def close_batch(self) -> Next:
        """Close the batch: push its arrival to blocks without a gradient, and pull the values that follow.

        Raises the error that ended the batch's push, if a retry cannot help.
        """
        if self._transfer is not None or self._taking is not None:
            self.drop()
        current, self.current = self.current, None
        assert current is not None, "no batch is open"
        self._changed[id(current)] = current
        if current.rejection is not None and not current.must_repeat:
            current.reject(current.rejection)
            if not self._others_wait:
                self._left.append(_Continuation("close", current))
                return self._refresh(current.member) or self._go_on()
        return self._close(current) or self._done()

    def _close(self, current: CurrentBatch) -> Next | None:
        sums = self.sums
        if current.must_repeat:
            # A sum must contain either all of a batch's gradients or none.
            if sums is not None and sums.is_at(current):
                self._give_up_sum()
            return None if current.failure is None else self._done(current.failure)
        if sums is not None:
            if not current.waits and not sums.is_pushed(current):
                return self._complete(sums, current, pull=self._pull_every == 1)
            return None
        if rest := self._blocks.difference(current.answered):
            self._left.append(_Continuation("settle", current))
            return self._begin(current, current.member, rest, {}, pull=self._pull_every == 1)
        return self._catch_up(current) if self._is_synchronous else None

    def _catch_up(self, current: CurrentBatch) -> Next | None:
        """In sync mode, pull the values that the batch's round has produced."""
        if self._is_synchronous and not current.must_repeat:
            versions, answered = self.versions, current.answered
            after = {base: self.mode.version_after(base) for base in set(answered.values())}
            behind = {block: after[base] for block, base in answered.items() if versions[block] < after[base]}
            if behind:
                return self._begin(current, current.member, (), behind)
        return None

    def abandon_batch(self) -> Done:
        """Abandon the batch, because the user has left the loop. The next batch opens with a new membership.

        Some blocks may lack the batch, and some values may be newer than others.
        """
        self.current = None
        self._is_member_lost = True
        return self.give_up_sum()

    # calls of the user

    def step(self) -> Next:
        """Push the batch, as gradients or arrival, to each block without an answer. Then pull if a pull is due.

        Raises GradientError if the batch completes a sum that cannot be pushed.
        """
        if self._transfer is not None or self._taking is not None:
            self.drop()
        current = self.current
        assert current is not None, "no batch is open"
        if current.must_repeat:
            return self._done()
        current.rejection = None
        self._steps_since_pull += 1
        pull = self._steps_since_pull >= self._pull_every
        if pull and self._pull_every > 1:
            self._left.append(_Continuation("pulled", current))
        if self.sums is not None:
            return self._complete(self.sums, current, pull=pull, raises=True) or self._go_on()
        rest = self._blocks.difference(current.answered) if current.answered else self._blocks
        return self._begin(current, current.member, rest, {}, pull=pull) or self._go_on()

    def rejected(self, error: Exception) -> None:
        """Record that a gradient was rejected before anything was sent. Ignored for a complete batch."""
        current = self.current
        if current is not None and not self._is_complete(current) and self._blocks - current.answered.keys():
            current.rejection = error

    def push(self, blocks: Collection[int]) -> Next:
        """Push the batch's gradients to these blocks; more may follow. Not used for batches that are pushed in sums."""
        self.drop()
        current = self._open_batch()
        return (
            self._done() if current.must_repeat else self._begin(current, current.member, blocks, {}) or self._go_on()
        )

    def pull(self, blocks: Collection[int], min_version: int = 0, *, as_reader: bool = False) -> Next:
        """Pull values of these blocks, at these versions or later; in sync mode at the batch's round or later.

        If a batch was pushed to some blocks, it first arrives at the others. Otherwise, two trainers would deadlock if
        each waited for a block to which the other has not pushed.

        Args:
            blocks: Their numbers.
            min_version: The lowest acceptable version.
            as_reader: Read values as if no batch were open.
        """
        self.drop()
        wanted, current = dict.fromkeys(blocks, min_version), self.current
        if current is None or as_reader:
            return self._begin(None, 0, (), wanted) or self._go_on()
        if self._others_wait and current.answered and not current.must_repeat:
            self._left.append(_Continuation("pull", current, wanted))
            return self._begin(current, current.member, self._blocks.difference(current.answered), {}) or self._go_on()
        return self._pull(current, wanted) or self._go_on()

    def _pull(self, current: CurrentBatch, wanted: Mapping[int, int]) -> Next | None:
        if self._is_synchronous and not current.must_repeat:
            bases, after = current.answered.items(), self.mode.version_after
            rounds = {block: max(after(base), wanted[block]) for block, base in bases if block in wanted}
            wanted = {**wanted, **rounds}
        # A batch that waits in a sum need not be repeated, even if this pull shows that the membership has ended.
        return self._begin(None if current.waits else current, current.member, (), wanted)

    def refresh(self, member: int) -> Next:
        """Pull all blocks: at a member's first round or later, or, as a reader (0), at any version."""
        self.drop()
        return self._refresh(member) or self._go_on()

    def _refresh(self, member: int) -> Next | None:
        return self._begin(None, member, (), dict.fromkeys(self._blocks, 0))

    def _open_batch(self) -> CurrentBatch:
        assert self.current is not None, "no batch is open"
        return self.current

    # sums

    def add(self, names: Collection[str]) -> Added:
        """Add up gradients of the batch (see ``BatchSums.add``)."""
        assert self.sums is not None, "batches are not pushed in sums"
        weight = self.sums.add(self._open_batch(), names)
        return Added(weight, self.sums.identity)

    def push_sum(self) -> Next:
        """Push the current sum, however many batches it contains."""
        self.drop()
        if self.sums is not None and self.sums.has_batches:
            return self._push_sum(self.sums, pull=self._is_synchronous)
        return self._done()

    def give_up_sum(self) -> Done:
        """Drop the current sum. This trainer or another one repeats its batches."""
        self._give_up_sum()
        return self._done()

    def _give_up_sum(self) -> None:
        if self.sums is not None:
            self._note(self.sums.members)
            self.sums.give_up()

    def _is_complete(self, current: CurrentBatch) -> bool:
        return current.waits or (self.sums is not None and self.sums.is_pushed(current))

    def _complete(self, sums: BatchSums, current: CurrentBatch, *, pull: bool, raises: bool = False) -> Next | None:
        """Complete a batch in the sum. If the sum is then full, push it."""
        sums.complete(current)
        if sums.is_full:
            return self._push_sum(sums, pull=pull, raises=raises)
        if pull and not self._is_synchronous:
            return self._refresh(current.member)
        return None

    def _push_sum(self, sums: BatchSums, *, pull: bool, raises: bool = False) -> PrepareSum:
        """Push several batches as one sum. Each block applies all of them or none.

        If the sum cannot be pushed, its batches are handed out again.
        """
        together, divisors = sums.take()
        self._taking = _SumPush(sums, together, pull, raises)
        return PrepareSum(together.pushed, divisors, sums.identity)

    # transfers to all pservers

    def _begin(
        self,
        current: CurrentBatch | None,
        member: int,
        pushes: Collection[int],
        pulls: Mapping[int, int],
        *,
        pull: bool = False,
        left: TransferState | None = None,
    ) -> Transfer | None:
        """Begin a transfer, or continue ``left``. None if there is nothing to send or to request."""
        if left is None:
            if not (pushes or pulls):
                return None
            if pushes and self._has_one_base and current is not None and not current.answered:
                current.base_version = min(self.versions.values())
            shards: list[ShardTransfer] = []
            for blocks in self._shards:
                wanted = {block: version for block, version in pulls.items() if block in blocks} if pulls else {}
                shards.append(ShardTransfer(set(blocks.intersection(pushes)), wanted))
            left = self._transfer = TransferState(
                0, current, self.versions, self.mode, pull, shards, frozenset(pushes), member=member
            )
            left.placement = self._placement
        self._serial += 1
        left.serial = self._serial
        batch = None if left.current is None else left.current.pushed
        return Transfer(self._serial, left.member, batch, tuple(map(left.call, left.shards)), left.pull_after_push)
