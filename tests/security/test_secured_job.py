"""Complete jobs with certificates on every connection, besieged by strangers, with real processes."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

import flightedl as fe
from flightedl.adapters.clock import SystemClock
from flightedl.adapters.etcd import EtcdCoordinator
from flightedl.adapters.etcd_access import EtcdAccess
from flightedl.config import CommonSettings
from flightedl.coordination.keys import JobKeys
from flightedl.coordination.records import ServerRecord
from flightedl.errors import AuthenticationError
from flightedl.examples.ledger import balance
from flightedl.launch.cluster import LocalCluster
from flightedl.launch.programs import TrainerProgram
from flightedl.launch.status import JobStatus
from flightedl.messages.checkpoints import CheckpointRequest
from flightedl_tools.main import run_command_line
from tests.support.etcd_server import EtcdServer

from .etcd_users import enable

pytestmark = [pytest.mark.etcd, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(240)]

#: Numbers of connections that are silent, that send slowly and never end, and that send invalid messages.
SILENT, SLOW, GIANT = 500, 50, 10
GIANT_BYTES = 16 << 20
#: Allowed growth of a server's memory, which is far below the amount of data sent to it.
MAY_GROW_BYTES = 64 << 20


def run_command(*arguments: str) -> None:
    assert run_command_line(list(arguments)) == 0


def ledger(directory: Path, pause: str) -> TrainerProgram:
    arguments = ("--records", "4000", "--epochs", "2", "--pause", pause, "--mode", "sync", "--data", str(directory))
    return TrainerProgram("flightedl.examples.ledger", arguments, 2)


def wait_for(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def batches_of(cluster: LocalCluster) -> int:
    with cluster.status() as status:
        try:
            return status.read(5.0).batches
        except fe.errors.FlightedlError:
            return 0


def addresses_of(etcd: EtcdAccess, job: str) -> list[str]:
    with contextlib.closing(EtcdCoordinator(etcd, clock=SystemClock())) as coordinator:
        keys = JobKeys(job)
        entries = [*coordinator.list(keys.pservers).entries, coordinator.get(keys.master_address)]
        return [msgspec.json.decode(entry.value, type=ServerRecord).address for entry in entries if entry is not None]


def replaced(cluster: LocalCluster, role: str, index: int) -> None:
    """Kill a server, and wait until the job continues with its replacement."""
    before = batches_of(cluster)
    cluster.kill(role, index)
    wait_for(lambda: batches_of(cluster) > before)


def settle(cluster: LocalCluster, counted: Path) -> None:
    outcome = cluster.outcome(150)
    assert outcome is not None
    assert outcome.exit_code == 0, outcome
    with np.load(counted) as counts:
        assert balance(counts) == (0, 0)


def test_certificates_are_renewed_while_the_job_runs(tmp_path: Path) -> None:
    certificates = tmp_path / "certs"
    run_command("certs", "create", str(certificates), "--job", "secured")
    with EtcdServer(tls_dir=certificates / "etcd") as etcd:
        enable(etcd, {"secured": ("flightedl-server", "flightedl-etcd")}, "unused")
        cluster = fe.local(
            pservers=2,
            job="secured",
            etcd=etcd.address,
            etcd_tls_dir=str(certificates / "server"),
            tls_dir=str(certificates),
            checkpoint=str(tmp_path / "ck"),
            output_dir=tmp_path / "out",
            # Slow enough that batches remain when the last server is replaced.
            trainers=ledger(tmp_path / "data", "0.1"),
        )
        with cluster:
            wait_for(lambda: batches_of(cluster) >= 5)
            chosen = CommonSettings(
                etcd=etcd.address,
                job="secured",
                etcd_tls_dir=str(certificates / "etcd"),
                tls_dir=str(certificates / "reader"),
            )
            with JobStatus(chosen, SystemClock()) as status:
                assert status.read(5.0).job == "secured"
                with pytest.raises(AuthenticationError, match="checkpoint is not for members of the role reader"):
                    status.checkpoint(CheckpointRequest(), 5.0)
            run_command("certs", "renew", str(certificates), "--authority")
            etcd.restart()
            for role, index in (("master", 0), ("pserver", 0), ("pserver", 1)):
                replaced(cluster, role, index)
            run_command("certs", "renew", str(certificates))
            for role, index in (("pserver", 0), ("pserver", 1), ("master", 0)):
                replaced(cluster, role, index)
            settle(cluster, tmp_path / "out" / "ledger.npz")


def slow_loris(address: str) -> socket.socket:
    """Send the start of an HTTP/2 connection, and then single bytes of the rest."""
    connection = plain(address)
    connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" + b"\x00")
    return connection


def giant_frame(address: str) -> socket.socket:
    """Send a frame that claims the maximum length, and as much of it as the server accepts."""
    connection = slow_loris(address)
    with contextlib.suppress(OSError):
        connection.sendall(b"\xff\xff\xff\x00\x00\x00\x00\x00\x01" + bytes(GIANT_BYTES))
    return connection


def http_1(address: str) -> bytes:
    with plain(address) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: me\r\n\r\n")
        with contextlib.suppress(OSError):
            return connection.recv(4096)
    return b""


def plain(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=5.0)
    connection.settimeout(2.0)
    return connection


@contextlib.contextmanager
def besieged(addresses: list[str]) -> Iterator[None]:
    """Keep connections of strangers to each server open."""
    with contextlib.ExitStack() as stack:
        for address in addresses:
            for _ in range(SILENT // len(addresses)):
                stack.enter_context(plain(address))
            for _ in range(SLOW):
                stack.enter_context(slow_loris(address))
            for _ in range(GIANT):
                stack.enter_context(giant_frame(address))
            assert b"200" not in http_1(address)
        yield


@pytest.mark.parametrize("is_secured", [True, False], ids=["with TLS", "in plain text"])
def test_strangers_neither_delay_the_job_nor_consume_memory(tmp_path: Path, is_secured: bool) -> None:
    more = {}
    if is_secured:
        run_command("certs", "create", str(tmp_path / "certs"))
        more["tls_dir"] = str(tmp_path / "certs")
    cluster = fe.local(
        pservers=1, job="besieged", output_dir=tmp_path / "out", trainers=ledger(tmp_path / "data", "0.02"), **more
    )
    with cluster:
        wait_for(lambda: batches_of(cluster) >= 5)
        pids = [pid for role in ("master", "pserver") if (pid := cluster.pid(role)) is not None]
        before = [psutil.Process(pid).memory_info().rss for pid in pids]
        with besieged(addresses_of(EtcdAccess(cluster.etcd_address), "besieged")):
            reached = batches_of(cluster)
            wait_for(lambda: batches_of(cluster) > reached + 5)
            grown = [psutil.Process(pid).memory_info().rss - was for pid, was in zip(pids, before, strict=True)]
            assert max(grown) < MAY_GROW_BYTES, grown
            settle(cluster, tmp_path / "out" / "ledger.npz")
        assert [cluster.pid(role) for role in ("master", "pserver")] == pids, "no server was restarted"
