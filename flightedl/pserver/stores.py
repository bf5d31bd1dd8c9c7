"""The interface between a shard and its two stores: ``dense`` for parameters, ``rows.store`` for tables.

A shard decides, under the lock of a span, and its stores carry that out. A *span* holds neighbouring blocks, or
buckets, with the same history so far. A store splits and joins spans as the protocol of the blocks does. The number of
a block determines its store.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import msgspec

from flightedl.domain.pserver.block_values import AddGradient, CopyBlocks, Needs, ReleasedBlocks, Split, Update
from flightedl.messages.parameters import Outcome
from flightedl.pserver.copier import SnapshotCopier
from flightedl.pserver.rows.values import NO_ROWS, TableRows
from flightedl.wire.rows import OutgoingBlocks

S = TypeVar("S")


class Wanted(NamedTuple):
    """Neighbouring blocks whose values somebody waits for, at or above a version."""

    blocks: range
    min_version: int
    #: Of buckets: the rows that are wanted with the version.
    rows: TableRows = NO_ROWS


class Pushed(msgspec.Struct, frozen=True):
    """The answer to a push of neighbouring blocks, and the values that are still to follow."""

    piece: OutgoingBlocks
    wanted: Wanted | None = None


class Span(Protocol):
    """Values of neighbouring blocks with the same history. The holder of ``lock`` calls its methods."""

    numbers: range
    is_split: bool
    lock: threading.Lock
    #: Bytes of the wire where each block starts and the last one ends; empty for buckets.
    offsets: Sequence[int]

    def get_ready(self, needs: Needs, received: Any) -> Any:
        """Have all memory that a push may take; return ``received``, copied if it outlives the message.

        Raises:
            MemoryError: nothing was done.
        """
        ...

    def carry_out(self, effect: AddGradient | Update, received: Any, *, has_checksum: bool = False) -> None:
        """Change the values as the protocol decided.

        Args:
            effect: The decision.
            received: The checked content of the push; None if no push led to the effect.
            has_checksum: New values are about to be sent with their checksum.
        """
        ...

    def piece(
        self, numbers: range, version: int, outcome: Outcome, wanted: TableRows = NO_ROWS, *, is_for_many: bool = False
    ) -> OutgoingBlocks:
        """Return values of some of the blocks, or the wanted rows; kept if others want this version, too."""
        ...

    def within(self, numbers: range, wanted: TableRows) -> TableRows:
        """Return those of the rows that lie in these buckets."""
        ...

    def cut(self, copies: SnapshotCopier, copy: CopyBlocks, lead: int | None = None) -> None:
        """Copy blocks for a cut, before they change. MemoryError: the copies are incomplete."""
        ...

    def parts(self, into: Sequence[range], version: int) -> list[Self]:
        """Return a span for each stretch of blocks, with its part of the values, which have this version."""
        ...


class Store(Protocol):
    """The spans of one kind. Each holds its own lock; the parts of a span share it."""

    #: Number of a block -> its span. May be split at any moment unless its lock is held.
    spans: dict[int, Any]

    @property
    def size_bytes(self) -> int:
        """Memory of the values and of all that belongs to them."""
        ...

    def name_of(self, number: int) -> str:
        """Return the name of a block, for messages to users."""
        ...

    def span(self, number: int) -> Any:
        """Return the span of a block.

        Raises:
            StalePlacementError: another pserver owns the block now, or will.
            MessageError: there is no such block here.
        """
        ...

    def release(self, released: ReleasedBlocks) -> Any:
        """Remove the span of these blocks and return its values. The locks of all spans are held."""
        ...

    def prepared(self, released: ReleasedBlocks, values: Any) -> Any:
        """Return a span with the values of released blocks, which nobody sees before ``adopt``.

        Raises:
            CorruptError: the values are not those of such blocks in this job.
            BusyError, MemoryError: there is no room.
        """
        ...

    def adopt(self, span: Any) -> None:
        """Add a span that is ``prepared``. The locks of all spans are held."""
        ...

    def begin_restore(self) -> None:
        """Forget what was restored so far: it was of a checkpoint that is damaged."""
        ...

    def restore(self, stored: Any) -> None:
        """Take over a record of a checkpoint before anybody uses the store.

        Raises:
            CorruptError: it is of other blocks, tables or optimizers.
        """
        ...

    @property
    def restored(self) -> Mapping[int, tuple[int, int]]:
        """Number -> (version, updates), of blocks that were restored."""
        ...

    def finish_restore(self) -> None:
        """Complete what needs all records of a checkpoint; the spans are split by then."""
        ...


def split_span(store: Store, split: Split, version: int) -> None:
    """Split a span as the protocol has split its own, which has this version; its lock is held."""
    if len(split.into) > 1:
        span = store.spans[split.span]
        parts = span.parts(split.into, version)
        span.is_split = True
        store.spans.update((number, part) for part in parts for number in part.numbers)


def distinct(spans: Mapping[int, S]) -> list[S]:
    """Return all spans of a store as they are now, by position; ``spans``: the store's."""
    return list(dict.fromkeys(spans.values()))
