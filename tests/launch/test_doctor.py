"""Findings of `flightedl doctor` about real processes that are frozen, hanging or dead."""

from __future__ import annotations

import signal
import time
from contextlib import closing
from pathlib import Path

import etcd3.etcdrpc as rpc
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import flightedl as fe
from flightedl.adapters.clock import SystemClock
from flightedl.adapters.etcd import EtcdCoordinator
from flightedl.config import DoctorSettings
from flightedl.domain.diagnosis.findings import Cause, Finding
from flightedl.domain.diagnosis.observations import Observations
from flightedl.domain.diagnosis.trainers import waits
from flightedl.errors import DeclarationError, FlightedlError
from flightedl.launch.cluster import LocalCluster, TrainerProgram
from flightedl.launch.doctor import Doctor
from flightedl.ports import Put
from flightedl_tools.doctor import report_lines
from flightedl_tools.report import report_of
from tests.support.etcd_server import EtcdServer

pytestmark = [pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(120)]

#: The first trainer hangs at its second batch until it is released.
SCRIPT = """
import pathlib, sys, time
import numpy as np
import flightedl as fe

def hang():
    while not pathlib.Path(sys.argv[2]).exists():
        time.sleep(0.05)

with fe.connect() as job:
    data = job.dataset(sys.argv[1], batch_size=5)
    model = job.parameters({"w": np.zeros(64, np.float32)}, optimizer=fe.SGD(lr=1.0), mode=fe.Sync(reduce="sum"))
    is_first = bool(job.once("slow"))
    for number, batch in enumerate(data):
        if is_first and number == 1:
            hang()
        model.step({"w": np.ones(64, np.float32)})
    job.wait_for_end()
"""


#: Always raises at one record; otherwise trains all files that are added to the directory.
FOLLOWING = """
import sys
import numpy as np
import flightedl as fe

with fe.connect() as job:
    data = job.dataset(sys.argv[1] + "/*.parquet", batch_size=5, follow=True)
    model = job.parameters({"w": np.zeros(64, np.float32)}, optimizer=fe.SGD(lr=1.0), mode=fe.Async())
    for batch in data:
        if 7 in batch["k"].to_pylist():
            raise ValueError("seven")
        model.step({"w": np.ones(64, np.float32)})
"""


def doctor(etcd: str, job: str) -> Doctor:
    return Doctor(DoctorSettings(etcd=etcd, job=job), SystemClock())


def until_found(own: Doctor, cause: Cause, text: str = "") -> tuple[Observations, Finding]:
    """Run the doctor until it reports this problem with this text, and return its findings."""
    deadline = time.monotonic() + 40
    while True:
        seen, found = own.explain(own.look())
        for each in found:
            if each.cause is cause and text in each.text:
                return seen, each
        assert time.monotonic() < deadline, [(each.cause, each.text) for each in found]
        time.sleep(0.2)


def test_the_doctor_names_hanging_frozen_and_dead_processes(own_etcd: EtcdServer, tmp_path: Path) -> None:
    stranger = doctor(own_etcd.address, "nobody")
    _, (unknown,) = stranger.explain(stranger.look())
    assert unknown.cause is Cause.UNKNOWN_JOB
    release = tmp_path / "release"
    (tmp_path / "train.py").write_text(SCRIPT)
    pq.write_table(pa.table({"k": np.arange(400)}), tmp_path / "k.parquet", row_group_size=20)
    program = TrainerProgram(str(tmp_path / "train.py"), (str(tmp_path / "k.parquet"), str(release)), 2)
    with LocalCluster(1, job="ill", etcd=own_etcd.address, output_dir=tmp_path / "out", trainers=program) as cluster:
        own = doctor(own_etcd.address, "ill")
        seen, slow = until_found(own, Cause.TRAINER_IS_SLOW, "others have waited")
        assert "train.py" in slow.text
        assert " hang" in slow.stack
        assert str(tmp_path) not in slow.stack
        assert any(wait.who.startswith("round ") and slow.who in wait.awaited for wait in waits(seen))
        page = report_of(*own.explain(own.look(with_stacks=True)), waits(seen))
        assert "pserver-0</summary>" in page
        assert "trainer_came" in page
        assert slow.text in "\n".join(report_lines(seen, [slow], waits(seen)))
        release.touch()

        # Start another script under the same job name.
        with cluster.connect() as second, pytest.raises(DeclarationError):
            second.parameters({"other": np.zeros(3, np.float32)}, optimizer=fe.SGD(lr=1.0))
        _, two = until_found(own, Cause.OTHER_JOB)
        assert "another model or dataset under the name ill" in two.text

        cluster.kill("pserver", number=signal.SIGSTOP)
        _, still = until_found(own, Cause.PSERVER_UNREACHABLE)
        assert "does not answer" in still.text
        cluster.kill("pserver", number=signal.SIGCONT)


def test_the_doctor_names_poison_and_frozen_servers_and_lost_trainers_and_exhausted_data(
    own_etcd: EtcdServer, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (tmp_path / "train.py").write_text(FOLLOWING)
    pq.write_table(pa.table({"k": np.arange(20)}), data / "k.parquet", row_group_size=10)
    program = TrainerProgram(str(tmp_path / "train.py"), (str(data),), 1)
    settings = {"attempts_limit": 1, "lease_ttl_s": 2.0, "follow_every_s": 0.5}
    with LocalCluster(1, job="ill", etcd=own_etcd.address, trainers=program, **settings) as cluster:
        own = doctor(own_etcd.address, "ill")
        _, poison = until_found(own, Cause.POISON_RECORD)
        assert "k.parquet, records 5 to 9 failed" in poison.text
        assert "ValueError: seven" in poison.text
        until_found(own, Cause.DATA_RUN_OUT)

        cluster.kill("master", number=signal.SIGSTOP)
        until_found(own, Cause.NO_MASTER)
        cluster.kill("master", number=signal.SIGCONT)
        until_found(own, Cause.DATA_RUN_OUT)

        cluster.kill("trainer", number=signal.SIGSTOP)
        until_found(own, Cause.NO_TRAINERS)
        cluster.kill("trainer", number=signal.SIGCONT)

        (data / "_END").touch()
        _, done = until_found(own, Cause.JOB_DONE)
        assert done.text == "all epochs are done"


def test_without_a_page_no_port_is_open_for_browsers(own_etcd: EtcdServer) -> None:
    """Each server listens only on its Flight port."""

    def ports(cluster: LocalCluster, role: str) -> list[int]:
        process = psutil.Process(cluster.pid(role))
        return [each.laddr.port for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN]

    with LocalCluster(1, job="plain", etcd=own_etcd.address) as cluster:
        assert cluster.page_url == ""
        assert [len(ports(cluster, role)) for role in ("master", "pserver")] == [1, 1]
    with LocalCluster(1, job="shown", etcd=own_etcd.address, page=True) as cluster:
        assert int(cluster.page_url.strip("/").rpartition(":")[2]) in ports(cluster, "master")
        assert len(ports(cluster, "master")) == 2


def test_the_doctor_distinguishes_an_absent_etcd_from_a_frozen_one(
    own_etcd: EtcdServer,
) -> None:
    def cause(address: str) -> Cause:
        own = doctor(address, "job")
        _, (found,) = own.explain(own.look())
        return found.cause

    assert cause("127.0.0.1:1") is Cause.ETCD_UNREACHABLE
    own_etcd.freeze()
    try:
        assert cause(own_etcd.address) is Cause.ETCD_WITHOUT_QUORUM
    finally:
        own_etcd.thaw()


def test_the_doctor_leads_with_a_full_etcd(own_etcd: EtcdServer) -> None:
    with closing(EtcdCoordinator(own_etcd.address, timeout_s=10.0, clock=SystemClock())) as coordinator:
        assert not coordinator.is_full()
        alarm = rpc.AlarmRequest(action=rpc.AlarmRequest.ACTIVATE, alarm=rpc.NOSPACE)
        coordinator._ask(lambda connection: connection.maintenance.Alarm, alarm)
        with pytest.raises(FlightedlError, match="space"):
            coordinator.transact([], [Put("/flightedl/a", b"")])
    own = doctor(own_etcd.address, "job")
    _, found = own.explain(own.look())
    assert [each.cause for each in found][:1] == [Cause.ETCD_FULL]
    assert Cause.UNKNOWN_JOB not in {each.cause for each in found}
