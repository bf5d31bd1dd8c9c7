"""Inputs, answers and effects of ``blocks``.

Effects are self-contained: the caller does not read the protocol's state to carry them out, because that state is
already ahead of the values. The caller carries out effects in order, before its next call for the same blocks.
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

#: Outcomes after which the blocks have applied the batch.
ANSWERED = frozenset({Outcome.ACCEPTED, Outcome.ALREADY_APPLIED})
#: The batches of a push, each with the number of batches in its task.
Batches = Sequence[tuple[Batch, int]]


class Extent(NamedTuple):
    """Adjacent blocks that initially form one span."""

    numbers: range
    #: True if cuts copy the span as a whole, because splitting it during training would take too long.
    is_copied_at_once: bool = False


class SpanPlace:
    """Position of a span in the plan. Base class of the spans in stores (arrays) and in the protocol (state).

    Args:
        numbers: Block numbers of the plan.
    """

    __slots__ = ("is_split", "numbers")

    def __init__(self, numbers: range) -> None:
        self.numbers = numbers
        #: True if this span has been replaced by other spans.
        self.is_split = False


class Push(msgspec.Struct, frozen=True):
    """Sender and batches of a push."""

    trainer: str
    generation: int
    member: int
    #: One batch, or several whose gradients were summed.
    batches: Batches
    #: Weight of the gradient in the mean of its round.
    weight: float = 1.0
    #: Number of batches that the trainer has begun since it was admitted as a member.
    step: int = 0

    @classmethod
    def of(cls, header: PushHeader) -> Push:
        """Return the push described by a trainer's message."""
        one = header.identity
        batches = [(Batch(one.epoch, one.task, one.batch), one.batch_count)]
        if header.further:
            batches += [(Batch(each.epoch, each.task, each.batch), each.batch_count) for each in header.further]
        return cls(header.trainer, header.generation, header.member, batches, header.weight, header.step)


class CopyBlocks(NamedTuple):
    """Copy these blocks in their current state, for a cut."""

    cut: int
    numbers: Sequence[int]
    #: Version and number of updates that are stored with the copies.
    version: int
    updates: int


class BlocksDue(NamedTuple):
    """These blocks have become due in a cut, which must copy them before they change."""

    cut: int
    numbers: Sequence[int]


class AddGradient(msgspec.Struct, frozen=True):
    """Add the pushed gradient, multiplied by its weight, to the sum of the open round."""

    batch: Batch
    weight: float
    #: Overwrite the sum, which is left over from an earlier round.
    is_first: bool
    #: Keep the gradient separate. When the round closes, its gradients are added in the order of their batches.
    is_ordered: bool


class Update(msgspec.Struct, frozen=True):
    """Run the optimizer once, on the pushed gradient or on the sum of the round."""

    from_version: int
    to_version: int
    #: Number of the blocks' earlier updates, for bias corrections. The learning rate depends on ``from_version``.
    number: int
    #: Batches whose gradients this update adds to the values.
    batches: Batches
    #: True to use the round's sum, False to use the pushed gradient.
    is_of_round: bool
    #: Factor by which the gradient or the sum is multiplied.
    scale: float = 1.0
    #: Factor for the learning rate.
    rate_factor: float = 1.0
    #: True if ``scale`` is 1 divided by the total weight of the round.
    is_mean: bool = False
    #: First epoch of which the blocks may lack batches; None if that is not an epoch before those of ``batches``.
    open_epoch: int | None = None


class EmptyRound(msgspec.Struct, frozen=True):
    """A round without gradients was closed. Only the version changes."""

    from_version: int
    to_version: int


Effect = CopyBlocks | BlocksDue | AddGradient | Update | EmptyRound


class Needs(NamedTuple):
    """Copies and memory allocations that must be made before a push, so that the push itself cannot fail."""

    copies: Sequence[CopyBlocks] = ()
    has_update: bool = False
    has_sum: bool = False
    #: True if the gradient is kept separate until its round closes.
    is_kept: bool = False


class Pushed(msgspec.Struct, frozen=True):
    """Result of a push to a span."""

    outcome: Outcome
    #: Version of the blocks once the effects have been carried out.
    version: int
    effects: Sequence[Effect] = ()
    #: For a rejected sum: bits of the batches that the blocks have already applied; see ``accumulation.applied_bits``.
    having: bytes = b""
    #: Version that the sender waits for; None if the sender receives no values.
    follows: int | None = None
    #: True if the blocks have reached version ``follows``.
    is_ready: bool = False
    #: True if other clients may be waiting for this change.
    is_news: bool = False


class Split(NamedTuple):
    """Several spans have replaced one span. The caller must split its arrays in the same way before anything else."""

    #: First block of the replaced span.
    span: int
    #: Block numbers of each new span, in ascending order.
    into: Sequence[range]


class Joined(NamedTuple):
    """Blocks have joined an adjacent span. The caller must move the blocks' values before it does anything else."""

    #: First block of the adjacent span before the change.
    kept: int
    moved: range


class CutBegun(NamedTuple):
    """A new cut: its number, and the numbers of the blocks that can be copied immediately."""

    cut: int
    due: Sequence[int]


class ViewApplied(NamedTuple):
    """Result of applying a view."""

    verdict: ViewVerdict
    reply: ViewReply
    #: First block of each span -> its effects. The caller carries out all effects before it releases the locks.
    effects: Sequence[tuple[int, Sequence[Effect]]]


class ReleasedBlocks(NamedTuple):
    """State, without values, of adjacent blocks that are leaving a pserver."""

    numbers: range
    version: int
    updates: int
    #: Output of ``AppliedBatches.release``.
    applied: bytes
    #: Number of the newest view. The pserver that adopts the blocks must have the same view.
    view: tuple[int, int]
    #: Member -> first round.
    members: Mapping[int, int]
    #: Member -> clock, see ``BlockRounds``.
    clocks: Mapping[int, int]
    #: Block -> election that gave the block its first values. Restored blocks accept no first values.
    elections: Mapping[int, int]
    is_copied_at_once: bool
    #: See ``BlockSpan.is_behind``.
    is_behind: bool


class Unmovable(enum.StrEnum):
    """Why a pserver cannot release or adopt blocks at the moment."""

    COPIED = "a cut is copying the blocks of this pserver"
    IN_ROUND = "a round of the blocks has begun"
    VIEW = "the two pservers know different views"


#: Block number -> (version, number of updates), for blocks from a checkpoint.
Restored = Mapping[int, tuple[int, int]]
