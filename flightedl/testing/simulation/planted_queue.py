"""Bugs planted in the task queue, in what is set aside, and in evaluations; see ``planted``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from msgspec import structs

from flightedl.domain.master.evaluations import Evaluation, Evaluations
from flightedl.domain.master.work import Work
from flightedl.domain.queue import reopening, storage, tasks
from flightedl.domain.queue.failed import FailedPieces
from flightedl.domain.queue.state import QueueState
from flightedl.domain.queue.tasks import TaskQueue
from flightedl.domain.queue.values import BatchRange
from flightedl.messages.base import decode, encode
from flightedl.messages.declarations import EvaluationsRecord

Original = Callable[..., Any]
#: Name -> what goes wrong, and (class or module, name in it, original -> what takes its place).
Bugs = dict[str, tuple[str, tuple[tuple[Any, str, Callable[[Original], Original]], ...]]]


def always(value: object) -> Callable[[Original], Original]:
    """Whatever is asked, this is the answer."""
    return lambda _original: lambda *_arguments, **_more: value


Parts = tuple[BatchRange, ...]


def _parts(change: Callable[[BatchRange, Parts], Parts]) -> Callable[[Original], Original]:
    """Something else becomes of a piece that failed."""
    return lambda original: lambda piece, *more: change(piece, original(piece, *more))


def _without_the_middle(_piece: BatchRange, parts: Parts) -> Parts:
    if len(parts) != 2:
        return parts
    first, second = parts
    second = replace(second, first_batch=second.first_batch + 1)
    return (first, second) if second.size else (first,)


def _without_what_follows(piece: BatchRange, parts: Parts) -> Parts:
    return tuple(part for part in parts if part.first_batch == piece.first_batch or part.size == 1)


def _all_of_it(_piece: BatchRange, parts: Parts) -> Parts:
    return () if len(parts) > 1 else parts


def _never_enough(piece: BatchRange, parts: Parts) -> Parts:
    return parts or (piece,)


def _numbered_again(original: Original) -> Original:
    def restore(state: QueueState, *arguments: Any, **more: Any) -> None:
        original(state, *arguments, **more)
        state.next_attempt = 1 + max((h.attempt for pending in state.pending for h in pending.holders), default=0)

    return restore


def _first_stretch(original: Original) -> Original:
    return lambda state, epoch, wanted, parts: original(state, epoch, list(wanted)[:1], parts)


def _done_all_the_same(original: Original) -> Original:
    """What waits behind what it is at counts as done."""

    def trainer_gone(self: TaskQueue, trainer: str, now: float, is_graceful: bool = False) -> Any:
        for attempt, pending in tuple(self._state.pending.held_by(trainer).items())[1:]:
            place = (pending.piece.epoch, pending.piece.position)
            self.finish(trainer, *place, attempt, now, generation=self.registrations()[trainer])
        return original(self, trainer, now, is_graceful)

    return trainer_gone


def _metrics_of_all(original: Original) -> Original:
    """Whatever is reported is added up, also what somebody else has reported before."""

    def take_reports(self: Work, ticket: Any, now: float) -> Any:
        if self._take_metrics is None:
            return original(self, ticket, now)
        take, self._take_metrics = self._take_metrics, None
        for report in ticket.finished:
            take(report.metrics)
        try:
            return original(self, ticket, now)
        finally:
            self._take_metrics = take

    return take_reports


def _but_for_evaluations(original: Original) -> Original:
    return lambda self, *arguments, **more: self._take_metrics is None and original(self, *arguments, **more)


def _without_sums(original: Original) -> Original:
    def encoded(self: Evaluations) -> bytes:
        record = decode(original(self), EvaluationsRecord)
        records = [structs.replace(one, sums={}) if not one.is_done else one for one in record.evaluations]
        return encode(EvaluationsRecord(evaluations=records))

    return encoded


def _results_so_far(_original: Original) -> Original:
    def encode_results(self: Evaluations) -> bytes | None:
        known = [structs.replace(self._record(each), is_done=True) for each in self._known.values()]
        return encode(EvaluationsRecord(evaluations=known)) if known else None

    return encode_results


def _done_when_all_are_out(original: Original) -> Original:
    def settle(self: Evaluations, found: Evaluation) -> None:
        original(self, found)
        if found.work is not None and not found.work.queue.counts().todo:
            found.is_done, found.work = True, None

    return settle


def _quarantined_whole(original: Original) -> Original:
    def quarantine(self: FailedPieces, piece: Any) -> None:
        original(self, replace(piece, first_batch=max(piece.first_batch - 1, 0)))

    return quarantine


def _only_failed_epochs(original: Original) -> Original:
    """What is set aside in one epoch is set aside in all that follow."""

    def take(self: TaskQueue, epoch: int, trainer: str, is_idle: bool) -> Any:
        while (piece := original(self, epoch, trainer, is_idle)) is not None:
            if not any(e < epoch and position == piece.position for (e, position), _ in self._state.failed.failed):
                return piece
        return None

    return take


def _promised_counts_as_done(original: Original) -> Original:
    def advance(self: TaskQueue) -> Any:
        effects = original(self)
        if effects:
            state = self._state
            for position in range(state.promises.count(state.epoch)):
                state.waiting.take_whole(state.epoch, position)
        return effects

    return advance


def _kept_twice(original: Original) -> Original:
    """What was promised is given to whom it was promised, and to the next one that asks."""

    def take(self: TaskQueue, epoch: int, trainer: str, is_idle: bool) -> Any:
        state = self._state
        promised = {*state.promises.others(epoch)}
        piece = original(self, epoch, trainer, is_idle)
        if piece is not None and piece.is_whole and piece.position in promised:
            state.waiting.put_run(epoch, piece.position, piece.position + 1, piece.failures)
        return piece

    return take


QUEUE_BUGS: Bugs = {
    "what is promised counts as done": (
        "the tasks that trainers were promised of the next epoch are not handed out when it begins",
        ((TaskQueue, "_advance", _promised_counts_as_done),),
    ),
    "a promise is kept twice": (
        "a task that a trainer was promised waits for others after it was given",
        ((TaskQueue, "_take", _kept_twice),),
    ),
    "the middle batch is dropped": (
        "of a failing piece that is halved, the first batch of the second half is in neither",
        ((tasks, "after_failure", _parts(_without_the_middle)),),
    ),
    "what follows a failing batch is dropped": (
        "of a piece that is split around a failing batch, what is behind it is not handed out again",
        ((tasks, "after_failure", _parts(_without_what_follows)),),
    ),
    "a failing piece is set aside whole": (
        "a piece that fails too often is not narrowed down",
        ((tasks, "after_failure", _parts(_all_of_it)),),
    ),
    "nothing is ever set aside": (
        "a batch that nobody can train is handed out for ever",
        ((tasks, "after_failure", _parts(_never_enough)),),
    ),
    "the batch before is set aside too": (
        "what is set aside is one batch longer than what failed",
        ((FailedPieces, "quarantine", _quarantined_whole),),
    ),
    "a task that failed is left out of later epochs": (
        "a task with a batch that was set aside is not trained in the epochs that follow",
        ((TaskQueue, "_take", _only_failed_epochs),),
    ),
    "attempts are numbered again": (
        "a new master gives out numbers that its predecessor has given out",
        ((storage, "restore", _numbered_again),),
    ),
    "only the first stretch is reopened": (
        "of what a pserver lacks, only the first tasks in a row are done again",
        ((reopening, "reopen", _first_stretch),),
    ),
    "what waits is lost with its trainer": (
        "of a trainer that is gone only what it was at goes back",
        ((TaskQueue, "trainer_gone", _done_all_the_same),),
    ),
    "metrics of a copy are added": (
        "the metrics of a piece that is reported again are added up again",
        ((Work, "take_reports", _metrics_of_all),),
    ),
    "metrics are not stored": (
        "a new master goes on with an evaluation's queue, and without its sums",
        ((Evaluations, "encode", _without_sums),),
    ),
    "an evaluation is resumed as if done": (
        "a checkpoint has what an evaluation has come to as its result",
        ((Evaluations, "encode_results", _results_so_far),),
    ),
    "an evaluation ends early": (
        "an evaluation is over when its last piece is handed out",
        ((Evaluations, "settle", _done_when_all_are_out),),
    ),
    "what the dead evaluate is not taken back": (
        "an evaluation waits for ever for a trainer that died",
        (
            (Evaluations, "trainer_gone", always(None)),
            (Evaluations, "tick", always(False)),
            (Work, "forget_the_dead", _but_for_evaluations),
        ),
    ),
}
