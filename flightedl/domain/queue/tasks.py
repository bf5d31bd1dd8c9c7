"""The task queue: which trainer does which batches of which epoch, exactly once each.

Rules:

* The queue is told of events, each with the instant ``now`` (monotonic seconds, of one clock per process). It answers
  with values. An event that makes no sense raises one of ``flightedl.errors`` and changes nothing.
* A trainer is its name and the *generation* of its registration. What a name holds was given to one generation: reports
  of another one are refused, and nothing is given to it before ``trainer_gone`` has taken that back.
* A *piece* is a stretch of batches of one task, normally all of it. Each time a piece is handed out, it gets a new
  *attempt* number, by which an old report is told from a current one.
* A trainer works on its pieces in the order in which it was given them. So the oldest one that it has not reported
  *runs*, and its clock starts when the one before it was reported. All others wait in its backlog, see ``pending``.
* A piece goes back when its trainer says so (``give_back``: not counted), fails (``fail``), is gone
  (``trainer_gone``), or runs for too long (``tick``): much longer than tasks take on average, or, until a first task is
  finished, for long without progress. Clocks stop while pservers are away, see ``clock``. With the last two reasons,
  all of that trainer's backlog goes back, but only what can be at fault is counted as failed: what ran, and, of a
  trainer that died, also the next, whose records it may have been reading. What waits is handed out before anything
  new, so that little waits at any time.
* How much a trainer may hold is limited, so that nobody hoards near the end of an epoch: see ``fair_share``.
* Epochs are a barrier. Nothing of an epoch is handed out while an earlier one has open pieces, also reopened ones. What
  a trainer may read of the next one is promised to it: see ``ahead``.
* Of data alone, a piece goes back without its batches that are done (``note_done``).
* What fails ``attempts_limit`` times is *suspect*: it is split, around the failing batch if it is known, else in
  halves, until single batches are left; one that fails ``confirmations`` times more is quarantined. The loss of a
  trainer weighs less than a reported failure, and nothing while others are lost, too: see ``bisection``. Suspects go
  only to trainers that hold nothing else, and those get nothing else meanwhile, so that no innocent piece is convicted
  because its holder died of another. They are handed out last in their epoch, or first once ``SUSPECTS_LIMIT`` wait.
* Near the end of an epoch an idle trainer gets a copy of a piece that only waits elsewhere: the last one of the longest
  backlog; else of the piece that runs longest, if that is clearly longer than tasks take on average. The first to
  finish wins.
* Data alone, without a model, is never out twice at a time: nothing would remove the duplicates. There are no copies
  then, and time takes a piece back only after ``stuck_after_s``. See ``deduplicate``.
* A job that was stopped (``stop``) begins nothing new. It still hands out what is *due*: done tasks that were reopened,
  and what is claimed (``claim``) since it is in some blocks only. It is over when nothing is out and nothing is due.
* ``reopen`` makes done tasks todo again, after a pserver lost their updates. Stored as a limited number of runs of
  positions: if there are more, the narrowest gaps of done tasks between them are reopened too, which is harmless
  (their batches are answered "already applied").

Cost: an event is O(log(open pieces)) and O(a backlog); looking for a copy is O(trainers); ``encode`` is O(open rows).
None depends on the number of tasks.

Not guaranteed: that a trainer works on what it holds, in that order, or that a finished piece was applied. The caller
decides whether to accept a report before it gets here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from flightedl.domain.exactly_once.intervals import IntervalSet
from flightedl.domain.queue import reopening, storage
from flightedl.domain.queue.backlog import Holder, Pending
from flightedl.domain.queue.bisection import LOSSES_PER_REPORT, after_failure
from flightedl.domain.queue.failed import shortened
from flightedl.domain.queue.fair_share import HOLDING_FLOOR, may_hold_more
from flightedl.domain.queue.state import QueueState
from flightedl.domain.queue.values import (
    AlreadyDone,
    BatchRange,
    Effect,
    Effects,
    EpochFinished,
    EpochsDone,
    Expired,
    FailedPiece,
    FailedSelector,
    Finished,
    NoTaskNow,
    Quarantined,
    QueueSettings,
    TaskGiven,
)
from flightedl.errors import CorruptError, FencedError, JobFailedError, NotFoundError, UsageError
from flightedl.messages.tasks import Assignment

SUSPECTS_LIMIT = 16
#: So many pieces of a backlog may be at fault when its trainer dies: the one that runs, and the one that is read ahead.
_BEGUN_COUNT = 2
_AVERAGED_COUNT = 10
_RETRY_FLOOR_S = 0.05
#: A task that takes longer than the average by less than this is no slow one.
_COPY_AFTER_S = 0.05
_RETRY_CEILING_S = 1.0


class TaskQueue(QueueState):
    """The queue of one dataset; see the module's rules. Not thread-safe."""

    __slots__ = ()

    # --- trainers ask and report ---

    def request(
        self,
        trainer: str,
        now: float,
        holding_limit: int = HOLDING_FLOOR,
        known: Collection[int] | None = None,
        trainer_count: int = 1,
        generation: int = 0,
    ) -> TaskGiven | NoTaskNow | EpochsDone:
        """A trainer asks for work.

        Args:
            trainer: Who asks.
            now: The instant.
            holding_limit: It gets nothing while it holds this many pieces.
            known: The attempts that it knows it holds; one that is missing, because the reply that told of it was
                lost, is told again. None: not said.
            trainer_count: How many trainers there are. Those that hold anything are known.
            generation: Of its registration.

        Raises:
            FencedError: another registration of this trainer holds work; see ``trainer_gone``.
            JobFailedError: too much has failed; nothing is handed out any more.
        """
        now = self._time(now)
        backlog = self.pending.backlog_of(trainer)
        held = backlog.pieces
        if held and backlog.generation != generation:
            raise FencedError(f"what generation {backlog.generation} of trainer {trainer} held was not taken back yet")
        if known is not None:
            for attempt, pending in held.items():
                if attempt not in known:
                    return TaskGiven(self.assignment(pending, attempt), is_copy=len(pending.holders) > 1)
        if (epoch := self.next_epoch) is None:
            return EpochsDone()
        self._refuse_when_broken(epoch)
        limit = self.settings.attempts_limit
        if len(held) >= holding_limit or any(pending.piece.failures >= limit for pending in held.values()):
            return NoTaskNow(_RETRY_CEILING_S)
        sharers = max(trainer_count, self.pending.trainer_count)
        if not may_hold_more(backlog, self.todo(epoch), len(self.pending), sharers, self.average_s):
            return NoTaskNow(_RETRY_CEILING_S)
        piece = self._take(epoch, trainer, is_idle=not held)
        if piece is not None:
            task = self.order(epoch).at(piece.position)
            pending = self.pending.hand_out(piece, task, self._new_holder(trainer, generation), now)
            return TaskGiven(self.assignment(pending, pending.holders[0].attempt))
        return self._copy_or_none(trainer, generation, epoch, now, is_idle=not held)

    def promise(self, trainer: str) -> tuple[Assignment, ...]:
        """What a trainer may read ahead of the next epoch, while nothing of this one is left for it; see ``ahead``.

        The attempts are 0, because the trainer does not hold these pieces.
        """
        if self.cursor < self.epoch_size(self.epoch) or self.waiting.lowest_epoch is not None:
            return ()
        if (order := self.next_order()) is None:
            return ()
        promised: list[Assignment] = []
        for position in self.promises.make(trainer, self.epoch + 1, order.size):
            task = order.at(position)
            piece = BatchRange(self.epoch + 1, position, 0, count := self.batches_of(task), count)
            promised.append(self._assignment(piece, task, attempt=0))
        return tuple(promised)

    def finish(
        self, trainer: str, epoch: int, position: int, attempt: int, now: float, *, generation: int = 0
    ) -> Finished | AlreadyDone:
        """A trainer reports that every batch of a piece is done.

        Raises:
            FencedError: the attempt is no longer current, and the work is not done.
        """
        now = self._time(now)
        pending = self._held(trainer, generation, epoch, position, attempt)
        if pending is None:
            return AlreadyDone()
        self._note_duration(pending, attempt, now)
        attempts = [holder.attempt for holder in pending.holders]
        self.losses.forget(pending.piece)
        self.pending.close(pending, now)
        self.finished_parts.setdefault((epoch, position), []).extend(attempts)
        return Finished(self._settle(epoch, position))

    def note_done(
        self, trainer: str, attempt: int, done: Iterable[tuple[int, int]], now: float, *, generation: int = 0
    ) -> None:
        """A trainer has done some batches of a piece that it holds: nobody else gets these batches.

        Does nothing where pservers or an evaluation say what counts, or if the attempt is no longer current.
        """
        now = self._time(now)
        if self.settings.is_deduplicated or not self.pending.is_holder(trainer, generation, attempt):
            return
        pending = self.pending.held_by(trainer)[attempt]
        piece = pending.piece
        known = pending.done.copy()
        known.update(IntervalSet(done).within(piece.first_batch, piece.end_batch))
        if known != pending.done:
            self.pending.set_done(pending, known)
            self.pending.progressed(trainer, now)
            self.revision += 1

    def fail(
        self,
        trainer: str,
        epoch: int,
        position: int,
        attempt: int,
        now: float,
        *,
        error: str,
        batch: int | None = None,
        generation: int = 0,
    ) -> Effects:
        """A trainer could not do a piece. ``batch``: at which batch of the task, where known.

        Raises:
            FencedError: the attempt is no longer current, and the work is not done.
        """
        now = self._time(now)
        pending = self._held(trainer, generation, epoch, position, attempt)
        return () if pending is None else self._lose(pending, attempt, now, error, batch, is_reported=True)

    def give_back(
        self, trainer: str, epoch: int, position: int, attempt: int, now: float, *, generation: int = 0
    ) -> Effects:
        """A trainer hands a piece back unharmed. Not counted as a failure.

        Raises:
            FencedError: the attempt is no longer current, and the work is not done.
        """
        now = self._time(now)
        pending = self._held(trainer, generation, epoch, position, attempt)
        return () if pending is None else self._lose(pending, attempt, now, None)

    def trainer_gone(self, trainer: str, now: float, is_graceful: bool = False) -> Effects:
        """A trainer is gone: what it held goes back at once.

        What it may have been at is counted as failed, unless the trainer left in good order.
        """
        now = self._time(now)
        self.promises.forget(trainer)
        return self._lose_all(trainer, now, "its trainer died or lost its lease", 0 if is_graceful else _BEGUN_COUNT)

    def tick(self, now: float, *, is_held_up: bool = False, progressed: Iterable[str] = ()) -> Effects:
        """Take back the pieces that have run for too long, with their trainers' backlogs. Call it every second or so.

        Clocks stop while ``is_held_up``: no piece can run, as a pserver is away. ``progressed`` are the trainers that
        have finished a batch since the last call.
        """
        self.clock.go(now, is_stopped=is_held_up)
        now = self._time(now)
        for trainer in progressed:
            self.pending.progressed(trainer, now)
        effects: list[Effect] = []
        for holder, pending in tuple(self.pending.running()):
            if reason := self._overdue(holder, now):
                effects.append(Expired(holder.trainer, self.assignment(pending, holder.attempt), reason))
                effects += self._lose_all(holder.trainer, now, reason, 1)
        return tuple(effects)

    # --- the master's other events ---

    def reopen(
        self, epoch: int, tasks: Iterable[tuple[int, int]], parts: Mapping[int, Iterable[tuple[int, int]]] | None = None
    ) -> int:
        """Make what is done of some tasks todo again, because its updates were lost.

        Args:
            epoch: An epoch that has begun.
            tasks: Half-open stretches of task numbers; what of them is not done stays as it is.
            parts: task -> half-open stretches of its batches, for tasks that are not in ``tasks``.

        Returns:
            How many tasks have done batches that are todo now, without those reopened to fill gaps.

        Raises:
            UsageError: the epoch has not begun, or there is no such task or batch.
            NotFoundError: the epoch is too long ago.
        """
        self.require_begun(epoch)
        return reopening.reopen(self, epoch, tasks, parts or {})

    def stop(self) -> None:
        """Begin nothing new: what is neither out nor due stays undone."""
        self.is_stopped = True
        self.revision += 1

    def claim(self, epoch: int, tasks: Iterable[int]) -> int:
        """Have tasks of a begun epoch finished before a stopped job ends.

        Returns:
            How many of them wait and were not due before.
        """
        order = self.order(epoch)
        count = 0
        for position in sorted(order.position_of(task) for task in tasks):
            if epoch == self.epoch and position >= self.cursor:
                # An older state of the queue does not know that it was handed out.
                self.waiting.put_run(epoch, self.cursor, position + 1, 0)
                self.cursor = position + 1
            if self.waiting.at(epoch, position):
                count += self.due.setdefault(epoch, IntervalSet()).add(position, position + 1)
        self.revision += bool(count)
        return count

    def is_due(self, epoch: int, position: int) -> bool:
        """True if the task at a position has to be finished before a stopped job ends."""
        return position in self.due.get(epoch, ())

    def deduplicate(self) -> None:
        """From now on a batch that is done twice counts once: trainers have declared a model.

        A batch then counts as done when pservers have it, so what trainers said of their pieces before is forgotten.
        """
        if self.settings.is_deduplicated:
            return
        self.settings = replace(self.settings, is_deduplicated=True)
        for pending in self.pending:
            if pending.done:
                self.pending.set_done(pending, IntervalSet())
                self.revision += 1

    def grow(self, task_count: int, batch_counts: Callable[[int], int] | None = None) -> None:
        """The dataset has ``task_count`` tasks now. They join the current epoch at its end, and all later ones.

        Args:
            task_count: With those that it had, which come first.
            batch_counts: As of the settings, also for the new ones; None: it knew them already.

        Raises:
            UsageError: fewer than before, or the dataset is not followed, or all epochs are done.
        """
        known = self.sizes.task_count
        if task_count < known:
            raise UsageError(
                f"the dataset had {known} tasks and now has {task_count}: files of a running job must stay"
            )
        if task_count == known:
            return
        if self.growth_ended or self.is_past_last:
            raise UsageError(
                "tasks can be added only to a dataset that is followed, and before its last epoch has ended"
            )
        self.settings = replace(
            self.settings, task_count=task_count, batch_counts=batch_counts or self.settings.batch_counts
        )
        self.sizes.grow(self.epoch, task_count, is_begun=self.cursor > 0)
        self._forget_sizes()
        self.revision += 1

    def end_growth(self) -> Effects:
        """No more tasks will join a followed dataset: the last epoch may end."""
        if self.growth_ended:
            return ()
        self.growth_ended = True
        self.revision += 1
        return self._advance()

    def retry_failed(self, selector: FailedSelector) -> int:
        """Make quarantined batches todo again, with all attempts before them; returns how many.

        Raises:
            NotFoundError: nothing quarantined is meant.
        """
        count = 0
        for (epoch, position), first, end in self._selected(selector):
            batch_count = self.batch_count(epoch, position)
            self.failed.release((epoch, position), first, end)
            self.waiting.put(BatchRange(epoch, position, first, end, batch_count))
            count += end - first
        self.revision += 1
        return count

    def drop_failed(self, selector: FailedSelector) -> int:
        """Let quarantined batches go: they are not listed any more and never trained; returns how many.

        Raises:
            NotFoundError: nothing quarantined is meant.
        """
        count = 0
        for place, first, end in self._selected(selector):
            self.failed.drop(place, first, end)
            count += end - first
        self.revision += 1
        return count

    # --- storage ---

    def encode(self) -> bytes:
        """Everything as one JSON document; see ``encode_parts`` for the one that stays small when much has failed."""
        return storage.encode(self)

    def encode_parts(self) -> tuple[bytes, bytes]:
        """(dispatch, failures): two documents to be written in one transaction.

        The first changes with every dispatch and stays below 4 kB + 200 B for each live trainer. The second has the
        same bytes as before unless something was quarantined, retried or dropped, or a dataset has grown many times.
        """
        return storage.encode_parts(self)

    @classmethod
    def decode(
        cls, data: bytes, settings: QueueSettings, failures: bytes | None = None, *, may_reseed: bool = False
    ) -> TaskQueue:
        """The queue that ``encode`` wrote, or ``encode_parts`` when ``failures`` is given.

        Timeouts of what is out begin anew, at the first event. ``settings.epochs`` may differ from before; a followed
        dataset keeps its stored number of tasks until ``grow``.

        Args:
            data: What was written.
            settings: Of the dataset as it is declared now.
            failures: The second document.
            may_reseed: Whether ``settings.seed`` and ``settings.shuffle`` may differ from before, too: then they count
                from the first epoch on of which nothing was handed out.

        Raises:
            CorruptError: the documents are damaged, inconsistent, or do not belong together.
            UsageError: they are of another dataset, seed or shuffle, or of a later epoch than there are to be.
        """
        queue = cls(settings)
        storage.restore(queue, data, failures, may_reseed=may_reseed)
        # More epochs than before can make an epoch end that was the last one and waited for more tasks.
        queue._advance()
        try:
            queue.check()
        except (AssertionError, LookupError, ValueError) as error:
            raise CorruptError(f"the stored task queue is inconsistent: {error}") from None
        return queue

    # --- decisions ---

    @property
    def timeout_s(self) -> float:
        """Seconds that a piece may run, or may make no progress while ``_limiting_average_s`` is None."""
        settings, average_s = self.settings, self._limiting_average_s
        if average_s is None:
            return settings.stuck_after_s
        return max(settings.timeout_factor * average_s, settings.timeout_floor_s)

    @property
    def _limiting_average_s(self) -> float | None:
        """Average duration of tasks, which limits how long a piece may run; None if only a lack of progress does."""
        return self.average_s if self.settings.is_deduplicated else None

    def _time(self, now: float) -> float:
        """Return the work clock's time, by which the clocks of pieces start that stand."""
        at = self.clock.at(now)
        self.pending.start_clocks(at)
        return at

    def _overdue(self, holder: Holder, now: float) -> str:
        """Return why a piece goes back, with the settings that decide it; empty if the piece may run on."""
        settings, average_s, limit_s = self.settings, self._limiting_average_s, self.timeout_s
        since_s = holder.progress_s if average_s is None else holder.since_s
        assert since_s is not None, "its clock goes"
        if (ran_s := now - since_s) <= limit_s:
            return ""
        if average_s is None:
            return f"the trainer finished no batch for {ran_s:.0f} s; the limit is {limit_s:g} s (stuck_after_s)"
        factor, floor_s = settings.timeout_factor, settings.timeout_floor_s
        return (
            f"the task ran for {ran_s:.0f} s; the limit is {limit_s:.0f} s: {factor:g} times the average of "
            f"{average_s:.1f} s (task_timeout_factor), at least {floor_s:g} s (task_timeout_floor_s)"
        )

    def _take(self, epoch: int, trainer: str, is_idle: bool) -> BatchRange | None:
        """Take the next piece of ``epoch`` for a trainer out of its table."""
        if self.is_stopped:
            return self.waiting.take_of(epoch, self.due.get(epoch, IntervalSet()), has_suspects=is_idle)
        if self.waiting.suspect_count(epoch) >= SUSPECTS_LIMIT:
            return self.waiting.take_suspect(epoch) if is_idle else None
        piece: BatchRange | None = None
        if (position := self.promises.next_of(trainer, epoch)) is not None:
            piece = self.waiting.take_whole(epoch, position)
        has_new = epoch == self.epoch and not self.is_past_last and self.cursor < self.epoch_size(epoch)
        if piece is None:
            piece = self.waiting.take_ready(epoch, self.promises.others(epoch) if has_new else ())
        if piece is None and has_new:
            batch_count = self.batch_count(epoch, self.cursor)
            piece = BatchRange(epoch, self.cursor, 0, batch_count, batch_count)
            self.cursor += 1
        if piece is not None:
            return piece
        return self.waiting.take_suspect(epoch) if is_idle else None

    def _copy_or_none(
        self, trainer: str, generation: int, epoch: int, now: float, is_idle: bool
    ) -> TaskGiven | NoTaskNow:
        """A copy of a piece for a trainer for which nothing else is there.

        Only idle trainers get one, so nobody gets a copy of its own piece.
        """
        if not is_idle or self.is_stopped or not self.settings.is_deduplicated:
            return NoTaskNow(_RETRY_CEILING_S)
        limit = self.settings.attempts_limit
        if (waiting := self.pending.copyable_waiting(epoch, limit)) is not None:
            return self._give_copy(self._new_holder(trainer, generation), waiting, now)
        found = self.pending.copyable_running(epoch, limit)
        if found is None or self.average_s is None:
            return NoTaskNow(_RETRY_CEILING_S)
        running, since_s = found
        wait_s = since_s + self.average_s + _COPY_AFTER_S - now
        if wait_s >= 0:
            return NoTaskNow(min(max(wait_s, _RETRY_FLOOR_S), _RETRY_CEILING_S))
        return self._give_copy(self._new_holder(trainer, generation), running, now)

    def _give_copy(self, holder: Holder, pending: Pending, now: float) -> TaskGiven:
        self.pending.add_holder(pending, holder, now)
        self.copies += 1
        return TaskGiven(self.assignment(pending, holder.attempt), is_copy=True)

    def _new_holder(self, trainer: str, generation: int) -> Holder:
        holder = Holder(trainer, self.next_attempt, generation)
        self.next_attempt += 1
        self.revision += 1
        return holder

    def _refuse_when_broken(self, epoch: int) -> None:
        failed, limit = self.failed, self.settings.failed_limit
        if (count := failed.failed.in_epoch(epoch)) > limit:
            last = f"; the last one: {failed.details[-1].error}" if failed.details else ""
            raise JobFailedError(
                f"{count} pieces of work failed in epoch {epoch + 1}, more than the limit of {limit}: "
                f"repair the data or the program, then retry or drop the failed tasks{last}"
            )

    def _held(self, trainer: str, generation: int, epoch: int, position: int, attempt: int) -> Pending | None:
        """The piece that a report is about; None: it was done before."""
        pending = self.pending.find(attempt)
        if pending is not None:
            piece = pending.piece
            is_holder = self.pending.is_holder(trainer, generation, attempt)
            if not is_holder or (piece.epoch, piece.position) != (epoch, position):
                raise FencedError(f"attempt {attempt} is not of {trainer} at position {position} of epoch {epoch + 1}")
            return pending
        place = (epoch, position)
        if attempt in self.finished_parts.get(place, ()):
            return None
        is_begun = epoch <= self.epoch and position < self.begun(epoch)
        if attempt >= self.next_attempt or not is_begun or self.pending.at(*place) or self.waiting.at(*place):
            raise FencedError(f"attempt {attempt} is no longer current: drop what is left of that task")
        return None

    def _lose_all(self, trainer: str, now: float, error: str, blamed_count: int) -> Effects:
        """A trainer finishes nothing of its backlog, of which the first so many may be to blame."""
        effects: list[Effect] = []
        held = tuple(self.pending.held_by(trainer).items())
        limit = self.settings.attempts_limit
        if blamed_count and all(pending.piece.failures < limit for _, pending in held):
            self.losses.happened_elsewhere()
        for number, (attempt, pending) in enumerate(held):
            effects += self._lose(pending, attempt, now, error if number < blamed_count else None)
        return tuple(effects)

    def _lose(
        self,
        pending: Pending,
        attempt: int,
        now: float,
        error: str | None,
        batch: int | None = None,
        *,
        is_reported: bool = False,
    ) -> Effects:
        """Take a piece from a holder that does not finish it. None as ``error``: the piece is not to blame."""
        self.revision += 1
        trainer, piece, settings = pending.holder(attempt).trainer, pending.piece, self.settings
        confirmations = settings.confirmations
        if error is not None and not is_reported:
            confirmations *= LOSSES_PER_REPORT
            is_single_suspect = piece.size == 1 and piece.failures >= settings.attempts_limit
            if is_single_suspect and not self.losses.counts(piece):
                error = None
        self.pending.drop_holder(pending, attempt, now, failed=error is not None)
        if pending.holders:
            return ()
        if error is None:
            parts: tuple[BatchRange, ...] = (pending.piece,)
        else:
            parts = after_failure(pending.piece, batch, settings.attempts_limit, confirmations)
        for part in parts:
            for first, end in pending.done.gaps(part.first_batch, part.end_batch):
                self.waiting.put(replace(part, first_batch=first, end_batch=end))
        if pending.done.size == pending.piece.size:
            return self._settle(pending.piece.epoch, pending.piece.position)
        return () if parts else self._quarantine(pending, trainer, error or "")

    def _quarantine(self, pending: Pending, trainer: str, error: str) -> Effects:
        piece = pending.piece
        self.losses.forget(piece)
        failed = FailedPiece(
            epoch=piece.epoch,
            position=piece.position,
            task=pending.task,
            first_batch=piece.first_batch,
            end_batch=piece.end_batch,
            attempts=piece.failures,
            trainer=trainer,
            error=shortened(error),
        )
        self.failed.quarantine(failed)
        return (Quarantined(failed), *self._settle(piece.epoch, piece.position))

    def _settle(self, epoch: int, position: int) -> Effects:
        """A piece was closed: end what it was the last one of."""
        self.revision += 1
        if not self.pending.at(epoch, position) and not self.waiting.at(epoch, position):
            self.finished_parts.pop((epoch, position), None)
            self.settled(epoch, position)
        effects: Effects = ()
        if epoch < self.epoch and not self.is_open(epoch):
            effects = (EpochFinished(epoch),)
        return effects + self._advance()

    def _advance(self) -> Effects:
        if not self.is_complete:
            return ()
        finished = EpochFinished(self.epoch)
        self.epoch += 1
        self.cursor = 0
        self.sizes.begin(self.epoch)
        if count := self.promises.count(self.epoch):
            self.waiting.put_run(self.epoch, 0, count, 0)
            self.cursor = count
        self._forget_sizes()
        return (finished,)

    def _forget_sizes(self) -> None:
        lowest = self.lowest_open_epoch
        if self.sizes.put_away(self.epoch if lowest is None else min(lowest, self.epoch)):
            self.failed.serial += 1  # They are stored together.
        self.failed.forget_before(self.sizes.oldest_epoch)

    def _note_duration(self, pending: Pending, attempt: int, now: float) -> None:
        holder = pending.holder(attempt)
        # None at all: of several pieces reported at once, it is not known how long each took.
        duration_s = 0.0 if holder.since_s is None else now - holder.since_s
        if duration_s <= 0 or not holder.is_timed or not pending.piece.is_whole:
            return
        self.last_s = duration_s
        self.average_count = min(self.average_count + 1, _AVERAGED_COUNT)
        before_s = self.average_s or 0.0
        self.average_s = before_s + (duration_s - before_s) / self.average_count

    def _selected(self, selector: FailedSelector) -> list[tuple[tuple[int, int], int, int]]:
        epochs = () if selector.task is None else self.failed.failed.epochs()
        order = {epoch: self.order(epoch) for epoch in epochs}

        def is_meant(place: tuple[int, int]) -> bool:
            epoch, position = place
            if selector.epoch is not None and epoch != selector.epoch:
                return False
            return selector.task is None or order[epoch].at(position) == selector.task

        found = self.failed.select(is_meant, selector.batch)
        if not found:
            raise NotFoundError("no failed task is meant by that: see which ones there are in the status")
        return found
