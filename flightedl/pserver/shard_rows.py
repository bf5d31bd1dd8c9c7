"""What a pserver's rows of tables are asked, and what ``domain.pserver.blocks`` decides about it, carried out.

As ``shard``, whose rules and locks these are. What a message says about rows is about all buckets of the pserver; where
they are several spans, since they came from files of different histories, each span answers for its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import chain
from typing import NamedTuple

import numpy as np

from flightedl.domain.checkpoint.values import OrderNumber, SnapshotCommand
from flightedl.domain.consistency.modes import Mode
from flightedl.domain.consistency.rounds_values import Pull
from flightedl.domain.model.optimizers import Optimizer
from flightedl.domain.model.sharding import ShardPlan
from flightedl.domain.pserver.block_values import Push, Split
from flightedl.domain.pserver.block_values import Pushed as Decided
from flightedl.errors import BusyError, MessageError
from flightedl.formats.row_batches import TABLE, WAITING, StoredRows
from flightedl.messages.parameters import Outcome
from flightedl.pserver.changes import Changes
from flightedl.pserver.held import HeldBlocks
from flightedl.pserver.meter import Meter
from flightedl.pserver.rows.incoming import IncomingRows
from flightedl.pserver.rows.span import ReceivedRows, RowSpan
from flightedl.pserver.rows.stored import CutRows
from flightedl.pserver.rows.values import NO_ROWS, TableRows
from flightedl.recording.writer import Recorder
from flightedl.wire.parts import ReceivedBlocks
from flightedl.wire.rows import OutgoingBlocks

_NO_FILE = SnapshotCommand(OrderNumber(0, 0, 0), None, "")


class Wanted(NamedTuple):
    """Neighbouring blocks whose values somebody waits for, at or above a version."""

    blocks: range
    min_version: int
    #: Of buckets: the rows that are wanted with the version.
    rows: TableRows = NO_ROWS


class Pushed(NamedTuple):
    """What became of neighbouring rows: the answer, and what is still to come."""

    piece: OutgoingBlocks
    wanted: Wanted | None


class ShardRows(HeldBlocks):
    """The rows of one pserver, and what they are asked. Thread-safe.

    Args: as ``ShardState``.
    """

    def __init__(
        self,
        plan: ShardPlan,
        index: int,
        optimizer: Optimizer,
        mode: Mode,
        wire: str,
        on_lost: Callable[[str], None],
        recorder: Recorder | None,
        generation: int,
        meter: Meter,
        row_bytes: int = 0,
        *,
        shares_memory: bool = False,
    ) -> None:
        super().__init__(
            plan, index, optimizer, mode, wire, on_lost, recorder, generation, row_bytes, shares_memory=shares_memory
        )
        self.meter = meter
        self.changes = Changes()
        self._incoming_rows = IncomingRows(plan, index)
        #: Held by the one export that reads all rows.
        self._reading = threading.Lock()

    def lookup(self, part: ReceivedBlocks) -> Wanted:
        """Rows that somebody asks for, at or above a version.

        Raises:
            MessageError: not all buckets of this pserver, or what is asked of them makes no sense.
        """
        blocks, version, _, data, _ = part
        self._require_all_buckets(blocks)
        return Wanted(blocks, version, self._incoming_rows.asked(data).wanted)

    def _require_all_buckets(self, blocks: range) -> None:
        if blocks != self.buckets:
            raise MessageError(f"the buckets of a pserver, {self.buckets} here, come together, and not {blocks}")

    def push_to_rows(self, push: Push, part: ReceivedBlocks, pull: bool) -> Iterator[Pushed]:
        """A part that is of all buckets."""
        blocks, version, _, data, _ = part
        self._require_all_buckets(blocks)
        received = self._incoming_rows.pushed(data)
        number = blocks.start
        while number < blocks.stop:
            span = self._row_span(number)
            mine = received if span.numbers == blocks else received.within(span.buckets, self.tables)
            if (pushed := self._push_rows_of(push, span, version, mine, pull)) is not None:
                yield pushed
                number = span.numbers.stop

    def _push_rows_of(
        self, push: Push, span: RowSpan, base_version: int, received: ReceivedRows, pull: bool
    ) -> Pushed | None:
        """All buckets of a span; None: it was split meanwhile."""
        protocol, first, has_gradient = self._protocol, span.numbers.start, len(received.gradients) > 0
        with span.lock:
            self._soundness.require()
            if span.is_split:
                return None
            with self._deciding:
                needs = protocol.prepare(first, push, base_version, has_gradient=has_gradient)
            try:
                for copy in needs.copies:
                    self._copy(span, copy)
                received = span.get_ready(needs, received)
            except MemoryError:
                raise BusyError(f"pserver {self._index} has no memory left for a gradient of rows") from None
            with self._soundness:
                with self._deciding:
                    decided = protocol.push(first, push, base_version, has_gradient=has_gradient)
                if isinstance(decided, Split):
                    self._split(decided, protocol.version(first))
                    return None
                self._carry_out(span, decided.effects, received)
                self.meter.updates(decided.effects, base_version, push.member)
            if decided.is_news:
                self.changes.has_news = True
            return self._answer_of_rows(span, decided, received, pull)

    @staticmethod
    def _answer_of_rows(span: RowSpan, decided: Decided, received: ReceivedRows, pull: bool) -> Pushed:
        """What became of a push to all buckets of a span, with the rows that are wanted if they can leave."""
        numbers, outcome = span.numbers, decided.outcome
        if outcome is Outcome.PARTLY_APPLIED:
            having = np.frombuffer(decided.having, np.uint8)
            return Pushed(OutgoingBlocks(numbers, decided.version, outcome, having, ()), None)
        if pull and decided.is_ready:
            return Pushed(span.piece(decided.version, outcome, received.wanted), None)
        wanted = None
        if pull and decided.follows is not None:
            # What was received is gone when the round closes.
            wanted = Wanted(numbers, decided.follows, received.wanted.copy())
        return Pushed(OutgoingBlocks(numbers, decided.version, outcome, None, ()), wanted)

    def all_rows(self, table: int) -> Iterator[StoredRows]:
        """Yield the rows of a table as they are when the first of them are taken.

        Only without checkpoints, which read behind the changes of rows in the same way.

        Raises:
            BusyError: Another caller reads a table, or there is no memory for what changes meanwhile; try again.
        """
        if not self._reading.acquire(blocking=False):
            raise BusyError(f"pserver {self._index} is being read for another export")
        cuts: list[CutRows] = []
        try:
            for span in self.row_spans():
                with span.lock:
                    self._soundness.require()
                    cuts.append(CutRows(span, self._protocol.version(span.numbers.start), 0, _NO_FILE, is_base=True))
            for rows in chain.from_iterable(cut.stored() for cut in cuts):
                if rows.table == table and rows.kind not in {TABLE, WAITING}:
                    yield rows
        except MemoryError:
            raise BusyError(f"pserver {self._index} has no memory left to export a table") from None
        finally:
            for cut in cuts:
                cut.drop()
            self._reading.release()

    def read_rows(self, wanted: Wanted, member: int) -> tuple[list[OutgoingBlocks], list[Wanted]]:
        pieces: list[OutgoingBlocks] = []
        rest: list[Wanted] = []
        number = wanted.blocks.start
        while number < wanted.blocks.stop:
            span = self._row_span(number)
            mine = ReceivedRows(wanted=wanted.rows)
            if span.numbers != wanted.blocks:
                mine = mine.within(span.buckets, self.tables)
            with span.lock:
                self._soundness.require()
                if span.is_split:
                    continue
                state = self._protocol.pull(number, member, wanted.min_version)
                present = self._protocol.version(number)
                if state is Pull.WAIT:
                    rest.append(Wanted(span.numbers, wanted.min_version, mine.wanted))
                elif state is Pull.NOT_MEMBER:
                    pieces.append(OutgoingBlocks(span.numbers, present, Outcome.NOT_MEMBER, None, ()))
                else:
                    pieces.append(span.piece(present, Outcome.NONE, mine.wanted))
            number = span.numbers.stop
        return pieces, rest
