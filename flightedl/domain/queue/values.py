"""What goes into the task queue and what comes out of it: settings, assignments, answers, effects.

Answers are what the asking trainer is told. Effects are what the master has to do or log. Both are values; only an
event that makes no sense raises.
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
    """What stays the same while a master leads.

    Args:
        task_count: Tasks at the beginning; at least 1, or 0 with ``follow``.
        batch_counts: How many batches a task has: at least 1, always the same for the same task. Not stored.
        epochs: Passes over the data, None: endless.
        seed: Keys the dispatch order of every epoch; of a queue that is stored, see ``TaskQueue.decode``.
        shuffle: False: tasks are handed out in their order.
        attempts_limit: A piece that failed this often is narrowed down.
        confirmations: A single batch over the limit is quarantined when trainers that held nothing else reported this
            many more failures, or twice as many such trainers were lost. 0: at the limit.
        timeout_floor_s: A piece that runs is never taken back earlier, once a completion time is known.
        timeout_factor: A piece is taken back after this many times the moving average of completion times.
        stuck_after_s: While no completion time is known, a piece is taken back after so long without progress; of data
            alone always, however long tasks take on average.
        is_deduplicated: A batch that is done twice counts once, because pservers or an evaluation see to it. Only then
            may two trainers have a piece at a time: idle trainers get copies of the slowest pieces near the end of an
            epoch, and a slow piece is taken back. False for data alone, see ``stuck_after_s``.
        follow: Whether tasks may be added; the last epoch then stays open until ``end_growth``.
        failed_limit: More quarantined stretches than this in one epoch, and nothing is handed out any more.
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

    def __post_init__(self) -> None:
        if self.task_count < (0 if self.follow else 1):
            raise UsageError(f"the dataset has {self.task_count} tasks: there is nothing to train on; check its files")
        if self.epochs is not None and self.epochs < 1:
            raise UsageError(f"epochs is {self.epochs}, but must be at least 1, or None for endless training")
        if self.attempts_limit < 1 or self.confirmations < 0 or self.failed_limit < 0:
            raise UsageError("attempts_limit must be at least 1, confirmations and failed_limit at least 0")
        if min(self.timeout_floor_s, self.timeout_factor, self.stuck_after_s) <= 0:
            raise UsageError("task timeouts must be above 0: timeout_floor_s, timeout_factor and stuck_after_s")

    @property
    def shuffled_by(self) -> int | None:
        """The seed, below 2**64; None: nothing is shuffled."""
        return self.seed & _SEED_MASK if self.shuffle else None


@dataclass(frozen=True, slots=True)
class BatchRange:
    """Batches ``first_batch`` to ``end_batch`` (exclusive) of the task at one position of an epoch's order."""

    epoch: int
    position: int
    first_batch: int
    end_batch: int
    #: Batches of the whole task.
    batch_count: int
    #: How often it failed so far.
    failures: int = 0

    @property
    def is_whole(self) -> bool:
        return self.first_batch == 0 and self.end_batch == self.batch_count

    @property
    def size(self) -> int:
        return self.end_batch - self.first_batch


# --- answers ---


@dataclass(frozen=True, slots=True)
class TaskGiven:
    """Do this. ``is_copy``: another trainer is at it too, the first to finish wins."""

    assignment: Assignment
    is_copy: bool = False


@dataclass(frozen=True, slots=True)
class NoTaskNow:
    """Nothing for this trainer at the moment; something may come back."""

    retry_after_s: float


@dataclass(frozen=True, slots=True)
class EpochsDone:
    """Every task of every epoch is done or failed."""


@dataclass(frozen=True, slots=True)
class AlreadyDone:
    """The report was not needed: that work is done, by this report's first arrival or by another trainer."""


# --- effects ---


@dataclass(frozen=True, slots=True)
class EpochFinished:
    """Every task of ``epoch`` is done or failed. Comes again when a reopened epoch is finished again."""

    epoch: int


@dataclass(frozen=True, slots=True)
class FailedPiece:
    """A quarantined stretch of batches: not trained in this epoch unless somebody retries it."""

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
    """A piece failed for good; to be logged."""

    piece: FailedPiece


@dataclass(frozen=True, slots=True)
class Expired:
    """A trainer was at a piece for too long; its attempt is no longer current, nor are those that waited behind it."""

    trainer: str
    assignment: Assignment
    #: How long it ran, what the limit was, and which settings change it.
    reason: str = ""


Effect = EpochFinished | Quarantined | Expired
Effects = tuple[Effect, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The report was accepted: the piece is done."""

    effects: Effects = ()


# --- views ---


class Counts(TaskCounts, frozen=True, kw_only=True):
    """Tasks of the current epoch by state; todo + pending + done + failed = total.

    A narrowed task counts once: as pending, else todo, else failed, else done, by the first that any piece of it is.
    """

    epoch: int
    #: Of ``todo``: those that were handed out before.
    retries: int
    #: Tasks of earlier epochs that were reopened and are not done again yet.
    reopened: int


@dataclass(frozen=True, slots=True)
class TaskBatches:
    """The batches of one task of one epoch by state, as half-open stretches; together they are all its batches."""

    todo: tuple[tuple[int, int], ...]
    pending: tuple[tuple[int, int], ...]
    done: tuple[tuple[int, int], ...]
    failed: tuple[tuple[int, int], ...]
    dropped: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class FailedSelector:
    """Which quarantined batches are meant; None: any."""

    epoch: int | None = None
    task: int | None = None
    batch: int | None = None
