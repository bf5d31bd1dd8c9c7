"""Bugs planted in what a pserver decides about its blocks; see ``planted``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flightedl.domain.checkpoint.snapshot import SnapshotCut
from flightedl.domain.consistency.rounds import BlockRounds
from flightedl.domain.consistency.views import PserverView
from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.exactly_once.cohorts import Cohort
from flightedl.domain.pserver.block_values import Batches, Effect, Push, Pushed, Restored, Split, Update
from flightedl.domain.pserver.blocks import BlockProtocol, BlockSpan
from flightedl.messages.parameters import Outcome

Original = Callable[..., Any]
#: Name -> what goes wrong, and (class, method, original -> what takes its place).
BlockBugs = dict[str, tuple[str, tuple[tuple[type, str, Callable[[Original], Original]], ...]]]
Blocks = BlockProtocol


def _nothing(_original: Original) -> Original:
    return lambda *_arguments, **_more: None


def _always(value: object) -> Callable[[Original], Original]:
    return lambda _original: lambda *_arguments, **_more: value


def _new_all_the_same(original: Original) -> Original:
    """What all blocks have is taken once more."""

    def mark(self: Blocks, span: BlockSpan, batches: Batches) -> bool | bytes | None:
        found: bool | bytes | None = original(self, span, batches)
        return True if found is False else found

    return mark


def _sums_all_the_same(original: Original) -> Original:
    def mark(self: Blocks, span: BlockSpan, batches: Batches) -> bool | bytes | None:
        found: bool | bytes | None = original(self, span, batches)
        if not isinstance(found, bytes):
            return found
        for batch, batch_count in batches:
            self._applied.mark(span.local, batch, batch_count)
        return True

    return mark


def _first_of_a_sum(original: Original) -> Original:
    return lambda self, span, batches: original(self, span, batches[:1])


def _applied_before_it_is_checked(original: Original) -> Original:
    def push(self: Blocks, first: int, push: Push, base: int, *, has_gradient: bool) -> Pushed | Split:
        found: Pushed | Split = original(self, first, push, base, has_gradient=has_gradient)
        if isinstance(found, Split) or found.outcome is not Outcome.NOT_MEMBER:
            return found
        span = self.span(first)
        update = Update(found.version, found.version, span.updates, push.batches, is_of_round=False)
        span.updates += 1
        return found._replace(effects=[update])

    return push


def _values_only(original: Original) -> Original:
    def restore(self: Blocks, applied: AppliedBatches, blocks: Restored) -> Sequence[Split]:
        found: Sequence[Split] = original(self, AppliedBatches(applied.block_count), blocks)
        return found

    return restore


def _of_one_version(original: Original) -> Original:
    """All blocks of a span go on as the first of them."""

    def restore(self: Blocks, applied: AppliedBatches, blocks: Restored) -> Sequence[Split]:
        first = {number: blocks[span.numbers.start] for span in self.spans for number in span.numbers}
        found: Sequence[Split] = original(self, applied, first)
        return found

    return restore


def _without_held(original: Original) -> Original:
    return lambda self, block, version, _held: original(self, block, version, ())


def _of_any_master(original: Original) -> Original:
    def consider(self: PserverView, *arguments: Any) -> Any:
        self._master_generation = 0
        return original(self, *arguments)

    return consider


def _anywhere(original: Original) -> Original:
    return lambda self, mode, _at_version: original(self, mode, self.version)


def _missing_bits(original: Original) -> Original:
    """A block that refuses a sum says that it has all of it."""

    def push(self: Blocks, first: int, push: Push, base: int, *, has_gradient: bool) -> Pushed | Split:
        found: Pushed | Split = original(self, first, push, base, has_gradient=has_gradient)
        if isinstance(found, Pushed) and found.having:
            return found._replace(having=b"\xff" * len(found.having))
        return found

    return push


def _without_closing(_original: Original) -> Original:
    def change_members(
        _self: Blocks, span: BlockSpan, admit: dict[int, int], remove: Sequence[int], _effects: list[Effect]
    ) -> None:
        span.rounds.change(admit, remove)

    return change_members


def _with_new_rounds(original: Original) -> Original:
    """The parts of a span forget who has arrived and what waits."""

    def split(self: Blocks, first: int, into: Sequence[range]) -> Split:
        found: Split = original(self, first, into)
        for numbers in into if len(into) > 1 else ():
            part = self.span(numbers.start)
            if part.rounds.held:
                members, rounds = part.rounds.members, BlockRounds(self.mode, part.rounds.version)
                rounds.change(members, ())
                part.rounds = rounds
        return found

    return split


def _first_of_a_span(original: Original) -> Original:
    """The batches are marked in the first block of a span only."""

    def mark_together(self: AppliedBatches, blocks: Sequence[int], batches: Batches) -> list[int]:
        having: list[int] = original(self, blocks, batches)
        for batch, batch_count in batches if not any(having) else ():
            for block in blocks[1:]:
                self.unmark((block,), batch, batch_count)
        return having

    return mark_together


def _turned(original: Original) -> Original:
    """Each block gets the set of the one beside it."""

    def rebuilt(blocks: Sequence[tuple[AppliedBatches, int]]) -> AppliedBatches:
        found: AppliedBatches = original([*blocks[1:], *blocks[:1]])
        return found

    return rebuilt


def _collapsed_too_early(_original: Original) -> Original:
    """An epoch that is sealed counts as through though a task of it is missing."""

    def collapse(self: Cohort, number: int, epoch: Any) -> None:
        if epoch.task_count and epoch.done_count >= epoch.task_count - 1 and not epoch.tasks:
            del self.epochs[number]
            self.through[number] = epoch.task_count

    return collapse


def _never_copied_before(_original: Original) -> Original:
    return lambda _self, _span: []


BLOCK_BUGS: BlockBugs = {
    "no dedupe": ("a pserver applies a batch that it has already", ((BlockProtocol, "_mark", _new_all_the_same),)),
    "apply before check": (
        "a pserver applies a gradient before it looks at who sent it",
        ((BlockProtocol, "push", _applied_before_it_is_checked),),
    ),
    "snapshot without applied": (
        "a checkpoint has values without the batches that are in them",
        ((BlockProtocol, "restore", _values_only),),
    ),
    "marks of the open round are saved": (
        "a checkpoint says that it has batches which wait in an accumulator",
        ((SnapshotCut, "cut", _without_held),),
    ),
    "marks after the cut are saved": (
        "a checkpoint says that it has batches which came after its copy",
        ((SnapshotCut, "marked", _nothing),),
    ),
    "blocks change before they are copied": (
        "a push does not copy blocks that are due before it changes them",
        ((BlockProtocol, "_copies_due", _never_copied_before),),
    ),
    "old views are taken": ("a pserver follows a deposed master", ((PserverView, "consider", _of_any_master),)),
    "sums are taken twice": (
        "a block that has some batches of a sum takes the sum all the same",
        ((BlockProtocol, "_mark", _sums_all_the_same),),
    ),
    "only the first of a sum is marked": (
        "a block takes a sum and does not note all of its batches",
        ((BlockProtocol, "_mark", _first_of_a_sum),),
    ),
    "a refusal names no batch": (
        "a block that refuses a sum says that it has all of its batches",
        ((BlockProtocol, "push", _missing_bits),),
    ),
    "a mode begins anywhere": (
        "pservers change the mode without agreeing on a round",
        ((BlockRounds, "can_switch", _always(True)), (BlockRounds, "switch", _anywhere)),
    ),
    "refused and marked": (
        "a batch that the round refuses stays marked",
        ((BlockProtocol, "_unmark", _nothing),),
    ),
    "un-marked in part": (
        "of a sum that the round refuses only the first batch is un-marked",
        ((BlockProtocol, "_unmark", _first_of_a_sum),),
    ),
    "the set of the block beside it": (
        "blocks that are put together from files get each other's applied sets",
        ((AppliedBatches, "rebuilt", _turned),),
    ),
    "restored as the first of them": (
        "blocks that lie together are restored at the version and with the updates of the first of them",
        ((BlockProtocol, "restore", _of_one_version),),
    ),
    "rounds of the removed stay open": (
        "a view removes a member, and its rounds go on waiting",
        ((BlockProtocol, "_change_members", _without_closing),),
    ),
    "a split forgets its round": (
        "blocks that are taken apart lose what waits in their round",
        ((BlockProtocol, "split", _with_new_rounds),),
    ),
    "marked in the first block": (
        "a batch is marked in the first of the blocks that it is pushed to",
        ((AppliedBatches, "mark_together", _first_of_a_span),),
    ),
    "an epoch collapses too early": (
        "an epoch counts as applied as a whole while a task of it is not",
        ((Cohort, "_collapse", _collapsed_too_early),),
    ),
}
