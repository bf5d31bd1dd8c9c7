"""Interface between a shard and its two stores: ``dense`` for parameters, ``rows.store`` for embedding tables.

A shard decides under the lock of a span, and the span's store carries out the decision. A *span* consists of adjacent
blocks or buckets with the same history. A store splits and joins its spans together with the block protocol. The number
of a block determines its store.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import msgspec

from flightedl.domain.pserver.block_values import AddGradient, CopyBlocks, Needs, Split, Update
from flightedl.messages.parameters import Outcome
from flightedl.pserver.copier import Copier
from flightedl.pserver.rows.values import NO_ROWS, TableRows
from flightedl.wire.rows import OutgoingBlocks

S = TypeVar("S")


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


class Span(Protocol):
    """Values of adjacent blocks with the same history. Methods may be called only while holding ``lock``."""

    numbers: range
    is_split: bool
    lock: threading.Lock
    #: Start of each block, and end of the last one, in bytes on the wire; empty for buckets.
    offsets: Sequence[int]

    def get_ready(self, needs: Needs, received: Any) -> Any:
        """Allocate all memory that a push may need. Return ``received``, or a copy if it must outlive the message.

        Raises:
            MemoryError: There is not enough memory; nothing was changed.
        """
        ...

    def carry_out(self, effect: AddGradient | Update, received: Any, *, has_checksum: bool = False) -> None:
        """Change the values as decided by the protocol.

        Args:
            effect: The protocol's decision.
            received: Validated contents of the push; None if the effect has no push.
            has_checksum: True if the new values will be sent with a checksum.
        """
        ...

    def piece(
        self, numbers: range, version: int, outcome: Outcome, wanted: TableRows = NO_ROWS, *, is_for_many: bool = False
    ) -> OutgoingBlocks:
        """Return the values of some of the blocks, or rows. With ``is_for_many``, keep them for other readers."""
        ...

    def within(self, numbers: range, wanted: TableRows) -> TableRows: ...

    def cut(self, copies: Copier, copy: CopyBlocks, lead: int | None = None) -> None:
        """Copy blocks for a cut before they change. Raises MemoryError if some could not be copied."""
        ...

    def parts(self, into: Sequence[range], version: int) -> list[Self]:
        """Return a span for each range of blocks, with the corresponding values, which have this version."""
        ...


class Store(Protocol):
    """The spans of parameters, or the spans of tables. Each span has a lock. Parts of a split span share a lock."""

    #: Block number -> span. Unless the span's lock is held, the span may be split concurrently.
    spans: dict[int, Any]

    @property
    def size_bytes(self) -> int: ...

    def name_of(self, number: int) -> str: ...

    def span(self, number: int) -> Any:
        """Return the span of a block.

        Raises:
            StalePlacementError: Another pserver owns the block, or is about to own it.
            MessageError: The block is not on this pserver.
        """
        ...

    def adopt(self, span: Any) -> None:
        """Add a span of blocks that have arrived. The caller holds the locks of all spans."""
        ...

    def drop(self, numbers: range, version: int) -> None:
        """Remove adjacent blocks of one span with this version. The caller holds the locks of all spans."""
        ...

    def begin_restore(self) -> None: ...

    def restore(self, stored: Any) -> None:
        """Restore one record of a checkpoint. Must be called before the store is used.

        Raises:
            CorruptError: The record does not match the blocks, tables or optimizers.
        """
        ...

    @property
    def restored(self) -> Mapping[int, tuple[int, int]]: ...

    def finish_restore(self) -> None:
        """Complete a restore, after all records have been restored and the spans have been split."""
        ...


def split_span(store: Store, split: Split, version: int) -> None:
    """Split a store's span, which has this version, in the same way as the protocol. The caller holds the lock."""
    if len(split.into) > 1:
        span = store.spans[split.span]
        parts = span.parts(split.into, version)
        span.is_split = True
        store.spans.update((number, part) for part in parts for number in part.numbers)


def distinct(spans: Mapping[int, S]) -> list[S]:
    """Return each distinct span of a store, in the order of ``spans``."""
    return list(dict.fromkeys(spans.values()))
