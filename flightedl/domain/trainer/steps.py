"""What a trainer sends and asks for, call by call of the user's code: a batch from its opening to its settling.

A method of :class:`Steps` that has something to do with servers returns an effect. The driver carries it out, calls
``answered`` (or ``failed``), and gets the next one, until there is :class:`Done`. One operation is under way at a time,
and another one that begins takes its place.

Rules:

* Every batch gets an answer from every block: blocks that the user's code did not push to get the batch's *arrival*
  (weight zero), because the others' rounds wait for it.
* A push that fails may be in some blocks and not in others. Its batch never arrives without its gradient: it is done
  again as a whole, whatever the user's code makes of the error. Where trying again cannot help, its task is undone: the
  error is raised again when the batch is closed, which ends the loop over the data.
* A batch whose gradient was rejected (``CurrentBatch.rejection``) is handed out again, unless a later ``step`` of the
  same turn succeeds. If a sum of several batches is rejected, each of them is handed out again and pushed alone.
* In synchronous mode, values that follow a batch are those of its round: a pull waits until each block has closed it.
  With backup members all blocks are pushed with one base, the lowest version held (``domain.consistency.rounds``).
* With ``push_every=n`` a batch waits in a sum, and is pushed with n - 1 others (``sums``); with ``Async(pull_every=m)``
  only every m-th step pulls. What waits is done again when the membership or the mode it was computed under is over.

The gradients themselves are the driver's; of a sum it has them under the sum's ``identity``.
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


class TakeSum(msgspec.Struct, frozen=True):
    """Get ready to push what was added up: the gradients of the next transfer are those of the sum of this identity.

    ``failed`` with a GradientError says that the sum cannot be pushed.
    """

    batch: Pushed
    #: Parameter -> the divisor of its sum; empty: it is pushed as it is.
    divisors: Mapping[str, int]
    identity: int


class FindPlacement(msgspec.Struct, frozen=True):
    """Look up who owns the blocks now, and tell the steps (``Steps.place``): a pserver lacks some that it was asked."""

    error: FlightedlError


Effect = Transfer | TakeSum | FindPlacement


class Done(msgspec.Struct, frozen=True, omit_defaults=True):
    """The operation is over."""

    #: The caller gets this error.
    error: BaseException | None = None
    #: The trainer has to join again before the next batch.
    is_member_lost: bool = False
    #: Batches that the user's code is through with and that have changed, for the loop.
    batches: tuple[BatchState, ...] = ()


class Added(msgspec.Struct, frozen=True):
    """Multiply the gradients by ``weight``, and add them to the sum of this identity."""

    weight: int
    identity: int


Next = Effect | Done
_DONE = Done()


def carried_out(steps: Steps, step: Next, carry_out: Callable[[Effect], object]) -> Done:
    """Do what an operation of ``steps`` says from ``step`` on, until it is over."""
    while not isinstance(step, Done):
        try:
            carry_out(step)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the steps say what follows
            step = steps.failed(error)
        else:
            step = steps.answered()
    return step


@dataclass(frozen=True, slots=True)
class _Left:
    """What an operation does after its present effect."""

    what: Literal["settle", "close", "pulled", "pull"]
    current: CurrentBatch
    #: Block -> the lowest version to be pulled.
    wanted: Mapping[int, int] | None = None


@dataclass(frozen=True, slots=True)
class _Taking:
    """A sum is pushed: the driver gets it ready, then it is transferred."""

    sums: BatchSums
    together: CurrentBatch
    pull: bool
    #: The user's code hears of a sum that cannot be pushed.
    is_told: bool


def _overlap(one: range, other: range) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)


class Steps:
    """The steps of one trainer.

    Args:
        shards: Of each pserver, its blocks.
        mode: The job's.
        buckets: Of each pserver, the buckets of tables that the block with the number of the first one stands for.
    """

    def __init__(self, shards: Sequence[Collection[int]], mode: Mode, buckets: Sequence[range] = ()) -> None:
        self._own(shards, buckets)
        #: Block -> version of the values that are held.
        self.versions: dict[int, int] = dict.fromkeys(sorted(self._blocks), 0)
        #: The batch that is open.
        self.current: CurrentBatch | None = None
        #: None where every batch is pushed for itself.
        self.sums: BatchSums | None = None
        self._sum_identity = 0
        #: The effect that is under way.
        self._transfer: TransferState | None = None
        self._taking: _Taking | None = None
        self._serial = 0
        #: Of the operation that is under way, last first.
        self._left: list[_Left] = []
        self._is_member_lost = False
        #: Batches that were closed and have changed since.
        self._changed: dict[int, CurrentBatch] = {}
        self._set_mode(mode)

    def _own(self, shards: Sequence[Collection[int]], buckets: Sequence[range]) -> None:
        self._shards = [frozenset(blocks) for blocks in shards]
        self._buckets = tuple(buckets) or (range(0),) * len(self._shards)
        self._blocks = frozenset[int]().union(*self._shards)

    def place(self, shards: Sequence[Collection[int]], buckets: Sequence[range] = ()) -> None:
        """Let other pservers own the blocks, between two operations or as ``FindPlacement`` asks for.

        Rows are as old as the oldest that their owner had before. A batch is pushed again to pservers with other
        buckets than before, which answer "already applied" where they have it.
        """
        transfer = self._transfer
        assert transfer is None or transfer.is_finding, "pservers are being asked"
        batches = [self.current, None if transfer is None else transfer.current]
        answered = [each.answered for each in batches if each is not None]
        old = {each: self.versions.pop(each.start) for each in self._buckets if each}
        self._own(shards, buckets)
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
        #: Of the job, as far as this trainer knows.
        self.mode = mode
        self._is_synchronous = isinstance(mode, Sync)
        #: What others get from a block may depend on this trainer's batch having come there.
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
        """True if rounds close when everybody's gradient is in."""
        return self._is_synchronous

    @property
    def round(self) -> int:
        """The newest synchronous round of which values are held; 0: rounds are not synchronous."""
        return max(self.versions.values(), default=0) if self._is_synchronous else 0

    @property
    def pushing(self) -> CurrentBatch | None:
        """The batch, or the sum of several, that the present transfer pushes."""
        return None if self._transfer is None else self._transfer.current

    def change_mode(self, mode: Mode) -> None:
        """The job has another mode, from the next batch on; what was added up under the old one is done again."""
        self._give_up_sum()
        self._set_mode(mode)

    # an operation under way

    def heard(
        self,
        serial: int,
        index: int,
        generation: int,
        answers: Sequence[Answer],
        error: BaseException | None = None,
    ) -> Verdict:
        """A conversation with a pserver is over; return how the transfer goes on there.

        Args:
            serial: Of the transfer.
            index: Of the pserver.
            generation: Of the process that was asked.
            answers: That have come, for blocks and for buckets.
            error: How the conversation ended; None: as it should.
        """
        transfer = self._transfer
        if transfer is None or transfer.serial != serial:
            return OVER
        if answers and self._buckets[index]:
            answers = joined_answers(answers, self._buckets[index])
        return transfer.heard(index, generation, answers, error)

    def give_up_transfer(self) -> None:
        """Nobody waits for the present transfer any more: no pserver is asked again, and later answers do not count."""
        if self._transfer is not None:
            self._transfer.is_given_up = True

    @property
    def is_misplaced(self) -> bool:
        """True if the rest of the present transfer goes to other pservers."""
        return self._transfer is not None and self._transfer.misplaced is not None

    def answered(self) -> Next:
        """The effect was carried out."""
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
        """The effect ended with this error."""
        return self._go_on() if self._end(error) else self._done(error)

    def drop(self) -> bool:
        """Nobody waits for what is under way: it ends as if it was interrupted. False: nothing was under way."""
        is_under_way = self._transfer is not None or self._taking is not None
        if is_under_way:
            self._end(KeyboardInterrupt())
        return is_under_way

    def check(self) -> None:
        """Assert the invariants."""
        if self.sums is not None:
            self.sums.check()

    def _end(self, error: BaseException) -> bool:
        """End the effect that is under way with an error; True if the operation goes on all the same."""
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
            if not taking.is_told:
                return True
        self._left.clear()
        return False

    def _go_on(self) -> Next:
        """Return what follows from what is left."""
        while self._left:
            left, step = self._left.pop(), None
            match left.what:
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
        """Batches of a sum change; the loop is told of those that are closed."""
        self._changed.update({id(batch): batch for batch in batches if batch is not self.current})

    # the batch

    def joined(self, member: int, mode: Mode | None = None) -> Next:
        """The trainer is a member now, under this mode if it is another one: have values that a member may have."""
        self.drop()
        if mode is not None:
            self.change_mode(mode)
        return self._refresh(member) or self._go_on()

    def open_batch(self, batch: Batch, member: int, step: int) -> Next:
        """The user's code is about to get a batch, as a member that has begun so many batches."""
        if self._transfer is not None or self._taking is not None:
            self.drop()
        self.current = current = CurrentBatch.of(batch, member, step)
        if self.sums is not None and self.sums.is_of_others(current):
            # The rest of a sum that is done again: its other batches were pushed for themselves, under another mode.
            return self._push_sum(self.sums, pull=self._is_synchronous)
        return _DONE

    def close_batch(self) -> Next:
        """The user's code is through with the batch: what it did not push arrives, and the values that follow come.

        It ends with the error that ended the batch's push, where doing it again cannot help.
        """
        if self._transfer is not None or self._taking is not None:
            self.drop()
        current, self.current = self.current, None
        assert current is not None, "no batch is open"
        self._changed[id(current)] = current
        if current.rejection is not None and not current.must_repeat:
            current.reject(current.rejection)
            if not self._others_wait:
                self._left.append(_Left("close", current))
                return self._refresh(current.member) or self._go_on()
        return self._close(current) or self._done()

    def _close(self, current: CurrentBatch) -> Next | None:
        sums = self.sums
        if current.must_repeat:
            # Nothing that it has pushed so far may be in a sum.
            if sums is not None and sums.is_at(current):
                self._give_up_sum()
            return None if current.failure is None else self._done(current.failure)
        if sums is not None:
            if not current.waits and not sums.is_pushed(current):
                return self._complete(sums, current, pull=self._pull_every == 1)
            return None
        if rest := self._blocks.difference(current.answered):
            self._left.append(_Left("settle", current))
            return self._begin(current, current.member, rest, {}, pull=self._pull_every == 1)
        return self._catch_up(current) if self._is_synchronous else None

    def _catch_up(self, current: CurrentBatch) -> Next | None:
        """In synchronous mode, have the values of the batch's round."""
        if self._is_synchronous and not current.must_repeat:
            versions, answered = self.versions, current.answered
            after = {base: self.mode.version_after(base) for base in set(answered.values())}
            behind = {block: after[base] for block, base in answered.items() if versions[block] < after[base]}
            if behind:
                return self._begin(current, current.member, (), behind)
        return None

    def abandon_batch(self) -> Done:
        """The loop was left in the midst of a batch: the next one is opened under a membership of its own.

        Some blocks may have the batch and others not, and some values may be newer than others.
        """
        self.current = None
        self._is_member_lost = True
        return self.give_up_sum()

    # what the user calls

    def step(self) -> Next:
        """Push the batch: gradients, or its arrival, to every block that has no answer yet. Then pull, if it is due.

        It ends with a GradientError if the batch completed a sum that cannot be pushed.
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
            self._left.append(_Left("pulled", current))
        if self.sums is not None:
            return self._complete(self.sums, current, pull=pull, is_told=True) or self._go_on()
        rest = self._blocks.difference(current.answered) if current.answered else self._blocks
        return self._begin(current, current.member, rest, {}, pull=pull) or self._go_on()

    def rejected(self, error: Exception) -> None:
        """Note that a gradient was rejected before anything of it was sent; ignored for a batch that is complete."""
        current = self.current
        if current is not None and not self._is_complete(current) and self._blocks - current.answered.keys():
            current.rejection = error

    def push(self, blocks: Collection[int]) -> Next:
        """Push the batch's gradients to these blocks; others may follow. Not where gradients are added up."""
        self.drop()
        current = self._at_hand()
        return (
            self._done() if current.must_repeat else self._begin(current, current.member, blocks, {}) or self._go_on()
        )

    def pull(self, blocks: Collection[int], min_version: int = 0, *, as_reader: bool = False) -> Next:
        """Have values of these blocks, at or above a version; in synchronous mode of the batch's round.

        A batch that was pushed in part arrives at the other blocks before: two trainers that wait for each other, each
        where the other has not pushed, would wait for ever.

        Args:
            blocks: Their numbers.
            min_version: The lowest version wanted.
            as_reader: Read values as if no batch was open.
        """
        self.drop()
        wanted, current = dict.fromkeys(blocks, min_version), self.current
        if current is None or as_reader:
            return self._begin(None, 0, (), wanted) or self._go_on()
        if self._others_wait and current.answered and not current.must_repeat:
            self._left.append(_Left("pull", current, wanted))
            return self._begin(current, current.member, self._blocks.difference(current.answered), {}) or self._go_on()
        return self._pull(current, wanted) or self._go_on()

    def _pull(self, current: CurrentBatch, wanted: Mapping[int, int]) -> Next | None:
        if self._is_synchronous and not current.must_repeat:
            bases, after = current.answered.items(), self.mode.version_after
            rounds = {block: max(after(base), wanted[block]) for block, base in bases if block in wanted}
            wanted = {**wanted, **rounds}
        # A batch that waits in a sum is not done again for a membership that ended.
        return self._begin(None if current.waits else current, current.member, (), wanted)

    def refresh(self, member: int) -> Next:
        """Pull all blocks: as a member at or above its first round, as a reader (0) at whatever version they are."""
        self.drop()
        return self._refresh(member) or self._go_on()

    def _refresh(self, member: int) -> Next | None:
        return self._begin(None, member, (), dict.fromkeys(self._blocks, 0))

    def _at_hand(self) -> CurrentBatch:
        assert self.current is not None, "no batch is open"
        return self.current

    # sums

    def add(self, names: Collection[str]) -> Added:
        """Gradients of the batch are added up, see ``BatchSums.add``."""
        assert self.sums is not None, "every batch is pushed for itself"
        weight = self.sums.add(self._at_hand(), names)
        return Added(weight, self.sums.identity)

    def push_sum(self) -> Next:
        """Push what was added up, of however many batches."""
        self.drop()
        if self.sums is not None and self.sums.has_batches:
            return self._push_sum(self.sums, pull=self._is_synchronous)
        return self._done()

    def give_up_sum(self) -> Done:
        """Forget what was added up: its batches are done again, here or by somebody else."""
        self._give_up_sum()
        return self._done()

    def _give_up_sum(self) -> None:
        if self.sums is not None:
            self._note(self.sums.members)
            self.sums.give_up()

    def _is_complete(self, current: CurrentBatch) -> bool:
        """True if nothing more can be added to the batch's gradients."""
        return current.waits or (self.sums is not None and self.sums.is_pushed(current))

    def _complete(self, sums: BatchSums, current: CurrentBatch, *, pull: bool, is_told: bool = False) -> Next | None:
        """Note that the sum has all gradients of a batch, and push the sum if it is full."""
        sums.complete(current)
        if sums.is_full:
            return self._push_sum(sums, pull=pull, is_told=is_told)
        if pull and not self._is_synchronous:
            return self._refresh(current.member)
        return None

    def _push_sum(self, sums: BatchSums, *, pull: bool, is_told: bool = False) -> TakeSum:
        """Make one push for several batches: each block takes all of them, or none.

        If the sum cannot be pushed, its batches are handed out again.
        """
        together, divisors = sums.take()
        self._taking = _Taking(sums, together, pull, is_told)
        return TakeSum(together.pushed, divisors, sums.identity)

    # one batch to all pservers

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
        """Begin a transfer, or go on with what is left of one; None: there is nothing to be sent or asked."""
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
        self._serial += 1
        left.serial = self._serial
        batch = None if left.current is None else left.current.pushed
        return Transfer(self._serial, left.member, batch, tuple(map(left.call, left.shards)), left.pull_after_push)
