"""Data of a group. In each round, ``for batch in data`` either yields one batch on every rank or ends on all ranks.

``domain.groups.plan`` decides which records a rank gets. Every rank computes the same plan, so ranks need not
communicate. A reader thread follows the plan a few rounds ahead. A second plan follows the committed rounds, and its
position is what ``state_dict`` returns. By default, every yielded round is committed; with ``explicit_commit``, the
user commits rounds.

A position is valid only for the model that was trained up to it, so save both in one checkpoint and load them together.
The resumed training then uses every record once, regardless of batches that ranks received after the checkpoint.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from queue import Empty
from typing import Any, Protocol

import pyarrow as pa
from msgspec.structs import replace

from flightedl.client.data.losses import LostData
from flightedl.client.data.pieces import PieceReader
from flightedl.client.data.read_queue import READ_AHEAD_MB, KeptBytes, ReadQueue, read_in_time
from flightedl.client.data.readers import Result, Transforming
from flightedl.client.data.transforms import as_exception
from flightedl.client.probe import DATA, SCRIPT
from flightedl.client.waiting import Waiting
from flightedl.domain.groups.incarnation import without
from flightedl.domain.groups.plan import BEGINNING, EpochEnd, Order, Piece, Position, Round, RoundPlan
from flightedl.domain.groups.shuffling import Shuffling
from flightedl.domain.groups.token import Token, decode, encode, require_same_data
from flightedl.errors import UsageError
from flightedl.formats.dataset_spec import batch_schema_of
from flightedl.messages import groups
from flightedl.messages.declarations import DeclaredDataset
from flightedl.process.fork_guard import GUARD

_log = logging.getLogger(__name__)

_CLOSE_S = 2.0
#: Maximum number of uncommitted batches, which are kept in memory.
_UNCOMMITTED_LIMIT = 1000
#: Maximum number of uncommitted rounds that a rank reports with the one that it starts.
_REPORTED_LIMIT = 16
_KEY = "flightedl_data"

#: A round with its batch, or with the error that reading it raised.
Item = tuple[Round, pa.RecordBatch | Exception] | EpochEnd | None


class Attendance(Protocol):
    """Membership of this rank in the current start of its group."""

    def begin(self, token: str, position: str) -> str:
        """Report the token that this rank has loaded (empty if none). Return the token that all ranks must use."""

    @property
    def left_out(self) -> Sequence[groups.Piece]:
        """Records that no rank receives. The same on every rank."""

    def take(self, at: int, step: Round, uncommitted: Sequence[Round] = ()) -> bool:
        """Record that this rank starts a round. ``at`` is the number of records before the round, over all epochs.

        It may still be training on the ``uncommitted`` ones.

        Returns:
            False if the group has stopped before this round.

        Raises:
            FencedError: this start of the group is over.
        """

    def finish(self) -> None:
        """Record that this rank has reached the end of the data."""


class GroupDataset:
    """Data of a group of ranks that train one model together.

    Args:
        declared: The dataset.
        data: Digest of the files.
        plan_from: Returns this rank's plan that begins at a position.
        seed: Seed of the order, which is part of every token.
        shuffling: Settings of the order, which are part of every token.
        reader: Reads the rounds of this rank.
        rank: This rank.
        attendance: This rank's membership in the group's starts.
        batch_done: Called with a batch's number of records when the next batch is requested.
        turn: Called with the loop's next phase: ``DATA`` (waiting) or ``SCRIPT``.
        waiting: Begins a wait of the user's thread.
        trouble_of_files: Returns the cause of a wait for files; empty if there is none.
        explicit_commit: True if ``state_dict`` includes only the rounds for which ``commit`` was called.
        read_ahead_bytes: Memory limit of the ``ReadQueue``.
        transforming: Transforms all batches.
        mixed_chunks: Number of chunks that a global batch mixes.
        may_lose: True if the loop may end without an error although records were left out.
    """

    def __init__(
        self,
        declared: DeclaredDataset,
        data: str,
        plan_from: Callable[[Position], RoundPlan],
        seed: int | None,
        shuffling: Shuffling,
        reader: PieceReader,
        rank: int,
        attendance: Attendance,
        batch_done: Callable[[int], None],
        turn: Callable[[str], object],
        waiting: Callable[[], Waiting],
        trouble_of_files: Callable[[], str],
        *,
        explicit_commit: bool = False,
        read_ahead_bytes: int = READ_AHEAD_MB << 20,
        transforming: Transforming | None = None,
        mixed_chunks: int = 0,
        may_lose: bool = False,
    ) -> None:
        self._declared = declared
        self._data = data
        self._plan_from = plan_from
        self._seed = seed
        self._shuffling = shuffling
        self._pieces = reader
        self._read = reader.read
        self._rank = rank
        self._attendance = attendance
        self._batch_done = batch_done
        self._turn = turn
        self._waiting = waiting
        self._trouble_of_files = trouble_of_files
        self._explicit_commit = explicit_commit
        self._transforming = transforming or Transforming()
        self._mixed_chunks = mixed_chunks
        self._may_lose = may_lose
        #: Epoch -> the records to be skipped, as pieces of its order.
        self._excluded: dict[int, Collection[groups.Piece]] = {}
        #: Error that has ended a loop; None if none has. Every further loop, and the session's end, raise it.
        self.error: Exception | None = None
        #: Item from the queue that has not been counted yet.
        self._item: Item = None
        self._has_begun = False
        self._is_over = False
        self._loaded: Token | None = None
        #: Follows the rounds that count.
        self._counted = plan_from(BEGINNING)
        #: Uncommitted rounds, oldest first. This rank may still be training on them.
        self._uncommitted: deque[tuple[Round, pa.RecordBatch]] = deque()
        self._handed_out: Round | None = None
        self._row_count = 0
        self._summary: EpochEnd | None = None
        self._queue: ReadQueue[Item] = ReadQueue(read_ahead_bytes)
        self._stopping = threading.Event()
        self._reader: threading.Thread | None = None

    @property
    def schema(self) -> pa.Schema:
        """Arrow schema of the batches before ``transform`` (and before ``decode``)."""
        return batch_schema_of(self._declared)

    @property
    def record_count(self) -> int:
        """Number of records in one epoch, over all ranks."""
        return self._declared.record_count

    @property
    def task_count(self) -> int:
        """Number of tasks in one epoch, over all ranks."""
        return self._declared.task_count

    @property
    def epoch(self) -> int:
        """Epoch of the current batch, counted from 0.

        Raises:
            UsageError: no batch is current.
        """
        if self._handed_out is None:
            raise UsageError("no batch is current: read the epoch inside `for batch in data`")
        return self._handed_out.epoch

    @property
    def current(self) -> tuple[int, int] | None:
        """Number of records and epoch of the current batch; None if no batch is current."""
        return None if self._handed_out is None else (self._row_count, self._handed_out.epoch)

    @property
    def summary(self) -> EpochEnd | None:
        """Numbers of records of the last complete epoch, and memory of this rank; None if no epoch is complete."""
        return self._summary

    @property
    def is_over(self) -> bool:
        """True if a loop has yielded every round of every epoch."""
        return self._is_over

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self.rounds()

    def rounds(self) -> Iterator[pa.RecordBatch]:
        """Yield one batch per round until all epochs are done. Every rank gets the same number of batches.

        After ``break``, a new loop continues with the next round, and so does a loop inside another loop. After an
        error, no loop continues, because this rank would be a round behind the others.

        Raises:
            UsageError: an earlier loop has yielded all rounds, or the ranks have loaded different positions.
            DataError: a file cannot be read, or the data is over but records were left out (``on_lost``).
        """
        if self._is_over and self.error is None:
            epochs = self._declared.declaration.epochs
            raise UsageError(
                f"this loop has received all rounds of all epochs ({epochs}): one loop covers them all, see epochs="
            )
        return self._rounds()

    def _rounds(self) -> Iterator[pa.RecordBatch]:
        while (batch := self._next_round()) is not None:
            self._turn(SCRIPT)
            yield batch
            self._turn(DATA)
            self._handed_out = None
            self._batch_done(batch.num_rows)

    def _next_round(self) -> pa.RecordBatch | None:
        """Start the next round and return its batch, or None at the end of the data."""
        GUARD.check()
        if self.error is not None:
            raise self.error
        try:
            if not self._has_begun:
                self._begin()
            while not self._is_over:
                self._item = self._item or self._next_item()
                if isinstance(self._item, EpochEnd):
                    self._end_epoch(self._item)
                elif self._item is None or not self._starts(self._item[0]):
                    self._end()
                else:
                    return self._handed(*self._item)
                self._item = None
        except Exception as error:
            self.error = error
            raise
        return None

    def _starts(self, step: Round) -> bool:
        earlier = [each for each, _ in islice(self._uncommitted, _REPORTED_LIMIT)]
        return self._attendance.take(self._at(step), step, earlier)

    def _at(self, step: Round) -> int:
        # A mixture may have some more records than the number that the master knows.
        return step.epoch * self.record_count + min(step.records, self.record_count - 1)

    def _handed(self, step: Round, batch: pa.RecordBatch | Exception) -> pa.RecordBatch:
        if isinstance(batch, Exception):
            raise batch
        if self._explicit_commit:
            self._require_commits()
            self._uncommitted.append((step, batch))
        else:
            self._counted.count()
        self._item = None
        self._handed_out, self._row_count = step, batch.num_rows
        return batch

    def _end(self) -> None:
        self._is_over = True
        self._attendance.finish()
        self.close()
        if left_out := self._attendance.left_out:
            places = [
                self._pieces.place(Round(epoch, 0, 0, 0, Order(lanes, window), (Piece(*piece),)))
                for epoch, lanes, window, *piece in left_out
            ]
            count = sum(map(self._lost_in, {each[0] for each in left_out}))
            LostData(count, places=tuple(dict.fromkeys(places))).report(may_lose=self._may_lose)

    def state_dict(self) -> dict[str, str]:
        """Return the position after the committed rounds, which is the same on every rank. Save it with the model.

        By default, all rounds that the loop has yielded are committed, including the current one. With
        ``explicit_commit``, only rounds for which ``commit`` was called are committed.
        """
        return {_KEY: encode(Token(self._data, self._seed, self._counted.position(), self._shuffling))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position that ``state_dict`` returned. The number of ranks and the batch size may differ.

        Raises:
            UsageError: the position is damaged, belongs to other data or another seed, or the loop has begun.
        """
        if self._has_begun:
            raise UsageError("the loop over the data has begun: load its position before the first batch")
        if not isinstance(state, Mapping) or _KEY not in state:
            raise UsageError("this is not a position in flightedl's data: load the result of data.state_dict()")
        token = decode(state[_KEY])
        require_same_data(token, self._data, self._seed, self._shuffling)
        self._loaded = token
        self._counted = self._plan_from(token.position)

    def commit(self, batch: pa.RecordBatch | None = None) -> None:
        """Commit a round, so that ``state_dict`` includes it. Requires a dataset declared with ``explicit_commit``.

        Args:
            batch: A yielded batch, committed with all earlier ones. None for the oldest uncommitted batch.

        Raises:
            UsageError: the dataset was declared without ``explicit_commit``, or there is no such batch.
        """
        if not self._explicit_commit:
            raise UsageError("rounds count as they are handed out: to commit them, declare explicit_commit=True")
        places = (place for place, (_, each) in enumerate(self._uncommitted) if batch is None or each is batch)
        place = next(places, None)
        if place is None:
            raise UsageError("this batch is not one of the loop's batches that are not committed")
        for _ in range(place + 1):
            self._uncommitted.popleft()
            self._counted.count()

    def close(self) -> None:
        if GUARD.is_forked:
            return
        self._stopping.set()
        if self._reader is not None:
            # Do not wait for a transform in a reader process, because it may never return.
            self._reader.join(_CLOSE_S if self._transforming.has_readers else None)
        self._transforming.close()

    def _begin(self) -> None:
        text = "" if self._loaded is None else encode(self._loaded)
        agreed = self._attendance.begin(text, "" if self._loaded is None else str(self._loaded))
        if agreed != text:
            self.load_state_dict({_KEY: agreed})
        self._has_begun = True
        read_ahead = partial(self._read_ahead, self._plan_from(self._counted.position()))
        self._reader = threading.Thread(target=read_ahead, name="flightedl-reader", daemon=True)
        self._reader.start()

    def _read_ahead(self, plan: RoundPlan) -> None:
        kept, transforming = KeptBytes(), self._transforming

        def deliver(step: Round, result: Result) -> None:
            if isinstance(result, pa.RecordBatch):
                self._put((step, result), *kept.of(result))
            elif result is not None:
                self._put((step, result))

        def in_order(item: Item) -> None:
            transforming.put(None, str, lambda _: self._put(item))

        step: Round | EpochEnd | None = plan.next()
        count = 1
        while not self._stopping.is_set() and step is not None:
            if isinstance(step, EpochEnd):
                held, decoded = self._pieces.held_bytes, self._pieces.decoded_records
                in_order(replace(step, mixed_chunks=self._mixed_chunks, held_bytes=held, decoded_records=decoded))
                step = plan.next()
                continue
            steps: list[Round] = []
            while isinstance(step, Round) and len(steps) < count:
                steps.append(step)
                step = plan.next()
            # The first round is needed at once.
            count = min(2 * count, self._pieces.rounds_at_once(steps[0].record_count))
            batches = self._read([self._kept(each) for each in steps])
            for each in steps:
                try:
                    transforming.put(next(batches), partial(self._pieces.place, each), partial(deliver, each))
                except BaseException as error:  # noqa: BLE001 - raised in the user's thread, at its round
                    in_order((each, as_exception(error)))
                    return
        in_order(None)

    def _put(self, item: Item, new_bytes: int = 0, own_bytes: int = 0) -> None:
        self._queue.put_unless(self._stopping, item, new_bytes, own_bytes)

    def _next_item(self) -> Item:
        if self._queue.items:
            return self._queue.get(0.0)
        return read_in_time(self._queue.get, Empty, self._waiting(), self._trouble_of_files)

    def _require_commits(self) -> None:
        if len(self._uncommitted) == _UNCOMMITTED_LIMIT:
            raise UsageError(
                f"the last {_UNCOMMITTED_LIMIT:,} batches are not committed, and a restart would repeat them: "
                "call data.commit() after each step, or declare the data without explicit_commit"
            )

    def _kept(self, step: Round) -> Round:
        """Return this rank's part of a round, without the excluded records."""
        if self._attendance.left_out and step.epoch not in self._excluded:
            self._excluded[step.epoch] = self._pieces.excluded(self._attendance.left_out, step)
        return without(step, self._excluded.get(step.epoch, ()))

    def _lost_in(self, epoch: int) -> int:
        left_out = self._excluded.get(epoch)
        if left_out is None:
            left_out = [each for each in self._attendance.left_out if each[0] == epoch]
        return sum(end - first for *_, first, end in left_out)

    def _end_epoch(self, end: EpochEnd) -> None:
        lost = self._lost_in(end.epoch)
        self._summary = end = replace(end, records=end.records - lost, lost_records=lost)
        if self._rank == 0 and (end.left_out or end.repeated):
            _log.warning(
                "epoch %d is over: the ranks got %d records in %d rounds left_out=%d repeated=%d",
                end.epoch + 1,
                end.records,
                end.rounds,
                end.left_out,
                end.repeated,
            )
