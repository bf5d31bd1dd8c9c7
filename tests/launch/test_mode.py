"""The mode of a running job, changed by the command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flightedl.launch.cluster import LocalCluster, TrainerProgram
from flightedl.testing.etcd_server import EtcdServer

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(120)]


def flightedl(etcd: EtcdServer, *arguments: str, job: str = "modes") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flightedl", *arguments, "--etcd", etcd.address, "--job", job]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_changes_it_and_the_job_keeps_it(own_etcd: EtcdServer, tmp_path: Path) -> None:
    missing = flightedl(own_etcd, "mode", "async", job="nobody")
    assert missing.returncode != 0
    assert "no job named nobody runs" in missing.stderr
    # Long enough for some commands of the shell, on a busy machine too.
    arguments = f"--records 4000 --per-task 50 --batch-size 10 --epochs 1 --pause 0.06 --data {tmp_path / 'data'}"
    program = TrainerProgram("flightedl.examples.ledger", tuple(arguments.split()), 2)
    with LocalCluster(2, job="modes", etcd=own_etcd.address, output_dir=tmp_path / "out", trainers=program) as cluster:
        shown = flightedl(own_etcd, "mode")
        while "Sync(reduce='sum')" not in shown.stdout:
            assert cluster.outcome() is None
            shown = flightedl(own_etcd, "mode")
        # A change before the first round is over begins with the job, and names no round.
        while "records" not in shown.stdout or not json.loads(shown.stdout)["records"]:
            assert cluster.outcome() is None
            shown = flightedl(own_etcd, "status", "--json")
        changed = flightedl(own_etcd, "mode", "async", "--push-every", "3", "--reduce", "sum")
        assert changed.returncode == 0, changed.stderr
        assert changed.stdout.startswith("mode Async(push_every=3, reduce='sum') on all pservers, since round ")
        wrong = flightedl(own_etcd, "mode", "async", "--backup", "1")
        assert (wrong.returncode, "Async has no setting 'backup'" in wrong.stderr) == (2, True)
        cluster.kill("master")
        status: dict[str, object] = {}
        while status.get("mode_change") != "" or not status.get("pservers"):
            assert cluster.outcome() is None
            found = flightedl(own_etcd, "status", "--json")
            status = json.loads(found.stdout) if found.returncode == 0 else {}
        assert status["mode"] == "Async"
        assert status["mode_settings"] == {
            "kind": "Async",
            "push_every": 3,
            "pull_every": 1,
            "staleness_scaled": False,
            "reduce": "sum",
        }
        outcome = cluster.outcome(90.0)
        assert outcome is not None
        assert outcome.exit_code == 0, outcome
        done = flightedl(own_etcd, "mode", "sync")
        assert (done.returncode != 0, "all epochs are done" in done.stderr or "runs at etcd" in done.stderr) == (
            True,
            True,
        )
