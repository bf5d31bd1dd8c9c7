"""Looks once more whether every pserver has what counts as done, at the end of each epoch and before the job ends.

A task counts as done because a trainer said so, whose word nobody checks at the time. Should that word ever be wrong,
whatever the reason, the batches are missing and nobody notices. So the master asks every pserver again what it has
applied, compares, and makes what is missing todo again.

Rules:

* An audit is about the epochs that have ended when it begins, and about what pservers are asked after that: an answer
  to an earlier question does not count (``serial``).
* It begins when an epoch has ended, and when all have, for the state of the queue at that moment (``revision``): what
  is found missing is done again, which is another state, and is looked at again.
* Every process that counts answers for itself. One that takes a pserver's place is asked, too.
* It is *clean* when all have answered and nothing was missing. Only then the job may be said to be done.
* A job that was stopped ends within an epoch. Work that nobody reported as done may stay undone there, but not in part:
  a task of which some blocks have batches that others lack is *torn* (``torn``) and is finished before the job ends.
* Work that is missing again and again although it is done each time is a fault that doing it again does not mend: after
  ``ROUNDS_LIMIT`` such audits in a row the job has failed.

Not guaranteed: that tasks with quarantined batches are whole but for these, as pservers tell of whole tasks only; nor
that what the pservers have counts once; that is what ``applied`` is for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flightedl.domain.exactly_once.intervals import IntervalSet
from flightedl.domain.recovery.replay import AppliedSummary, tasks_to_reopen, torn_tasks

#: Audits in a row at the end of the job that may find something.
ROUNDS_LIMIT = 10


class Audit:
    """The newest audit of one job; see the module's rules."""

    def __init__(self, pserver_count: int) -> None:
        self._pserver_count = pserver_count
        self._serial = 0
        self._end_epoch = 0
        #: The queue's at the beginning of the newest audit.
        self._revision = -1
        #: index -> generation of the process that has answered, and what it has.
        self._answered: dict[int, tuple[int, AppliedSummary]] = {}
        self._has_found = False
        self._is_last = False
        self._rounds = 0
        #: Tasks that counted as done and were missing, in all audits.
        self.missing_count = 0

    def epochs_ended(self, end_epoch: int, revision: int, *, is_last: bool) -> bool:
        """Epochs 0 to ``end_epoch``, exclusive, have ended; the queue is at ``revision``.

        With ``is_last`` all have: whatever has changed since the audit before has to be looked at. True if an audit
        begins, so that the pservers have to be asked.
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
        """The serial of the audit that this process has to answer; None: it has nothing to answer."""
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
        """A process says what it has.

        Returns:
            epoch -> tasks that it lacks, to be reopened as far as they count as done; then ``found`` is to be told how
            many these were.
        """
        if serial != self._serial:
            return {}
        self._answered[index] = generation, summary
        return tasks_to_reopen(summary, self._end_epoch, task_count_of)

    def torn(self, task_count_of: Callable[[int], int]) -> dict[int, list[int]]:
        """Tasks by epoch that are in some blocks only; empty while an answer is missing."""
        if not self._is_last or len(self._answered) < self._pserver_count:
            return {}
        return torn_tasks([summary for _, summary in self._answered.values()], self._end_epoch, task_count_of)

    def found(self, reopened: int) -> None:
        """So many tasks that a process lacks counted as done."""
        if reopened:
            self._has_found = True
            self.missing_count += reopened

    def is_clean(self, revision: int, generations: Mapping[int, int]) -> bool:
        """Whether nothing is missing of what the queue has done at ``revision``.

        ``generations``: of the processes that count, by index.
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
        """Whether work is missing however often it is done."""
        return self._rounds >= ROUNDS_LIMIT
