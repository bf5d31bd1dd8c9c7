"""Findings: problems with a job, and processes that are waiting for other processes."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Severity(enum.IntEnum):
    """Severity of a finding. A lower number is worse."""

    #: The job cannot continue until this is fixed.
    BROKEN = 0
    #: The job continues, but more slowly than necessary or with some loss.
    HARMFUL = 1
    #: Worth knowing.
    NOTE = 2


class Cause(enum.StrEnum):
    """Kinds of problems."""

    ETCD_UNREACHABLE = "etcd_unreachable"
    ETCD_WITHOUT_QUORUM = "etcd_without_quorum"
    ETCD_FULL = "etcd_full"
    ETCD_SLOW = "etcd_slow"
    ETCD_UNSOUND = "etcd_unsound"
    ACCESS_REFUSED = "access_refused"
    UNKNOWN_JOB = "unknown_job"
    NO_MASTER = "no_master"
    MASTER_DEPOSED = "master_deposed"
    MASTER_UNREACHABLE = "master_unreachable"
    PSERVER_MISSING = "pserver_missing"
    PSERVER_RESTARTS = "pserver_restarts"
    PSERVER_UNREACHABLE = "pserver_unreachable"
    PSERVER_CUT_OFF = "pserver_cut_off"
    PSERVER_OUT_OF_MEMORY = "pserver_out_of_memory"
    PSERVER_WAITS = "pserver_waits"
    PSERVERS_LIMIT = "pservers_limit"
    OTHER_PLAN = "other_plan"
    OTHER_JOB = "other_job"
    JOB_REFUSED = "job_refused"
    VERSIONS_DIFFER = "versions_differ"
    CLOCKS_DIFFER = "clocks_differ"
    TOO_MANY_THREADS = "too_many_threads"
    NO_TRAINERS = "no_trainers"
    TRAINER_STANDS_STILL = "trainer_stands_still"
    TRAINER_IS_SLOW = "trainer_is_slow"
    TRAINER_CUT_OFF = "trainer_cut_off"
    ROUND_STUCK = "round_stuck"
    GRADIENTS_REFUSED = "gradients_refused"
    MODE_CHANGE_WAITS = "mode_change_waits"
    SLOW_FILE = "slow_file"
    TASK_TIMED_OUT = "task_timed_out"
    POISON_RECORD = "poison_record"
    SCRIPT_RAISES = "script_raises"
    DATA_RUN_OUT = "data_run_out"
    DATA_MISSING = "data_missing"
    TOO_FEW_TASKS = "too_few_tasks"
    JOB_DONE = "job_done"
    WORK_WAS_MISSING = "work_was_missing"
    CERTIFICATE_ENDS = "certificate_ends"
    DISK_NEARLY_FULL = "disk_nearly_full"
    STORE_FULL = "store_full"
    STORE_FAILS = "store_fails"
    STORE_SLOW = "store_slow"
    TABLE_FULL = "table_full"


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem with the job, or a notable fact about the job."""

    cause: Cause
    severity: Severity
    #: "etcd", "master", "pserver-1", a trainer's id, or "job".
    who: str
    #: Observed problem, as a sentence.
    text: str
    #: Recommended action as a sentence; empty if no action is needed.
    advice: str = ""
    #: Stack traces of the process's threads if they help to explain the finding; otherwise empty.
    stack: str = ""


@dataclass(frozen=True, slots=True)
class Wait:
    """A process or a round that is waiting for other processes."""

    who: str
    #: Text for people.
    awaited: str
    seconds: float | None = None
