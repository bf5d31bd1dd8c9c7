"""The master that rank 0 of a group starts if there is no etcd: its life, its access, and errors of one sentence."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace as changed

from flightedl.adapters.clock import SystemClock
from flightedl.client import own_master as module
from flightedl.client.data.start_name import start_name
from flightedl.client.group_store import agent_store
from flightedl.client.own_master import Inheritance, OwnMaster, Published, own_master
from flightedl.config import TrainerSettings, child_environment
from flightedl.coordination.coordinators import open_coordinator
from flightedl.errors import AuthenticationError, FencedError, UnavailableError, UsageError
from flightedl.messages.base import decode, encode
from flightedl.messages.groups import GroupRecord, Suspect
from flightedl.ports import Coordinator, Put
from tests.support.clock import FakeClock
from tests.support.contracts.coordinator import eventually

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]
KEY = "flightedl/default/master/1"


class Store:
    """A group's store in memory."""

    host = "127.0.0.1"

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def put(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> str | None:
        return self.values.get(key)


class Ranks:
    """Ranks of one group in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stack: ExitStack) -> None:
        self.store = Store()
        self._monkeypatch = monkeypatch
        self._stack = stack

    def open(self, rank: int, size: int = 2, *, give_up_s: float = 60.0) -> AbstractContextManager[OwnMaster]:
        self._monkeypatch.setattr(module, "group_store", lambda: self.store)
        self._monkeypatch.setattr("flightedl.client.data.start_name.group_store", lambda: self.store)
        self._monkeypatch.setattr(module, "rank_and_size", lambda *_: (rank, size))
        self._monkeypatch.setattr(module, "_sessions", iter([1]))
        return own_master(TrainerSettings(give_up_s=give_up_s), SystemClock())

    def enter(self, rank: int, size: int = 2) -> OwnMaster:
        return self._stack.enter_context(self.open(rank, size))

    def coordinator(self, own: OwnMaster) -> Coordinator:
        coordinator = open_coordinator(own.access, clock=SystemClock())
        self._stack.callback(coordinator.close)
        return coordinator


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr(module, "_children", [])
    with ExitStack() as stack:
        yield Ranks(monkeypatch, stack)
    for child in module._children:
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            pipe.close()
        child.wait(20.0)


def child_of(own: OwnMaster) -> subprocess.Popen[bytes]:
    assert own.child is not None
    return own.child


def test_ranks_share_a_coordinator_that_strangers_cannot_use(ranks: Ranks) -> None:
    first, second = ranks.enter(0), ranks.enter(1)
    ranks.coordinator(first).transact([], [Put("a", b"1")])
    entry = ranks.coordinator(second).get("a")
    assert entry is not None
    assert entry.value == b"1"

    with pytest.raises(UnavailableError):
        open_coordinator(replace(first.access, credentials=None), clock=SystemClock()).get("a")
    with ranks.open(0) as other, pytest.raises(AuthenticationError):
        open_coordinator(replace(first.access, credentials=other.access.credentials), clock=SystemClock()).get("a")


def test_the_master_remains_until_the_last_rank_has_left(ranks: Ranks) -> None:
    with ranks.open(0) as first:
        second = ranks.coordinator(ranks.enter(1))
        lease = second.grant(60.0)
        second.transact([], [Put("/flightedl/default/trainers/t", b"{}", lease.id)])
        first.is_clean = True
    stdin = child_of(first).stdin
    assert stdin is not None
    # The process of rank 0 ends.
    stdin.close()
    time.sleep(1.0)
    assert child_of(first).poll() is None
    lease.revoke()
    assert child_of(first).wait(20.0) == 0


def test_the_master_ends_with_a_session_that_failed(ranks: Ranks) -> None:
    with pytest.raises(ZeroDivisionError), ranks.open(0) as first:
        raise ZeroDivisionError
    assert child_of(first).wait(20.0) == 0


def test_the_reason_for_the_masters_end_is_known(ranks: Ranks) -> None:
    own = ranks.enter(0)
    assert not own.over()
    child_of(own).kill()
    assert (
        eventually(own.over) == f"the group's master, process {child_of(own).pid}, has ended: it was killed by SIGKILL"
    )
    other = ranks.enter(0)
    child_of(other).terminate()
    assert eventually(other.over).endswith("has ended: terminated")


def test_a_rank_that_finds_the_address_of_an_earlier_start_reads_it_again(ranks: Ranks) -> None:
    own = ranks.enter(0)
    late = ranks.store.values[KEY]
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        gone = replace_in(late, address=f"127.0.0.1:{closed.getsockname()[1]}")
    ranks.store.values[KEY] = gone
    timer = threading.Timer(1.0, lambda: ranks.store.values.update({KEY: late}))
    timer.start()
    assert ranks.enter(1).cluster == own.cluster
    timer.join()


def replace_in(text: str, **values: str) -> str:
    return encode(changed(decode(text.encode(), Published), **values)).decode()


def test_a_rank_that_has_joined_an_earlier_start_is_told_so(ranks: Ranks) -> None:
    earlier = ranks.enter(0)
    second = ranks.enter(1)
    current = ranks.enter(0)
    look_up = start_name("default", "", 1, 7, second)
    assert look_up() is None
    start_name("default", "", 0, 5, earlier)
    assert look_up() == f"{earlier.cluster}-5"
    start_name("default", "", 0, 6, current)
    with pytest.raises(FencedError, match="rank 0 was started again"):
        look_up()


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda store: store.put("flightedl/default/start", "7"), "FLIGHTEDL_ETCD is set for rank 0, but not for this"),
        (lambda store: store.put(KEY, '{"version": "0.0.1"}'), "rank 0 runs flightedl 0.0.1, but this rank"),
    ],
)
def test_ranks_that_contradict_each_other_are_told_so(
    ranks: Ranks, prepare: Callable[[Store], None], message: str
) -> None:
    prepare(ranks.store)
    with pytest.raises(UsageError, match=message), ranks.open(1):
        pass


def test_a_rank_with_an_etcd_is_told_that_rank_0_has_none(ranks: Ranks) -> None:
    ranks.enter(0)
    with pytest.raises(UsageError, match="FLIGHTEDL_ETCD is set for this rank, but not for rank 0"):
        start_name("default", "", 1, 7)()


def test_a_rank_that_cannot_reach_the_master_is_told_so(ranks: Ranks) -> None:
    ranks.enter(0)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        ranks.store.values[KEY] = replace_in(ranks.store.values[KEY], address=f"127.0.0.1:{port}")
        with pytest.raises(UnavailableError, match=f"the group's master at 127.0.0.1:{port} does not answer"):
            ranks.open(1, give_up_s=0.5).__enter__()


def test_a_group_without_a_store_is_told_what_to_do(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = ranks.open(1)
    monkeypatch.setattr(module, "group_store", lambda: None)
    with pytest.raises(UsageError, match=r"init_process_group before fe\.connect"):
        opened.__enter__()


def test_a_rank_that_cannot_reach_torchruns_store_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(closed.getsockname()[1]))
        with pytest.raises(
            UnavailableError, match=r"\(MASTER_ADDR, MASTER_PORT\) cannot be reached .*: Connection ref"
        ):
            agent_store("p")


def test_a_master_that_cannot_bind_says_why(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setenv("FLIGHTEDL_PORT", str(port))
        message = rf"the group's master could not be started: cannot listen on 0\.0\.0\.0 port {port} \(Address already"
        with pytest.raises(UsageError, match=message):
            ranks.enter(0)
    monkeypatch.setenv("FLIGHTEDL_PORT", "0")
    monkeypatch.setenv("FLIGHTEDL_BIND", "192.0.2.1")
    with pytest.raises(UsageError, match=r"cannot listen on 192\.0\.2\.1 port 0 \(Cannot assign"):
        ranks.enter(0)


def test_the_master_binds_to_the_interface_of_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def interface(host: str, local: str = "2") -> tuple[str, str]:
        monkeypatch.setenv("WORLD_SIZE", "4")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        return module._interface(host)

    own = next(
        (
            each.address
            for many in psutil.net_if_addrs().values()
            for each in many
            if each.family == socket.AF_INET and not each.address.startswith("127.")
        ),
        None,
    )
    assert interface("10.0.0.1", local="4") == ("127.0.0.1", "127.0.0.1")
    assert interface("localhost")[0] == "0.0.0.0"
    assert interface("192.0.2.1") == ("0.0.0.0", "192.0.2.1")
    assert own is None or interface(own) == (own, own)
    with pytest.raises(UsageError, match=r"\(MASTER_ADDR\), 'no-such\.invalid', cannot be resolved"):
        interface("no-such.invalid")


SCRIPT = """
import os, signal, sys
import flightedl as fe

with fe.connect() as job:
    data = job.dataset(sys.argv[1], batch_size=10, epochs=2, shuffle=True, group="auto")
    ids = [number for batch in data for number in batch["id"].to_pylist()]
    assert sorted(ids) == sorted([*range(60)] * 2), ids
    if sys.argv[2:]:
        fork = os.fork()
        if not fork:
            # Like a worker of a DataLoader, it keeps the pipe open.
            os.close(1)
            os.close(2)
            signal.alarm(60)
            signal.pause()
        with open(sys.argv[2], "w") as file:
            file.write(str(fork))
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    pq.write_table(pa.table({"id": range(60)}), tmp_path / "data.parquet", row_group_size=7)
    return tmp_path / "data.parquet"


def run_script(
    *arguments: object, script: str = SCRIPT, finds: bool = False, **variables: str
) -> tuple[int, psutil.Process | None]:
    """Run a script as a group of one without any launcher. Return its exit code and its master if it still runs."""
    environment = child_environment(**variables)
    environment.pop("FLIGHTEDL_ETCD", None)
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    started = [line for line in done.stderr.splitlines() if "started the group's master" in line]
    assert len(started) == 1, done.stderr
    assert ("a record that kills its rank in every start cannot be found" in done.stderr) is not finds
    try:
        return done.returncode, psutil.Process(int(started[0].split("process ")[1].split(",")[0]))
    except psutil.NoSuchProcess:
        return done.returncode, None


def test_a_script_without_a_launcher_is_a_group_of_one(data: Path) -> None:
    code, master = run_script(data)
    assert code == 0
    if master is not None:
        master.wait(20.0)


@pytest.mark.slow
def test_the_master_ends_with_a_killed_rank_0_even_if_a_fork_of_it_lives(data: Path, tmp_path: Path) -> None:
    began = time.monotonic()
    code, master = run_script(data, tmp_path / "fork")
    fork = psutil.Process(int((tmp_path / "fork").read_text()))
    try:
        assert code == -signal.SIGKILL
        if master is not None:
            master.wait(20.0)
        assert fork.is_running(), f"it ended before the master, after {time.monotonic() - began:.0f} s"
    finally:
        fork.kill()


POISON = """
import os, signal, sys
import flightedl as fe

with fe.connect() as job:
    data = job.dataset(sys.argv[1], batch_size=5, shuffle=True, group="auto", on_lost="continue")
    ids = [0]
    for batch in data:
        ids += batch["id"].to_pylist()
        if 33 in ids:
            os.kill(os.getpid(), signal.SIGKILL)
    assert len(ids) == 56, ids
"""


@pytest.mark.slow
def test_a_record_that_kills_its_rank_is_found_across_masters(data: Path, tmp_path: Path) -> None:
    codes = []
    variables = {"FLIGHTEDL_CHECKPOINT": str(tmp_path / "index"), "FLIGHTEDL_ATTEMPTS_LIMIT": "2"}
    while not codes or (codes[-1] and len(codes) < 5):
        code, master = run_script(data, script=POISON, finds=True, **variables)
        codes.append(code)
        if master is not None:
            master.wait(20.0)
    # A rank that dies in its first moments has not reported its round yet. Later starts report before each round.
    assert codes in ([-9, -9, 0], [-9, -9, -9, 0])
    assert not (tmp_path / "index" / "default" / "group.json").exists()


def test_torchruns_store_carries_the_records_that_killed_ranks_to_the_next_start() -> None:
    agent, clock = Store(), FakeClock(jumps=True)
    assert module._inherited(agent, "k", clock) == Inheritance(start=1, key="k")
    left = Inheritance(start=1, group=GroupRecord(starts=1, suspects=[Suspect(end=5, pieces=[])]))
    agent.put("inheritance", encode(left).decode())
    assert module._inherited(agent, "k", clock) == changed(left, start=2, key="k")
    # The second master ends without a word.
    assert module._inherited(agent, "k", clock) == changed(left, start=3, key="k")
