"""Restart policy for a job's processes. Pure: it is told how a process ended, and returns a decision.

The rules depend on how a process ended:

* A *server* (etcd, master, pserver) should not end while the job runs. It is restarted: immediately the first time,
  later after a delay that doubles unless the server was ended from outside. Too many short runs in a row end the job;
  more are allowed if the last run was ended from outside.
* If a process cannot be started at the moment, the start is retried after the same delays.
* A *trainer* that exited with 0 has finished, and so has one that exited with 4, because its data was incomplete. When
  all trainers have finished, the job is done.
* If a trainer was killed, terminated by a signal (143), or exited with 75 ("start me again"), or if its exit status
  could not be read, the user's script is not at fault. The trainer is replaced like a server, but more often.
* If a trainer exited with any other code, the user's script crashed. It is started once more. If the same slot crashes
  again, or all slots have crashed, the script is at fault and not the machine, so the job is given up.
* A crash *while training* is different, because a poison record may be the cause, and the master can find it only if
  trainers keep failing on it. So once the job has trained on a batch, a slot's crashes and short runs are forgotten
  whenever work was assigned since its last crash. ``crashes_while_training`` crashes in a row without new work end the
  job. If the master does not answer, its last report is used.
* A poison record fails again when it is retried. If the script raises the same error at the same place for several
  batches, but never twice for the same batch, then the script is at fault. The job is given up when every trainer has
  raised the error, at more batches than there are trainers, or after ``crashes_without_failed`` crashes that no batch
  was found to cause.
* The master's queue decides whether a batch or the trainer is at fault (``domain.queue.blame``). A trainer that is in
  doubt there is restarted, but with a pause between its attempts, as long as another trainer has not crashed. A trainer
  that has to end is not restarted, and the others continue without it.
* A server that exits with 0 has left politely, so this counts as an end from outside.
* Exit codes 2 (the input must be changed) and 3 (the job cannot continue) end the job immediately, because a retry
  cannot help. A process that a signal has stopped does not end, but its lease expires and nothing replaces it. After
  ``frozen_s`` it therefore counts as lost, like a pod whose probe fails, and is killed and restarted.

The trainers of a *group* train one model together, and none can continue without the others. If one must be restarted,
all of them are, including those that have finished.

After a run of at least ``long_run_s``, the slot's short runs and crashes are forgotten. ``restarts_limit`` limits the
total number of restarts of a slot, for any reason.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from flightedl.errors import EXIT_FAILED, EXIT_JOB_FAILED, EXIT_START_AGAIN, EXIT_UNKNOWN, EXIT_USAGE, has_finished


class Role(StrEnum):
    """Kind of a process in a job."""

    ETCD = "etcd"
    MASTER = "master"
    PSERVER = "pserver"
    TRAINER = "trainer"


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in a job for one process at a time."""

    role: Role
    index: int

    def __str__(self) -> str:
        is_only_one = self.role is Role.ETCD or (self.role is Role.MASTER and not self.index)
        return str(self.role) if is_only_one else f"{self.role}-{self.index}"


@dataclass(frozen=True, slots=True)
class StartAgain:
    """Start a new process in the slot, ``after_s`` seconds from now."""

    slot: Slot
    after_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class StartTogether:
    """Stop all trainers and start new ones ``after_s`` seconds from now, because the trainer in ``slot`` has ended."""

    slot: Slot
    after_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class SlotFinished:
    """The slot stays empty, because the trainer has done all of its work, or for another ``reason``."""

    slot: Slot
    reason: str = "has finished"


@dataclass(frozen=True, slots=True)
class AllFinished:
    """Every trainer has done all of its work, so the job is done."""

    #: 0, or ``EXIT_INCOMPLETE`` if a trainer has exited with it.
    exit_code: int = 0


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Stop everything. The output of the process in ``slot`` shows why."""

    slot: Slot
    reason: str
    exit_code: int


Decision = StartAgain | StartTogether | SlotFinished | AllFinished | GiveUp


@dataclass(frozen=True, slots=True)
class Account:
    """Progress of a job, as its master reports it."""

    #: True if any batch has been trained on.
    has_trained: bool
    is_done: bool
    #: Number of assignments of work.
    attempts: int
    #: Number of tasks that were found to be at fault and set aside.
    failed: int = 0
    #: Number of batches at which ``error``, the most frequent error, was raised. Each batch counts once.
    raised_once: int = 0
    error: str = ""
    #: Number of trainers that raised ``error``; 0 if unknown.
    raised_by: int = 0
    #: Names of the trainers that have failed since they last processed a batch, and of those that have to end.
    in_doubt: frozenset[str] = frozenset()
    given_up: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the number of restarts, and delays before them."""

    #: Number of runs in a row, each shorter than ``long_run_s``, after which a server's slot is given up.
    server_short_runs: int = 4
    #: The same limit for a trainer's slot, if none of these runs ended with a crash of the script.
    trainer_short_runs: int = 10
    #: The same limit if the last run was ended from outside: by SIGKILL, by SIGTERM, or because its lease was lost, or
    #: if a server exited with 0.
    ended_short_runs: int = 30
    crashes_of_a_slot: int = 2
    crashes_while_training: int = 5
    #: Bisecting two tasks of a few thousand batches each, one per trainer, takes fewer crashes than this.
    crashes_without_failed: int = 40
    restarts_limit: int = 200
    long_run_s: float = 20.0
    first_delay_s: float = 0.25
    longest_delay_s: float = 5.0
    #: Maximum number of seconds for which a process may be frozen; longer than a lease, in case it wakes up in time.
    frozen_s: float = 30.0


@dataclass(slots=True)
class _Record:
    short_runs: int = 0
    crashes: int = 0
    restarts: int = 0
    #: True if the slot's last process was ended from outside, so that the next one need not wait.
    is_ended_from_outside: bool = False
    #: Attempts at its last crash.
    attempts: int = 0
    #: True if the trainer in this slot has done all of its work, or was given up alone.
    is_finished: bool = False
    #: Exit code with which it has finished.
    exit_code: int = 0
    is_given_up: bool = False


#: Exit code of a trainer that returns its work after SIGTERM.
EXIT_TERMINATED = 128 + signal.SIGTERM
_ENDED_FROM_OUTSIDE = frozenset({-signal.SIGKILL, -signal.SIGTERM, EXIT_TERMINATED, EXIT_START_AGAIN, EXIT_UNKNOWN})


@dataclass(slots=True)
class RestartPolicy:
    """Decides about restarts in all slots of a job."""

    slots: Sequence[Slot]
    limits: Limits = Limits()
    #: True if the trainers are the ranks of a group.
    is_group: bool = False
    _records: dict[Slot, _Record] = field(init=False)
    #: The latest account.
    _account: Account | None = field(init=False, default=None)
    #: Number of trainer crashes since the last task was set aside, and total number of tasks set aside.
    _crashes: int = field(init=False, default=0)
    _failed: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._records = {slot: _Record() for slot in self.slots}

    def ended(self, slot: Slot, exit_code: int, ran_s: float, account: Account | None = None) -> tuple[Decision, ...]:
        """Decide what to do after the process in ``slot`` has ended. ``exit_code`` may be minus the number of a signal.

        Args:
            slot: Its slot.
            exit_code: Its exit code.
            ran_s: Seconds for which it ran.
            account: The master's account, or None if it is unknown.
        """
        return tuple(map(self._together, self._ended(slot, exit_code, ran_s, account)))

    def _together(self, decision: Decision) -> Decision:
        if not self.is_group or not isinstance(decision, StartAgain) or decision.slot.role is not Role.TRAINER:
            return decision
        for record in self._of_trainers():
            record.is_finished = False
        return StartTogether(decision.slot, decision.after_s, decision.reason)

    def _ended(self, slot: Slot, exit_code: int, ran_s: float, account: Account | None) -> tuple[Decision, ...]:
        account = self._account = account or self._account
        record = self._records[slot]
        if record.is_finished:
            raise ValueError(f"{slot} has finished; nothing runs there")
        is_trainer = slot.role is Role.TRAINER
        record.is_ended_from_outside = exit_code in _ENDED_FROM_OUTSIDE or (exit_code == 0 and not is_trainer)
        in_doubt = frozenset() if account is None else account.in_doubt
        if is_trainer and exit_code == EXIT_FAILED and account is not None and str(slot) in account.given_up:
            return self._given_up(slot, record)
        if ran_s >= self.limits.long_run_s:
            record.short_runs = record.crashes = 0
        if account is not None and not account.has_trained:
            account = None
        if is_trainer and account is not None and account.attempts != record.attempts:
            record.short_runs = record.crashes = 0
            record.attempts = account.attempts
        if is_trainer and has_finished(exit_code):
            return self._finished(SlotFinished(slot), record, exit_code)
        others = [each for each in self._of_trainers() if each is not record]
        if exit_code == EXIT_FAILED and str(slot) in in_doubt and any(not each.crashes for each in others):
            record.crashes += 1
            return (self._start_again(slot, record, "the script crashed (exit code 1); the other trainers go on"),)
        if exit_code in {EXIT_USAGE, EXIT_JOB_FAILED}:
            return (GiveUp(slot, f"{slot} ended: {describe_exit(exit_code)}", exit_code),)
        if is_trainer and exit_code > 0 and not record.is_ended_from_outside:
            return (self._crashed(slot, record, exit_code, account),)
        return (self._lost(slot, record, exit_code),)

    def _given_up(self, slot: Slot, record: _Record) -> tuple[Decision, ...]:
        record.is_given_up = True
        if all(each.is_given_up for each in self._of_trainers()):
            return (GiveUp(slot, f"every trainer was given up, {slot} as the last one", EXIT_FAILED),)
        reason = "is given up, because it fails at one batch after another; the other trainers go on"
        return self._finished(SlotFinished(slot, reason), record)

    def _finished(self, found: SlotFinished, record: _Record, exit_code: int = 0) -> tuple[Decision, ...]:
        record.is_finished, record.exit_code = True, exit_code
        worst = max(each.exit_code for each in self._of_trainers())
        return (found, AllFinished(worst)) if self.is_all_finished else (found,)

    def not_started(self, slot: Slot, reason: str) -> Decision:
        """Decide what to do if the machine, and not the job, prevented a process from starting."""
        record = self._records[slot]
        record.is_ended_from_outside = False
        record.short_runs += 1
        if record.short_runs >= self.limits.ended_short_runs:
            why = f"{slot} could not be started {record.short_runs} times in a row, the last time: {reason}"
            return GiveUp(slot, why, EXIT_FAILED)
        return self._start_again(slot, record, reason)

    @property
    def is_all_finished(self) -> bool:
        """True if there are trainers, and all of them have done their work."""
        trainers = self._of_trainers()
        return bool(trainers) and all(each.is_finished for each in trainers)

    def add(self, slot: Slot) -> None:
        """Supervise another server."""
        self._records[slot] = _Record()

    def is_finished(self, slot: Slot) -> bool:
        """True if the slot's trainer has done all of its work."""
        return self._records[slot].is_finished

    def _of_trainers(self) -> list[_Record]:
        return [record for slot, record in self._records.items() if slot.role is Role.TRAINER]

    def _crashed(self, slot: Slot, record: _Record, exit_code: int, account: Account | None) -> Decision:
        """Decide what to do after a crash. ``account`` is None if it is unknown or no batch has been trained on."""
        record.crashes += 1
        is_training = account is not None and not account.is_done
        limit = self.limits.crashes_while_training if is_training else self.limits.crashes_of_a_slot
        ended = describe_exit(exit_code)
        if record.crashes >= limit:
            return GiveUp(slot, f"the script crashed in {slot} again ({ended})", EXIT_FAILED)
        trainers = self._of_trainers()
        if account is not None:
            if account.failed != self._failed:
                self._failed, self._crashes = account.failed, 0
            self._crashes += 1
            is_everywhere = account.raised_by == 0 or account.raised_by >= len(trainers)
            if account.raised_once > len(trainers) and is_everywhere:
                where = f"at {account.raised_once} different batches, and at none of them twice"
                return GiveUp(slot, f"the script raised the same error {where}: {account.error}", EXIT_FAILED)
            if self._crashes >= self.limits.crashes_without_failed:
                return GiveUp(slot, f"the script crashed {self._crashes} times, at no batch in particular", EXIT_FAILED)
            return self._start_again(slot, record, f"the script crashed ({ended}); its work is retried")
        if len(trainers) > 1 and all(each.crashes for each in trainers):
            return GiveUp(slot, f"the script crashed in {slot} too, so in every trainer ({ended})", EXIT_FAILED)
        return self._start_again(slot, record, f"the script crashed ({ended}); it is retried once")

    def _lost(self, slot: Slot, record: _Record, exit_code: int) -> Decision:
        record.short_runs += 1
        limit = self.limits.trainer_short_runs if slot.role is Role.TRAINER else self.limits.server_short_runs
        if record.is_ended_from_outside:
            limit = max(limit, self.limits.ended_short_runs)
        if record.short_runs >= limit:
            return GiveUp(
                slot, f"{slot} ended {record.short_runs} times in a row, the last time: {describe_exit(exit_code)}", 1
            )
        return self._start_again(slot, record, describe_exit(exit_code))

    def _start_again(self, slot: Slot, record: _Record, reason: str) -> Decision:
        if record.restarts >= self.limits.restarts_limit:
            return GiveUp(
                slot, f"{slot} was started again {record.restarts} times, and ended again: {reason}", EXIT_FAILED
            )
        record.restarts += 1
        delays = self.limits.first_delay_s * 2.0 ** (record.short_runs + record.crashes - 2)
        is_first = record.short_runs + record.crashes <= 1
        if record.is_ended_from_outside:
            delays = min(delays, self.limits.first_delay_s)
        return StartAgain(slot, 0.0 if is_first else min(delays, self.limits.longest_delay_s), reason)


def describe_exit(code: int) -> str:
    """Describe how a process ended, for example as ``exit code 1`` or ``killed by SIGKILL``."""
    if code == EXIT_TERMINATED:
        return "terminated by SIGTERM"
    if code == EXIT_UNKNOWN:
        return "its exit status could not be read"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
