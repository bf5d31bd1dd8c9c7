"""Values that a shard exchanges with its two stores: ``dense`` for parameters, ``rows`` for embedding tables.

A shard decides under the lock of a span, and the span's store carries out the decision. A *span* consists of adjacent
blocks or buckets with the same history. A store splits and joins its spans together with the block protocol. The number
of a block determines its store. ``array_span.ArraySpan`` describes the methods that both kinds of spans have. They may
be called only while holding the span's lock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from flightedl.domain.pserver.block_values import Split
from flightedl.rowstore.values import NO_ROWS, TableRows
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


def split_span(spans: dict[int, Any], split: Split, version: int) -> None:
    """Split a store's span, which has this version, in the same way as the protocol. The caller holds its lock."""
    if len(split.into) > 1:
        span = spans[split.span]
        parts = span.parts(split.into, version)
        span.is_split = True
        spans.update((number, part) for part in parts for number in part.numbers)


def distinct(spans: Mapping[int, S]) -> list[S]:
    """Return each distinct span of a store, in the order of ``spans``."""
    return list(dict.fromkeys(spans.values()))
