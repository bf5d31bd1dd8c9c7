"""Commands that change a job, when its etcd or master is dead, when the job has ended, and when its master dies.

Each command either finishes its change with the master's successor, or ends soon with one sentence.
"""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.adapters.etcd import EtcdCoordinator
from flightedl.coordination.keys import JobKeys
from flightedl.coordination.records import ServerRecord
from flightedl.errors import EXIT_FAILED, EXIT_USAGE
from flightedl.launch.cluster import LocalCluster
from flightedl.launch.programs import TrainerProgram
from flightedl.ports import Put
from flightedl_tools.main import run_command_line
from tests.support.contracts.coordinator import eventually
from tests.support.etcd_server import EtcdServer
from tests.support.processes import closed_port

pytestmark = [pytest.mark.etcd, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(180)]

#: The commands, and the output of a command that has finished with the master's successor.
COMMANDS = {
    "checkpoint save": r"checkpoint c-\d+ is complete",
    "mode async --push-every 2 --short-pushes": r"mode Async\(push_every=2\) on all pservers, since round \d+.*",
    "scale pservers 1": r"the job has 1 pserver",
    "scale pservers --cancel": r"the job has 2 pservers",
}
SCRIPT = """
import sys, time
import numpy as np
import flightedl as fe

with fe.connect() as job:
    data = job.dataset(sys.argv[1], batch_size=1)
    model = job.parameters({"w": np.zeros(200_000, np.float32)}, optimizer=fe.SGD(lr=1.0), mode=fe.Async())
    for batch in data:
        model.step({"w": np.ones(200_000, np.float32)})
        time.sleep(0.1)
"""


class Place(NamedTuple):
    etcd: str
    job: str = "demo"
    #: Called while a command runs in another thread.
    strike: Callable[[], None] = lambda: None


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    (tmp_path / "train.py").write_text(SCRIPT)
    pq.write_table(pa.table({"k": np.arange(100_000)}), tmp_path / "k.parquet", row_group_size=20)
    program = TrainerProgram(str(tmp_path / "train.py"), (str(tmp_path / "k.parquet"),), 1)
    more = {"checkpoint": str(tmp_path / "kept"), "output_dir": tmp_path / "out", "trainers": program}
    with LocalCluster(2, job="demo", **more) as made:
        with made.status() as status:
            eventually(lambda: status.read(10.0).batches > 3, 120.0)
        yield made


def dead_etcd(request: pytest.FixtureRequest) -> Place:
    return Place(f"127.0.0.1:{request.getfixturevalue('nothing_listens')}")


def ended_job(request: pytest.FixtureRequest) -> Place:
    return Place(request.getfixturevalue("etcd").address, "ended")


def dead_master(request: pytest.FixtureRequest) -> Place:
    """Its lease, and so its address in etcd, outlives it."""
    etcd: EtcdServer = request.getfixturevalue("etcd")
    record = ServerRecord(address=f"127.0.0.1:{request.getfixturevalue('nothing_listens')}", generation=1)
    with contextlib.closing(EtcdCoordinator(etcd.access, clock=SystemClock())) as coordinator:
        coordinator.transact([], [Put(JobKeys("dead").master_address, msgspec.json.encode(record))])
    return Place(etcd.address, "dead")


def dying_master(request: pytest.FixtureRequest) -> Place:
    """The command's request reaches a frozen master, which is then killed; its successor has another address."""
    cluster: LocalCluster = request.getfixturevalue("cluster")
    with cluster.status() as status:
        master = status.master()
    assert master is not None
    port = int(master.address.rpartition(":")[2])
    cluster.kill("master", 0, signal.SIGSTOP)

    def strike() -> None:
        eventually(lambda: is_connected_to(port), 60.0)
        cluster.kill("master")

    return Place(cluster.etcd_address, strike=strike)


def is_connected_to(port: int) -> bool:
    """True if this process has a connection to a port of this machine."""
    found = psutil.Process().net_connections("tcp")
    return any(each.raddr and each.raddr.port == port and each.status == psutil.CONN_ESTABLISHED for each in found)


@pytest.fixture
def nothing_listens() -> Iterator[int]:
    with closed_port() as port:
        yield port


#: Exit code of a command in each situation, and what it says; None if it succeeds.
SITUATIONS = {
    dead_etcd: (EXIT_FAILED, r"flightedl: etcd at [\d.:]+ cannot be reached: start it.*"),
    ended_job: (EXIT_USAGE, r"flightedl: job ended is not running at etcd [\d.:]+: it has no master"),
    dead_master: (EXIT_FAILED, r"flightedl: no answer within 1 s; the last attempt: .*"),
    dying_master: None,
}


@pytest.mark.usefixtures("etcd")
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda each: each.__name__)
def test_a_command_that_changes_a_job(
    situation: Callable[[pytest.FixtureRequest], Place],
    command: str,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place, expected = situation(request), SITUATIONS[situation]
    options = ["--etcd", place.etcd, "--job", place.job, "--timeout-s", "1" if situation is dead_master else "60"]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_command_line, [*command.split(), *options])
        place.strike()
        code = running.result(90.0)
    out, err = capsys.readouterr()
    if expected is None:
        assert (code, bool(re.fullmatch(COMMANDS[command], out.strip()))) == (0, True), (out, err)
    else:
        assert (code, out) == (expected[0], "")
        assert re.fullmatch(expected[1], err.strip()), err
