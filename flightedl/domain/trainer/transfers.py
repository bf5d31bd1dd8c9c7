"""One push, pull or both to all pservers: the requests, the answers, and what they mean for the batch.

All messages of a trainer are idempotent, because a push carries the identity of its batch. After any failure, the same
request is sent again to the process that then holds the pserver's index. Only *answers* have a meaning:

* If a block has applied the batch, from this message or an earlier one, the block is settled. It is then pulled if new
  values are needed and did not come with the answer.
* If the gradient came too late at a block, or the block does not know the sender as a member, the block has not applied
  it. The batch must be computed again under a new membership. The rest of this transfer is then useless.
* If a block has applied some batches of a sum, it rejects the sum and lists these batches. The trainer pushes the other
  batches again. In sync mode, these batches join the next round, because the trainer has already arrived at this round.
* A pserver that lacks blocks is not called again. When the other pservers have answered all pushes, the driver looks up
  the placement, and the rest of the transfer goes to the blocks' owners (``TransferState.place``).
* If there was no answer, the outcome is unknown, or the called process is gone, the trainer repeats the request. All
  other errors are final, because the pserver would reject the request again.

The driver may call the pservers of a :class:`Transfer` one after another or concurrently. For each pserver, a separate
:class:`ShardTransfer` contains the part that the pserver has not answered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from flightedl.domain.consistency.modes import Mode, Sync
from flightedl.domain.exactly_once.accumulation import missing_places
from flightedl.domain.retries import is_transient
from flightedl.domain.trainer.batches import PLACEMENT, CurrentBatch, Pushed
from flightedl.errors import FlightedlError, StalePlacementError
from flightedl.marks import sometimes
from flightedl.messages.parameters import Outcome


class Push(msgspec.Struct, frozen=True):
    """Push the batch to blocks of one pserver."""

    #: Ascending.
    blocks: list[int]
    #: Block -> version at which its gradient was computed.
    bases: dict[int, int]


class Pull(msgspec.Struct, frozen=True):
    """Pull values from a pserver."""

    #: Block -> lowest version that is acceptable.
    wanted: dict[int, int]


Call = Push | Pull


class Transfer(msgspec.Struct, frozen=True):
    """Call each pserver, and repeat the call until ``Steps.handle_answers`` returns :class:`Over` for that pserver."""

    #: Distinguishes this transfer from earlier ones.
    serial: int
    #: Membership id of the sender; 0 if it only reads.
    member: int
    #: The batch to push; None if the transfer only reads values.
    batch: Pushed | None
    #: The call to make to each pserver; None for a pserver that has no part in the transfer.
    calls: tuple[Call | None, ...]
    #: True if new values are needed from the blocks that accept the batch.
    pull_after_push: bool = False


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """Answer for a range of blocks."""

    begin: int
    end: int
    #: Outcome of the batch; ``Outcome.NONE`` for a pull.
    outcome: int
    #: Version of the values that came with the answer and have been stored; None if no values came.
    version: int | None = None
    #: Batches of a rejected sum that the blocks already have, as returned by ``applied_bits``.
    having: bytes = b""


class Over(msgspec.Struct, frozen=True):
    """No more requests are sent to this pserver."""


class Refused(msgspec.Struct, frozen=True):
    """Raise this error, because a retry cannot help."""

    error: BaseException


class AskAgain(msgspec.Struct, frozen=True):
    """Because of this error, repeat the call to the process that holds the index at that time."""

    error: FlightedlError
    call: Call


class KeepWaiting(msgspec.Struct, frozen=True):
    """Repeat the call. The pserver is healthy."""

    for_what: str
    call: Call


Verdict = Over | Refused | AskAgain | KeepWaiting
OVER = Over()


def or_moved(error: BaseException, *, is_newest: bool) -> BaseException:
    """Return the error for ``Steps.handle_answers`` after a call to a pserver has failed.

    If a retry could help, but the sender knows a newer placement than the one that it uses, the blocks count as moved:
    a pserver whose blocks have all moved away may have ended permanently.
    """
    is_moved = isinstance(error, FlightedlError) and is_transient(error) and not is_newest
    return StalePlacementError(str(error)) if is_moved else error


class ShardTransfer(msgspec.Struct, eq=False):
    """The part of a transfer that one pserver has not answered."""

    #: Blocks that have not answered for the batch.
    pushes: set[int]
    #: Block -> lowest version that is acceptable.
    pulls: dict[int, int]
    #: True if the gradient was too late or the membership is lost.
    must_repeat: bool = False


class TransferState(msgspec.Struct, eq=False):
    """A transfer in flight."""

    serial: int
    #: The batch or sum of batches; None if the transfer only reads values.
    current: CurrentBatch | None
    #: Block -> version of the values that the trainer has. Updated in place.
    versions: dict[int, int]
    mode: Mode
    pull_after_push: bool
    shards: list[ShardTransfer]
    #: Blocks to which the batch is to be pushed.
    pushes: frozenset[int]
    #: True if the batch must be computed again under a new membership.
    must_repeat: bool = False
    #: For each rejected sum, the positions of the batches that the block lacks.
    refusals: set[tuple[int, ...]] = set()
    #: True if the transfer was given up. Answers that arrive later are ignored.
    is_given_up: bool = False
    #: Membership of the sender.
    member: int = 0
    #: Answer of a pserver that lacks blocks; None once the placement has been looked up.
    misplaced: StalePlacementError | None = None
    #: True while the driver looks up the placement.
    is_finding: bool = False
    #: Version of the placement when the transfer began; 0 if none is stored.
    placement: int = 0

    def place(self, owners: Sequence[frozenset[int]], changed: Mapping[int, Sequence[int]]) -> None:
        """Send the unanswered part to the blocks' new owners.

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
        """Return the next call to a pserver, or None if nothing is left to do."""
        if self.is_given_up or shard.must_repeat:
            return None
        if shard.pushes and (current := self.current) is not None:
            blocks = sorted(shard.pushes)
            return Push(blocks, self._bases(current, blocks))
        return Pull(dict(shard.pulls)) if shard.pulls else None

    def _bases(self, current: CurrentBatch, blocks: Sequence[int]) -> dict[int, int]:
        """Return the versions at which these blocks' gradients are assumed to have been computed."""
        if current.base_version is not None:
            return dict.fromkeys(blocks, current.base_version)
        return dict(zip(blocks, map(self.versions.__getitem__, blocks), strict=True))

    def handle(self, index: int, generation: int, answers: Sequence[Answer], error: BaseException | None) -> Verdict:
        """Handle a pserver's answers (see ``Steps.handle_answers``)."""
        shard = self.shards[index]
        if self.is_given_up:
            return OVER
        for answer in answers:
            self._apply_answer(shard, index, generation, answer)
        if isinstance(error, StalePlacementError):
            sometimes("a block had moved to another pserver")
            self.misplaced = error
            return OVER
        if error is not None and not (isinstance(error, FlightedlError) and is_transient(error)):
            return Refused(error)
        if shard.must_repeat or not (shard.pushes or shard.pulls):
            return OVER
        if error is None and self.misplaced is not None and not shard.pushes:
            # Other trainers may be waiting for pushes that this trainer has yet to send to other pservers.
            return OVER
        call = self.call(shard)
        assert call is not None, "an unfinished transfer has no call"
        if error is None:
            return KeepWaiting(f"pserver {index}: the other trainers' gradients of this round", call)
        if isinstance(call, Push):
            sometimes("a gradient was sent again under the same identity")
        return AskAgain(error, call)

    def _apply_answer(self, shard: ShardTransfer, index: int, generation: int, answer: Answer) -> None:
        """Apply an answer. If the pserver was replaced between two answers, the older generation is kept."""
        outcome, version, current = answer.outcome, answer.version, self.current
        blocks = range(answer.begin, answer.end)
        if outcome in _TOO_LATE:
            sometimes("a gradient came too late and was computed again")
            shard.must_repeat = self.must_repeat = True
        elif outcome != _NONE and current is not None:
            shard.pushes.difference_update(blocks)
            current.generations[index] = min(generation, current.generations.get(index, generation))
            if self.placement:
                # The first placement is the oldest one.
                current.generations.setdefault(PLACEMENT, self.placement)
            bases = self._bases(current, blocks)
            if outcome == _PARTLY_APPLIED:
                sometimes("a sum was refused in part")
                self.refusals.add(missing_places(answer.having, 1 + len(current.pushed.others)))
                # In sync mode, the trainer has arrived with weight zero and continues with the next round.
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
#: In Python 3.11, every access to an enum member calls a Python function, which is slow.
_NONE, _PARTLY_APPLIED = Outcome.NONE, Outcome.PARTLY_APPLIED
