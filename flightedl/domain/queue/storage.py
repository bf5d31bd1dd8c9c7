"""A task queue in its stored form, as JSON.

Rules:

* There are two documents. The *dispatch* document changes with every assignment. It contains a fixed part, each
  trainer's name once, and about 30 bytes per row. Consecutive tasks form one row if they were assigned together, or if
  they are waiting (see ``backlog``, ``waiting``).
* The *failures* document changes only when a piece is quarantined, retried or dropped, or when old sizes of epochs move
  to it. The dispatch document contains the serial number of the failures document, which reveals documents that do not
  belong together.
* Times are not stored, because they are meaningless in another process.
* A document with an unknown version, an unknown field or a missing field raises CorruptError.
* All invariants of a restored queue are checked before the queue is used.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, TypeVar

import msgspec

from flightedl.domain.exactly_once.intervals import IntervalSet
from flightedl.domain.queue.backlog import Holder, Pending
from flightedl.domain.queue.blame import Place, Testimony
from flightedl.domain.queue.failed import BatchTable
from flightedl.domain.queue.fair_share import HOLDING_CEILING
from flightedl.domain.queue.order import EpochSizes
from flightedl.domain.queue.seeds import EpochSeeds
from flightedl.domain.queue.state import QueueState
from flightedl.domain.queue.values import BatchRange, FailedPiece
from flightedl.errors import CorruptError, UsageError
from flightedl.messages.decoding import from_json

VERSION = 4

Natural = Annotated[int, msgspec.Meta(ge=0)]


class _Document(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    version: Natural


class HeldDocument(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The backlog of a trainer's registration."""

    generation: Natural
    #: Rows as in ``backlog``. A piece with two holders is in the rows of both.
    rows: list[list[Natural]]


class DispatchDocument(_Document, kw_only=True):
    """Counters of the queue, and its open tasks."""

    #: (first epoch, seed or None), see ``seeds``.
    seeds: list[tuple[Natural, Natural | None]]
    revision: Natural
    epoch: Natural
    cursor: Natural
    next_attempt: Natural
    #: Recent sizes of epochs, as in ``order``: (first epoch, base, size).
    sizes: list[tuple[Natural, Natural, Natural]]
    growth_ended: bool = False
    #: Trainer -> its backlog, which is never empty.
    held: dict[str, HeldDocument] = {}
    #: Waiting complete tasks, as (epoch, start, end, failures).
    runs: list[tuple[Natural, Natural, Natural, Natural]] = []
    #: Other waiting pieces, as (epoch, position, first batch, end batch, failures).
    parts: list[tuple[Natural, Natural, Natural, Natural, Natural]] = []
    #: Witnesses against suspect pieces, as in ``blame``.
    witnesses: list[tuple[Place, list[Testimony]]] = []
    #: Finished pieces of tasks with other, open pieces: (epoch, position, attempts).
    finished_parts: list[tuple[Natural, Natural, list[Natural]]] = []
    #: Positions of tasks that must be done even though the job is stopped, as (epoch, ``IntervalSet.encode``).
    due: list[tuple[Natural, bytes]] = []
    average_s: float | None = None
    average_count: Natural = 0
    copies: Natural = 0
    failures_serial: Natural = 0


class FailuresDocument(_Document, kw_only=True):
    """Data that rarely changes: quarantined batches, and old sizes of epochs."""

    serial: Natural
    #: (epoch, position, first batch, end batch, …).
    failed: list[list[Natural]] = []
    dropped: list[list[Natural]] = []
    details: list[FailedPiece] = []
    forgotten: Natural = 0
    #: Older sizes of epochs, in the same form as the recent ones.
    sizes: list[tuple[Natural, Natural, Natural]] = []


class QueueDocument(_Document, kw_only=True):
    """Both documents in one."""

    dispatch: msgspec.Raw
    failures: msgspec.Raw


Document = TypeVar("Document", bound=_Document)


def _decoded(data: bytes | msgspec.Raw, kind: type[Document]) -> Document:
    """Decode a document.

    Raises:
        CorruptError: see the module's rules.
    """
    try:
        document = from_json(data, kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptError(f"the stored task queue cannot be read: {str(error)[:200]}") from None
    if document.version != VERSION:
        raise CorruptError(
            f"the stored task queue has version {document.version}, but this flightedl reads version {VERSION}. "
            "Use the flightedl that wrote it, or begin a new job"
        )
    return document


#: Attributes with the same names in the state and in the dispatch document.
_COUNTERS = (
    *("revision", "epoch", "cursor", "next_attempt"),
    *("growth_ended", "average_s", "average_count", "copies"),
)
#: (epoch, position, first batch, end batch, failures)
Row = tuple[int, int, int, int, int]


def encode(state: QueueState) -> bytes:
    """Return both documents as one."""
    dispatch, failures = encode_parts(state)
    return msgspec.json.encode(
        QueueDocument(version=VERSION, dispatch=msgspec.Raw(dispatch), failures=msgspec.Raw(failures))
    )


def encode_parts(state: QueueState) -> tuple[bytes, bytes]:
    """Return (dispatch document, failures document)."""
    document = DispatchDocument(
        version=VERSION,
        seeds=state.seeds.rows,
        sizes=state.sizes.recent,
        held={
            trainer: HeldDocument(backlog.generation, backlog.rows)
            for trainer, backlog in sorted(state.pending.backlogs().items())
        },
        runs=state.waiting.runs,
        parts=[_row(piece) for piece in state.waiting.pieces],
        witnesses=state.blame.rows(state.suspects()),
        finished_parts=[(*place, attempts) for place, attempts in state.finished_parts.items()],
        due=[(epoch, positions.encode()) for epoch, positions in state.due.items()],
        failures_serial=state.failed.serial,
        **{name: getattr(state, name) for name in _COUNTERS},
    )
    return msgspec.json.encode(document), _encode_failures(state)


def _row(piece: BatchRange) -> Row:
    return piece.epoch, piece.position, piece.first_batch, piece.end_batch, piece.failures


def _encode_failures(state: QueueState) -> bytes:
    failed = state.failed
    if failed.encoded is None or failed.encoded[0] != failed.serial:
        document = FailuresDocument(
            version=VERSION,
            serial=failed.serial,
            failed=failed.failed.rows,
            dropped=failed.dropped.rows,
            details=failed.details,
            forgotten=failed.forgotten,
            sizes=state.sizes.older,
        )
        failed.encoded = (failed.serial, msgspec.json.encode(document))
    return failed.encoded[1]


def restore(state: QueueState, data: bytes, failures: bytes | None, *, may_reseed: bool) -> None:
    """Fill a new ``state`` from its documents. ``data`` contains both if ``failures`` is None.

    If ``may_reseed`` is true, epochs that have not begun get the seed in the settings.

    Raises:
        CorruptError: the documents cannot be read, or do not belong together.
        UsageError: the documents have another dataset, seed or shuffling.
    """
    if failures is None:
        dispatch, failed = _both_of(data)
    else:
        dispatch = _decoded(data, DispatchDocument)
        failed = _decoded(failures, FailuresDocument)
    if dispatch.failures_serial != failed.serial:
        raise CorruptError("the stored task queue and its list of failures were not stored together")
    _restore_counters(state, dispatch, failed)
    if may_reseed and state.seeds.last != state.settings.shuffled_by:
        state.seeds.change(state.first_unbegun_epoch, state.settings.shuffled_by)
    _check_settings(state, dispatch)
    try:
        _restore_failures(state, failed)
        _restore_pieces(state, dispatch)
    except (ValueError, IndexError) as error:
        raise CorruptError(f"the stored task queue is inconsistent: {error}") from None


def _both_of(data: bytes) -> tuple[DispatchDocument, FailuresDocument]:
    both = _decoded(data, QueueDocument)
    return _decoded(both.dispatch, DispatchDocument), _decoded(both.failures, FailuresDocument)


def progress_of(queue: bytes) -> tuple[int, int, int]:
    """Return (epoch, number of done or failed tasks, number of tasks) for the last epoch that a stored queue began.

    Raises:
        CorruptError: ``queue`` is not an output of ``encode``.
    """
    dispatch, failures = _both_of(queue)
    sizes = EpochSizes(dispatch.sizes, failures.sizes)
    epoch = dispatch.epoch if dispatch.cursor or not dispatch.epoch else dispatch.epoch - 1
    total = sizes.find(epoch)[1]
    held = [(row[0], row[1], row[1] + row[2]) for each in dispatch.held.values() for row in each.rows]
    parts = [(row[0], row[1], row[1] + 1) for row in dispatch.parts]
    spans = [*held, *parts, *(row[:3] for row in dispatch.runs)]
    waiting = {position for place, start, end in spans if place == epoch for position in range(start, end)}
    begun = dispatch.cursor if epoch == dispatch.epoch else total
    return epoch, begun - len(waiting), total


def is_over(dispatch: bytes, epochs: int | None) -> bool:
    """True if a stored queue was done: none of the tasks in ``epochs`` epochs is open.

    Raises:
        CorruptError: ``dispatch`` is not a dispatch document.
    """
    document = _decoded(dispatch, DispatchDocument)
    is_open = document.held or document.runs or document.parts or not document.growth_ended
    return epochs is not None and document.epoch >= epochs and not is_open


def has_failed(failures: bytes) -> bool:
    """True if a stored queue has quarantined batches, which can be retried. Raises the same error as ``is_over``."""
    return bool(_decoded(failures, FailuresDocument).failed)


def _check_settings(state: QueueState, document: DispatchDocument) -> None:
    settings = state.settings
    if state.seeds.last != settings.shuffled_by:
        raise UsageError(
            f"the stored task queue is {_shuffled(state.seeds.last)}, but the dataset is declared as "
            f"{_shuffled(settings.shuffled_by)}. Declare it as before, or begin a new job"
        )
    known = state.sizes.task_count
    if settings.task_count < known or (settings.task_count > known and not settings.follow):
        raise UsageError(
            f"the stored task queue has {known} tasks, but the dataset now has {settings.task_count}: its files have "
            "changed. Restore the files, or begin a new job"
        )
    if not state.growth_ended and not settings.follow:
        raise UsageError("the stored task queue follows a growing dataset: declare it with follow, or begin a new job")
    epochs = settings.epochs
    if epochs is not None and (document.epoch > epochs or (document.epoch == epochs and document.cursor > 0)):
        raise UsageError(
            f"the stored task queue is in epoch {document.epoch + 1}, so epochs= must be more than {epochs}"
        )


def _shuffled(seed: int | None) -> str:
    return "not shuffled" if seed is None else f"shuffled by seed {seed}"


def _restore_counters(state: QueueState, document: DispatchDocument, failures: FailuresDocument) -> None:
    rows = [*failures.sizes, *document.sizes]
    rises = all(before[0] < after[0] and before[2] <= after[2] for before, after in pairwise(rows))
    if not document.sizes or not rises or rows[-1][0] > document.epoch or any(base > size for _, base, size in rows):
        raise CorruptError("the stored task queue has impossible numbers of tasks")
    seeds = document.seeds
    rises = all(before[0] < after[0] for before, after in pairwise(seeds))
    if not seeds or seeds[0][0] != 0 or not rises or seeds[-1][0] > document.epoch + 1:
        raise CorruptError("the stored task queue has impossible seeds of its epochs")
    for name in _COUNTERS:
        setattr(state, name, getattr(document, name))
    state.sizes = EpochSizes(document.sizes, failures.sizes)
    state.seeds = EpochSeeds(seeds)


def _restore_pieces(state: QueueState, document: DispatchDocument) -> None:
    _restore_held(state, document)
    for epoch, start, end, failures in document.runs:
        if not start < end:
            raise CorruptError("the stored task queue has an empty run")
        state.waiting.put_run(epoch, start, end, failures)
    for row in document.parts:
        state.waiting.put(_piece(state, row))
    state.blame.restore(document.witnesses)
    state.due = {epoch: IntervalSet.decode(positions) for epoch, positions in document.due}
    state.finished_parts = {(epoch, position): attempts for epoch, position, attempts in document.finished_parts}


def _restore_held(state: QueueState, document: DispatchDocument) -> None:
    holds = [
        (Holder(trainer, attempt, held.generation), piece, done)
        for trainer, held in document.held.items()
        for row in held.rows
        for attempt, piece, done in _pieces_of(state, row)
    ]
    if len({holder.attempt for holder, _, _ in holds}) != len(holds):
        raise CorruptError("the stored task queue contains an attempt twice")
    out: dict[tuple[int, int, int], Pending] = {}
    for holder, piece, done in sorted(holds, key=lambda hold: hold[0].attempt):
        place = (piece.epoch, piece.position, piece.first_batch)
        if (known := out.get(place)) is None:
            task = state.order(piece.epoch).at(piece.position)
            out[place] = state.pending.hand_out(piece, task, holder, None, done)
        elif known.piece == piece:
            state.pending.add_holder(known, holder, None)
        else:
            raise CorruptError(f"the stored task queue has two pieces at position {piece.position}")


def _pieces_of(state: QueueState, row: list[int]) -> list[tuple[int, BatchRange, list[tuple[int, int]]]]:
    """Return (attempt, piece, done ranges) for each piece in a row."""
    epoch, position, count, failures, attempt, *stretch = row
    if stretch:
        first, end, *done = stretch
        stretches = list(zip(done[::2], done[1::2], strict=True))
        return [(attempt, _piece(state, (epoch, position, first, end, failures)), stretches)]
    if not 1 <= count <= HOLDING_CEILING or epoch > state.epoch or position + count > state.begun(epoch):
        raise CorruptError(f"the stored task queue assigns {count} pieces from position {position} to one trainer")
    numbers = range(count)
    batch_counts = [state.batch_count(epoch, position + number) for number in numbers]
    return [
        (attempt + n, BatchRange(epoch, position + n, 0, batch_counts[n], batch_counts[n], failures), [])
        for n in numbers
    ]


def _restore_failures(state: QueueState, document: FailuresDocument) -> None:
    failed = state.failed
    failed.failed = BatchTable.from_rows(document.failed)
    failed.dropped = BatchTable.from_rows(document.dropped)
    failed.details = document.details
    failed.forgotten = document.forgotten
    failed.serial = document.serial


def _piece(state: QueueState, row: Row) -> BatchRange:
    epoch, position, first, end, failures = row
    if epoch > state.epoch or position >= state.begun(epoch):
        raise CorruptError(f"the stored task queue has a piece at position {position}, which has not been assigned")
    return BatchRange(epoch, position, first, end, state.batch_count(epoch, position), failures)
