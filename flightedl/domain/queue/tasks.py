"""The task queue: assigns the batches of each epoch to trainers so that each batch is done exactly once.

Rules:

* Methods take an event and the time ``now`` (monotonic seconds, from one clock per process), and return values. An
  invalid event raises one of the errors in ``flightedl.errors`` and changes nothing.
* A trainer is identified by its name and the *generation* of its registration. All pieces held under a name belong to
  one generation. Reports from another generation are rejected. A new generation gets no pieces until
  ``trainer_departed`` has taken back those of the old one.
* A *piece* is a range of batches of one task, usually all of them. Each assignment of a piece gets a new *attempt*
  number, which distinguishes current reports from outdated ones.
* A trainer works on its pieces in the order of assignment. Its oldest unreported piece *runs*; the clock of this piece
  starts when the piece before it is reported. All other pieces wait in the trainer's backlog (see ``pending``).
* A piece is taken back if its trainer returns it (``give_back``, which does not count as a failure), fails (``fail``),
  departs (``trainer_departed``), or exceeds the timeout (``tick``). The timeout is a multiple of the average duration
  of tasks; until the first task is finished, it limits the time without progress. Clocks are stopped while pservers are
  down (see ``clock``).
* When a trainer departs or a timeout expires, the trainer's entire backlog is taken back, but only pieces that may be
  at fault count as failed: the running one and, if the trainer died, the next one, whose records it may have been
  reading. Waiting pieces are assigned before new ones, so only a few are waiting at any time.
* The number of pieces that a trainer holds is limited, so that no trainer hoards work near the end of an epoch (see
  ``fair_share``).
* Epochs are barriers: no task of an epoch is assigned while an earlier epoch has open pieces, including reopened ones.
  Trainers may read ahead those tasks of the next epoch that were promised to them (see ``ahead``).
* For data without a model, done batches (``note_done``) are removed from a piece that is taken back.
* A piece that has failed ``attempts_limit`` times is *suspect*. It is split, around the failing batch if that batch is
  known, otherwise in halves, until single batches are left. A batch that then fails ``confirmations`` more times is
  quarantined. The loss of a trainer weighs less than a reported failure, and does not count at all while other trainers
  are being lost too (see ``bisection``).
* Which failures count against a piece, how many are needed to quarantine it, and when a trainer or the job has to end
  instead, is decided by ``blame``. A trainer that failed at a piece gets others first, as long as it fails.
* A suspect is assigned only to a trainer that holds nothing else, and the trainer gets nothing else until the suspect
  is done. So no valid piece is quarantined because another piece killed its trainer. Suspects are assigned last in
  their epoch, or first if ``SUSPECTS_LIMIT`` of them are waiting.
* Near the end of an epoch, an idle trainer gets a copy of the last waiting piece of the longest backlog. If no piece is
  waiting, it gets a copy of the piece that has been running longest, if this is clearly longer than average. The first
  trainer to finish the piece wins.
* Data without a model is never assigned to two trainers at the same time, because duplicates would not be detected. Its
  pieces are not copied, and a piece is taken back only after ``stuck_after_s`` (see ``deduplicate``).
* A stopped job (``stop``) begins no new tasks. It still assigns tasks that are *due*: reopened tasks, and tasks that
  only some blocks have applied (``claim``). The job is over when no task is pending or due.
* ``reopen`` repeats done tasks whose updates a pserver has lost. They are stored as a limited number of runs of
  positions. If there are more runs than the limit, done tasks in the narrowest gaps between them are reopened as well.
  This does no harm, because pservers answer "already applied" when the batches of these tasks are repeated.

Cost: an event takes O(log(open pieces) + length of a backlog), a search for a piece to copy takes O(trainers), and
``encode`` takes O(open rows). No cost depends on the number of tasks.

The queue cannot verify that trainers work on their pieces in order, or that the batches of a finished piece have been
applied. The caller decides which reports to accept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from flightedl.domain.exactly_once.intervals import IntervalSet
from flightedl.domain.queue import reopening, storage
from flightedl.domain.queue.backlog import Holder, Pending
from flightedl.domain.queue.bisection import LOSSES_PER_REPORT, after_failure
from flightedl.domain.queue.blame import LOST
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
    Failure,
    Finished,
    NoTaskNow,
    Quarantined,
    QueueSettings,
    TaskGiven,
)
from flightedl.errors import CorruptError, FencedError, JobFailedError, NotFoundError, UsageError
from flightedl.marks import sometimes
from flightedl.messages.tasks import Assignment

SUSPECTS_LIMIT = 16
#: Number of pieces that may be at fault when a trainer dies: the running piece, and the piece being read ahead.
_BEGUN_COUNT = 2
#: Number of tasks whose durations the moving average covers.
_AVERAGED_COUNT = 10
_RETRY_FLOOR_S = 0.05
#: A task counts as slow if it takes this many seconds longer than the average task.
_COPY_AFTER_S = 0.05
_RETRY_CEILING_S = 1.0


class TaskQueue(QueueState):
    """The task queue of one dataset; see the module's docstring for the rules. Not thread-safe."""

    __slots__ = ()

    # --- requests and reports from trainers ---

    def request(
        self,
        trainer: str,
        now: float,
        holding_limit: int = HOLDING_FLOOR,
        known: Collection[int] | None = None,
        trainer_count: int = 1,
        generation: int = 0,
        witness: str = "",
    ) -> TaskGiven | NoTaskNow | EpochsDone:
        """Assign one piece to a trainer that requests work.

        Args:
            trainer: Name of the trainer.
            now: The time.
            holding_limit: Number of pieces from which on the trainer gets no more.
            known: Attempts that the trainer knows it holds. If one is missing, its reply was lost, and it is returned
                again. None if unknown.
            trainer_count: Number of trainers, at least; those that hold pieces are known.
            generation: Generation of the trainer's registration.
            witness: Name of the trainer that outlives its process, see ``blame``; empty if unknown.

        Raises:
            FencedError: another registration of this trainer holds pieces; see ``trainer_departed``.
            JobFailedError: too many pieces have failed, or all trainers, so no pieces are assigned.
            TrainerFailedError: this trainer fails, so it gets no more pieces.
        """
        now = self._time(now)
        backlog = self.pending.backlog_of(trainer)
        held = backlog.pieces
        if held and backlog.generation != generation:
            raise FencedError(f"generation {backlog.generation} of trainer {trainer} still holds tasks")
        if known is not None:
            for attempt, pending in held.items():
                if attempt not in known:
                    return TaskGiven(self.assignment(pending, attempt), is_copy=len(pending.holders) > 1)
        if (epoch := self.next_epoch) is None:
            return EpochsDone()
        self._refuse_when_broken(epoch)
        wait_s, failed_at = self.blame.asked(trainer, witness, now)
        if wait_s > 0:
            return NoTaskNow(min(wait_s, _RETRY_CEILING_S))
        limit = self.settings.attempts_limit
        if len(held) >= holding_limit or any(pending.piece.failures >= limit for pending in held.values()):
            return NoTaskNow(_RETRY_CEILING_S)
        sharers = max(trainer_count, self.pending.trainer_count)
        if not may_hold_more(backlog, self.todo(epoch), len(self.pending), sharers, self.average_s):
            return NoTaskNow(_RETRY_CEILING_S)
        avoided = {position for place, position, _ in failed_at if place == epoch}
        piece = self._next_piece(epoch, trainer, now, avoided, is_idle=not held)
        if piece is not None:
            task = self.order(epoch).at(piece.position)
            pending = self.pending.hand_out(piece, task, self._new_holder(trainer, generation), now)
            return TaskGiven(self.assignment(pending, pending.holders[0].attempt))
        return self._copy_or_none(trainer, generation, epoch, now, is_idle=not held)

    def promise(self, trainer: str) -> tuple[Assignment, ...]:
        """Return tasks of the next epoch that a trainer may read, if this epoch has none left for it (see ``ahead``).

        Promised tasks have attempt number 0, because the trainer does not hold them.
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
        """Handle a trainer's report that all batches of a piece are done.

        Raises:
            FencedError: the attempt is no longer current, and the piece is not done.
        """
        now = self._time(now)
        pending = self._held(trainer, generation, epoch, position, attempt)
        if pending is None:
            sometimes("a task that was done was reported again")
            return AlreadyDone()
        self._note_duration(pending, attempt, now)
        attempts = [holder.attempt for holder in pending.holders]
        self.losses.forget(pending.piece)
        self.blame.succeeded(trainer)
        self.blame.take(pending.piece)
        self.pending.close(pending, now)
        self.finished_parts.setdefault((epoch, position), []).extend(attempts)
        return Finished(self._settle(epoch, position))

    def note_done(
        self, trainer: str, attempt: int, done: Iterable[tuple[int, int]], now: float, *, generation: int = 0
    ) -> None:
        """Record that some batches of a trainer's piece are done, so that they are never assigned again.

        Does nothing if batches are deduplicated or the attempt is outdated.
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
            self.blame.succeeded(trainer)
            self.revision += 1

    def fail(
        self,
        trainer: str,
        epoch: int,
        position: int,
        attempt: int,
        now: float,
        *,
        generation: int = 0,
        **failure: Any,
    ) -> Effects:
        """Handle a trainer's report that a piece has failed. ``failure`` are the fields of ``Failure``.

        Raises:
            FencedError: the attempt is no longer current, and the piece is not done.
        """
        now = self._time(now)
        pending = self._held(trainer, generation, epoch, position, attempt)
        return () if pending is None else self._lose(pending, attempt, now, Failure(**failure))

    def give_back(
        self, trainer: str, epoch: int, position: int, attempt: int, now: float, *, generation: int = 0
    ) -> Effects:
        """Take back a piece that a trainer returns. This does not count as a failure.

        Raises:
            FencedError: the attempt is no longer current, and the piece is not done.
        """
        now = self._time(now)
        pending = self._held(trainer, generation, epoch, position, attempt)
        return () if pending is None else self._lose(pending, attempt, now, None)

    def trainer_departed(self, trainer: str, now: float, is_graceful: bool = False) -> Effects:
        """Take back all pieces of a trainer that is gone.

        Unless ``is_graceful`` is true, the pieces that the trainer may have begun count as failed.
        """
        now = self._time(now)
        self.promises.forget(trainer)
        blamed_count = 0 if is_graceful else _BEGUN_COUNT
        effects = self._lose_all(trainer, now, "its trainer died or lost its lease", blamed_count)
        self.blame.names.pop(trainer, None)
        return effects

    def tick(self, now: float, *, is_held_up: bool = False, progressed: Iterable[str] = ()) -> Effects:
        """Take back pieces that have timed out, with their trainers' backlogs. Call this about once per second.

        While ``is_held_up`` is true, clocks are stopped, because no piece can run while a pserver is down.
        ``progressed`` lists the trainers that have finished a batch since the last call.
        """
        self.clock.go(now, is_stopped=is_held_up)
        now = self._time(now)
        for trainer in progressed:
            self.pending.progressed(trainer, now)
        effects: list[Effect] = []
        for holder, pending in tuple(self.pending.running()):
            if reason := self._overdue(holder, now):
                sometimes("a task timed out")
                effects.append(Expired(holder.trainer, self.assignment(pending, holder.attempt), reason))
                effects += self._lose_all(holder.trainer, now, reason, 1)
        return tuple(effects)

    # --- other events ---

    def reopen(
        self, epoch: int, tasks: Iterable[tuple[int, int]], parts: Mapping[int, Iterable[tuple[int, int]]] | None = None
    ) -> int:
        """Make done batches of some tasks todo again, because their updates were lost.

        Args:
            epoch: An epoch that has begun.
            tasks: Half-open ranges of task numbers. Batches that are not done remain as they are.
            parts: Task -> half-open ranges of its batches, for tasks that are not in ``tasks``.

        Returns:
            Number of tasks with reopened batches, excluding those reopened to fill gaps.

        Raises:
            UsageError: the epoch has not begun, or there is no such task or batch.
            NotFoundError: the epoch was forgotten.
        """
        self.require_begun(epoch)
        return reopening.reopen(self, epoch, tasks, parts or {})

    def stop(self) -> None:
        """Begin no more tasks. Tasks that are neither pending nor due are left undone."""
        self.is_stopped = True
        self.revision += 1

    def claim(self, epoch: int, tasks: Iterable[int]) -> int:
        """Mark tasks of an epoch that has begun as due, so that they are done before a stopped job ends.

        Returns:
            Number of waiting tasks that were not due before.
        """
        order = self.order(epoch)
        count = 0
        for position in sorted(order.position_of(task) for task in tasks):
            if epoch == self.epoch and position >= self.cursor:
                # The task was assigned after this state was stored.
                self.waiting.put_run(epoch, self.cursor, position + 1, 0)
                self.cursor = position + 1
            if self.waiting.at(epoch, position):
                count += self.due.setdefault(epoch, IntervalSet()).add(position, position + 1)
        self.revision += bool(count)
        return count

    def is_due(self, epoch: int, position: int) -> bool:
        return position in self.due.get(epoch, ())

    def deduplicate(self) -> None:
        """Start to deduplicate batches, because trainers have declared a model.

        From now on, a batch is done once pservers have applied it, so earlier reports of done batches are dropped.
        """
        if self.settings.is_deduplicated:
            return
        self.settings = replace(self.settings, is_deduplicated=True)
        for pending in self.pending:
            if pending.done:
                self.pending.set_done(pending, IntervalSet())
                self.revision += 1

    def grow(self, task_count: int, batch_counts: Callable[[int], int] | None = None) -> None:
        """Add tasks to the dataset. They are appended to the current epoch and belong to all later epochs.

        Args:
            task_count: New number of tasks; existing tasks keep their numbers.
            batch_counts: As in the settings, but including new tasks; None if the settings include them already.

        Raises:
            UsageError: there are fewer tasks than before, the dataset is not followed, or all epochs are done.
        """
        known = self.sizes.task_count
        if task_count < known:
            raise UsageError(
                f"the dataset had {known} tasks and now has {task_count}. Do not remove files of a running job"
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
        """Record that a growing dataset is complete, so that its last epoch may end."""
        if self.growth_ended:
            return ()
        self.growth_ended = True
        self.revision += 1
        return self._advance()

    def retry_failed(self, selector: FailedSelector) -> int:
        """Return quarantined batches to the todo state, and reset their attempts. Return the number of batches.

        Raises:
            NotFoundError: the selector matches no quarantined batch.
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
        """Drop quarantined batches, so that they are neither listed nor trained on. Return the number of batches.

        Raises:
            NotFoundError: the selector matches no quarantined batch.
        """
        count = 0
        for place, first, end in self._selected(selector):
            self.failed.drop(place, first, end)
            count += end - first
        self.revision += 1
        return count

    # --- storage ---

    def encode(self) -> bytes:
        """Return the queue as one JSON document. For frequent use, see ``encode_parts``."""
        return storage.encode(self)

    def encode_parts(self) -> tuple[bytes, bytes]:
        """Return (dispatch, failures): two documents that must be written in one transaction.

        The first document changes with every assignment and has at most 4 kB + 200 B per live trainer. The second
        changes only if batches are quarantined, retried or dropped, or if the dataset has grown many times.
        """
        return storage.encode_parts(self)

    @classmethod
    def decode(
        cls, data: bytes, settings: QueueSettings, failures: bytes | None = None, *, may_reseed: bool = False
    ) -> TaskQueue:
        """Decode a queue written by ``encode``, or by ``encode_parts`` if ``failures`` is given.

        The timeouts of pending pieces restart at the first event. ``settings.epochs`` may have changed. A growing
        dataset keeps its stored number of tasks until ``grow``.

        Args:
            data: The document, or the dispatch document.
            settings: Settings of the dataset as it is declared now.
            failures: The failures document.
            may_reseed: True if ``settings.seed`` and ``settings.shuffle`` may have changed, too. They are then
                effective from the first epoch that has not begun.

        Raises:
            CorruptError: the documents are damaged, inconsistent, or do not belong together.
            UsageError: the documents have another dataset, seed or shuffling, or have passed the new last epoch.
        """
        queue = cls(settings)
        storage.restore(queue, data, failures, may_reseed=may_reseed)
        # The former last epoch was waiting for more tasks. Since epochs have been added, it may end now.
        queue._advance()
        try:
            queue.check()
        except (AssertionError, LookupError, ValueError) as error:
            raise CorruptError(f"the stored task queue is inconsistent: {error}") from None
        return queue

    # --- decisions ---

    @property
    def timeout_s(self) -> float:
        """Seconds for which a piece may run, or may run without progress if ``_limiting_average_s`` is None."""
        settings, average_s = self.settings, self._limiting_average_s
        if average_s is None:
            return settings.stuck_after_s
        return max(settings.timeout_factor * average_s, settings.timeout_floor_s)

    @property
    def _limiting_average_s(self) -> float | None:
        """Average duration of tasks, which determines the limit for a piece; None if only progress is monitored."""
        return self.average_s if self.settings.is_deduplicated else None

    def _time(self, now: float) -> float:
        """Return the time on the work clock, and start stopped clocks of running pieces."""
        at = self.clock.at(now)
        self.pending.start_clocks(at)
        return at

    def _overdue(self, holder: Holder, now: float) -> str:
        settings, average_s, limit_s = self.settings, self._limiting_average_s, self.timeout_s
        since_s = holder.progress_s if average_s is None else holder.since_s
        assert since_s is not None, "its clock is running"
        if (ran_s := now - since_s) <= limit_s:
            return ""
        if average_s is None:
            return f"the trainer finished no batch for {ran_s:.0f} s; the limit is {limit_s:g} s (stuck_after_s)"
        factor, floor_s = settings.timeout_factor, settings.timeout_floor_s
        return (
            f"the task ran for {ran_s:.0f} s; the limit is {limit_s:.0f} s: {factor:g} times the average of "
            f"{average_s:.1f} s (task_timeout_factor), at least {floor_s:g} s (task_timeout_floor_s)"
        )

    def _next_piece(
        self, epoch: int, trainer: str, now: float, avoided: Collection[int], is_idle: bool
    ) -> BatchRange | None:
        """Take the next piece of ``epoch`` that a trainer may get out of its table. Return the piece, or None.

        Pieces at ``avoided`` positions come after all others that are not suspect.
        """

        def suspect() -> BatchRange | None:
            holders = self.pending.backlogs()
            is_left = lambda piece: self.blame.leaves(piece, trainer, holders, now)  # noqa: E731
            return self.waiting.take_suspect(epoch, is_left) if is_idle else None

        if self.is_stopped:
            return self.waiting.take_of(epoch, self.due.get(epoch, IntervalSet()), has_suspects=is_idle)
        if self.waiting.suspect_count(epoch) >= SUSPECTS_LIMIT:
            return suspect()
        piece: BatchRange | None = None
        if (position := self.promises.next_of(trainer, epoch)) is not None:
            piece = self.waiting.take_complete(epoch, position)
        has_new = epoch == self.epoch and not self.is_past_last and self.cursor < self.epoch_size(epoch)
        if piece is None:
            piece = self.waiting.take_ready(epoch, self.promises.others(epoch) if has_new else (), avoided)
        if piece is None and has_new:
            batch_count = self.batch_count(epoch, self.cursor)
            piece = BatchRange(epoch, self.cursor, 0, batch_count, batch_count)
            self.cursor += 1
        if piece is None and avoided:
            piece = self.waiting.take_ready(epoch)
        return suspect() if piece is None else piece

    def _copy_or_none(
        self, trainer: str, generation: int, epoch: int, now: float, is_idle: bool
    ) -> TaskGiven | NoTaskNow:
        """Assign a copy of a piece to a trainer, if any piece may be copied.

        Only idle trainers get copies, so no trainer gets a copy of a piece that it holds.
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
        sometimes("a slow task was copied to an idle trainer")
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
            last = f". The last error was: {failed.details[-1].error}" if failed.details else ""
            raise JobFailedError(
                f"{count} pieces of work failed in epoch {epoch + 1}, more than the limit of {limit}. "
                f"Repair the data or the program, then retry or drop the failed tasks{last}"
            )

    def _held(self, trainer: str, generation: int, epoch: int, position: int, attempt: int) -> Pending | None:
        """Return the reported piece, or None if it has already been done."""
        pending = self.pending.find(attempt)
        if pending is not None:
            piece = pending.piece
            is_holder = self.pending.is_holder(trainer, generation, attempt)
            if not is_holder or (piece.epoch, piece.position) != (epoch, position):
                raise FencedError(
                    f"trainer {trainer} does not hold attempt {attempt} at position {position} of epoch {epoch + 1}"
                )
            return pending
        place = (epoch, position)
        if attempt in self.finished_parts.get(place, ()):
            return None
        is_begun = epoch <= self.epoch and position < self.begun(epoch)
        if attempt >= self.next_attempt or not is_begun or self.pending.at(*place) or self.waiting.at(*place):
            sometimes("a report about an outdated attempt was rejected")
            raise FencedError(f"attempt {attempt} is no longer current: drop the rest of its task")
        return None

    def _lose_all(self, trainer: str, now: float, error: str, blamed_count: int) -> Effects:
        """Take back a trainer's backlog. Its first ``blamed_count`` pieces count as failed."""
        effects: list[Effect] = []
        held = tuple(self.pending.held_by(trainer).items())
        limit = self.settings.attempts_limit
        if blamed_count and all(pending.piece.failures < limit for _, pending in held):
            self.losses.happened_elsewhere()
        for number, (attempt, pending) in enumerate(held):
            effects += self._lose(pending, attempt, now, Failure(error, LOST) if number < blamed_count else None)
        return tuple(effects)

    def _lose(self, pending: Pending, attempt: int, now: float, failure: Failure | None) -> Effects:
        """Take back a piece from a holder. It counts as failed unless ``failure`` is None."""
        self.revision += 1
        trainer = pending.holder(attempt).trainer
        failure = self._counted(trainer, pending.piece, failure, now)
        self.pending.drop_holder(pending, attempt, now, failed=failure is not None)
        if pending.holders:
            return ()
        piece = pending.piece
        parts = (piece,) if failure is None else self._parts(piece, failure, now)
        suspicion = self.blame.take(piece, is_set_aside=not parts)
        for part in parts:
            for first, end in pending.done.gaps(part.first_batch, part.end_batch):
                waiting = replace(part, first_batch=first, end_batch=end)
                self.waiting.put(waiting)
                if len(parts) == 1 or part.failures >= self.settings.attempts_limit:
                    self.blame.put(waiting, suspicion)
        if pending.done.size == piece.size:
            return self._settle(piece.epoch, piece.position)
        return () if failure is None or parts else self._quarantine(pending, trainer, failure.error)

    def _counted(self, trainer: str, piece: BatchRange, failure: Failure | None, now: float) -> Failure | None:
        """Return a failure if it counts against the piece, otherwise None."""
        is_single_suspect = piece.size == 1 and piece.failures >= self.settings.attempts_limit
        if failure is None or (failure.fault == LOST and is_single_suspect and not self.losses.counts(piece)):
            return None
        if not self.blame.failed(trainer, piece, failure, now):
            sometimes("a failure was not blamed on its piece")
            return None
        return failure

    def _parts(self, piece: BatchRange, failure: Failure, now: float) -> tuple[BatchRange, ...]:
        """Return the pieces to retry instead of a failed one; empty if it must be quarantined."""
        confirmations = self.settings.confirmations * (LOSSES_PER_REPORT if failure.fault == LOST else 1)
        parts = after_failure(piece, failure.batch, self.settings.attempts_limit, confirmations)
        if len(parts) > 1:
            sometimes("a failing task was split")
        elif not parts and not self.blame.convicts(piece, failure.fault, now):
            sometimes("a batch was not quarantined for lack of witnesses")
            return (piece,)
        return parts

    def _quarantine(self, pending: Pending, trainer: str, error: str) -> Effects:
        sometimes("a batch was quarantined")
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
        """Record that a piece is closed. If it was the last open piece of its task or epoch, end the task or epoch."""
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
        # If several pieces are reported together, their individual durations are unknown: all but the first seem to
        # take 0 s.
        duration_s = 0.0 if holder.since_s is None else now - holder.since_s
        if duration_s <= 0 or not holder.is_timed or not pending.piece.is_complete_task:
            return
        self.last_s = duration_s
        self.average_count = min(self.average_count + 1, _AVERAGED_COUNT)
        before_s = self.average_s or 0.0
        self.average_s = before_s + (duration_s - before_s) / self.average_count

    def _selected(self, selector: FailedSelector) -> list[tuple[tuple[int, int], int, int]]:
        epochs = () if selector.task is None else self.failed.failed.epochs()
        order = {epoch: self.order(epoch) for epoch in epochs}

        def is_selected(place: tuple[int, int]) -> bool:
            epoch, position = place
            if selector.epoch is not None and epoch != selector.epoch:
                return False
            return selector.task is None or order[epoch].at(position) == selector.task

        found = self.failed.select(is_selected, selector.batch)
        if not found:
            raise NotFoundError("no failed task matches. The status lists all failed tasks")
        return found
