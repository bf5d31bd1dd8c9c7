"""Comparison of all pservers' applied batches with the done tasks, after each epoch and before the job ends.

A task counts as done when a trainer reports it as finished. If such a report were wrong for any reason, the missing
batches would go unnoticed. The master therefore asks all pservers for their applied batches, and reopens missing tasks.

Rules:

* An audit covers the epochs that had ended when it began. Answers to earlier audits are ignored (``serial``).
* An audit begins when an epoch has ended. At the end of the last epoch, it covers the queue in its current state
  (``revision``). Repeating missing tasks changes this state, so another audit follows.
* Each process answers for itself. If a pserver is replaced, the new process is asked too.
* An audit is *clean* if all pservers have answered and no task was missing. Only after a clean audit may the job be
  reported as done.
* A stopped job ends in the middle of an epoch, in which some tasks may remain undone. But a task is *torn* if only some
  blocks have applied one of its batches (``torn``); torn tasks must be finished before the job ends.
* If tasks are still missing after ``ROUNDS_LIMIT`` audits in a row, the job fails.

An audit does not check the other batches of a task with quarantined batches, because pservers report only complete
tasks. Nor does an audit check that each batch was applied only once; ``applied`` ensures this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flightedl.domain.exactly_once.intervals import IntervalSet
from flightedl.domain.recovery.replay import AppliedSummary, tasks_to_reopen, torn_tasks

#: Maximum number of consecutive audits at the end of a job that may find missing tasks.
ROUNDS_LIMIT = 10


class Audit:
    """The newest audit of one job. The module's docstring describes the rules."""

    def __init__(self, pserver_count: int) -> None:
        self._pserver_count = pserver_count
        self._serial = 0
        self._end_epoch = 0
        #: Revision of the queue when the newest audit began.
        self._revision = -1
        #: Pserver index -> (generation of the process that answered, its applied tasks).
        self._answered: dict[int, tuple[int, AppliedSummary]] = {}
        self._has_found = False
        self._is_last = False
        self._rounds = 0
        #: Number of done tasks that turned out to be missing, in all audits.
        self.missing_count = 0

    @property
    def is_open(self) -> bool:
        """True while any pserver has not answered."""
        return self._end_epoch > 0 and len(self._answered) < self._pserver_count

    def resize(self, pserver_count: int) -> None:
        self._pserver_count = pserver_count
        self._answered = {index: each for index, each in self._answered.items() if index < pserver_count}

    def epochs_ended(self, end_epoch: int, revision: int, *, is_last: bool) -> bool:
        """Begin an audit of the epochs before ``end_epoch`` if one is due. True if the pservers must be asked.

        If ``is_last``, all epochs have ended, and each change of the queue's ``revision`` requires another audit.
        """
        is_new = end_epoch > self._end_epoch or (is_last and (revision != self._revision or not self._is_last))
        if not is_new:
            return False
        self._rounds = self._rounds + 1 if is_last and self._is_last and self._has_found else 0
        self._serial += 1
        self._end_epoch, self._revision, self._is_last = end_epoch, revision, is_last
        self._answered, self._has_found = {}, False
        return True

    def wanted(self, index: int, generation: int) -> int | None:
        if not self._end_epoch or self._generations.get(index) == generation:
            return None
        return self._serial

    @property
    def _generations(self) -> dict[int, int]:
        return {index: generation for index, (generation, _) in self._answered.items()}

    def answered(
        self,
        index: int,
        generation: int,
        serial: int,
        summary: AppliedSummary,
        task_count_of: Callable[[int], int],
    ) -> dict[int, IntervalSet]:
        """Handle a process's answer.

        Returns:
            Epoch -> tasks that it lacks. The caller reopens those that are done, and passes their number to ``found``.
        """
        if serial != self._serial:
            return {}
        self._answered[index] = generation, summary
        return tasks_to_reopen(summary, self._end_epoch, task_count_of)

    def torn(self, task_count_of: Callable[[int], int]) -> dict[int, list[int]]:
        """Return the torn tasks by epoch; empty until all pservers have answered."""
        if not self._is_last or len(self._answered) < self._pserver_count:
            return {}
        return torn_tasks([summary for _, summary in self._answered.values()], self._end_epoch, task_count_of)

    def found(self, reopened: int) -> None:
        if reopened:
            self._has_found = True
            self.missing_count += reopened

    def is_clean(self, revision: int, generations: Mapping[int, int]) -> bool:
        """True if no pserver lacks any of the tasks that are done at ``revision``.

        ``generations`` maps pserver indices to the generations of the current processes.
        """
        return (
            self._is_last
            and revision == self._revision
            and not self._has_found
            and len(self._answered) == self._pserver_count
            and self._generations.items() <= generations.items()
        )

    @property
    def has_failed(self) -> bool:
        return self._rounds >= ROUNDS_LIMIT
