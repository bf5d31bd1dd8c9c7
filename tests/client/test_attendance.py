"""Ranks of a group with a real master: starts, tokens, ends, and records that kill their rank."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import flightedl as fe
from flightedl.client.data import attendance
from flightedl.client.data.attendance import GroupAttendance, is_own_failure
from flightedl.client.data.start_name import start_name
from flightedl.client.session import Job
from flightedl.config import child_environment
from flightedl.errors import EXIT_START_AGAIN, FencedError, UnavailableError, UsageError
from flightedl.launch.cluster import LocalCluster
from flightedl.messages.groups import GroupPlaceReply
from tests.support.clock import FakeClock

RECORDS = 60
pytestmark = [pytest.mark.etcd, pytest.mark.slow]


class Group:
    """A group whose ranks are threads of this process, and its starts."""

    def __init__(self, cluster: LocalCluster, directory: Path) -> None:
        self.cluster = cluster
        self.path = directory / "data.parquet"
        pq.write_table(pa.table({"id": range(RECORDS)}), self.path, row_group_size=5)

    def start(self, *work: Callable[[Job, Any], Any], **more: Any) -> list[Any]:
        """Run one function as each rank; return their results, or the errors that their sessions ended with."""

        def run(rank: int) -> Any:
            try:
                with self.cluster.connect(**more) as job:
                    data = job.dataset(str(self.path), batch_size=4, group=(rank, len(work)), on_lost="continue")
                    return work[rank](job, data)
            except Exception as error:  # noqa: BLE001 - the test looks at it
                return error

        with ThreadPoolExecutor(len(work)) as threads:
            return list(threads.map(run, range(len(work))))

    @property
    def status(self) -> Any:
        with self.cluster.status() as status:
            return status.read(5.0)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    with fe.local(pservers=0, attempts_limit=2, lease_ttl_s=2.0) as cluster:
        yield Group(cluster, tmp_path)


def take_all(_job: Job, data: Any) -> list[int]:
    return [record for batch in data for record in batch["id"].to_pylist()]


def taking(rounds: int) -> Callable[[Job, Any], tuple[list[int], Any]]:
    """Return a rank that leaves its loop after a number of rounds and returns their records and the position."""

    def take(_job: Job, data: Any) -> tuple[list[int], Any]:
        loop = iter(data)
        records = [record for _ in range(rounds) for record in next(loop)["id"].to_pylist()]
        return records, data.state_dict()

    return take


def loading(token: Any) -> Callable[[Job, Any], list[int]]:
    def load(job: Job, data: Any) -> list[int]:
        data.load_state_dict(token)
        return take_all(job, data)

    return load


def failing(token: Any) -> Callable[[Job, Any], None]:
    """Return a rank whose script raises at its second batch."""

    def fail(_job: Job, data: Any) -> None:
        data.load_state_dict(token)
        loop = iter(data)
        next(loop)
        next(loop)
        raise ValueError("an odd record")

    return fail


def going_on(group: Group) -> Callable[[Job, Any], None]:
    """Return a rank that requests another batch after its start is over."""

    def go_on(_job: Job, data: Any) -> None:
        loop = iter(data)
        next(loop)
        next(loop)
        while group.status.group.phase != "over":
            threading.Event().wait(0.05)
        take_all(_job, loop)

    return go_on


def test_starts_of_a_group_from_the_first_to_the_end_of_the_data(group: Group) -> None:
    """All starts share one cluster, because servers take seconds to start."""
    # Two ranks take three rounds and leave.
    (of_zero, token), (of_one, same) = group.start(taking(3), taking(3))
    assert token == same
    assert group.status.group.phase == "over", "the data did not end"

    # One rank raises, and the other one learns that its start is over.
    failed, other = group.start(failing(token), going_on(group))
    assert isinstance(failed, ValueError)
    assert isinstance(other, FencedError)

    # Two different positions are rejected in both ranks, and the error names both.
    ((_, elsewhere),) = group.start(taking(1))
    refused = group.start(loading(token), loading(elsewhere))
    assert all(isinstance(error, UsageError) for error in refused)
    assert "rank 0 has loaded the data's position epoch 1 after 24 records and rank 1 epoch 1 after 4" in str(
        refused[0]
    )

    # The same rank raises again: its records are assigned to no rank, and the status names them.
    failed, _ = group.start(failing(token), going_on(group))
    assert isinstance(failed, ValueError)
    (piece,) = group.status.failed
    assert (piece.records, piece.error) == (4, "ValueError: an odd record")

    # One rank loads the position, and three ranks read the rest.
    rest = group.start(take_all, loading(token), take_all)
    counted = Counter([*of_zero, *of_one, *(record for records in rest for record in records)])
    left_out = {each.first_record + number for each in piece.ranges for number in range(each.records)}
    assert set(counted) == set(range(RECORDS)) - left_out
    assert max(counted.values()) == 1
    status = group.status
    assert (status.state, status.group.starts, status.records) == ("done", 6, RECORDS)

    # A later start that loads no position begins with the first record.
    (again,) = group.start(take_all)
    assert len(again) == RECORDS - len(left_out)


def test_a_rank_whose_lease_has_expired_gets_no_more_rounds(group: Group) -> None:
    def freeze(job: Job, data: Any) -> list[int]:
        loop = iter(data)
        next(loop)
        held = job._process.registration.held
        while held.ttl_s < 30:
            threading.Event().wait(0.05)
        held.has_lost()
        # Another request of the trainer registers it again, under a new generation.
        job.once("x")
        return take_all(job, loop)

    (frozen,) = group.start(freeze)
    assert isinstance(frozen, FencedError)
    assert "start this rank again" in str(frozen)
    assert len(group.start(take_all)[0]) == RECORDS


def test_a_rank_that_was_frozen_asks_the_master_before_the_next_round(group: Group) -> None:
    def stand_still(job: Job, data: Any) -> None:
        loop, attendance = iter(data), job._data._attendance
        next(loop)
        # Stop the reporter, as if no thread of this process had run.
        attendance._closing.set()
        attendance._reporter.join()
        assert len(group.start(take_all)[0]) == RECORDS
        attendance._confirmed_at -= 10
        next(loop)

    (error,) = group.start(stand_still)
    assert isinstance(error, FencedError)


FROZEN = """
import sys, time
import flightedl as fe

with fe.connect() as job:
    for batch in job.dataset(sys.argv[1], batch_size=1, group=(0, 1)):
        print("took", batch["id"][0], flush=True)
        time.sleep(0.2)
"""


@pytest.mark.faults
def test_a_rank_that_wakes_after_its_group_was_restarted_gets_no_more_rounds(group: Group) -> None:
    environment = child_environment(FLIGHTEDL_ETCD=group.cluster.etcd_address, FLIGHTEDL_JOB=group.cluster.job)
    with subprocess.Popen(
        [sys.executable, "-c", FROZEN, group.path], env=environment, stdout=subprocess.PIPE, text=True
    ) as frozen:
        assert frozen.stdout is not None
        assert [frozen.stdout.readline() for _ in range(3)]
        frozen.send_signal(signal.SIGSTOP)
        (records,) = group.start(take_all)
        threading.Event().wait(2.5)
        frozen.send_signal(signal.SIGCONT)
        left = frozen.stdout.read()
    assert frozen.returncode == EXIT_START_AGAIN
    # The line about its current batch may arrive late.
    assert left.count("took") <= 1
    assert len(records) == RECORDS
    assert group.status.state == "done"


def test_a_start_is_named_by_the_launcher_or_formed_by_the_master() -> None:
    assert start_name("j", "given", 1, 7)() == "given"
    assert start_name("j", "", 0, 7)() == ""


@pytest.mark.torch
def test_rank_0_publishes_its_generation_through_the_store_of_the_process_group() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        other = start_name("j", "", 1, 8)
        assert other() is None
        assert start_name("j", "", 0, 7)() == "7"
        assert other() == "7"
    finally:
        dist.destroy_process_group()


class Coordinator:
    """JAX's coordinator, reduced to the methods in use."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def key_value_set(self, key: str, value: str, *, allow_overwrite: bool) -> None:
        assert allow_overwrite
        self.values[key] = value

    def key_value_dir_get(self, directory: str) -> list[tuple[str, str]]:
        return [(key, value) for key, value in self.values.items() if key.startswith(directory)]


def test_rank_0_publishes_its_generation_through_the_coordinator_of_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    state = SimpleNamespace(global_state=SimpleNamespace(client=Coordinator()))
    monkeypatch.setitem(sys.modules, "jax._src.distributed", state)
    other = start_name("j", "", 1, 8)
    assert other() is None
    assert start_name("j", "", 0, 7)() == "7"
    assert other() == "7"


@pytest.mark.parametrize(
    ("error", "is_own"),
    [
        (ValueError("an odd record"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), True),
        (RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer"), False),
        (ConnectionResetError("Connection reset by peer"), False),
        (FencedError("over"), False),
        (SystemExit(143), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_errors_caused_by_another_rank_are_not_blamed_on_this_rank(error: BaseException, is_own: bool) -> None:
    assert is_own_failure(error) == is_own


def test_a_rank_counts_as_confirmed_since_its_request_and_not_since_the_reply() -> None:
    clock = FakeClock()
    attendance: Any = object.__new__(GroupAttendance)
    attendance._process = SimpleNamespace(clock=clock)
    attendance.is_stopping = False

    def answer_slowly(*_: object) -> GroupPlaceReply:
        clock.advance(3.0)
        return GroupPlaceReply(is_current=True)

    attendance._once = answer_slowly
    asked_at = clock.now()
    attendance._confirm(None, 5.0)
    assert attendance._confirmed_at == asked_at


def test_a_rank_names_the_likely_reason_why_another_never_asks_and_ends(
    group: Group, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(attendance, "_LATE_S", 0.3)
    monkeypatch.setenv("FLIGHTEDL_SAY_AFTER_S", "0.1")
    monkeypatch.setenv("FLIGHTEDL_START_TIMEOUT_S", "7")

    has_ended = threading.Event()

    def ask(job: Job, data: Any) -> None:
        try:
            take_all(job, data)
        finally:
            has_ended.set()

    error, _ = group.start(ask, lambda _job, _data: has_ended.wait(20))
    assert isinstance(error, UnavailableError)
    assert re.search(r"START_TIMEOUT_S\) for rank 1 of 2 to ask .*accelerator.prepare", str(error))
    assert "accelerator.prepare" in capsys.readouterr().err
