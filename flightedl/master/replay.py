"""What the master does about pservers that come back with less than they had: their lost batches are dispatched again.

Wraps ``domain.checkpoints_replay`` for the service, which calls everything here under its lock and stores ``encode()``
in the same transaction as the queue.
"""

from __future__ import annotations

import logging
from typing import Literal

from flightedl.domain.audit import Audit
from flightedl.domain.checkpoints_replay import AppliedSummary, PserverRecovery
from flightedl.domain.tasks import TaskQueue
from flightedl.errors import NotFoundError
from flightedl.messages.control import AppliedReply
from flightedl.messages.tasks import FinishedTask

_log = logging.getLogger(__name__)

#: Stands for the generation of a pserver that acknowledged nothing, because it has no blocks.
_NOTHING_TO_LOSE = 1 << 62


class Replay:
    """Which process of each pserver counts, and what to do again when it is another one."""

    def __init__(self, pserver_count: int, recovery: Literal["replay", "rollback"], stored: bytes | None) -> None:
        self._pserver_count = pserver_count
        self._audit = Audit(pserver_count)
        self._recovery = (
            PserverRecovery(pserver_count, recovery)
            if stored is None
            else PserverRecovery.restore(stored, pserver_count, recovery)
        )
        #: index -> why what its process lacks cannot be done again.
        self._refused: dict[int, str] = {}

    def encode(self) -> bytes:
        """The state that a successor goes on from."""
        return self._recovery.encode()

    def seen(self, index: int, generation: int) -> None:
        """A pserver's key is there."""
        if generation != self._recovery.generation_of(index):
            self._refused.pop(index, None)
        self._recovery.seen(index, generation)

    @property
    def refusal(self) -> str:
        """Why the job cannot go on: a pserver lacks what cannot be done again. Empty: it can."""
        if self._audit.has_failed:
            return (
                "a pserver lacks work that trainers report as done, however often it is done again, so the model lacks "
                "some of the data: keep the master's log, and begin the job again with --resume"
            )
        return next(iter(self._refused.values()), "")

    def is_settled(self, index: int, generation: int) -> bool:
        """Whether what this process has is taken into account."""
        return self._recovery.generation_of(index) == generation and self._recovery.is_settled(index)

    @property
    def is_all_settled(self) -> bool:
        """Whether the queue's word for what is done can be taken."""
        return self._recovery.is_all_settled

    def settled(self) -> dict[int, int]:
        """The processes whose word was taken, by index: their generations."""
        return self._recovery.settled()

    def begin_anew(self) -> None:
        """All values are gone, and with them all that was done."""
        self._recovery.begin_anew()

    def must_reload(self, index: int) -> int | None:
        """Rollback: the generation that has to end and come back; None: it may stay."""
        found = self._recovery.to_reload().get(index)
        return None if found is None else found.generation

    def counts(self, report: FinishedTask) -> bool:
        """Whether finished work is in the pservers that count; one without blocks was never asked."""
        named = dict(enumerate(report.pservers))
        return self._recovery.accepts([named.get(i) or _NOTHING_TO_LOSE for i in range(self._pserver_count)])

    def announced(self, index: int, generation: int, reply: AppliedReply, queue: TaskQueue | None) -> bool:
        """Reopen what this process lacks. True: something changed and has to be stored.

        A process that lacks an epoch of which nothing is known any more is never settled; see ``refusal``.
        """
        try:
            lacking = self._recovery.announced(
                index,
                generation,
                AppliedSummary.decode(reply.summary),
                0 if queue is None else queue.begun_epochs,
                (lambda _epoch: 0) if queue is None else queue.epoch_size,
                reply.checkpoint,
            )
        except NotFoundError as error:
            self._refuse(index, reply.checkpoint, error)
            return False
        if lacking is None:
            return False
        reopened = 0
        for epoch, tasks in lacking.items():
            assert queue is not None, "nothing is lacking without a queue"
            reopened += queue.reopen(epoch, tasks)
        _log.info(
            "pserver is settled index=%d generation=%d checkpoint=%s tasks_to_do_again=%d",
            index,
            generation,
            reply.checkpoint,
            reopened,
        )
        for text in reply.skipped:
            _log.warning("pserver %d skipped %s", index, text)
        return True

    def _refuse(self, index: int, checkpoint: int | None, error: NotFoundError) -> None:
        origin = "no checkpoint" if checkpoint is None else f"checkpoint {checkpoint}"
        reason = (
            f"pserver {index} came back from {origin}, and what it lacks cannot be done again ({error}): "
            "stop the job and begin it again with --resume"
        )
        if self._refused.get(index) != reason:
            _log.error("%s", reason)
        self._refused[index] = reason

    # the audit

    def audit(self, queue: TaskQueue) -> bool:
        """Look whether one is due; True: it begins, and the pservers have to be asked."""
        return self._audit.epochs_ended(queue.epoch, queue.revision, is_last=queue.is_done)

    def audit_wanted(self, index: int, generation: int) -> int | None:
        """The serial of the audit that this process has to answer; None: nothing has to be asked."""
        return self._audit.wanted(index, generation) if self.is_settled(index, generation) else None

    def audited(self, index: int, generation: int, serial: int, reply: AppliedReply, queue: TaskQueue) -> bool:
        """Reopen what counts as done and is missing in this process. True: there was some."""
        reopened = 0
        summary = AppliedSummary.decode(reply.summary)
        lacking = self._audit.answered(index, generation, serial, summary, lambda epoch: _size(queue, epoch))
        for epoch, tasks in lacking.items():
            # Of a task that is not whole a pserver does not say what it has: one with quarantined batches never is.
            tasks.difference_update(queue.quarantined(epoch))
            count = queue.reopen(epoch, tasks)
            reopened += count
            if count:
                _log.warning(
                    "pserver lacks work that was reported as done, it is done again index=%d generation=%d epoch=%d "
                    "tasks=%d first_task=%d",
                    index,
                    generation,
                    epoch + 1,
                    count,
                    next(iter(tasks))[0],
                )
        self._audit.found(reopened)
        return reopened > 0

    def is_audited(self, queue: TaskQueue) -> bool:
        """Whether every process that counts has all that counts as done."""
        return self._audit.is_clean(queue.revision, self.settled())

    @property
    def missing_count(self) -> int:
        """Tasks that counted as done and were missing in a pserver, since this master began."""
        return self._audit.missing_count


def _size(queue: TaskQueue, epoch: int) -> int:
    """Tasks of an epoch that has ended; 0: it is forgotten, and was looked at when it ended."""
    try:
        return queue.epoch_size(epoch)
    except NotFoundError:
        return 0
