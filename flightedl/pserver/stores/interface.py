"""Interface of a shard's two stores: ``dense`` for parameters, ``rows`` for embedding tables.

A shard decides under the lock of a span, and the span's store carries out the decision. A *span* consists of adjacent
blocks or buckets with the same history. A store splits and joins its spans together with the block protocol. The number
of a block determines its store. ``Span`` describes the methods that both kinds of spans have. They may be called only
while holding the span's lock.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from flightedl.domain.pserver.block_values import AddGradient, CopyBlocks, Needs, ReleasedBlocks, SpanPlace, Update
from flightedl.messages.parameters import Outcome
from flightedl.pserver.stores.array_span import BlockCopies, ReceivedArray
from flightedl.pserver.stores.row_span import ReceivedRows, RowCopies
from flightedl.rowstore.values import NO_ROWS, TableRows
from flightedl.wire.rows import OutgoingBlocks

S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)
Place = TypeVar("Place", bound=SpanPlace)
Content = TypeVar("Content", ReceivedArray, ReceivedRows)


class SpanCopies(BlockCopies, RowCopies, Protocol):
    """Receives the blocks and the rows of spans for a cut."""


class Span(Protocol[Content]):
    """Values of adjacent blocks with the same history: an ``ArraySpan`` or a ``RowSpan``. Guarded by ``lock``."""

    numbers: range
    is_split: bool
    lock: threading.Lock
    #: Start of each block, and end of the last one, in bytes on the wire; empty for buckets.
    offsets: Sequence[int]

    def get_ready(self, needs: Needs, received: Content) -> Content:
        """Allocate all memory that a push may need. Return ``received``, or a copy if it must outlive the message.

        Raises:
            MemoryError: There is not enough memory; nothing was changed.
        """

    def carry_out(self, effect: AddGradient | Update, received: Content) -> None:
        """Change the values as decided by the protocol. ``received`` is empty if the effect has no push."""

    def piece(self, numbers: range, version: int, outcome: Outcome, received: Content) -> OutgoingBlocks:
        """Return the current values of some of the blocks, as requested."""

    def cut(self, copies: SpanCopies, copy: CopyBlocks) -> None:
        """Copy blocks for a cut before they change. Raises MemoryError if some could not be copied."""


class Store(Protocol[S_co]):
    """All spans of one kind on a pserver: a ``DenseStore`` or a ``RowStore``."""

    def span(self, number: int) -> S_co:
        """Return the span of a block, which may be split concurrently. Raises the errors of ``DenseStore.span``."""

    def drop(self, released: ReleasedBlocks) -> None:
        """Remove adjacent blocks of one span. The caller holds the locks of all spans."""


class Wanted(NamedTuple):
    """A read of adjacent blocks at a minimum version."""

    blocks: range
    min_version: int
    #: Rows to read if the blocks are buckets.
    rows: TableRows = NO_ROWS


class Pushed(msgspec.Struct, frozen=True):
    """Answer to a push of adjacent blocks, and the read of values that must follow the answer."""

    piece: OutgoingBlocks
    wanted: Wanted | None = None


def replace_span(spans: dict[int, Place], parts: Sequence[Place]) -> None:
    """Replace a store's span with its parts."""
    spans[parts[0].numbers.start].is_split = True
    spans.update((number, part) for part in parts for number in part.numbers)


def distinct(spans: Mapping[int, S]) -> list[S]:
    """Return each distinct span of a store, in the order of ``spans``."""
    return list(dict.fromkeys(spans.values()))
