"""One push or pull, or both, to all pservers: the requests, the answers, and their meaning for the batch.

Everything that a trainer sends is idempotent, because a push carries its batch's identity. After any failure, the same
request is sent again, to the process that then holds the pserver's index. Only *answers* have a meaning:

* A block that has the batch (from this message or an earlier one) is settled. If new values are needed, the block is
  pulled, unless its values came with the answer.
* A block at which the gradient came too late, or that does not know the sender as a member, has not applied it. The
  batch has to be computed again, under a new membership; the rest of this transfer is useless.
* A block that has some batches of a sum rejects the sum and says which batches it has. The trainer pushes the others
  again. In synchronous mode, these join the next round, because the trainer has already arrived in this round.
* A pserver that lacks blocks is not called again. When the others have answered all pushes, the driver looks up the
  placement, and the rest of the transfer goes to the owners of the blocks (``TransferState.place``).
* After no answer, an unknown outcome, or a call to a process that is gone, the same request is repeated. Any other
  error is final, because the request would be rejected again.

The driver calls the pservers of a :class:`Transfer` one at a time or concurrently. The unanswered part at each pserver
is an independent :class:`ShardTransfer`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from flightedl.domain.consistency.modes import Mode, Sync
from flightedl.domain.exactly_once.accumulation import missing_places
from flightedl.domain.retries import is_transient
from flightedl.domain.trainer.batches import CurrentBatch, Pushed
from flightedl.errors import FlightedlError, StalePlacementError
from flightedl.messages.parameters import Outcome


class Push(msgspec.Struct, frozen=True):
    """Push the batch to blocks of a pserver."""

    #: Ascending.
    blocks: list[int]
    #: Block -> version at which its gradient was computed.
    bases: dict[int, int]


class Pull(msgspec.Struct, frozen=True):
    """Pull values from a pserver."""

    #: Block -> the lowest acceptable version.
    wanted: dict[int, int]


Call = Push | Pull


class Transfer(msgspec.Struct, frozen=True):
    """Make each pserver's call, and repeat it until ``Steps.handle_answers`` returns :class:`Over` for that pserver."""

    #: Distinguishes the transfer from earlier ones.
    serial: int
    #: Membership of the sender; 0 for a reader.
    member: int
    #: None if values are only read.
    batch: Pushed | None
    #: The call to each pserver; None if the pserver has no part in the transfer.
    calls: tuple[Call | None, ...]
    #: True if new values are needed from blocks that accept the batch.
    pull_after_push: bool = False


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """The answer for a range of blocks."""

    begin: int
    end: int
    #: Outcome of the batch; ``Outcome.NONE`` for a pull.
    outcome: int
    #: Version of the values that came with the answer and are stored; None if none came.
    version: int | None = None
    #: The batches of a rejected sum that the blocks already have; see ``applied_bits``.
    having: bytes = b""


class Over(msgspec.Struct, frozen=True):
    """No more requests are sent to this pserver."""


class Refused(msgspec.Struct, frozen=True):
    """Raise the error, because a retry cannot help."""

    error: BaseException


class AskAgain(msgspec.Struct, frozen=True):
    """Because of this error, repeat the call to the process that then holds the index."""

    error: FlightedlError
    call: Call


class KeepWaiting(msgspec.Struct, frozen=True):
    """Repeat the call; the pserver is healthy."""

    for_what: str
    call: Call


Verdict = Over | Refused | AskAgain | KeepWaiting
OVER = Over()


class ShardTransfer(msgspec.Struct, eq=False):
    """The unanswered part of a transfer at one pserver."""

    #: Blocks that have not yet answered for the batch.
    pushes: set[int]
    #: Block -> the lowest acceptable version.
    pulls: dict[int, int]
    #: The gradient was too late, or the membership is lost.
    must_repeat: bool = False


class TransferState(msgspec.Struct, eq=False):
    """A transfer in flight."""

    serial: int
    #: The batch, or sum of batches; None if values are only read.
    current: CurrentBatch | None
    #: Block -> version of the values that the trainer has; updated in place.
    versions: dict[int, int]
    mode: Mode
    pull_after_push: bool
    shards: list[ShardTransfer]
    #: Blocks to which the batch is pushed.
    pushes: frozenset[int]
    #: The batch has to be computed again, under a new membership.
    must_repeat: bool = False
    #: For each rejected sum, the positions of its batches that the block lacks.
    refusals: set[tuple[int, ...]] = set()
    #: True once the transfer was given up; later answers are ignored.
    is_given_up: bool = False
    #: Membership of the sender.
    member: int = 0
    #: The answer of a pserver that lacks blocks, until the placement is looked up.
    misplaced: StalePlacementError | None = None
    #: The driver is looking up the placement.
    is_finding: bool = False

    def place(self, owners: Sequence[frozenset[int]], changed: Mapping[int, Sequence[int]]) -> None:
        """Send the unanswered part to other owners.

        Args:
            owners: Blocks of each pserver.
            changed: Block that represented buckets -> blocks that now represent them, even if they have the batch.
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
        """Return the next call to a pserver; None if nothing is left."""
        if self.is_given_up or shard.must_repeat:
            return None
        if shard.pushes and (current := self.current) is not None:
            blocks = sorted(shard.pushes)
            return Push(blocks, self._bases(current, blocks))
        return Pull(dict(shard.pulls)) if shard.pulls else None

    def _bases(self, current: CurrentBatch, blocks: Sequence[int]) -> dict[int, int]:
        """Return the versions at which these blocks' gradients count as computed."""
        if current.base_version is not None:
            return dict.fromkeys(blocks, current.base_version)
        return dict(zip(blocks, map(self.versions.__getitem__, blocks), strict=True))

    def handle(self, index: int, generation: int, answers: Sequence[Answer], error: BaseException | None) -> Verdict:
        """Handle a pserver's answers; see ``Steps.handle_answers``."""
        shard = self.shards[index]
        if self.is_given_up:
            return OVER
        for answer in answers:
            self._apply_answer(shard, index, generation, answer)
        if isinstance(error, StalePlacementError):
            self.misplaced = error
            return OVER
        if error is not None and not (isinstance(error, FlightedlError) and is_transient(error)):
            return Refused(error)
        if shard.must_repeat or not (shard.pushes or shard.pulls):
            return OVER
        if error is None and self.misplaced is not None and not shard.pushes:
            # Other trainers may be waiting for pushes that this trainer still has to send elsewhere.
            return OVER
        call = self.call(shard)
        assert call is not None, "an unfinished transfer has no call"
        if error is None:
            return KeepWaiting(f"pserver {index}: the other trainers' gradients of this round", call)
        return AskAgain(error, call)

    def _apply_answer(self, shard: ShardTransfer, index: int, generation: int, answer: Answer) -> None:
        """Apply an answer. If the pserver was replaced between answers, its older generation is kept."""
        outcome, version, current = answer.outcome, answer.version, self.current
        blocks = range(answer.begin, answer.end)
        if outcome in _TOO_LATE:
            shard.must_repeat = self.must_repeat = True
        elif outcome != _NONE and current is not None:
            shard.pushes.difference_update(blocks)
            current.generations[index] = min(generation, current.generations.get(index, generation))
            bases = self._bases(current, blocks)
            if outcome == _PARTLY_APPLIED:
                self.refusals.add(missing_places(answer.having, 1 + len(current.pushed.others)))
                # In a synchronous round, the trainer has arrived with weight zero and continues with the next round.
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
#: In Python 3.11, each access to an enum member calls a Python function.
_NONE, _PARTLY_APPLIED = Outcome.NONE, Outcome.PARTLY_APPLIED
