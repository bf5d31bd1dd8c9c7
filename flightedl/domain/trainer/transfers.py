"""One push or pull, or both, to all pservers: what is left of it, and what each answer and each failure means for it.

Everything that a trainer sends is idempotent: a push is known by its batch. So whatever fails on the way is simply sent
again, to whichever process holds the pserver's index by then, and only what was *answered* counts:

* A block that has the batch (from this copy or an earlier one) is settled. Where fresh values are wanted, it is pulled,
  unless they came with the answer.
* A block at which the gradient came too late, or that does not know the sender as a member, has nothing of it. The
  batch has to be computed again, under a new membership; nothing else of this transfer is of any use.
* A block that has some batches of a sum takes none, and says which it has. The sum's owner pushes the others again; in
  synchronous mode to the next round, since it has arrived in this one.
* No answer, an unknown outcome, an address of a process that is gone: the same request once more. Any other error is
  final: the request would be refused for ever.

A transfer is carried out one pserver at a time or all at once. A :class:`ShardTransfer` is about one pserver. It shares
with the others only what each may add to at any time: what its own blocks have, that the batch has to be computed
again, and refused sums.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from flightedl.domain.consistency.modes import Mode, Sync
from flightedl.domain.exactly_once.accumulation import lacking_of
from flightedl.domain.retries import is_transient
from flightedl.domain.trainer.batches import CurrentBatch
from flightedl.errors import FlightedlError
from flightedl.messages.parameters import Outcome

_TOO_LATE = frozenset({Outcome.STALE, Outcome.NOT_MEMBER})


@dataclass(frozen=True, slots=True)
class Push:
    """Send the batch to blocks of a pserver, and give each answer to ``answered``."""

    current: CurrentBatch
    #: Rising.
    blocks: Sequence[int]
    #: Of these blocks, and maybe others: the version that the gradient was computed at.
    bases: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Pull:
    """Ask a pserver for values, and give them to ``answered``."""

    #: Block -> the lowest version wanted.
    wanted: Mapping[int, int]


Call = Push | Pull


@dataclass(frozen=True, slots=True)
class Over:
    """Nothing more is asked of this pserver."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Raise the error: asking again cannot help."""

    error: FlightedlError


@dataclass(frozen=True, slots=True)
class AskAgain:
    """Look up who holds the index and ask again, a little later; give up when that has lasted too long."""

    error: FlightedlError


@dataclass(frozen=True, slots=True)
class KeepWaiting:
    """All is in order: ask for the rest again, for as long as it takes."""

    for_what: str


Verdict = Over | Refused | AskAgain | KeepWaiting
OVER = Over()


class ShardTransfer:
    """What one pserver still has to be sent and asked for.

    Args:
        index: Of the pserver.
        whole: What it is a part of.
        pushes: Its blocks that the batch goes to.
        pulls: Its block -> the lowest version wanted.
    """

    __slots__ = ("_whole", "generation", "index", "must_repeat", "pulls", "pushes")

    def __init__(self, index: int, whole: Transfer, pushes: set[int], pulls: dict[int, int]) -> None:
        self.index = index
        self._whole = whole
        #: Blocks that have not answered for the batch.
        self.pushes = pushes
        #: Blocks whose values are wanted, each at this version or above.
        self.pulls = pulls
        #: Of the process that was asked last.
        self.generation = 0
        #: The gradient was too late, or the membership is gone.
        self.must_repeat = False

    @property
    def is_over(self) -> bool:
        """Whether nothing more is asked of this pserver."""
        return self._whole.is_given_up or self.must_repeat or not (self.pushes or self.pulls)

    def next_call(self, generation: int) -> Call:
        """What to ask the process that holds the index now; ``generation``: its own."""
        self.generation = generation
        current = self._whole.current
        if self.pushes and current is not None:
            blocks = sorted(self.pushes)
            return Push(current, blocks, self._bases(blocks))
        return Pull(dict(self.pulls))

    def answered(self, blocks: range, outcome: int, version: int | None = None, having: bytes = b"") -> None:
        """Neighbouring blocks have answered.

        Args:
            blocks: Their numbers.
            outcome: What became of the batch there.
            version: Of the values that came with the answer and are stored; None: none came.
            having: Of a sum that was not taken: which of its batches the blocks have, see ``having_bits``.
        """
        current = self._whole.current
        if outcome in _TOO_LATE:
            self.must_repeat = self._whole.must_repeat = True
        elif outcome == Outcome.PARTLY_APPLIED and current is not None:
            self.pushes.difference_update(blocks)
            self._whole.refusals.add(lacking_of(having, 1 + len(current.further)))
            current.note_answers({}, self.index, self.generation)
            if self._whole.pull_after_push and isinstance(self._whole.mode, Sync):
                # The trainer has arrived in their round, with nothing, and goes on with the next one as elsewhere.
                bases, after = self._bases(blocks), self._whole.mode.version_after
                self.pulls.update({block: after(bases[block]) for block in blocks})
            return
        elif outcome != Outcome.NONE:
            self._settle(blocks, has_values=version is not None)
        if version is not None:
            self._whole.versions.update(dict.fromkeys(blocks, version))
            for block in blocks if self.pulls else ():
                self.pulls.pop(block, None)

    def _settle(self, blocks: range, *, has_values: bool) -> None:
        """They have the batch; their values have come with the answer, or are to be pulled."""
        self.pushes.difference_update(blocks)
        whole, bases = self._whole, self._bases(blocks)
        versions = dict(zip(blocks, map(bases.__getitem__, blocks), strict=True))
        if whole.current is not None:
            whole.current.note_answers(versions, self.index, self.generation)
        if whole.pull_after_push and not has_values:
            after = whole.mode.version_after
            self.pulls.update({block: after(version) for block, version in versions.items()})

    def _bases(self, blocks: Iterable[int]) -> Mapping[int, int]:
        """At least these blocks -> the version that the batch's gradient was computed at.

        Of each block until newer values of it are noted.
        """
        current = self._whole.current
        if current is not None and current.base_version is not None:
            return dict.fromkeys(blocks, current.base_version)
        return self._whole.versions

    def ended(self) -> Verdict:
        """The call is through; what was not answered for takes longer."""
        if self.is_over:
            return OVER
        return KeepWaiting(f"pserver {self.index}: the other trainers' gradients of this round")

    def failed(self, error: FlightedlError) -> Verdict:
        """The call failed, or nobody holds the index. What was answered before counts."""
        if not is_transient(error):
            return Refused(error)
        return OVER if self.is_over else AskAgain(error)


class Transfer:
    """What is sent to and asked of all pservers.

    Args:
        shards: Of each pserver, its blocks.
        versions: Block -> the version of the values that are held; kept up to date.
        mode: Says which version follows a push.
        current: The batch that is pushed, or at whose rounds values are pulled; None: values are only read.
        member: Under which membership; 0: as a reader.
        pushes: Blocks that the batch goes to.
        pulls: Block -> the lowest version wanted.
        pull_after_push: Whether fresh values are wanted of blocks that have taken the batch.
    """

    __slots__ = (
        "current",
        "is_given_up",
        "member",
        "mode",
        "must_repeat",
        "pull_after_push",
        "refusals",
        "shards",
        "versions",
    )

    #: Makes what it has to do with one pserver.
    of_shard: Callable[[int, Transfer, set[int], dict[int, int]], ShardTransfer] = ShardTransfer

    def __init__(
        self,
        shards: Sequence[frozenset[int]],
        versions: dict[int, int],
        mode: Mode,
        current: CurrentBatch | None,
        member: int,
        pushes: Collection[int] = (),
        pulls: Mapping[int, int] | None = None,
        *,
        pull_after_push: bool = False,
    ) -> None:
        self.versions = versions
        self.mode = mode
        self.current = current
        self.member = member
        self.pull_after_push = pull_after_push
        #: Nobody waits for it any more.
        self.is_given_up = False
        #: The batch has to be computed again, under a new membership.
        self.must_repeat = False
        #: What blocks lack that did not take a sum: places of the sum's batches.
        self.refusals: set[tuple[int, ...]] = set()
        wanted = {} if pulls is None else pulls
        if len(shards) == 1:
            self.shards = [self.of_shard(0, self, set(pushes), dict(wanted))]
        else:
            self.shards = [
                self.of_shard(
                    index,
                    self,
                    set(blocks.intersection(pushes)),
                    {block: version for block, version in wanted.items() if block in blocks} if wanted else {},
                )
                for index, blocks in enumerate(shards)
            ]

    def give_up(self) -> None:
        """Nobody waits for it any more."""
        self.is_given_up = True

    @property
    def is_over(self) -> bool:
        """True if nothing more is asked of any pserver."""
        for shard in self.shards:  # noqa: SIM110 - a generator costs a small step more than all that it asks
            if not shard.is_over:
                return False
        return True
