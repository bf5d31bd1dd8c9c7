"""Pages for Prometheus and for probes, of a master and a pserver started as on a cluster."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from tests.support.etcd_server import EtcdServer
from tests.support.processes import free_port

pytestmark = [pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(120)]


def page(port: int, path: str = "metrics") -> str:
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=5) as reply:
                return str(reply.read().decode())
        except (urllib.error.URLError, ConnectionError):
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_a_master_and_a_pserver_show_their_metrics(etcd: EtcdServer, job_name: str, tmp_path: os.PathLike[str]) -> None:
    ports = {"master": free_port(), "pserver": free_port()}
    health_ports = {role: free_port() for role in ports}
    started = []
    try:
        for role, port in ports.items():
            more = ["--pservers", "1"] if role == "master" else []
            place = ["--etcd", etcd.address, "--job", job_name, "--checkpoint", str(tmp_path)]
            command = [sys.executable, "-m", "flightedl", role, *place, "--metrics-port", str(port), *more]
            command += ["--health-port", str(health_ports[role])]
            started.append(subprocess.Popen(command))
        shown = page(ports["master"])
        assert f'flightedl_pservers_desired{{index="0",job="{job_name}",role="master"}} 1.0' in shown
        assert "flightedl_checkpoint_age_seconds{" in shown
        assert "flightedl_checkpoint_trouble{" in shown
        assert "flightedl_commit_seconds_bucket{" in shown
        assert f'flightedl_events_total{{index="0",job="{job_name}",kind="master_leads",role="master"}} 1.0' in shown
        assert "process_resident_memory_bytes " in shown
        assert "flightedl_lease_slack_seconds{" in shown
        assert f'flightedl_serving{{index="0",job="{job_name}",role="pserver"}} 0.0' in page(ports["pserver"])
        assert page(health_ports["master"], "ready") == "it leads\n"
        assert page(health_ports["pserver"], "ready") == "the job has no model\n"
    finally:
        for process in started:
            process.terminate()
        for process in started:
            assert process.wait(20) == 0
