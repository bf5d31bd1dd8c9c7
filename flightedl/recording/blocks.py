"""The protocol of a pserver's blocks that is recorded, and one that is made from a recording.

A span is told by its first block. Calls about different spans come at once; they are recorded in the order in which
they were decided.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import msgspec

from flightedl.domain.checkpoint.snapshot import SnapshotCut
from flightedl.domain.consistency.modes import Mode
from flightedl.domain.consistency.rounds import BlockRounds
from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.pserver import block_values as values
from flightedl.domain.pserver.block_values import BlockSpan, CopyBlocks, Needs, Push, Restored, Span, ViewTaken
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
    """As ``BlockProtocol.initialized``."""

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

    block: int
    position: int


class CutOver(_Event, frozen=True):
    """As ``BlockProtocol.end_cut``, or ``drop_cut``."""

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
                name: list(value) if isinstance(value, range) else value
                for name, value in effect._asdict().items()
                if not isinstance(value, SnapshotCut)
            }
        }
        for effect in effects
    ]


def _apart(blocks: BlockProtocol[Any], numbers: range | None = None) -> Apart:
    """The spans of these blocks; None: of all."""
    found = (span.numbers for span in blocks.spans)
    return Apart([(each.start, len(each)) for each in found if numbers is None or each.start in numbers])


def _pushed(blocks: BlockProtocol[Any], numbers: range, pushed: values.Pushed | None) -> list[object]:
    if pushed is None:
        return [_apart(blocks, numbers)]
    answer = PushAnswered(pushed.outcome.name, pushed.version, pushed.having, pushed.follows, pushed.is_ready)
    return [answer, *_effects(pushed.effects)]


def _viewed(taken: ViewTaken[Any]) -> list[object]:
    found: list[object] = [taken.reply]
    for span, effects in taken.effects:
        found += [{"Span": span.numbers.start}, *_effects(effects)] if effects else []
    return found


class RecordedBlocks(BlockProtocol[Span]):
    """Records what happens to it; arguments as of ``block_protocol``."""

    def __init__(
        self,
        recorder: Recorder,
        pserver: tuple[int, int],
        spans: Sequence[Span],
        mode: Mode,
        guard: AbstractContextManager[object],
    ) -> None:
        super().__init__(spans, mode, guard)
        self._now = recorder.now
        self._recorder = recorder.core("blocks")
        #: Inside those of the spans, outside the guard: what is decided is recorded before anything else is decided.
        self._order = threading.RLock()
        #: Splits within another event are a part of it.
        self._depth = 0
        begun = [(span.numbers.start, len(span.numbers)) for span in spans]
        whole = [span.numbers.start for span in spans if span.is_copied_whole]
        self._record(BlocksBegun(*pserver, begun, mode.to_json(), whole))

    def _record(self, event: _Event, effects: Sequence[object] = ()) -> None:
        self._recorder.record(self._now(), event, effects)

    def prepare(self, span: Span, push: Push, base_version: int, *, has_gradient: bool) -> Needs:
        with self._order:
            needs = super().prepare(span, push, base_version, has_gradient=has_gradient)
            if needs.copy is not None:
                event = PushPrepared(span.numbers.start, push, base_version, has_gradient)
                self._record(event, _effects([needs.copy]))
        return needs

    def push(self, span: Span, push: Push, base_version: int, *, has_gradient: bool) -> values.Pushed | None:
        event = BlocksPushed(span.numbers.start, push, base_version, has_gradient)
        with self._order:
            self._depth += 1
            try:
                pushed = super().push(span, push, base_version, has_gradient=has_gradient)
            except Exception as error:
                self._recorder.raised(self._now(), event, error)
                raise
            finally:
                self._depth -= 1
            self._record(event, _pushed(self, span.numbers, pushed))
        return pushed

    def split(self, span: Span, into: Sequence[range]) -> None:
        with self._order:
            was_split = span.is_split
            super().split(span, into)
            if span.is_split and not was_split and not self._depth:
                self._record(SpanSplit(span.numbers.start, [(part.start, len(part)) for part in into]))

    def initialized(self, number: int, election: int) -> None:
        with self._order:
            super().initialized(number, election)
            self._record(FirstValuesTaken(number, election))

    def take_view(self, request: ViewRequest) -> ViewTaken[Span]:
        with self._order:
            try:
                taken = super().take_view(request)
            except Exception as error:
                self._recorder.raised(self._now(), ViewCame(request), error)
                raise
            self._record(ViewCame(request), _viewed(taken))
        return taken

    def begin_cut(self, cut: SnapshotCut) -> list[int]:
        with self._order:
            due = super().begin_cut(cut)
            self._record(CutBegun(cut.at_round), [Due(due)])
        return due

    def copy(self, span: Span, position: int) -> CopyBlocks | None:
        with self._order:
            copy = super().copy(span, position)
            if copy is not None:
                self._record(BlockCopied(span.numbers.start, position), _effects([copy]))
        return copy

    def end_cut(self, cut: SnapshotCut) -> AppliedBatches | None:
        with self._order:
            is_current = cut is self._cut
            applied = super().end_cut(cut)
            if is_current:
                self._record(CutOver(is_dropped=False))
        return applied

    def drop_cut(self, cut: SnapshotCut) -> None:
        with self._order:
            is_current = cut is self._cut
            super().drop_cut(cut)
            if is_current:
                self._record(CutOver(is_dropped=True))

    def seal(self, epochs: Iterable[tuple[int, int]]) -> None:
        known = list(epochs)
        with self._order:
            try:
                super().seal(known)
            except Exception as error:
                self._recorder.raised(self._now(), EpochsSealed(known), error)
                raise
            self._record(EpochsSealed(known))

    def restore(self, applied: AppliedBatches, blocks: Restored) -> None:
        with self._order:
            event = BlocksRestored(applied.encode(), dict(blocks))
            self._depth += 1
            try:
                super().restore(applied, blocks)
            finally:
                self._depth -= 1
            self._record(event, [_apart(self)])


def block_protocol(
    recorder: Recorder | None,
    pserver: tuple[int, int],
    spans: Sequence[Span],
    mode: Mode,
    guard: AbstractContextManager[object],
) -> BlockProtocol[Span]:
    """A protocol, which is recorded where there is something to record it.

    Args:
        recorder: Of the process.
        pserver: Its index and generation.
        spans: As of ``BlockProtocol``.
        mode: Likewise.
        guard: Likewise.
    """
    if recorder is None:
        return BlockProtocol(spans, mode, guard)
    return RecordedBlocks(recorder, pserver, spans, mode, guard)


class _PlainSpan(BlockSpan):
    """Blocks without values."""

    def parts(self, into: Sequence[range]) -> Sequence[Self]:
        return [type(self)(numbers, self.local_of(numbers), self.rounds) for numbers in into]


class _WholeSpan(_PlainSpan):
    """The same that is copied as one."""

    is_copied_whole = True


class BlocksPlayer:
    """A protocol to which recorded events happen."""

    def __init__(self) -> None:
        self._blocks: BlockProtocol[_PlainSpan] | None = None
        self._cut: SnapshotCut | None = None

    def play(self, _at: float, name: str, event: msgspec.Raw) -> Sequence[object]:
        """Let it happen; the effects."""
        if name not in _EVENTS:
            raise CorruptError(f"no event of a pserver's blocks: {name}")
        happened: Any = decode(event, _EVENTS[name])
        if isinstance(happened, BlocksBegun):
            self._blocks = _begun(happened)
            return ()
        if self._blocks is None:
            raise CorruptError("blocks that have not begun")
        return self._happens(self._blocks, happened)

    def _happens(self, blocks: BlockProtocol[_PlainSpan], event: Any) -> Sequence[object]:
        match event:
            case BlocksPushed(first, push, base, has_gradient):
                span = self._span(blocks, first)
                return _pushed(blocks, span.numbers, blocks.push(span, push, base, has_gradient=has_gradient))
            case PushPrepared(first, push, base, has_gradient):
                needs = blocks.prepare(self._span(blocks, first), push, base, has_gradient=has_gradient)
                return _effects([] if needs.copy is None else [needs.copy])
            case SpanSplit(first, into):
                blocks.split(self._span(blocks, first), [range(start, start + count) for start, count in into])
            case FirstValuesTaken(block, election):
                blocks.initialized(block, election)
            case ViewCame(request):
                return _viewed(blocks.take_view(request))
            case EpochsSealed(epochs):
                blocks.seal(epochs)
            case BlocksRestored(applied, restored):
                blocks.restore(AppliedBatches.decode(applied), restored)
                return [_apart(blocks)]
            case _:
                return self._copies(blocks, event)
        return ()

    def _copies(self, blocks: BlockProtocol[_PlainSpan], event: Any) -> Sequence[object]:
        match event:
            case CutBegun(at_round):
                self._cut = SnapshotCut(blocks.block_count, at_round)
                return [Due(blocks.begin_cut(self._cut))]
            case BlockCopied(first, position):
                copy = blocks.copy(self._span(blocks, first), position)
                return _effects([] if copy is None else [copy])
            case CutOver(is_dropped) if self._cut is not None:
                if is_dropped:
                    blocks.drop_cut(self._cut)
                else:
                    blocks.end_cut(self._cut)
        return ()

    @staticmethod
    def _span(blocks: BlockProtocol[_PlainSpan], first: int) -> _PlainSpan:
        span = blocks.span_of(first)
        if span is None:
            raise CorruptError(f"block {first} does not lie here")
        return span


def _begun(event: BlocksBegun) -> BlockProtocol[_PlainSpan]:
    mode = Mode.from_json(event.mode)
    spans: list[_PlainSpan] = []
    at = 0
    for first, count in event.spans:
        kind = _WholeSpan if first in event.copied_whole else _PlainSpan
        spans.append(kind(range(first, first + count), range(at, at + count), BlockRounds(mode)))
        at += count
    return BlockProtocol(spans, mode, nullcontext())
