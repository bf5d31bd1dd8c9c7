"""The protocol of a pserver's blocks that is recorded, and one that is made from a recording.

Calls about different spans come under one lock of the caller, so they are recorded in the order of the decisions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from flightedl.domain.consistency.modes import Mode
from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.pserver import block_values as values
from flightedl.domain.pserver.block_values import CopyBlocks, Extent, Needs, Push, Restored, Split, ViewTaken
from flightedl.domain.pserver.blocks import BlockProtocol
from flightedl.errors import CorruptError
from flightedl.messages.control import ViewRequest
from flightedl.recording.values import by_name, decode
from flightedl.recording.writer import Recorder


class _Event(msgspec.Struct, frozen=True):
    """What happens to the blocks of a pserver."""


class BlocksBegun(_Event, frozen=True):
    """The first event.

    ``spans``: (first block, how many), by position. ``copied_whole``: the first blocks of those that are.
    """

    pserver: int
    generation: int
    spans: list[tuple[int, int]]
    mode: dict[str, Any]
    copied_whole: list[int] = []


class PushPrepared(_Event, frozen=True):
    """As ``BlockProtocol.prepare``, where blocks have to be copied before."""

    span: int
    push: Push
    base_version: int
    has_gradient: bool


class BlocksPushed(_Event, frozen=True):
    """As ``BlockProtocol.push``."""

    span: int
    push: Push
    base_version: int
    has_gradient: bool


class SpanSplit(_Event, frozen=True):
    """As ``BlockProtocol.split``. ``into``: (first block, how many) of each part."""

    span: int
    into: list[tuple[int, int]]


class FirstValuesTaken(_Event, frozen=True):
    """As ``BlockProtocol.initialize``, where the block takes them."""

    block: int
    election: int


class ViewCame(_Event, frozen=True):
    """As ``BlockProtocol.take_view``."""

    request: ViewRequest


class CutBegun(_Event, frozen=True):
    """As ``BlockProtocol.begin_cut``."""

    round: int | None


class BlockCopied(_Event, frozen=True):
    """As ``BlockProtocol.copy``, where the block was due."""

    cut: int
    block: int


class CutOver(_Event, frozen=True):
    """As ``BlockProtocol.end_cut``, or ``drop_cut``."""

    cut: int
    is_dropped: bool


class EpochsSealed(_Event, frozen=True):
    """As ``BlockProtocol.seal``."""

    epochs: list[tuple[int, int]]


class BlocksRestored(_Event, frozen=True):
    """As ``BlockProtocol.restore``."""

    applied: bytes
    blocks: dict[int, tuple[int, int]]


class PushAnswered(msgspec.Struct, frozen=True):
    """What became of a push to a span; effects on its values follow."""

    outcome: str
    version: int
    having: bytes
    follows: int | None
    is_ready: bool


class Apart(msgspec.Struct, frozen=True):
    """Spans that an event has left or made, each as (first block, how many)."""

    spans: list[tuple[int, int]]


class Due(msgspec.Struct, frozen=True):
    """Positions of blocks that are to be copied at once."""

    local: list[int]


_EVENTS = by_name(_Event.__subclasses__())


def _effects(effects: Iterable[values.Effect]) -> list[object]:
    return [
        {
            type(effect).__name__: {
                name: list(value) if isinstance(value, range) else value for name, value in effect._asdict().items()
            }
        }
        for effect in effects
    ]


def _apart(blocks: BlockProtocol) -> Apart:
    """All spans."""
    return Apart([(span.numbers.start, len(span.numbers)) for span in blocks.spans])


def _pushed(pushed: values.Pushed | Split) -> list[object]:
    if isinstance(pushed, Split):
        return [Apart([(part.start, len(part)) for part in pushed.into])]
    answer = PushAnswered(pushed.outcome.name, pushed.version, pushed.having, pushed.follows, pushed.is_ready)
    return [answer, *_effects(pushed.effects)]


def _viewed(taken: ViewTaken) -> list[object]:
    found: list[object] = [taken.reply]
    for first, effects in taken.effects:
        found += [{"Span": first}, *_effects(effects)] if effects else []
    return found


class RecordedBlocks(BlockProtocol):
    """Records what happens to it; arguments as of ``block_protocol``."""

    def __init__(self, recorder: Recorder, pserver: tuple[int, int], extents: Sequence[Extent], mode: Mode) -> None:
        super().__init__(extents, mode)
        self._now = recorder.now
        self._recorder = recorder.core("blocks")
        #: Splits within another event are a part of it.
        self._depth = 0
        begun = [(each.numbers.start, len(each.numbers)) for each in extents]
        whole = [each.numbers.start for each in extents if each.is_copied_whole]
        self._record(BlocksBegun(*pserver, begun, mode.to_json(), whole))

    def _record(self, event: _Event, effects: Sequence[object] = ()) -> None:
        self._recorder.record(self._now(), event, effects)

    def prepare(self, first: int, push: Push, base_version: int, *, has_gradient: bool) -> Needs:
        needs = super().prepare(first, push, base_version, has_gradient=has_gradient)
        if needs.copies:
            self._record(PushPrepared(first, push, base_version, has_gradient), _effects(needs.copies))
        return needs

    def push(self, first: int, push: Push, base_version: int, *, has_gradient: bool) -> values.Pushed | Split:
        event = BlocksPushed(first, push, base_version, has_gradient)
        self._depth += 1
        try:
            pushed = super().push(first, push, base_version, has_gradient=has_gradient)
        except Exception as error:
            self._recorder.raised(self._now(), event, error)
            raise
        finally:
            self._depth -= 1
        self._record(event, _pushed(pushed))
        return pushed

    def split(self, first: int, into: Sequence[range]) -> Split:
        split = super().split(first, into)
        if len(into) > 1 and not self._depth:
            self._record(SpanSplit(first, [(part.start, len(part)) for part in into]))
        return split

    def initialize(self, number: int, election: int) -> bool:
        is_taken = super().initialize(number, election)
        if is_taken:
            self._record(FirstValuesTaken(number, election))
        return is_taken

    def take_view(self, request: ViewRequest) -> ViewTaken:
        try:
            taken = super().take_view(request)
        except Exception as error:
            self._recorder.raised(self._now(), ViewCame(request), error)
            raise
        self._record(ViewCame(request), _viewed(taken))
        return taken

    def begin_cut(self, at_round: int | None) -> values.CutBegun:
        begun = super().begin_cut(at_round)
        self._record(CutBegun(at_round), [Due(list(begun.due))])
        return begun

    def copy(self, cut: int, number: int) -> CopyBlocks | None:
        copy = super().copy(cut, number)
        if copy is not None:
            self._record(BlockCopied(cut, number), _effects([copy]))
        return copy

    def end_cut(self, cut: int) -> AppliedBatches | None:
        applied = super().end_cut(cut)
        if applied is not None:
            self._record(CutOver(cut, is_dropped=False))
        return applied

    def drop_cut(self, cut: int) -> None:
        is_known = cut in self._cuts
        super().drop_cut(cut)
        if is_known:
            self._record(CutOver(cut, is_dropped=True))

    def seal(self, epochs: Iterable[tuple[int, int]]) -> None:
        known = list(epochs)
        try:
            super().seal(known)
        except Exception as error:
            self._recorder.raised(self._now(), EpochsSealed(known), error)
            raise
        self._record(EpochsSealed(known))

    def restore(self, applied: AppliedBatches, blocks: Restored) -> Sequence[Split]:
        event = BlocksRestored(applied.encode(), dict(blocks))
        self._depth += 1
        try:
            splits = super().restore(applied, blocks)
        finally:
            self._depth -= 1
        self._record(event, [_apart(self)])
        return splits


def block_protocol(
    recorder: Recorder | None, pserver: tuple[int, int], extents: Sequence[Extent], mode: Mode
) -> BlockProtocol:
    """A protocol, which is recorded where there is something to record it.

    Args:
        recorder: Of the process.
        pserver: Its index and generation.
        extents: As of ``BlockProtocol``.
        mode: Likewise.
    """
    if recorder is None:
        return BlockProtocol(extents, mode)
    return RecordedBlocks(recorder, pserver, extents, mode)


class BlocksPlayer:
    """A protocol to which recorded events happen."""

    def __init__(self) -> None:
        self._blocks: BlockProtocol | None = None

    def play(self, _at: float, name: str, event: msgspec.Raw) -> Sequence[object]:
        """Let it happen; the effects."""
        if name not in _EVENTS:
            raise CorruptError(f"no event of a pserver's blocks: {name}")
        happened: Any = decode(event, _EVENTS[name])
        if isinstance(happened, BlocksBegun):
            extents = [
                Extent(range(first, first + count), first in happened.copied_whole) for first, count in happened.spans
            ]
            self._blocks = BlockProtocol(extents, Mode.from_json(happened.mode))
            return ()
        if self._blocks is None:
            raise CorruptError("blocks that have not begun")
        try:
            return self._happens(self._blocks, happened)
        except KeyError as error:
            raise CorruptError(f"block {error} does not lie here") from None

    @staticmethod
    def _happens(blocks: BlockProtocol, event: Any) -> Sequence[object]:
        match event:
            case BlocksPushed(first, push, base, has_gradient):
                return _pushed(blocks.push(first, push, base, has_gradient=has_gradient))
            case PushPrepared(first, push, base, has_gradient):
                return _effects(blocks.prepare(first, push, base, has_gradient=has_gradient).copies)
            case SpanSplit(first, into):
                blocks.split(first, [range(start, start + count) for start, count in into])
            case FirstValuesTaken(block, election):
                blocks.initialize(block, election)
            case ViewCame(request):
                return _viewed(blocks.take_view(request))
            case EpochsSealed(epochs):
                blocks.seal(epochs)
            case BlocksRestored(applied, restored):
                blocks.restore(AppliedBatches.decode(applied), restored)
                return [_apart(blocks)]
            case _:
                return BlocksPlayer._copies(blocks, event)
        return ()

    @staticmethod
    def _copies(blocks: BlockProtocol, event: Any) -> Sequence[object]:
        match event:
            case CutBegun(at_round):
                return [Due(list(blocks.begin_cut(at_round).due))]
            case BlockCopied(cut, number):
                copy = blocks.copy(cut, number)
                return _effects([] if copy is None else [copy])
            case CutOver(cut, is_dropped):
                if is_dropped:
                    blocks.drop_cut(cut)
                else:
                    blocks.end_cut(cut)
        return ()
