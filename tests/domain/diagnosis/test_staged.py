"""Staged problems: each is named by its cause, and by none of the consequences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from flightedl.domain.diagnosis.examine import examine
from flightedl.domain.diagnosis.findings import Cause, Severity, Wait
from flightedl.domain.diagnosis.observations import Asked, Observations, ShownCertificate, StoreTried
from flightedl.domain.diagnosis.trainers import waits
from flightedl.messages.hosts import HostFacts
from flightedl.messages.status import (
    FailedPiece,
    JobEvent,
    PserverStatusReply,
    RaisedError,
    RunningPiece,
    ServerStatus,
    StatusReply,
    TableCounts,
    TaskCounts,
    TrainerStatus,
)

NOW = 1_700_000_000.0
FACTS = HostFacts(version="1", wall_s=NOW, cores=8, threads=4, memory_bytes=1 << 30, memory_limit_bytes=16 << 30)
UP = Asked(address="h:1", seconds=0.01, received_s=NOW)
SILENT = Asked(address="h:1", error="did not answer within 2 s", code="deadline")
CLOSED = Asked(address="h:1", is_connected=False, error="cannot be reached", code="unavailable")
MAIN = "thread MainThread\n  site/script.py:3 <module>\n  site/script.py:9 slow_function"


def pserver(index: int, **more: Any) -> PserverStatusReply:
    said: dict[str, Any] = {
        "index": index,
        "state": "serving",
        "blocks": 2,
        "lowest_version": 7,
        "highest_version": 7,
        "size_bytes": 100,
        "pushes": 7,
        "rows": {},
        "members": [1, 2],
        "plan_hash": "plan",
        "facts": FACTS,
    }
    return PserverStatusReply(**{**said, **more})


def as_seen(said: PserverStatusReply, *waits_for: str) -> ServerStatus:
    """Return the status of a pserver in the master's status."""
    return ServerStatus(
        index=said.index,
        address="h:1",
        generation=9,
        state="serving",
        waits_for=list(waits_for),
        waits_at=said.waits_at,
        waits_s=said.waits_s,
    )


def trainer(trainer_id: str, **more: Any) -> TrainerStatus:
    said = {"generation": 5, "host": "host", "pid": 4, "member": 1, "holding": 2, "batch_s": 0.2, "facts": FACTS}
    return TrainerStatus(trainer=trainer_id, **{**said, **more})


def healthy() -> Observations:
    replies = {index: pserver(index) for index in (0, 1)}
    return Observations(
        job="demo",
        asker=FACTS,
        etcd=(UP,),
        jobs=("demo",),
        lock_generation=3,
        address_generation=3,
        master=UP,
        status=StatusReply(
            job="demo",
            state="training",
            plan_hash="plan",
            tasks=TaskCounts(todo=10, pending=4, done=6, total=20),
            task_s=1.0,
            master=ServerStatus(index=0, address="h:1", generation=3, state="serving", facts=FACTS),
            pservers=[as_seen(each) for each in replies.values()],
            pservers_desired=2,
            trainers=[trainer("t1"), trainer("t2")],
        ),
        pservers={0: UP, 1: UP},
        replies=replies,
    )


def with_status(seen: Observations, **more: Any) -> Observations:
    assert seen.status is not None
    return replace(seen, status=msgspec.structs.replace(seen.status, **more))


def with_trainers(seen: Observations, *trainers: TrainerStatus) -> Observations:
    return with_status(seen, trainers=list(trainers))


def with_pserver(seen: Observations, *waits_for: str, **more: Any) -> Observations:
    """Return observations with a changed pserver 1."""
    said = pserver(1, **more)
    assert seen.status is not None
    seen = with_status(seen, pservers=[seen.status.pservers[0], as_seen(said, *waits_for)])
    return replace(seen, replies={**seen.replies, 1: said})


def without_pserver(seen: Observations, asked: Asked, state: str = "not reached") -> Observations:
    """Return observations in which pserver 1 does not answer."""
    known = ServerStatus(index=1, address="h:1", generation=9, state=state)
    assert seen.status is not None
    seen = with_status(seen, pservers=[seen.status.pservers[0], known])
    return replace(seen, pservers={0: UP, 1: asked}, replies={0: seen.replies[0]})


def waited_for(seen: Observations, *names: str, seconds: float = 20) -> Observations:
    """Return observations in which a round of pserver 1 waits."""
    return with_pserver(seen, *names, waits_for=list(range(len(names))), waits_at=7, waits_s=seconds)


def limited(received_bytes: int) -> Observations:
    """Return observations of busy pservers, each of which received 7 messages with these bytes in total."""
    seen, facts = healthy(), msgspec.structs.replace(FACTS, busy_cores=1.2)
    assert seen.status is not None
    servers = [
        msgspec.structs.replace(each, facts=facts, pushes=7, received_bytes=received_bytes)
        for each in seen.status.pservers
    ]
    return with_status(seen, pservers=servers, profile={"script": 30.0, "push": 40.0, "pull": 30.0})


def gone(count: int) -> tuple[JobEvent, ...]:
    return tuple(JobEvent(number=n, at=NOW, kind="pserver_gone", who="pserver-1") for n in range(count))


def no_master(seen: Observations, **more: Any) -> Observations:
    return replace(seen, **{"status": None, "master": None, "address_generation": 0, **more})


OLD = HostFacts(version="1", wall_s=NOW - 3600, cores=8, threads=4)
POISON = FailedPiece(
    epoch=0,
    task=3,
    first_batch=1,
    end_batch=2,
    attempts=5,
    trainer="t1",
    error="bad",
    url="s3://b/x",
    first_record=7,
    records=8,
)
FULL = "c-7: [Errno 28] No space left on device"

#: Problem -> (observations, the first cause, the process at fault).
STAGED: dict[str, tuple[Observations, Cause, str]] = {
    "a trainer is frozen": (
        with_trainers(waited_for(healthy(), "t2"), trainer("t1"), trainer("t2", silent_s=30)),
        Cause.TRAINER_STANDS_STILL,
        "t2",
    ),
    "a trainer is slow, and others wait for it": (
        with_trainers(waited_for(healthy(), "t2"), trainer("t1"), trainer("t2", batch_s=18)),
        Cause.TRAINER_IS_SLOW,
        "t2",
    ),
    "a script hangs, and nobody waits for it": (
        with_trainers(healthy(), trainer("t1"), trainer("t2", batch_s=600)),
        Cause.TRAINER_IS_SLOW,
        "t2",
    ),
    "the storage is slow": (
        with_pserver(healthy(), written_s=60, written_bytes=50_000_000),
        Cause.STORE_SLOW,
        "pserver-1",
    ),
    "the storage is full": (with_status(healthy(), checkpoint_alarm=FULL), Cause.STORE_FULL, "job"),
    "the storage refuses": (with_status(healthy(), checkpoint_alarm="403 Forbidden"), Cause.STORE_FAILS, "job"),
    "etcd has lost its quorum": (
        no_master(healthy(), etcd=(SILENT, CLOSED, CLOSED), jobs=(), lock_generation=0, pservers={}, replies={}),
        Cause.ETCD_WITHOUT_QUORUM,
        "etcd",
    ),
    "etcd is not there": (
        no_master(healthy(), etcd=(CLOSED,), jobs=(), lock_generation=0, pservers={}, replies={}),
        Cause.ETCD_UNREACHABLE,
        "etcd",
    ),
    "one of three of etcd is down": (replace(healthy(), etcd=(UP, UP, CLOSED)), Cause.ETCD_UNREACHABLE, "etcd"),
    "etcd is full": (
        no_master(healthy(), etcd=(UP, replace(UP, is_full=True)), lock_generation=0, pservers={}, replies={}),
        Cause.ETCD_FULL,
        "etcd",
    ),
    "etcd is slow": (replace(healthy(), etcd=(replace(UP, seconds=1.5),)), Cause.ETCD_SLOW, "etcd"),
    "a member of etcd has an old version": (
        replace(healthy(), etcd=(replace(UP, version=(3, 5, 16), member_count=3),)),
        Cause.ETCD_UNSOUND,
        "etcd",
    ),
    "etcd wants a password": (
        no_master(
            healthy(), etcd=(replace(SILENT, code="authentication"),), lock_generation=0, pservers={}, replies={}
        ),
        Cause.ACCESS_REFUSED,
        "etcd",
    ),
    "a pserver has another plan": (with_pserver(healthy(), plan_hash="other"), Cause.OTHER_PLAN, "pserver-1"),
    "one file is slow": (
        with_status(
            healthy(),
            running=[
                RunningPiece(
                    trainer="t2",
                    epoch=0,
                    task=3,
                    first_batch=0,
                    end_batch=9,
                    failures=0,
                    running_s=90,
                    url="s3://b/slow",
                )
            ],
        ),
        Cause.SLOW_FILE,
        "t2",
    ),
    "a table has no memory for more rows": (
        with_status(healthy(), tables=[TableCounts(name="users", rows=10, refused=3)]),
        Cause.TABLE_FULL,
        "job",
    ),
    "a record is poison": (with_status(healthy(), failed=[POISON]), Cause.POISON_RECORD, "job"),
    "the script raises at every batch": (
        with_status(healthy(), raised=[RaisedError(place="a.py:3", error="KeyError", batches=4, repeated=3)]),
        Cause.SCRIPT_RAISES,
        "job",
    ),
    "the clock of a pserver is off by an hour": (with_pserver(healthy(), facts=OLD), Cause.CLOCKS_DIFFER, "pserver-1"),
    "the clock of a trainer is off by an hour": (
        with_trainers(healthy(), trainer("t1"), trainer("t2", facts=OLD)),
        Cause.CLOCKS_DIFFER,
        "t2",
    ),
    "two jobs use one name": (
        with_status(
            healthy(),
            master=ServerStatus(
                index=0, address="h:1", generation=3, state="serving", refused_calls={"declaration": 2}, facts=FACTS
            ),
        ),
        Cause.OTHER_JOB,
        "master",
    ),
    "a round waits for nobody that there is": (
        with_pserver(healthy(), waits_for=[99], waits_at=7, waits_s=20),
        Cause.ROUND_STUCK,
        "pserver-1",
    ),
    "a round waits for somebody without work": (
        with_trainers(waited_for(healthy(), "t2"), trainer("t1"), trainer("t2", holding=0)),
        Cause.ROUND_STUCK,
        "pserver-1",
    ),
    "a deposed master has the address": (
        replace(healthy(), address_generation=2, status=None, master=replace(CLOSED, code="unavailable")),
        Cause.MASTER_DEPOSED,
        "master",
    ),
    "who answers at the address is another master": (
        replace(healthy(), status=None, master=replace(SILENT, code="replaced")),
        Cause.MASTER_DEPOSED,
        "master",
    ),
    "no master runs": (no_master(healthy(), lock_generation=0), Cause.NO_MASTER, "master"),
    "the master recovers": (no_master(healthy()), Cause.NO_MASTER, "master"),
    "the master stands still": (replace(healthy(), status=None, master=SILENT), Cause.MASTER_UNREACHABLE, "master"),
    "the job has another name": (
        no_master(healthy(), jobs=("train",), lock_generation=0, pservers={}, replies={}),
        Cause.UNKNOWN_JOB,
        "job",
    ),
    "a pserver is out of memory": (
        with_pserver(healthy(), facts=msgspec.structs.replace(FACTS, memory_bytes=15 << 30), refused_calls={"busy": 9}),
        Cause.PSERVER_OUT_OF_MEMORY,
        "pserver-1",
    ),
    "pservers are busy, and trainers wait for them": (limited(8 << 20), Cause.PSERVERS_LIMIT, "job"),
    "a pserver dies again and again": (replace(healthy(), events=gone(3)), Cause.PSERVER_RESTARTS, "pserver-1"),
    "a pserver is missing": (
        replace(healthy(), pservers={0: UP}, replies={0: pserver(0)}),
        Cause.PSERVER_MISSING,
        "pserver-1",
    ),
    "a pserver stands still": (without_pserver(healthy(), SILENT), Cause.PSERVER_UNREACHABLE, "pserver-1"),
    "a firewall is between us and a pserver": (
        without_pserver(healthy(), CLOSED, "serving"),
        Cause.PSERVER_CUT_OFF,
        "pserver-1",
    ),
    "a firewall is between a trainer and a pserver": (
        with_trainers(healthy(), trainer("t1"), trainer("t2", waiting_for="pserver 1 to answer")),
        Cause.TRAINER_CUT_OFF,
        "t2",
    ),
    "versions differ": (
        with_pserver(healthy(), facts=msgspec.structs.replace(FACTS, version="2")),
        Cause.VERSIONS_DIFFER,
        "job",
    ),
    "the data has run out": (
        with_status(healthy(), is_growing=True, tasks=TaskCounts(done=20, total=20)),
        Cause.DATA_RUN_OUT,
        "job",
    ),
    "there are fewer tasks than trainers": (
        with_status(
            with_trainers(healthy(), trainer("t1"), trainer("t2", holding=0)), tasks=TaskCounts(pending=1, total=1)
        ),
        Cause.TOO_FEW_TASKS,
        "job",
    ),
    "files of the data are gone": (with_status(healthy(), dataset_alarm="a.csv is gone"), Cause.DATA_MISSING, "job"),
    "nobody trains": (with_trainers(healthy()), Cause.NO_TRAINERS, "job"),
    "trainers begin too many threads": (
        with_trainers(
            healthy(), *(trainer(f"t{n}", facts=msgspec.structs.replace(FACTS, threads=0)) for n in range(3))
        ),
        Cause.TOO_MANY_THREADS,
        "host",
    ),
    "gradients are not finite": (
        with_pserver(healthy(), refused_calls={"gradient": 3}),
        Cause.GRADIENTS_REFUSED,
        "pserver-1",
    ),
    "a pserver waits for first values": (
        with_pserver(healthy(), state="waiting", waiting_for="first values"),
        Cause.PSERVER_WAITS,
        "pserver-1",
    ),
    "a change of the mode waits": (with_status(healthy(), mode_change="pserver 1"), Cause.MODE_CHANGE_WAITS, "job"),
    "work that counted was missing": (with_status(healthy(), missing_tasks=2), Cause.WORK_WAS_MISSING, "job"),
    "what a pserver lacks cannot be done again": (
        replace(healthy(), events=(JobEvent(number=1, at=NOW, kind="job_refused", who="pserver-1", text="it lacks"),)),
        Cause.JOB_REFUSED,
        "pserver-1",
    ),
    "a task was taken back by time": (
        replace(
            healthy(), events=(JobEvent(number=1, at=NOW, kind="work_expired", who="t2", text="x: because it ran"),)
        ),
        Cause.TASK_TIMED_OUT,
        "t2",
    ),
    "a certificate ends tomorrow": (
        replace(healthy(), certificates={"master": ShownCertificate(ends_s=NOW + 86_400)}),
        Cause.CERTIFICATE_ENDS,
        "master",
    ),
    "a certificate has ended": (
        replace(healthy(), certificates={"pserver-1": ShownCertificate(error="certificate has expired")}),
        Cause.CERTIFICATE_ENDS,
        "pserver-1",
    ),
    "the next checkpoint does not fit": (
        replace(healthy(), store=StoreTried(url="/checkpoints", size_bytes=1, free_bytes=239)),
        Cause.DISK_NEARLY_FULL,
        "store",
    ),
    "all is done": (with_status(healthy(), state="done"), Cause.JOB_DONE, "job"),
}


@pytest.mark.parametrize("problem", STAGED)
def test_only_the_cause_is_named(problem: str) -> None:
    seen, cause, who = STAGED[problem]
    found = examine(seen)
    assert [(each.cause, each.who) for each in found] == [(cause, who)]
    assert found[0].text
    assert found[0].advice or cause is Cause.JOB_DONE


def test_a_healthy_job_has_no_findings() -> None:
    assert examine(healthy()) == []
    assert waits(healthy()) == []


def test_a_trainer_that_waits_for_servers_is_not_a_slow_script() -> None:
    assert examine(with_trainers(healthy(), trainer("t1"), trainer("t2", batch_s=600, doing="push"))) == []


def test_every_cause_is_staged() -> None:
    assert {cause for _, cause, _ in STAGED.values()} == set(Cause)


def test_the_worst_finding_is_first() -> None:
    seen = with_status(with_trainers(healthy()), checkpoint_alarm=FULL, missing_tasks=1)
    found = examine(replace(seen, etcd=(UP, CLOSED)))
    assert [each.severity for each in found] == sorted(each.severity for each in found)
    assert found[0].severity is Severity.BROKEN
    assert found[-1].severity is Severity.NOTE


def test_a_stack_locates_a_slow_script() -> None:
    seen, _, _ = STAGED["a script hangs, and nobody waits for it"]
    (found,) = examine(replace(seen, stacks={"t2": f"thread x\n  a.py:1 f\n\n{MAIN}"}))
    assert "site/script.py:9 slow_function" in found.text
    assert "slow_function" in found.stack


def test_waits_are_listed_with_names() -> None:
    seen = with_trainers(
        waited_for(healthy(), "t2"),
        trainer("t1", name="trainer-0", waiting_for="the round to close"),
        trainer("t2", name="trainer-1"),
    )
    assert waits(seen) == [
        Wait("round 7 of pserver-1", "trainer-1 (t2)", 20),
        Wait("trainer-0 (t1)", "the round to close"),
    ]


def test_a_waiting_trainer_is_not_slow_itself() -> None:
    seen = with_trainers(healthy(), trainer("t1"), trainer("t2", batch_s=600, waiting_for="a task"))
    assert examine(seen) == []


def test_an_etcd_without_a_listener_is_named_once() -> None:
    closed = replace(CLOSED, error="nothing listens at h:1")
    seen = no_master(healthy(), etcd=(closed,), jobs=(), lock_generation=0, pservers={}, replies={})
    (text,) = [each.text for each in examine(seen) if each.cause is Cause.ETCD_UNREACHABLE]
    assert text == "nothing listens at h:1"


def test_more_pservers_are_recommended_only_if_messages_are_large() -> None:
    (large,), (small,) = examine(limited(8 << 20)), examine(limited(7 << 10))
    assert "Run `flightedl scale pservers 4`" in large.advice
    assert "more pservers would not help" in small.advice
    assert "70% of their time sending gradients and receiving values" in large.text
