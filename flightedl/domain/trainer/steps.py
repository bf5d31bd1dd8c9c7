"""What a trainer sends and asks for, call by call of the user's code: a batch from its membership to its settling.

Each method of :class:`Steps` that has something to do with servers is a generator of effects: the driver carries one
out, sends its answer in (or throws the error that it ended with), and gets the next one, until the generator returns.

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

from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from flightedl.domain.consistency.modes import Async, Bounded, Mode, Sync
from flightedl.domain.trainer.batches import CurrentBatch
from flightedl.domain.trainer.membership import Denied, Joined, NotYet
from flightedl.domain.trainer.sums import BatchSums
from flightedl.domain.trainer.transfers import Transfer
from flightedl.errors import GradientError
from flightedl.messages.tasks import JoinReply

_Result = TypeVar("_Result")


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
Work = Generator[Effect, Any, _Result]


def carried_out(work: Work[_Result], carry_out: Callable[[Effect], Any]) -> _Result:
    """The result of ``work``, each of whose effects is answered by ``carry_out`` or ends with its error.

    Raises:
        BaseException: what ``work`` makes of an error, mostly the error itself.
    """
    try:
        effect = next(work)
        while True:
            try:
                answer = carry_out(effect)
            except BaseException as error:  # noqa: BLE001 - whatever it is, the work says what follows
                effect = work.throw(error)
            else:
                effect = work.send(answer)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


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

    # the batch

    def open_batch(self, current: CurrentBatch) -> Work[bool]:
        """Be a member, and have values that a member may have; False: the batch's task was taken away."""
        while not self._membership.begin_batch(current):
            match self._membership.join_answered((yield AskToJoin(current))):
                case Joined(new_mode):
                    if new_mode is not None:
                        self.change_mode(new_mode)
                    yield from self.refresh()
                case Denied():
                    return False
                case NotYet(waiting_for):
                    yield WaitToJoin(waiting_for)
        if self.sums is not None and self.sums.is_of_others(current):
            # The rest of a sum that is done again: its other batches were pushed for themselves, under another mode.
            yield from self._push_sum(self.sums, pull=self._is_synchronous)
        return True

    def close_batch(self, current: CurrentBatch) -> Work[None]:
        """The user's code is through with the batch: what it did not push arrives, and the values that follow come.

        Raises:
            BaseException: what ended its push, where doing it again cannot help.
        """
        if current.rejection is not None and not current.must_repeat:
            current.reject(current.rejection)
            if not self._others_wait:
                yield from self.refresh()
        if current.must_repeat:
            self._leave_out(current)
        elif (sums := self.sums) is not None:
            if not current.waits and not sums.is_pushed(current):
                yield from self._complete(sums, current, pull=self._pull_every == 1)
        else:
            if rest := self._unanswered(current):
                yield from self._send(current, rest, pull=self._pull_every == 1)
            yield from self._catch_up(current)

    def _leave_out(self, current: CurrentBatch) -> None:
        """The batch is done again: nothing that it has pushed so far may be in a sum."""
        if self.sums is not None and self.sums.is_at(current):
            self.sums.give_up()
        if current.failure is not None:
            raise current.failure

    def _catch_up(self, current: CurrentBatch) -> Work[None]:
        """In synchronous mode, have the values of the batch's round."""
        if self._is_synchronous and not current.must_repeat:
            versions, answered = self.versions, current.answered
            after = {base: self.mode.version_after(base) for base in set(answered.values())}
            behind = {block: after[base] for block, base in answered.items() if versions[block] < after[base]}
            if behind:
                yield from self._transfer(current, current.member, pulls=behind)

    def abandon_batch(self) -> None:
        """The loop was left in the midst of a batch: the next one is opened under a membership of its own.

        Some blocks may have the batch and others not, and some values may be newer than others.
        """
        self._membership.lost()
        self.give_up_sum()

    # what the user calls

    def step(self, current: CurrentBatch) -> Work[None]:
        """Push the batch: gradients, or its arrival, to every block that has no answer yet. Then pull, if it is due.

        Raises:
            GradientError: the batch completed a sum that cannot be pushed.
        """
        if current.must_repeat:
            return
        current.rejection = None
        self._steps_since_pull += 1
        pull = self._steps_since_pull >= self._pull_every
        if self.sums is not None:
            error = yield from self._complete(self.sums, current, pull=pull)
            if error is not None:
                raise error
        else:
            yield from self._send(current, self._unanswered(current), pull=pull)
        if pull:
            self._steps_since_pull = 0

    def rejected(self, current: CurrentBatch, error: Exception) -> None:
        """Note that a gradient was rejected before anything of it was sent; ignored for a batch that is complete."""
        is_pushed = self.sums is not None and self.sums.is_pushed(current)
        if not (current.waits or is_pushed) and self._unanswered(current):
            current.rejection = error

    def push(self, current: CurrentBatch, blocks: Collection[int]) -> Work[None]:
        """Push the batch's gradients to these blocks; others may follow. Not where gradients are added up."""
        if not current.must_repeat:
            yield from self._send(current, blocks, pull=False)

    def pull(self, current: CurrentBatch | None, blocks: Iterable[int], min_version: int = 0) -> Work[None]:
        """Have values of these blocks, at or above a version; in synchronous mode of the batch's round.

        A batch that was pushed in part arrives at the other blocks before: two trainers that wait for each other, each
        where the other has not pushed, would wait for ever.
        """
        wanted = dict.fromkeys(blocks, min_version)
        if current is None:
            yield from self._transfer(None, 0, pulls=wanted)
            return
        if self._others_wait and current.answered and not current.must_repeat:
            yield from self._send(current, self._unanswered(current), pull=False)
        if self._is_synchronous and not current.must_repeat:
            bases, after = current.answered.items(), self.mode.version_after
            wanted |= {block: max(after(base), min_version) for block, base in bases if block in wanted}
        # A batch that waits in a sum is not done again for a membership that ended.
        yield from self._transfer(None if current.waits else current, current.member, pulls=wanted)

    def refresh(self) -> Work[None]:
        """Pull all blocks: as a member at or above its first round, else at whatever version they are."""
        yield from self._transfer(None, self._membership.member, pulls=dict.fromkeys(self._blocks, 0))

    # sums

    def add(self, current: CurrentBatch, names: Collection[str]) -> int:
        """Gradients of the batch are added up, see ``BatchSums.add``; what each is multiplied by."""
        assert self.sums is not None, "every batch is pushed for itself"
        return self.sums.add(current, names)

    def push_sum(self) -> Work[None]:
        """Push what was added up, of however many batches."""
        if self.sums is not None and self.sums.has_batches:
            yield from self._push_sum(self.sums, pull=self._is_synchronous)

    def give_up_sum(self) -> None:
        """Forget what was added up: its batches are done again, here or by somebody else."""
        if self.sums is not None:
            self.sums.give_up()

    def _complete(self, sums: BatchSums, current: CurrentBatch, *, pull: bool) -> Work[GradientError | None]:
        """All gradients of a batch are in the sum: push it, if it is time. Returns the same as ``_push_sum``."""
        sums.complete(current)
        if sums.is_full:
            return (yield from self._push_sum(sums, pull=pull))
        if pull and not self._is_synchronous:
            yield from self._transfer(None, current.member, pulls=dict.fromkeys(self._blocks, 0))
        return None

    def _push_sum(self, sums: BatchSums, *, pull: bool) -> Work[GradientError | None]:
        """One push for several batches: each block takes all of them, or none.

        Returns the error of a sum that cannot be pushed; its batches are then handed out again.
        """
        together, divisors = sums.take()
        try:
            yield TakeSum(together, divisors, sums.identity)
        except GradientError as error:
            sums.split(error)
            return error
        try:
            refusals = yield from self._send(together, self._blocks, pull=pull)
        except BaseException as error:
            sums.push_failed(error)
            raise
        sums.settle(together, refusals)
        yield from self._catch_up(together)
        return None

    # one batch to all pservers

    def _unanswered(self, current: CurrentBatch) -> Collection[int]:
        return self._blocks.difference(current.answered) if current.answered else self._blocks

    def _send(
        self, current: CurrentBatch, blocks: Collection[int], *, pull: bool
    ) -> Generator[Effect, Any, set[tuple[int, ...]]]:
        """Push a batch; returns what blocks lack of a sum that they did not take."""
        try:
            transfer = yield from self._transfer(current, current.member, blocks, pull=pull)
        except BaseException as error:
            if not current.answered.keys() >= set(blocks):
                current.push_failed(error)
            raise
        return transfer.refusals

    def _transfer(
        self,
        current: CurrentBatch | None,
        member: int,
        pushes: Collection[int] = (),
        pulls: Mapping[int, int] | None = None,
        *,
        pull: bool = False,
    ) -> Generator[Effect, Any, Transfer]:
        if current is not None and self._has_one_base and not current.answered:
            current.base_version = min(self.versions.values())
        transfer = self.transfers(
            self._shards,
            self.versions,
            self.mode,
            current,
            member,
            pushes,
            pulls,
            pull_after_push=pull,
        )
        if not transfer.is_over:
            yield transfer
        if transfer.must_repeat:
            self._membership.lost()
            if current is not None:
                current.must_repeat = True
        return transfer
