"""Inputs and outputs of the task queue: settings, pieces, answers and effects.

Answers go to the requesting trainer. Effects go to the master, which logs them or acts on them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flightedl.errors import UsageError
from flightedl.messages.status import TaskCounts
from flightedl.messages.tasks import Assignment

_SEED_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """Settings of a queue.

    Args:
        task_count: Initial number of tasks; at least 1, or 0 with ``follow``.
        batch_counts: Function that returns the number of batches of a task: at least 1, always the same. Not stored.
        epochs: Number of passes over the data; None for endless training.
        seed: Seed of every epoch's order; for a stored queue, see ``TaskQueue.decode``.
        shuffle: False to assign tasks in their order.
        attempts_limit: Number of failures after which a piece is split.
        confirmations: Number of failures above the limit, reported by trainers that held nothing else, at which a
            single batch is quarantined; of losses of such trainers, twice as many.
        timeout_floor_s: Minimum timeout of a piece, once the average duration of tasks is known.
        timeout_factor: Timeout of a piece, as a multiple of the moving average of durations.
        stuck_after_s: Seconds without progress after which a piece is taken back while the average duration is unknown
            and, for data without a model, always.
        is_deduplicated: True if pservers or an evaluation count a repeated batch once. Only then may two trainers hold
            a piece at a time: idle trainers get copies of slow pieces near the end of an epoch, and slow pieces are
            taken back. False for data without a model.
        follow: True if tasks may be added; the last epoch then remains open until ``end_growth``.
        failed_limit: Maximum number of quarantined ranges per epoch; above it, no more tasks are assigned.
        stand_still_s: Seconds for which trainers may fail with nothing done in between, see ``blame``.
    """

    task_count: int
    batch_counts: Callable[[int], int]
    epochs: int | None = 1
    seed: int = 0
    shuffle: bool = False
    attempts_limit: int = 3
    confirmations: int = 2
    timeout_floor_s: float = 30.0
    timeout_factor: float = 5.0
    stuck_after_s: float = 900.0
    is_deduplicated: bool = True
    follow: bool = False
    failed_limit: int = 10_000
    stand_still_s: float = 600.0

    def __post_init__(self) -> None:
        if self.task_count < (0 if self.follow else 1):
            raise UsageError(
                f"the dataset has {self.task_count} tasks, so there is no data to train on. Check its files"
            )
        if self.epochs is not None and self.epochs < 1:
            raise UsageError(f"epochs is {self.epochs}, but must be at least 1, or None for endless training")
        if self.attempts_limit < 1 or self.confirmations < 0 or self.failed_limit < 0:
            raise UsageError("attempts_limit must be at least 1, confirmations and failed_limit at least 0")
        if min(self.timeout_floor_s, self.timeout_factor, self.stuck_after_s, self.stand_still_s) <= 0:
            raise UsageError("timeout_floor_s, timeout_factor, stuck_after_s and stand_still_s must be above 0")

    @property
    def shuffled_by(self) -> int | None:
        """The seed, below 2**64; None if the data is not shuffled."""
        return self.seed & _SEED_MASK if self.shuffle else None


@dataclass(frozen=True, slots=True)
class BatchRange:
    """Batches ``first_batch`` to ``end_batch`` (exclusive) of the task at a position in an epoch's order."""

    epoch: int
    position: int
    first_batch: int
    end_batch: int
    #: Number of batches of the complete task.
    batch_count: int
    #: Number of failures so far.
    failures: int = 0

    @property
    def is_complete_task(self) -> bool:
        return self.first_batch == 0 and self.end_batch == self.batch_count

    @property
    def size(self) -> int:
        return self.end_batch - self.first_batch


@dataclass(frozen=True, slots=True)
class Failure:
    """A trainer's failure at a piece."""

    error: str
    #: Cause: the ``fault`` of an error, empty if unknown, or "lost" if the process ended or the piece timed out.
    fault: str = ""
    #: Number of the failing batch within the task; None if unknown.
    batch: int | None = None
    #: Location in the user's code that raised the error; empty if there is none.
    place: str = ""


# --- answers ---


@dataclass(frozen=True, slots=True)
class TaskGiven:
    """A piece was assigned. If ``is_copy``, another trainer holds it too, and the first to finish it wins."""

    assignment: Assignment
    is_copy: bool = False


@dataclass(frozen=True, slots=True)
class NoTaskNow:
    """There is no piece for this trainer now, but there may be one later."""

    retry_after_s: float


@dataclass(frozen=True, slots=True)
class EpochsDone:
    """No task remains."""


@dataclass(frozen=True, slots=True)
class AlreadyDone:
    """The piece was already done: the report repeats an earlier one, or another trainer has finished the piece."""


# --- effects ---


@dataclass(frozen=True, slots=True)
class EpochFinished:
    """All tasks of ``epoch`` are done or failed. Emitted again when a reopened epoch has been finished again."""

    epoch: int


@dataclass(frozen=True, slots=True)
class FailedPiece:
    """A quarantined range of batches. They are not trained on in this epoch unless a user retries them."""

    epoch: int
    position: int
    task: int
    first_batch: int
    end_batch: int
    attempts: int
    trainer: str
    error: str


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A piece was quarantined."""

    piece: FailedPiece


@dataclass(frozen=True, slots=True)
class Expired:
    """A running piece has exceeded its timeout. It was taken back along with its trainer's backlog."""

    trainer: str
    assignment: Assignment
    #: Duration of the piece, its limit, and the settings that determine the limit.
    reason: str = ""


Effect = EpochFinished | Quarantined | Expired
Effects = tuple[Effect, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The report was accepted, and the piece is done."""

    effects: Effects = ()


# --- views ---


class Counts(TaskCounts, frozen=True, kw_only=True):
    """Numbers of tasks in the current epoch by state: todo + pending + done + failed = total.

    A split task is counted once, in the first of these states that any of its pieces has: pending, todo, failed, done.
    """

    epoch: int
    #: Number of ``todo`` tasks that have been assigned before.
    retries: int
    #: Number of tasks of earlier epochs that were reopened and are not done.
    reopened: int


@dataclass(frozen=True, slots=True)
class TaskBatches:
    """Batches of one task in one epoch, by state, as half-open ranges."""

    todo: tuple[tuple[int, int], ...]
    pending: tuple[tuple[int, int], ...]
    done: tuple[tuple[int, int], ...]
    failed: tuple[tuple[int, int], ...]
    dropped: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class FailedSelector:
    """A selection of quarantined batches. None matches everything."""

    epoch: int | None = None
    task: int | None = None
    batch: int | None = None
