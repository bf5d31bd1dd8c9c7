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
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from queue import Empty
from typing import Any, Protocol

import pyarrow as pa

from flightedl.client.data.read_queue import READ_AHEAD_MB, KeptBytes, ReadQueue, read_in_time
from flightedl.client.data.readers import Result, Transforming
from flightedl.client.probe import DATA, SCRIPT
from flightedl.client.waiting import Waiting
from flightedl.domain.groups.plan import BEGINNING, EpochEnd, Position, Round, RoundPlan
from flightedl.domain.groups.token import Token, decode, encode, require_same_data
from flightedl.errors import UsageError
from flightedl.formats.dataset_spec import batch_schema_of
from flightedl.formats.indices import Indices
from flightedl.messages.declarations import DeclaredDataset

_log = logging.getLogger(__name__)

_CLOSE_S = 2.0
#: Maximum number of uncommitted batches, which are kept in memory.
_UNCOMMITTED_LIMIT = 1000
_KEY = "flightedl_data"
#: Rank 0 logs a warning if it finds that more than this fraction of the records was decoded more than once.
_DECODED_TWICE = 0.05


#: A round with its batch, or with the error that reading it raised.
Item = tuple[Round, pa.RecordBatch | Exception] | EpochEnd | None


class Attendance(Protocol):
    """Membership of this rank in the current start of its group."""

    def begin(self, token: str, position: str) -> str:
        """Report the token that this rank has loaded (empty if none). Return the token that all ranks must use."""

    def kept(self, step: Round) -> Round:
        """Return this rank's share of the round, without the excluded records."""

    def take(self, at: int, step: Round) -> None:
        """Record that this rank starts a round. ``at`` is the number of records before the round, over all epochs.

        Raises:
            FencedError: this start of the group is over.
        """

    def finish(self) -> None:
        """Record that this rank has reached the end of the data."""


class GroupDataset:
    """Data of a group of ranks that train one model together.

    Args:
        declared: The dataset.
        data: Digest of the files and tasks.
        plan_from: Returns this rank's plan that begins at a position.
        seed: Seed of the plan, which is part of every token.
        read: Reads a round of this rank.
        rank: This rank.
        attendance: This rank's membership in the group's starts.
        batch_done: Called with a batch's number of records when the next batch is requested.
        turn: Called with the loop's next phase: ``DATA`` (waiting) or ``SCRIPT``.
        waiting: Begins a wait of the user's thread.
        trouble_of_files: Returns the cause of a wait for files; empty if there is none.
        explicit_commit: True if ``state_dict`` includes only the rounds for which ``commit`` was called.
        read_ahead_bytes: Memory limit of the ``ReadQueue``.
        transforming: Transforms all batches.
        place: Returns the location of a round's records.
    """

    def __init__(
        self,
        declared: DeclaredDataset,
        data: str,
        plan_from: Callable[[Position], RoundPlan],
        seed: int | None,
        read: Callable[[Round], pa.RecordBatch],
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
        place: Callable[[Round], str] = str,
    ) -> None:
        self._declared = declared
        self._data = data
        self._plan_from = plan_from
        self._seed = seed
        self._read = read
        self._rank = rank
        self._attendance = attendance
        self._batch_done = batch_done
        self._turn = turn
        self._waiting = waiting
        self._trouble_of_files = trouble_of_files
        self._explicit_commit = explicit_commit
        self._transforming = transforming or Transforming()
        self._place = place
        self._has_begun = False
        self._is_over = False
        self._loaded: Token | None = None
        #: Follows the rounds that count.
        self._counted = plan_from(BEGINNING)
        #: Uncommitted rounds, oldest first.
        self._uncommitted: deque[pa.RecordBatch] = deque()
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
        """Number of records yielded, left out and repeated in the last complete epoch; None if no epoch is complete."""
        return self._summary

    @property
    def is_over(self) -> bool:
        """True if a loop has yielded every round of every epoch."""
        return self._is_over

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self.rounds()

    def rounds(self) -> Iterator[pa.RecordBatch]:
        """Yield one batch per round until all epochs are done. Every rank gets the same number of batches.

        After ``break``, a new loop continues with the next round.

        Raises:
            UsageError: an earlier loop has yielded all rounds, or the ranks have loaded different positions.
            DataError: a file cannot be read.
        """
        if self._is_over:
            epochs = self._declared.declaration.epochs
            raise UsageError(
                f"this loop has received all rounds of all epochs ({epochs}): one loop covers them all, see epochs="
            )
        return self._rounds()

    def _rounds(self) -> Iterator[pa.RecordBatch]:
        if not self._has_begun:
            self._begin()
        while (item := self._next_item()) is not None:
            if isinstance(item, EpochEnd):
                self._end_epoch(item)
                continue
            step, batch = item
            self._attendance.take(step.epoch * self.record_count + step.records, step)
            if isinstance(batch, Exception):
                raise batch
            self._handed_out, self._row_count = step, batch.num_rows
            if self._explicit_commit:
                self._require_commits()
                self._uncommitted.append(batch)
            else:
                self._count_round()
            self._turn(SCRIPT)
            yield batch
            self._turn(DATA)
            self._handed_out = None
            self._batch_done(batch.num_rows)
        self._is_over = True
        self._attendance.finish()
        self.close()

    def state_dict(self) -> dict[str, str]:
        """Return the position after the committed rounds, which is the same on every rank. Save it with the model.

        By default, all rounds that the loop has yielded are committed, including the current one. With
        ``explicit_commit``, only rounds for which ``commit`` was called are committed.
        """
        return {_KEY: encode(Token(self._data, self._seed, self._counted.position()))}

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
        require_same_data(token, self._data, self._seed)
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
        places = (place for place, each in enumerate(self._uncommitted) if batch is None or each is batch)
        place = next(places, None)
        if place is None:
            raise UsageError("this batch is not one of the loop's batches that are not committed")
        for _ in range(place + 1):
            self._uncommitted.popleft()
            self._count_round()

    def close(self) -> None:
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

        while not self._stopping.is_set() and (step := plan.next()) is not None:
            if isinstance(step, EpochEnd):
                in_order(step)
                continue
            try:
                batch = self._read(self._attendance.kept(step))
                transforming.put(batch, partial(self._place, step), partial(deliver, step))
            except Exception as error:  # noqa: BLE001 - raised in the user's thread, at its round
                in_order((step, error))
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

    def _count_round(self) -> None:
        while isinstance(self._counted.next(), EpochEnd):
            pass

    def _end_epoch(self, end: EpochEnd) -> None:
        self._summary = end
        # Reading indices costs nothing, and no element is read twice.
        is_decoded = self._declared.declaration.format != Indices.name
        twice = end.decoded / max(end.records, 1) - 1 if is_decoded else 0.0
        if self._rank == 0 and (end.left_out or end.repeated or twice > _DECODED_TWICE):
            _log.warning(
                "epoch %d is over: the ranks got %d records in %d rounds left_out=%d repeated=%d decoded_twice=%.0f%%",
                end.epoch + 1,
                end.records,
                end.rounds,
                end.left_out,
                end.repeated,
                100 * twice,
            )
