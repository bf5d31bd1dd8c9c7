"""The systemd units and the Slurm script: their commands, variables and signals run a complete job."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from flightedl.adapters.etcd_program import find_etcd
from flightedl.errors import EXIT_INCOMPLETE, EXIT_JOB_FAILED, EXIT_START_AGAIN, EXIT_USAGE
from flightedl.launch.policy import EXIT_TERMINATED
from tests.support.etcd_server import EtcdServer
from tests.support.processes import free_port

from .test_manifests import VARIABLES

DEPLOY = Path(__file__).parents[2] / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
SLURM = DEPLOY / "slurm" / "flightedl.sbatch"
BIN = str(Path(sys.executable).parent)
#: Arguments of a ledger that runs for a moment.
LEDGER = "--records 200 --per-task 50 --batch-size 10 --epochs 1"


def service(path: Path) -> configparser.SectionProxy:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[method-assign, assignment]
    unit.read(path)
    return unit["Service"]


def variables() -> dict[str, str]:
    lines = (DEPLOY / "systemd" / "flightedl.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_restart_restartable_processes_and_wait_for_the_drain(path: Path) -> None:
    found = service(path)
    assert found["Restart"] == "on-failure"
    never = set(map(int, found["RestartPreventExitStatus"].split()))
    assert never == {EXIT_USAGE, EXIT_JOB_FAILED} | ({EXIT_INCOMPLETE} if "trainer" in path.name else set())
    assert EXIT_START_AGAIN not in never
    assert float(found["TimeoutStopSec"]) > float(variables()["FLIGHTEDL_DRAIN_S"])
    if "trainer" in path.name:
        assert found["SuccessExitStatus"] == str(EXIT_TERMINATED)


def test_every_setting_of_the_units_exists() -> None:
    assert variables().keys() <= VARIABLES
    exported = set(re.findall(r"export (FLIGHTEDL_\w+)", SLURM.read_text()))
    assert exported <= VARIABLES
    assert "FLIGHTEDL_ETCD" in exported


def test_the_slurm_script_is_valid_shell() -> None:
    subprocess.run(["bash", "-n", str(SLURM)], check=True, timeout=30)


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    """List of started processes. The fixture kills those that are left, with all their descendants."""
    found: list[subprocess.Popen[bytes]] = []
    yield found
    for process in found:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.etcd
@pytest.mark.slow
@pytest.mark.timeout(100)
def test_the_units_run_a_job(
    etcd: EtcdServer, job_name: str, tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    """The units start concurrently, as at boot, and end by systemd's signal in the reverse order."""
    given = variables() | {
        "FLIGHTEDL_ETCD": etcd.address,
        "FLIGHTEDL_JOB": job_name,
        "FLIGHTEDL_CHECKPOINT": str(tmp_path / "checkpoints"),
        "FLIGHTEDL_BIND": "127.0.0.1",
        "FLIGHTEDL_ADVERTISE": "127.0.0.1",
        "FLIGHTEDL_TLS_DIR": "",
    }
    environment = {"PATH": os.environ["PATH"], **given}
    logs = ExitStack()

    def start(name: str) -> subprocess.Popen[bytes]:
        (path,) = (each for each in UNITS if name in each.name)
        command = shlex.split(service(path)["ExecStart"].replace("/opt/flightedl/bin", BIN))
        if name == "trainer":
            command = [*command[:-1], "flightedl.examples.ledger", *LEDGER.split(), "--data", str(tmp_path / "data")]
        log = logs.enter_context((tmp_path / f"{name}-{len(started)}.log").open("wb"))
        process = subprocess.Popen(
            command, env=environment, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True
        )
        started.append(process)
        return process

    with logs:
        trainer = start("trainer")
        servers = [start(name) for name in ("master", "pserver", "pserver", "pserver")]
        assert trainer.wait(60) == 0, (tmp_path / "trainer-0.log").read_text()
        assert [each.poll() for each in servers] == [None] * 4, "servers run until they get a signal"
        master, *pservers = servers
        for group in (pservers, [master]):
            for each in group:
                each.send_signal(getattr(signal, service(UNITS[0])["KillSignal"]))
            assert {each.wait(45) for each in group} == {0}
    assert "0 lost, 0 double" in (tmp_path / "trainer-0.log").read_text()


SRUN = f"""#!{sys.executable}
import os, subprocess, sys
words, count, output = sys.argv[1:], int(os.environ["SLURM_NTASKS"]), None
while words[0].startswith("--"):
    name, _, value = words.pop(0).partition("=")
    if name == "--ntasks":
        count = int(value)
    elif name == "--output":
        output = open(value, "wb")
    else:
        assert name in ("--overlap", "--nodes", "--nodelist", "--kill-on-bad-exit"), name
import signal
children, ends = [], []
signal.signal(signal.SIGTERM, lambda *_: ends.append(1) or [child.terminate() for child in children])
for _ in range(count):
    children.append(subprocess.Popen(words, stdout=output, stderr=output))
    if ends:
        children[-1].terminate()
sys.exit(max(child.wait() for child in children))
"""


def allocation(tmp_path: Path) -> dict[str, str]:
    """Environment of a Slurm allocation, with a stand-in for srun that runs commands on this machine."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", "#!/bin/sh\necho 127.0.0.1\n")):
        (tools / name).write_text(text)
        (tools / name).chmod(stat.S_IRWXU)
    (tools / "etcd").symlink_to(find_etcd()[0])
    return {
        "PATH": f"{tools}:{BIN}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "here",
        "SLURM_NTASKS": "2",
        "FLIGHTEDL_ETCD_PORT": str(free_port(2)),
        "FLIGHTEDL_BIND": "127.0.0.1",
        "FLIGHTEDL_CHECKPOINT": str(tmp_path / "checkpoints"),
        "TMPDIR": str(tmp_path),
    }


@pytest.mark.etcd
@pytest.mark.slow
@pytest.mark.timeout(100)
def test_the_slurm_script_runs_a_job(tmp_path: Path, started: list[subprocess.Popen[bytes]]) -> None:
    """A job requeued before its first checkpoint starts from scratch."""
    environment = allocation(tmp_path) | {"SLURM_RESTART_COUNT": "1"}
    command = ["bash", str(SLURM), "flightedl.examples.ledger", *LEDGER.split(), "--data", str(tmp_path / "data")]
    with (tmp_path / "slurm.out").open("wb") as out:
        process = subprocess.Popen(
            command, env=environment, cwd=tmp_path, stdout=out, stderr=out, start_new_session=True
        )
        started.append(process)
        assert process.wait(90) == 0, (tmp_path / "slurm.out").read_text()
    assert "0 lost, 0 double" in (tmp_path / "slurm.out").read_text()
    assert list(tmp_path.glob("slurm-7-pserver-*.log")), "output of services is kept"
    deadline = time.monotonic() + 10
    while list(tmp_path.glob("flightedl-etcd-*")):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.etcd
@pytest.mark.slow
@pytest.mark.timeout(100)
def test_the_slurm_script_ends_if_etcd_cannot_run(tmp_path: Path, started: list[subprocess.Popen[bytes]]) -> None:
    environment = allocation(tmp_path)
    command = ["bash", str(SLURM), "flightedl.examples.ledger", *LEDGER.split(), "--data", str(tmp_path / "data")]
    with (
        socket.create_server(("127.0.0.1", int(environment["FLIGHTEDL_ETCD_PORT"]) + 1)),
        (tmp_path / "slurm.out").open("wb") as out,
    ):
        process = subprocess.Popen(
            command, env=environment, cwd=tmp_path, stdout=out, stderr=out, start_new_session=True
        )
        started.append(process)
        assert process.wait(60) == 1
    assert "etcd has ended" in (tmp_path / "slurm.out").read_text()
