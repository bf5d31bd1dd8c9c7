"""The ledger under faults of real processes: every record of every epoch counts exactly once, despite the faults.

The tests also check the queue's own account: every task of every epoch is done, and none has failed.

The simulation (``tests/simulation``) covers each fault in each mode. Because a cluster of seven processes takes seconds
to start, here each fault is tested in one mode, and only killed trainers are tested in every mode.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import etcd3
import numpy as np
import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.adapters.etcd import EtcdCoordinator
from flightedl.config import MasterSettings, child_environment
from flightedl.domain.consistency.modes import Async, Bounded, Mode, Sync
from flightedl.errors import FlightedlError
from flightedl.examples.ledger import CLOCKS, PARAMETERS, ROWS, SHARED_ROWS, findings
from flightedl.launch.cluster import LocalCluster
from flightedl.launch.programs import TrainerProgram
from flightedl.launch.status import JobStatus
from flightedl.messages.scaling import ScaleReply, ScaleRequest
from flightedl.messages.status import StatusReply
from flightedl.messages.tasks import ModeReply, ModeRequest
from flightedl.ports import Delete, Entry
from tests.support.etcd_server import EtcdServer
from tests.support.processes import ServerProcess
from tests.support.proxy import TcpProxy

pytestmark = [pytest.mark.etcd, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(240)]

RECORDS, PER_TASK, BATCH, EPOCHS, TRAINERS = 3000, 100, 20, 2, 3
TASKS = RECORDS // PER_TASK
END_S = 150.0


class Ledger:
    """One ledger job: its cluster, its own etcd, and the faults so far."""

    def __init__(
        self, cluster: LocalCluster, asked: JobStatus, etcd: EtcdServer, directory: Path, lease_ttl_s: float
    ) -> None:
        self.cluster = cluster
        self._asked = asked
        self.etcd = etcd
        self.directory = directory
        self.lease_ttl_s = lease_ttl_s
        self.hold = directory / "hold"
        self.events: list[str] = []

    def status(self) -> StatusReply | None:
        try:
            return self._asked.read(2.0)
        except FlightedlError:
            return None

    def done(self) -> int:
        """Number of finished tasks over all epochs, or -1 if it is unknown."""
        found = self.status()
        return -1 if found is None else found.tasks.done + found.epoch * TASKS * (found.state != "done")

    def until(self, condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            outcome = self.cluster.outcome()
            assert outcome is None, f"the job ended while the test waited for {what}: {outcome}; {self.events}"
            assert time.monotonic() < deadline, (
                f"{what} did not happen within {timeout_s} s; {self.status()}; {self.events}"
            )
            time.sleep(0.05)

    def until_done(self, tasks: int) -> None:
        """Wait until this number of tasks is done."""
        self.until(lambda: self.done() >= tasks, f"{tasks} tasks")

    def log(self, name: str) -> str:
        return (self.directory / "logs" / f"{name}.log").read_text()

    def check(self) -> None:
        """Wait for the end, and check that everything counted once."""
        self.hold.unlink(missing_ok=True)
        outcome = self.cluster.outcome(END_S)
        assert outcome is not None, f"the job did not end: {self.status()}; {self.events}"
        assert outcome.exit_code == 0, f"{outcome}; {self.events}"
        counts = np.load(self.directory / "ledger.npz")
        for name in PARAMETERS:
            assert np.array_equal(counts[name], np.ones((EPOCHS, RECORDS))), list(findings(counts, PER_TASK))
        batches = EPOCHS * RECORDS // BATCH
        assert [counts[name].tolist() for name in CLOCKS] == [[batches]] * len(CLOCKS)
        self.until_status(lambda found: found.state == "done")
        found = self.status()
        assert found is not None
        assert (found.tasks.done, found.tasks.failed, found.failed) == (TASKS, 0, [])

    def until_status(self, condition: Callable[[StatusReply], bool]) -> None:
        deadline = time.monotonic() + 20.0
        while (found := self.status()) is None or not condition(found):
            assert time.monotonic() < deadline, found
            time.sleep(0.05)


@pytest.fixture
def ledger(own_etcd: EtcdServer, tmp_path: Path) -> Iterator[Callable[..., Ledger]]:
    """Function that starts a ledger job. The test injects faults and calls ``check``."""
    with ExitStack() as stack:

        def start(
            mode: str = "sync",
            lease_ttl_s: float = 3.0,
            pause_s: float = 0.02,
            *,
            checkpoints: bool = False,
            spare: bool = False,
            etcd: str = "",
            hold: bool = False,
            tables: bool = False,
        ) -> Ledger:
            """Start the job. ``hold`` delays the last epoch until ``check``, so that every fault happens in time."""
            events: list[str] = []
            arguments = f"--records {RECORDS} --per-task {PER_TASK} --batch-size {BATCH} --epochs {EPOCHS}"
            arguments += f" --mode {mode} --pause {pause_s} --data {tmp_path / 'data'}"
            arguments += " --tables" * tables
            out = tmp_path / "out"
            if hold:
                out.mkdir()
                (out / "hold").touch()
                arguments += f" --hold {out / 'hold'}"
            program = TrainerProgram("flightedl.examples.ledger", tuple(arguments.split()), TRAINERS)
            cluster = LocalCluster(
                2,
                job="ledger",
                etcd=etcd or own_etcd.address,
                output_dir=out,
                trainers=program,
                lease_ttl_s=lease_ttl_s,
                checkpoint=str(tmp_path / "checkpoints") if checkpoints else None,
                checkpoint_every_s=1.0,
                standby=spare,
                on_event=events.append,
            )
            started = stack.enter_context(cluster)
            job = Ledger(started, stack.enter_context(started.status()), own_etcd, out, lease_ttl_s)
            job.events = events
            job.until_done(4)
            return job

        yield start


@contextmanager
def standby(job: Ledger, tmp_path: Path) -> Iterator[ServerProcess]:
    """Start a second master that already waits for the lock, so that it precedes the killed master's successor."""
    values = MasterSettings(etcd=job.etcd.address, job="ledger", lease_ttl_s=job.lease_ttl_s, pservers=0)
    process = ServerProcess(
        [sys.executable, "-m", "flightedl.master"], tmp_path / "standby.log", child_environment(values)
    )
    try:
        job.until(lambda: "stands by: process " in process.log(), "the standby")
        yield process
    finally:
        process.kill()


def freeze(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def thaw(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)


def test_rows_of_tables_count_once_despite_kills(ledger: Callable[..., Ledger]) -> None:
    job = ledger("sync", checkpoints=True, tables=True)
    job.until_status(lambda found: found.checkpoint != "")
    for number, victim in enumerate(("pserver", "trainer", "master", "pserver")):
        job.until_done(6 + number * 8)
        job.cluster.kill(victim, number % 2 if victim == "pserver" else 0)
    job.check()
    counts = np.load(job.directory / "ledger.npz")
    assert np.array_equal(counts[ROWS], np.ones((EPOCHS, RECORDS)))
    assert counts[SHARED_ROWS].sum() == EPOCHS * RECORDS


def test_a_killed_master_is_restarted(ledger: Callable[..., Ledger]) -> None:
    job = ledger()
    for tasks in (8, 20, 40):
        job.until_done(tasks)
        before = job.cluster.kill("master")
        job.until(lambda before=before: job.cluster.pid("master") not in {None, before}, "a new master")
    job.check()


@pytest.mark.parametrize("mode", ["accumulated", "backup", "bounded", "deterministic"])
def test_killed_trainers_neither_lose_nor_repeat_a_batch_in_any_mode(ledger: Callable[..., Ledger], mode: str) -> None:
    job = ledger(mode)
    for number, tasks in enumerate((8, 20, 32)):
        job.until_done(tasks)
        job.cluster.kill("trainer", number % TRAINERS)
    job.check()


def set_mode(job: Ledger, mode: Mode) -> ModeReply:
    """Set the mode as ``flightedl mode`` does: retry with any master until every pserver has the mode."""
    deadline = time.monotonic() + 60.0
    while True:
        try:
            with job.cluster.status() as status:
                reply = status.change("set_mode", ModeRequest(mode=mode.to_json()), ModeReply, 10.0)
        except FlightedlError as error:
            reply, reason = None, str(error)
        else:
            reason = reply.waiting_for
        if reply is not None and reply.is_agreed:
            return reply
        assert time.monotonic() < deadline, reason
        time.sleep(0.1)


def test_the_mode_changes_during_kills(ledger: Callable[..., Ledger]) -> None:
    job = ledger("sync", checkpoints=True)
    modes = (Async(push_every=3), Bounded(staleness=2), Sync(reduce="sum"), Async(pull_every=2), Sync(reduce="sum"))
    modes = tuple(replace(mode, reduce="sum") if isinstance(mode, Async) else mode for mode in modes)
    victims = ("trainer", "pserver", "master", "trainer", "pserver")
    rounds = [0]
    for number, (mode, victim) in enumerate(zip(modes, victims, strict=True)):
        job.until_done(6 + number * 8)
        if number % 2:
            job.cluster.kill(victim, number % 2)
        reply = set_mode(job, mode)
        assert reply.mode == mode.to_json()
        assert reply.round >= rounds[-1]
        rounds.append(reply.round)
        if not number % 2:
            job.cluster.kill(victim)
        job.until_done(9 + number * 8)
        found = job.status()
        assert found is None or found.mode_settings == mode.to_json()
    job.check()


def scale(job: Ledger, pservers: int) -> ScaleReply:
    """Change the number of pservers as ``flightedl scale`` does, and wait until the blocks have moved."""
    deadline, request = time.monotonic() + 90.0, ScaleRequest(pservers=pservers, wait_s=0.5)
    while True:
        try:
            with job.cluster.status() as status:
                reply = status.change("scale", request, ScaleReply, 10.0)
        except FlightedlError as error:
            reply, reason = None, str(error)
        else:
            reason = reply.waiting_for
        if reply is not None and reply.is_done:
            assert (reply.pservers, reply.is_given_up) == (pservers, False)
            return reply
        assert time.monotonic() < deadline, (reason, job.events)
        time.sleep(0.1)


def change_pservers(job: Ledger, victim: str | None) -> None:
    """Change the pservers three times, each time after a kill, and check that everything counted once."""
    job.until_status(lambda found: found.checkpoint != "")
    for count in (4, 1, 3):
        if victim is None:
            job.cluster.scale(count)
        else:
            job.cluster.kill(victim)
            scale(job, count)
        job.until_status(lambda found, count=count: len(found.pservers) == count)
    job.check()
    counts = np.load(job.directory / "ledger.npz")
    assert np.array_equal(counts[ROWS], np.ones((EPOCHS, RECORDS)))
    assert counts[SHARED_ROWS].sum() == EPOCHS * RECORDS
    assert "has left the job" in " ".join(job.events)


def test_pservers_change_from_2_to_4_to_1_to_3(ledger: Callable[..., Ledger]) -> None:
    change_pservers(ledger("sync", pause_s=0.3, checkpoints=True, tables=True), None)


@pytest.mark.storm
@pytest.mark.parametrize("victim", ["pserver", "trainer", "master"])
@pytest.mark.parametrize("mode", ["async", "sync", "bounded", "accumulated", "deterministic"])
def test_pservers_change_during_kills(ledger: Callable[..., Ledger], mode: str, victim: str) -> None:
    change_pservers(ledger(mode, pause_s=0.5, checkpoints=True, tables=True), victim)


def test_a_standby_takes_over_from_a_killed_master(ledger: Callable[..., Ledger], tmp_path: Path) -> None:
    job = ledger("async", hold=True)
    with standby(job, tmp_path) as second:
        # On a busy machine the launcher's new master may acquire the lock first. Then it is killed, too.
        for _ in range(4):
            job.cluster.kill("master")
            job.until(lambda: leads(job, second) or leads(job, None), "the takeover", job.lease_ttl_s + 10)
            if leads(job, second):
                break
        assert leads(job, second)
        job.until_done(20)
        second.kill()
        job.check()


def leads(job: Ledger, second: ServerProcess | None) -> bool:
    """True if the second master leads or, if it is None, if the launcher's present master leads."""
    if second is not None:
        return "master ready" in second.log()
    pid, found = job.cluster.pid("master"), job.status()
    return pid is not None and found is not None and found.master is not None and found.master.pid == pid


def test_a_frozen_master_is_deposed_and_harmless_when_it_wakes(ledger: Callable[..., Ledger], tmp_path: Path) -> None:
    job = ledger(hold=True)
    with standby(job, tmp_path) as second:
        pid = job.cluster.pid("master")
        assert pid is not None
        freeze(pid)
        job.until(lambda: "master ready" in second.log(), "the takeover", job.lease_ttl_s + 10)
        job.until_done(16)
        thaw(pid)
        job.until(lambda: job.cluster.pid("master") not in {None, pid}, "the end of the zombie")
        assert "exit code 75" in " ".join(job.events)
        job.check()


def test_a_frozen_pserver_is_replaced_while_it_is_frozen(ledger: Callable[..., Ledger]) -> None:
    """Neither the trainers whose pushes it holds nor the master that calls it wait for it."""
    job = ledger("async", checkpoints=True, spare=True)
    job.until_status(lambda found: len(found.pservers) == 2 and found.checkpoint != "")
    before = job.status()
    assert before is not None
    frozen = before.pservers[0]
    freeze(frozen.pid)
    try:

        def is_replaced() -> bool:
            found = job.status()
            return found is not None and any(
                p.index == frozen.index and p.generation != frozen.generation for p in found.pservers
            )

        job.until(is_replaced, "its successor")
        at = job.done()
        job.until(lambda: job.done() > at + 2 * TRAINERS, "work with its successor")
    finally:
        thaw(frozen.pid)
    job.check()


def test_a_frozen_trainer_registers_again_when_it_wakes(ledger: Callable[..., Ledger]) -> None:
    job = ledger("sync", pause_s=0.06)
    for index, tasks in ((0, 8), (1, 24)):
        job.until_done(tasks)
        pid = job.cluster.pid("trainer", index)
        assert pid is not None
        before = {trainer.trainer: trainer.generation for trainer in job.status().trainers}
        freeze(pid)
        job.until(lambda: len(job.status().trainers) == TRAINERS - 1 if job.status() else False, "its lease to end")
        job.until_done(tasks + 6)
        thaw(pid)

        def is_back(before: dict[str, int] = before) -> bool:
            found = job.status()
            if found is None:
                return False
            now = {trainer.trainer: trainer.generation for trainer in found.trainers}
            return any(before.get(name, generation) != generation for name, generation in now.items())

        job.until(is_back, "its return under a new generation")
    job.check()


def test_the_job_survives_a_kill_and_restart_of_etcd(ledger: Callable[..., Ledger]) -> None:
    # The leases outlast the restart even on a machine where it takes some seconds.
    job = ledger(lease_ttl_s=15.0)
    for tasks in (8, 24):
        job.until_done(tasks)
        job.etcd.kill()
        job.etcd.restart()
    job.check()


def test_the_job_survives_a_compaction_of_etcd(ledger: Callable[..., Ledger]) -> None:
    job = ledger()
    for tasks in (8, 16, 24, 32):
        job.until_done(tasks)
        job.etcd.freeze() if tasks % 16 else None
        job.etcd.thaw()
        job.etcd.compact()
        job.cluster.kill("trainer", tasks % TRAINERS)
    job.check()


def test_the_job_survives_a_compaction_while_every_watch_is_cut(
    ledger: Callable[..., Ledger], own_etcd: EtcdServer
) -> None:
    with TcpProxy(own_etcd.address) as proxy:
        job = ledger(lease_ttl_s=10.0, etcd=proxy.address)
        direct = EtcdCoordinator(own_etcd.address, clock=SystemClock())
        for number, tasks in enumerate((8, 20)):
            job.until_done(tasks)
            proxy.refuse()
            victim = number % TRAINERS
            held = direct.list("/flightedl/ledger/trainers/").entries
            pid = job.cluster.kill("trainer", victim)
            gone = [entry for entry in held if f'"pid":{pid}' in entry.value.decode().replace(" ", "")]
            # The event of the trainer's death is compacted before any process can read it.
            direct.transact([], [Delete(entry.key) for entry in gone])
            direct.compact()
            proxy.heal()
            job.until(
                lambda number=number: job.log("master").count("keys are listed again") > number,
                "keys to be listed again",
            )
            assert gone
        direct.close()
        job.check()


def test_the_job_survives_an_etcd_frozen_for_ten_seconds(ledger: Callable[..., Ledger]) -> None:
    # If a lease was renewed a sixth of its TTL ago, its holder trusts it for another half.
    job = ledger(lease_ttl_s=24.0)
    job.until_done(10)
    job.etcd.freeze()
    time.sleep(10.0)
    job.etcd.thaw()
    job.until_done(0)
    at = max(0, job.done())
    job.until(lambda: job.done() > at, "dispatch to resume", 10.0)
    job.check()


def test_a_trainer_that_gets_sigterm_returns_its_tasks(ledger: Callable[..., Ledger]) -> None:
    """It returns them long before its lease expires, and neither queue nor launcher counts a failure."""
    job = ledger("sync", lease_ttl_s=60.0, pause_s=0.05)
    for number in range(2 * TRAINERS):
        job.until_done(5 + number * 4)
        index = number % TRAINERS
        job.until(lambda index=index: job.cluster.pid("trainer", index) is not None, "a trainer")
        pid = job.cluster.kill("trainer", index, signal.SIGTERM)

        def is_gone(pid: int = pid) -> bool:
            found = job.status()
            return found is not None and not any(f"-{pid}-" in t.trainer for t in found.trainers)

        job.until(is_gone, "its leave", 30.0)
    job.check()
    assert "terminated by SIGTERM" in " ".join(job.events)
    assert "crashed" not in " ".join(job.events)


def test_the_job_survives_ten_killed_trainers(ledger: Callable[..., Ledger]) -> None:
    job = ledger("rarely-pulled")
    for number in range(10):
        job.until_done(5 + number * 4)
        index = number % TRAINERS
        job.until(lambda index=index: job.cluster.pid("trainer", index) is not None, "a trainer")
        job.cluster.kill("trainer", index)
    job.check()


def test_processes_deposed_without_notice_do_no_harm(ledger: Callable[..., Ledger], own_etcd: EtcdServer) -> None:
    """Their leases end in etcd while they continue to work until their next renewal, some of them for seconds."""
    job = ledger(lease_ttl_s=6.0, checkpoints=True, hold=True)
    with (
        contextlib.closing(EtcdCoordinator(own_etcd.address, clock=SystemClock())) as direct,
        contextlib.closing(etcd3.client(*own_etcd.address.split(":"))) as raw,
    ):

        def held(prefix: str) -> list[Entry]:
            return [entry for entry in direct.list(f"/flightedl/ledger/{prefix}").entries if entry.lease_id]

        for prefix in ("trainers/", "ps/", "master/lock", "trainers/"):
            job.until(lambda prefix=prefix: bool(held(prefix)), prefix)
            deposed = held(prefix)[0]
            raw.revoke_lease(deposed.lease_id)
            count = 1 if prefix == "master/lock" else TRAINERS if prefix == "trainers/" else 2

            def is_back(prefix: str = prefix, deposed: Entry = deposed, count: int = count) -> bool:
                found = held(prefix)
                return len(found) == count and deposed.create_revision not in {each.create_revision for each in found}

            job.until(is_back, f"{deposed.key} to be held again")
    job.check()
