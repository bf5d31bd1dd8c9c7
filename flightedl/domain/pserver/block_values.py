"""What comes to a pserver's blocks, what they answer, and what that does to their values; ``blocks`` decides.

Effects are complete in themselves: whoever carries them out, in their order and before anything else happens to these
blocks, needs to look at no state of the protocol, which is ahead of them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from flightedl.domain.consistency.views import ViewVerdict
from flightedl.domain.exactly_once.batches import Batch
from flightedl.messages.control import ViewReply
from flightedl.messages.parameters import Outcome, PushHeader

#: The blocks have the batch.
ANSWERED = frozenset({Outcome.ACCEPTED, Outcome.ALREADY_APPLIED})
#: Batches of a push, each with the number of batches of its task.
Batches = Sequence[tuple[Batch, int]]


class Extent(NamedTuple):
    """Neighbouring blocks that begin as one span."""

    numbers: range
    #: A cut copies all of its blocks in one moment: to split it while it is trained would take long.
    is_copied_whole: bool = False


class SpanPlace:
    """The place of a span in the plan: a store derives its arrays from it, the protocol its state.

    Args:
        numbers: Block numbers of the plan.
    """

    __slots__ = ("is_split", "numbers")

    def __init__(self, numbers: range) -> None:
        self.numbers = numbers
        #: Other spans have taken its blocks over.
        self.is_split = False


class Push(msgspec.Struct, frozen=True):
    """Who pushes what."""

    trainer: str
    generation: int
    member: int
    #: One, or those of a sum.
    batches: Batches
    #: Of the gradient in the mean of its round.
    weight: float = 1.0
    #: How many batches the trainer has begun since it was admitted.
    step: int = 0

    @classmethod
    def of(cls, header: PushHeader) -> Push:
        """What a trainer's message says."""
        one = header.identity
        batches = [(Batch(one.epoch, one.task, one.batch), one.batch_count)]
        if header.further:
            batches += [(Batch(each.epoch, each.task, each.batch), each.batch_count) for each in header.further]
        return cls(header.trainer, header.generation, header.member, batches, header.weight, header.step)


class CopyBlocks(NamedTuple):
    """Copy these blocks for a cut, as they are now."""

    cut: int
    numbers: Sequence[int]
    #: That the copies have in the file.
    version: int
    updates: int


class BlocksDue(NamedTuple):
    """A cut may copy these blocks from now on, and has to before they change."""

    cut: int
    numbers: Sequence[int]


class AddGradient(msgspec.Struct, frozen=True):
    """Add the gradient that was pushed, times its weight, to the sum of the open round."""

    batch: Batch
    weight: float
    #: Overwrite the sum: what is in it is of an older round.
    is_first: bool
    #: Keep the gradient by itself instead, to be added in the order of the batches when the round closes.
    is_ordered: bool


class Update(msgspec.Struct, frozen=True):
    """Run the optimizer once, on the gradient that was pushed or on the sum of a round."""

    from_version: int
    to_version: int
    #: Updates before this one.
    number: int
    #: That are in the values from now on.
    batches: Batches
    is_of_round: bool
    #: What the gradient, or the sum, is multiplied by.
    scale: float = 1.0
    #: What the learning rate is multiplied by.
    rate_factor: float = 1.0
    #: The sum of a round is divided by its weight: ``scale`` is 1 / that.
    is_mean: bool = False


class EmptyRound(msgspec.Struct, frozen=True):
    """A round was closed that has no gradient: only the version has changed."""

    from_version: int
    to_version: int


Effect = CopyBlocks | BlocksDue | AddGradient | Update | EmptyRound


class Needs(NamedTuple):
    """What has to be done, and what memory has to be there, before a push is taken: then it cannot fail any more."""

    copies: Sequence[CopyBlocks] = ()
    #: The values may change.
    has_update: bool = False
    #: The gradient is added to the sum of a round.
    has_sum: bool = False
    #: The gradient is kept by itself until its round closes.
    is_kept: bool = False


class Pushed(msgspec.Struct, frozen=True):
    """What became of a push to the blocks of a span."""

    outcome: Outcome
    #: Of the blocks, after the effects.
    version: int
    effects: Sequence[Effect] = ()
    #: Which batches of a sum the blocks have that did not take it, see ``accumulation.having_bits``.
    having: bytes = b""
    #: The version that the sender waits for; None: it gets no values.
    follows: int | None = None
    #: Whether it is there.
    is_ready: bool = False
    #: Whether somebody else may wait for what has changed.
    is_news: bool = False


class Split(NamedTuple):
    """Other spans have taken the place of one; the arrays are split in the same way before anything else happens."""

    #: First block of the span.
    span: int
    #: Block numbers of each of those that take its place, rising.
    into: Sequence[range]


class CutBegun(NamedTuple):
    """A new cut: its number, and the numbers of the blocks that are due at once."""

    cut: int
    due: Sequence[int]


class ViewTaken(NamedTuple):
    """What became of a view."""

    verdict: ViewVerdict
    reply: ViewReply
    #: First block of each span, and what follows for it; all of it is carried out before the locks are given back.
    effects: Sequence[tuple[int, Sequence[Effect]]]


class ReleasedBlocks(NamedTuple):
    """The state of neighbouring blocks that leave a pserver, without their values."""

    numbers: range
    version: int
    updates: int
    #: Output of ``AppliedBatches.release``.
    applied: bytes
    #: Number of the newest view: the other pserver has to know the same one.
    view: tuple[int, int]
    #: Member -> first round.
    members: Mapping[int, int]
    #: Member -> clock, see ``BlockRounds``.
    clocks: Mapping[int, int]
    #: Block -> the election whose first values it has; no later one's are taken once it was restored.
    elections: Mapping[int, int]
    is_copied_whole: bool


class Unmovable(enum.StrEnum):
    """The reason why blocks cannot leave a pserver, or come to it, at the moment."""

    COPIED = "a cut is copying the blocks of this pserver"
    IN_ROUND = "a round of the blocks has begun"
    VIEW = "the two pservers know different views"


#: Block number -> (version, updates), of blocks from a checkpoint.
Restored = Mapping[int, tuple[int, int]]
