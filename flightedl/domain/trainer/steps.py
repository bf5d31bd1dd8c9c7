"""What a trainer sends and asks for, call by call of the user's code: a batch from its membership to its settling.

A method of :class:`Steps` that has something to do with servers returns an effect. The driver carries it out, calls
``answered`` (or ``failed``), and gets the next one, until there is :class:`Done`. What is left to be done meanwhile is
a stack of values in ``Steps``: one operation is under way at a time, and another one that begins takes its place.

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
from typing import Any, Literal, Protocol

from flightedl.domain.consistency.modes import Async, Bounded, Mode, Sync
from flightedl.domain.trainer.batches import CurrentBatch
from flightedl.domain.trainer.membership import Denied, Joined, NotYet
from flightedl.domain.trainer.sums import BatchSums
from flightedl.domain.trainer.transfers import Transfer
from flightedl.errors import GradientError
from flightedl.messages.tasks import JoinReply


@dataclass(frozen=True, slots=True)
class AskToJoin:
    """Ask the master for a membership, to work on this batch; the answer is its ``JoinReply``."""

    current: CurrentBatch


@dataclass(frozen=True, slots=True)
class WaitToJoin:
    """Wait a little; it has to be asked for again."""

    for_what: str


@dataclass(frozen=True, slots=True)
class TakeSum:
    """Get ready to push what was added up: the gradients of the next transfer are those of the sum of this identity.

    A GradientError says that the sum cannot be pushed.
    """

    together: CurrentBatch
    #: Parameter -> what its sum is divided by; empty: it is pushed as it is.
    divisors: Mapping[str, int]
    identity: object


#: A :class:`Transfer` is carried out when it is over, or failed.
Effect = Transfer | TakeSum | AskToJoin | WaitToJoin


@dataclass(frozen=True, slots=True)
class Done:
    """The operation is over. ``is_open``: of ``open_batch``, whether the batch may be worked on."""

    is_open: bool = False
    #: The caller gets this error.
    error: BaseException | None = None


Next = Effect | Done
_DONE = Done()


def carried_out(steps: Steps, step: Next, carry_out: Callable[[Effect], Any]) -> bool:
    """Do what an operation of ``steps`` says from ``step`` on; return ``Done.is_open``.

    Raises:
        BaseException: the one of ``Done``.
    """
    while not isinstance(step, Done):
        try:
            answer = carry_out(step)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the steps say what follows
            step = steps.failed(error)
        else:
            step = steps.answered(answer)
    if step.error is not None:
        raise step.error
    return step.is_open


# what is left of an operation


@dataclass(frozen=True, slots=True)
class _Transferring:
    """A transfer is carried out."""

    transfer: Transfer
    #: Blocks that the batch is pushed to; None: the transfer only pulls.
    pushes: Collection[int] | None
    #: The sum that is pushed.
    sums: BatchSums | None


@dataclass(frozen=True, slots=True)
class _Taking:
    """The driver gets a sum ready."""

    sums: BatchSums
    together: CurrentBatch
    pull: bool
    #: The user's code hears of a sum that cannot be pushed.
    is_told: bool


@dataclass(frozen=True, slots=True)
class _Then:
    """Go on with a batch: by the master's answer, looking whether it may be opened, ..."""

    what: Literal["join", "open", "opened", "settle", "close", "pulled"]
    current: CurrentBatch


@dataclass(frozen=True, slots=True)
class _Pulling:
    """Have values of these blocks, each at this version or above, and of the batch's rounds."""

    current: CurrentBatch
    wanted: Mapping[int, int]


_Frame = _Transferring | _Taking | _Then | _Pulling


class Membership(Protocol):
    """What the steps need of the trainer's membership, see ``TrainerMembership``."""

    @property
    def member(self) -> int:
        """0: none."""
        ...

    def begin_batch(self, current: CurrentBatch) -> bool:
        """False: join first."""
        ...

    def join_answered(self, reply: JoinReply) -> Joined | Denied | NotYet:
        """The master has answered."""
        ...

    def lost(self) -> None:
        """Join again before the next batch is handed out."""
        ...


class Steps:
    """The steps of one trainer.

    Args:
        shards: Of each pserver, its blocks.
        membership: Of the trainer.
        mode: The job's.
    """

    #: Makes transfers.
    transfers: Callable[..., Transfer] = Transfer

    def __init__(self, shards: Sequence[Collection[int]], membership: Membership, mode: Mode) -> None:
        self._shards = [frozenset(blocks) for blocks in shards]
        self._blocks = frozenset[int]().union(*self._shards)
        self._membership = membership
        #: Block -> version of the values that are held.
        self.versions: dict[int, int] = dict.fromkeys(sorted(self._blocks), 0)
        #: None where every batch is pushed for itself.
        self.sums: BatchSums | None = None
        #: Of the operation that is under way, last first.
        self._left: list[_Frame] = []
        self._set_mode(mode)

    def _set_mode(self, mode: Mode) -> None:
        #: Of the job, as far as this trainer knows.
        self.mode = mode
        self._is_synchronous = isinstance(mode, Sync)
        #: What others get from a block may depend on this trainer's batch having come there.
        self._others_wait = isinstance(mode, Sync | Bounded)
        self._has_one_base = isinstance(mode, Sync) and mode.backup > 0
        self._pull_every = mode.pull_every if isinstance(mode, Async) else 1
        self._steps_since_pull = 0
        self.sums = None
        if isinstance(mode, Async | Sync) and mode.push_every > 1:
            is_mean, keeps_shares = mode.reduce == "mean", isinstance(mode, Async)
            self.sums = BatchSums(mode.push_every, is_mean=is_mean, keeps_shares=keeps_shares)

    @property
    def is_synchronous(self) -> bool:
        """Whether rounds close when everybody's gradient is in."""
        return self._is_synchronous

    @property
    def round(self) -> int:
        """The newest synchronous round of which values are held; 0: rounds are not synchronous."""
        return max(self.versions.values(), default=0) if self._is_synchronous else 0

    def change_mode(self, mode: Mode) -> None:
        """The job has another mode, from the next batch on; what was added up under the old one is done again."""
        self.give_up_sum()
        self._set_mode(mode)

    # an operation under way

    def answered(self, answer: JoinReply | None = None) -> Next:
        """The effect was carried out; ``answer``: the master's, to ``AskToJoin``."""
        step = self._resumed(self._left.pop(), answer)
        return step or (self._go_on(None) if self._left else _DONE)

    def failed(self, error: BaseException) -> Next:
        """The effect ended with this error."""
        left = self._left
        while left:
            match left.pop():
                case _Transferring(transfer, pushes, sums) if pushes is not None and transfer.current is not None:
                    if not transfer.current.answered.keys() >= set(pushes):
                        transfer.current.push_failed(error)
                    if sums is not None:
                        sums.push_failed(error)
                case _Taking(sums, is_told=is_told) if isinstance(error, GradientError):
                    sums.split(error)
                    if not is_told:
                        return self._go_on(None)
                case _:
                    pass
        return Done(error=error)

    def drop(self) -> None:
        """Nobody waits for what is under way: it ends as if it was interrupted."""
        if self._left:
            self.failed(KeyboardInterrupt())

    def _go_on(self, step: Next | None) -> Next:
        """``step``, or where it is None, what follows from what is left."""
        left = self._left
        while step is None:
            if not left:
                return _DONE
            step = self._resumed(left.pop(), None)
        return step

    def _resumed(self, frame: _Frame, answer: JoinReply | None) -> Next | None:
        match frame:
            case _Transferring(transfer, _, sums):
                return self._transferred(transfer, sums)
            case _Taking(sums, together, pull):
                return self._transfer(together, together.member, self._blocks, pull=pull, sums=sums)
            case _Pulling(current, wanted):
                return self._pull(current, wanted)
            case _Then("join", current):
                assert answer is not None, "the master's answer is awaited"
                return self._joined(current, answer)
            case _Then("open", current):
                return self._open(current)
            case _Then("opened"):
                return Done(is_open=True)
            case _Then("settle", current):
                return self._catch_up(current)
            case _Then("close", current):
                return self._close(current)
            case _:
                self._steps_since_pull = 0
                return None

    # the batch

    def open_batch(self, current: CurrentBatch) -> Next:
        """Be a member, and have values that a member may have; not open: the batch's task was taken away."""
        self.drop()
        return self._go_on(self._open(current))

    def _open(self, current: CurrentBatch) -> Next | None:
        if not self._membership.begin_batch(current):
            self._left.append(_Then("join", current))
            return AskToJoin(current)
        self._left.append(_Then("opened", current))
        if self.sums is not None and self.sums.is_of_others(current):
            # The rest of a sum that is done again: its other batches were pushed for themselves, under another mode.
            return self._push_sum(self.sums, pull=self._is_synchronous)
        return None

    def _joined(self, current: CurrentBatch, reply: JoinReply) -> Next | None:
        """Return what follows from the master's answer."""
        match self._membership.join_answered(reply):
            case Joined(new_mode):
                if new_mode is not None:
                    self.change_mode(new_mode)
                self._left.append(_Then("open", current))
                return self._refresh()
            case NotYet(waiting_for):
                self._left.append(_Then("open", current))
                return WaitToJoin(waiting_for)
            case Denied():
                return _DONE

    def close_batch(self, current: CurrentBatch) -> Next:
        """The user's code is through with the batch: what it did not push arrives, and the values that follow come.

        It ends with the error that ended the batch's push, where doing it again cannot help.
        """
        if self._left:
            self.drop()
        if current.rejection is not None and not current.must_repeat:
            current.reject(current.rejection)
            if not self._others_wait:
                self._left.append(_Then("close", current))
                return self._go_on(self._refresh())
        return self._close(current) or (self._go_on(None) if self._left else _DONE)

    def _close(self, current: CurrentBatch) -> Next | None:
        if current.must_repeat:
            return self._leave_out(current)
        if (sums := self.sums) is not None:
            if not current.waits and not sums.is_pushed(current):
                return self._complete(sums, current, pull=self._pull_every == 1)
            return None
        if rest := self._unanswered(current):
            self._left.append(_Then("settle", current))
            return self._transfer(current, current.member, rest, pull=self._pull_every == 1)
        return self._catch_up(current) if self._is_synchronous else None

    def _leave_out(self, current: CurrentBatch) -> Done | None:
        """The batch is done again: nothing that it has pushed so far may be in a sum."""
        if self.sums is not None and self.sums.is_at(current):
            self.sums.give_up()
        return None if current.failure is None else Done(error=current.failure)

    def _catch_up(self, current: CurrentBatch) -> Next | None:
        """In synchronous mode, have the values of the batch's round."""
        if self._is_synchronous and not current.must_repeat:
            versions, answered = self.versions, current.answered
            after = {base: self.mode.version_after(base) for base in set(answered.values())}
            behind = {block: after[base] for block, base in answered.items() if versions[block] < after[base]}
            if behind:
                return self._transfer(current, current.member, pulls=behind)
        return None

    def abandon_batch(self) -> None:
        """The loop was left in the midst of a batch: the next one is opened under a membership of its own.

        Some blocks may have the batch and others not, and some values may be newer than others.
        """
        self._membership.lost()
        self.give_up_sum()

    # what the user calls

    def step(self, current: CurrentBatch) -> Next:
        """Push the batch: gradients, or its arrival, to every block that has no answer yet. Then pull, if it is due.

        It ends with a GradientError if the batch completed a sum that cannot be pushed.
        """
        if self._left:
            self.drop()
        if current.must_repeat:
            return _DONE
        current.rejection = None
        self._steps_since_pull += 1
        pull = self._steps_since_pull >= self._pull_every
        if pull and self._pull_every > 1:
            self._left.append(_Then("pulled", current))
        if self.sums is not None:
            return self._go_on(self._complete(self.sums, current, pull=pull, is_told=True))
        rest = self._unanswered(current) if current.answered else self._blocks
        return self._transfer(current, current.member, rest, pull=pull) or self._go_on(None)

    def rejected(self, current: CurrentBatch, error: Exception) -> None:
        """Note that a gradient was rejected before anything of it was sent; ignored for a batch that is complete."""
        is_pushed = self.sums is not None and self.sums.is_pushed(current)
        if not (current.waits or is_pushed) and self._unanswered(current):
            current.rejection = error

    def push(self, current: CurrentBatch, blocks: Collection[int]) -> Next:
        """Push the batch's gradients to these blocks; others may follow. Not where gradients are added up."""
        self.drop()
        return _DONE if current.must_repeat else self._go_on(self._transfer(current, current.member, blocks))

    def pull(self, current: CurrentBatch | None, blocks: Iterable[int], min_version: int = 0) -> Next:
        """Have values of these blocks, at or above a version; in synchronous mode of the batch's round.

        A batch that was pushed in part arrives at the other blocks before: two trainers that wait for each other, each
        where the other has not pushed, would wait for ever.
        """
        self.drop()
        wanted = dict.fromkeys(blocks, min_version)
        if current is None:
            return self._go_on(self._transfer(None, 0, pulls=wanted))
        if self._others_wait and current.answered and not current.must_repeat:
            self._left.append(_Pulling(current, wanted))
            return self._go_on(self._transfer(current, current.member, self._unanswered(current)))
        return self._go_on(self._pull(current, wanted))

    def _pull(self, current: CurrentBatch, wanted: Mapping[int, int]) -> Next | None:
        if self._is_synchronous and not current.must_repeat:
            bases, after = current.answered.items(), self.mode.version_after
            rounds = {block: max(after(base), wanted[block]) for block, base in bases if block in wanted}
            wanted = {**wanted, **rounds}
        # A batch that waits in a sum is not done again for a membership that ended.
        return self._transfer(None if current.waits else current, current.member, pulls=wanted)

    def refresh(self) -> Next:
        """Pull all blocks: as a member at or above its first round, else at whatever version they are."""
        self.drop()
        return self._go_on(self._refresh())

    def _refresh(self) -> Next | None:
        return self._transfer(None, self._membership.member, pulls=dict.fromkeys(self._blocks, 0))

    # sums

    def add(self, current: CurrentBatch, names: Collection[str]) -> int:
        """Gradients of the batch are added up, see ``BatchSums.add``; what each is multiplied by."""
        assert self.sums is not None, "every batch is pushed for itself"
        return self.sums.add(current, names)

    def push_sum(self) -> Next:
        """Push what was added up, of however many batches."""
        self.drop()
        if self.sums is not None and self.sums.has_batches:
            return self._go_on(self._push_sum(self.sums, pull=self._is_synchronous))
        return _DONE

    def give_up_sum(self) -> None:
        """Forget what was added up: its batches are done again, here or by somebody else."""
        if self.sums is not None:
            self.sums.give_up()

    def _complete(self, sums: BatchSums, current: CurrentBatch, *, pull: bool, is_told: bool = False) -> Next | None:
        """Note that the sum has all gradients of a batch, and push the sum if it is full."""
        sums.complete(current)
        if sums.is_full:
            return self._push_sum(sums, pull=pull, is_told=is_told)
        if pull and not self._is_synchronous:
            return self._transfer(None, current.member, pulls=dict.fromkeys(self._blocks, 0))
        return None

    def _push_sum(self, sums: BatchSums, *, pull: bool, is_told: bool = False) -> TakeSum:
        """Make one push for several batches: each block takes all of them, or none.

        If the sum cannot be pushed, its batches are handed out again.
        """
        together, divisors = sums.take()
        self._left.append(_Taking(sums, together, pull, is_told))
        return TakeSum(together, divisors, sums.identity)

    # one batch to all pservers

    def _unanswered(self, current: CurrentBatch) -> Collection[int]:
        return self._blocks.difference(current.answered) if current.answered else self._blocks

    def _transfer(
        self,
        current: CurrentBatch | None,
        member: int,
        pushes: Collection[int] | None = None,
        pulls: Mapping[int, int] | None = None,
        *,
        pull: bool = False,
        sums: BatchSums | None = None,
    ) -> Next | None:
        """Begin a transfer of a batch, or (``sums``) of a sum as one; None: there was nothing to be sent or asked."""
        if current is not None and self._has_one_base and not current.answered:
            current.base_version = min(self.versions.values())
        transfer = self.transfers(
            self._shards,
            self.versions,
            self.mode,
            current,
            member,
            pushes or (),
            pulls,
            pull_after_push=pull,
        )
        if not (pushes or pulls):
            return self._transferred(transfer, sums)
        self._left.append(_Transferring(transfer, pushes, sums))
        return transfer

    def _transferred(self, transfer: Transfer, sums: BatchSums | None) -> Next | None:
        """Draw the conclusions from a transfer that is over."""
        current = transfer.current
        if transfer.must_repeat:
            self._membership.lost()
            if current is not None:
                current.must_repeat = True
        if sums is None or current is None:
            return None
        sums.settle(current, transfer.refusals)
        return self._catch_up(current)
