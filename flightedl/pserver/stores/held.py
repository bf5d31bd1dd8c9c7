"""The stores of a shard, with their block protocol and locks.

Locks are acquired in this order: the lock for all spans; the spans' locks in ascending order; ``deciding``, which is
held while the protocol decides about shared state; the lock of the changes. No lock is held while waiting or sending.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TypeVar

from flightedl.domain.consistency.modes import Mode
from flightedl.domain.pserver.block_values import Extent, Split
from flightedl.domain.pserver.blocks import BlockProtocol
from flightedl.pserver.stores.array_span import ArraySpan
from flightedl.pserver.stores.dense import DenseStore
from flightedl.pserver.stores.interface import Store, distinct, replace_span
from flightedl.pserver.stores.row_span import RowSpan
from flightedl.pserver.stores.rows import RowStore
from flightedl.pserver.stores.soundness import Soundness
from flightedl.recording.recorded import recorded
from flightedl.recording.writer import Recorder

AnySpan = ArraySpan | RowSpan
S = TypeVar("S", ArraySpan, RowSpan, AnySpan)


class Held:
    """The stores of one pserver, and their locks. Thread-safe.

    Args:
        dense: Store of parameters.
        rows: Store of tables.
        first_bucket: Lowest number of a bucket. Blocks of parameters have lower numbers.
        mode: Initial mode of the blocks.
        soundness: Guard of the stores and the protocol.
        recorder: Recorder of the protocol's calls; None to disable recording.
        pserver: (index, generation) of the process, for recordings.
    """

    def __init__(
        self,
        dense: DenseStore,
        rows: RowStore,
        first_bucket: int,
        mode: Mode,
        soundness: Soundness,
        recorder: Recorder | None,
        pserver: tuple[int, int],
    ) -> None:
        self.dense = dense
        self.rows = rows
        self.first_bucket = first_bucket
        self.soundness = soundness
        self.deciding = threading.Lock()
        #: Held, together with the locks of all spans, while spans are added or removed. The parts of a split span share
        #: a lock.
        self._all = threading.Lock()
        extents = [
            *(Extent(span.numbers) for span in distinct(dense.spans)),
            *(Extent(span.numbers, is_copied_at_once=True) for span in distinct(rows.spans)),
        ]
        about = {"pserver": pserver[0], "generation": pserver[1]}
        self.protocol = recorded(recorder, about, BlockProtocol, extents, mode)

    def store(self, number: int) -> Store[AnySpan]:
        return self.rows if number >= self.first_bucket else self.dense

    def spans(self) -> list[AnySpan]:
        """Return all spans in ascending order."""
        return [*distinct(self.dense.spans), *distinct(self.rows.spans)]

    def split(self, split: Split, version: int) -> None:
        """Split a span, which has this version, in the same way as the protocol. The caller holds its lock."""
        if len(split.into) > 1 and split.span < self.first_bucket:
            replace_span(self.dense.spans, self.dense.spans[split.span].parts(split.into))
        elif len(split.into) > 1:
            replace_span(self.rows.spans, self.rows.spans[split.span].parts(split.into, version))

    @contextlib.contextmanager
    def locked(self, store: Store[S], number: int) -> Iterator[S]:
        """Hold the lock of a block's span and yield the span. Raises MessageError if the block is not here."""
        while True:
            span = store.span(number)
            with span.lock:
                self.soundness.require()
                # The span may have been split or released while this thread waited for the lock.
                if not span.is_split:
                    yield span
                    return

    @contextlib.contextmanager
    def all_locked(self) -> Iterator[None]:
        with self._all, contextlib.ExitStack() as held:
            for lock in dict.fromkeys((*(span.lock for span in self.spans()), self.rows.lock)):
                held.enter_context(lock)
            self.soundness.require()
            yield
