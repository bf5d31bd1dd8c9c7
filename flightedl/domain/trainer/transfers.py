"""One push or pull, or both, to all pservers: the requests, the answers, and what each of them means for the batch.

Everything that a trainer sends is idempotent: a push is known by its batch. So whatever fails on the way is simply sent
again, to whichever process holds the pserver's index by then, and only what was *answered* counts:

* A block that has the batch (from this copy or an earlier one) is settled. Where fresh values are wanted, it is pulled,
  unless they came with the answer.
* A block at which the gradient came too late, or that does not know the sender as a member, has nothing of it. The
  batch has to be computed again, under a new membership; nothing else of this transfer is of any use.
* A block that has some batches of a sum takes none, and says which it has. The sum's owner pushes the others again; in
  synchronous mode to the next round, since it has arrived in this one.
* A pserver that lacks blocks is asked for nothing more. When the others have answered, the driver finds the placement,
  and what is left goes to the owners of the blocks (``TransferState.place``).
* No answer, an unknown outcome, an address of a process that is gone: the same request once more. Any other error is
  final: the request would be refused for ever.

The driver asks the pservers of a :class:`Transfer` one at a time or all at once. What is left of one of them is a
:class:`ShardTransfer`, of which the others know nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from flightedl.domain.consistency.modes import Mode, Sync
from flightedl.domain.exactly_once.accumulation import lacking_of
from flightedl.domain.retries import is_transient
from flightedl.domain.trainer.batches import CurrentBatch, Pushed
from flightedl.errors import FlightedlError, StalePlacementError
from flightedl.messages.parameters import Outcome


class Push(msgspec.Struct, frozen=True):
    """Send the batch to blocks of a pserver."""

    #: Rising.
    blocks: list[int]
    #: Of these blocks: the version that the gradient was computed at.
    bases: dict[int, int]


class Pull(msgspec.Struct, frozen=True):
    """Ask a pserver for values."""

    #: Block -> the lowest version wanted.
    wanted: dict[int, int]


Call = Push | Pull


class Transfer(msgspec.Struct, frozen=True):
    """Ask each pserver that has a call, until ``Steps.heard`` says that nothing more is asked of it."""

    #: Tells the transfer from those before it.
    serial: int
    #: Under which membership; 0: as a reader.
    member: int
    #: None: values are only read.
    batch: Pushed | None
    #: By pserver; None: it has no part in the transfer.
    calls: tuple[Call | None, ...]
    #: True if fresh values are wanted of blocks that have taken the batch.
    pull_after_push: bool = False


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """The answer of neighbouring blocks."""

    begin: int
    end: int
    #: What became of the batch there; ``Outcome.NONE`` for a pull.
    outcome: int
    #: Version of the values that came with the answer, which are stored; None if none came.
    version: int | None = None
    #: The batches of a refused sum that the blocks already have, see ``having_bits``.
    having: bytes = b""


class Over(msgspec.Struct, frozen=True):
    """Nothing more is asked of this pserver."""


class Refused(msgspec.Struct, frozen=True):
    """Raise the error: asking again cannot help."""

    error: BaseException


class AskAgain(msgspec.Struct, frozen=True):
    """Ask the process that holds the index by then, because of this error."""

    error: FlightedlError
    call: Call


class KeepWaiting(msgspec.Struct, frozen=True):
    """Ask once more: the pserver is fine."""

    for_what: str
    call: Call


Verdict = Over | Refused | AskAgain | KeepWaiting
OVER = Over()


class ShardTransfer(msgspec.Struct, eq=False):
    """What is left of a transfer at one pserver."""

    #: Blocks that have no answer for the batch yet.
    pushes: set[int]
    #: Block -> the lowest version wanted.
    pulls: dict[int, int]
    #: The gradient was too late, or the membership is gone.
    must_repeat: bool = False


class TransferState(msgspec.Struct, eq=False):
    """A transfer that is under way."""

    serial: int
    #: The batch, or the sum of several; None: values are only read.
    current: CurrentBatch | None
    #: Block -> the version of the values that are held; kept up to date.
    versions: dict[int, int]
    mode: Mode
    pull_after_push: bool
    shards: list[ShardTransfer]
    #: Blocks that the batch is pushed to.
    pushes: frozenset[int]
    #: The batch has to be computed again, under a new membership.
    must_repeat: bool = False
    #: What blocks lack that did not take a sum: places of the sum's batches.
    refusals: set[tuple[int, ...]] = set()
    #: Nobody waits for it any more.
    is_given_up: bool = False
    #: The membership that it is under.
    member: int = 0
    #: A pserver's answer that it lacks blocks, until the placement is looked up.
    misplaced: StalePlacementError | None = None
    #: The driver finds the placement.
    is_finding: bool = False

    def place(self, owners: Sequence[frozenset[int]], changed: Mapping[int, Sequence[int]]) -> None:
        """Let what is left go to other owners.

        Args:
            owners: Of each pserver, its blocks.
            changed: Block that stood for buckets -> those that stand for them now, also where they have the batch.
        """

        def now(block: int) -> Sequence[int]:
            return changed.get(block, (block,))

        left = [block for shard in self.shards for block in shard.pushes] + [*self.pushes & changed.keys()]
        pushes = {new for block in left for new in now(block)}
        pulls = {new: at for shard in self.shards for block, at in shard.pulls.items() for new in now(block)}
        self.pushes = frozenset(new for block in self.pushes for new in now(block))
        self.shards = [
            ShardTransfer(pushes & blocks, {block: at for block, at in pulls.items() if block in blocks})
            for blocks in owners
        ]

    def call(self, shard: ShardTransfer) -> Call | None:
        """What is asked of a pserver now; None: nothing more."""
        if self.is_given_up or shard.must_repeat:
            return None
        if shard.pushes and (current := self.current) is not None:
            blocks = sorted(shard.pushes)
            return Push(blocks, self._bases(current, blocks))
        return Pull(dict(shard.pulls)) if shard.pulls else None

    def _bases(self, current: CurrentBatch, blocks: Sequence[int]) -> dict[int, int]:
        """Return the versions that the gradients of these blocks count as computed at."""
        if current.base_version is not None:
            return dict.fromkeys(blocks, current.base_version)
        return dict(zip(blocks, map(self.versions.__getitem__, blocks), strict=True))

    def heard(self, index: int, generation: int, answers: Sequence[Answer], error: BaseException | None) -> Verdict:
        """A conversation with a pserver is over; see ``Steps.heard``."""
        shard = self.shards[index]
        if self.is_given_up:
            return OVER
        for answer in answers:
            self._take(shard, index, generation, answer)
        if isinstance(error, StalePlacementError):
            self.misplaced = error
            return OVER
        if error is not None and not (isinstance(error, FlightedlError) and is_transient(error)):
            return Refused(error)
        if shard.must_repeat or not (shard.pushes or shard.pulls):
            return OVER
        call = self.call(shard)
        assert call is not None, "something is left to be asked"
        if error is None:
            return KeepWaiting(f"pserver {index}: the other trainers' gradients of this round", call)
        return AskAgain(error, call)

    def _take(self, shard: ShardTransfer, index: int, generation: int, answer: Answer) -> None:
        """Blocks have answered. A pserver that was replaced meanwhile counts as what it was before."""
        outcome, version, current = answer.outcome, answer.version, self.current
        blocks = range(answer.begin, answer.end)
        if outcome in _TOO_LATE:
            shard.must_repeat = self.must_repeat = True
        elif outcome != _NONE and current is not None:
            shard.pushes.difference_update(blocks)
            current.generations[index] = min(generation, current.generations.get(index, generation))
            bases = self._bases(current, blocks)
            if outcome == _PARTLY_APPLIED:
                self.refusals.add(lacking_of(answer.having, 1 + len(current.pushed.further)))
                # In a synchronous round the trainer has arrived, with nothing, and goes on with the next one.
                is_pulled = self.pull_after_push and isinstance(self.mode, Sync)
            else:
                current.answered.update(bases)
                is_pulled = self.pull_after_push and version is None
            if is_pulled:
                after = self.mode.version_after
                shard.pulls.update({block: after(base) for block, base in bases.items()})
        if version is not None:
            self.versions.update(dict.fromkeys(blocks, version))
            for block in blocks if shard.pulls else ():
                shard.pulls.pop(block, None)


_TOO_LATE = frozenset({Outcome.STALE, Outcome.NOT_MEMBER})
#: Python 3.11 calls a Python function wherever a member of an enum is named.
_NONE, _PARTLY_APPLIED = Outcome.NONE, Outcome.PARTLY_APPLIED
