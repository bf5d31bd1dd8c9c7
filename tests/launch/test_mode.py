"""``flightedl mode`` changes the mode of a running job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flightedl.launch.cluster import LocalCluster
from flightedl.launch.programs import TrainerProgram
from flightedl_tools.main import run_command_line
from tests.support.etcd_server import EtcdServer

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(120)]


#: The script is slow until it is released, so that the test's commands run during training on any machine.
SCRIPT = """
import pathlib, sys, time
import numpy as np
import flightedl as fe

with fe.connect() as job:
    data = job.dataset(sys.argv[1], batch_size=5)
    model = job.parameters({"w": np.zeros(2000, np.float32)}, optimizer=fe.SGD(lr=1.0), mode=fe.Sync(reduce="sum"))
    for batch in data:
        model.step({"w": np.ones(2000, np.float32)})
        if not pathlib.Path(sys.argv[2]).exists():
            time.sleep(0.3)
    job.wait_for_end()
"""


class Said(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def test_the_command_changes_the_mode_and_the_job_keeps_it(
    own_etcd: EtcdServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def flightedl(etcd: EtcdServer, *arguments: str, job: str = "modes") -> Said:
        """Run the command in this process, which saves the second that a new process needs for imports."""
        code = run_command_line([*arguments, "--etcd", etcd.address, "--job", job])
        return Said(code, *capsys.readouterr())

    missing = flightedl(own_etcd, "mode", "async", job="nobody")
    assert missing.returncode != 0
    assert "job nobody is not running" in missing.stderr
    release = tmp_path / "release"
    (tmp_path / "train.py").write_text(SCRIPT)
    pq.write_table(pa.table({"k": np.arange(2000)}), tmp_path / "k.parquet", row_group_size=20)
    program = TrainerProgram(str(tmp_path / "train.py"), (str(tmp_path / "k.parquet"), str(release)), 2)
    with LocalCluster(2, job="modes", etcd=own_etcd.address, output_dir=tmp_path / "out", trainers=program) as cluster:
        shown = flightedl(own_etcd, "mode")
        while "Sync(reduce='sum')" not in shown.stdout:
            assert cluster.outcome() is None
            shown = flightedl(own_etcd, "mode")
        # A change before the end of the first round applies from the start of the job, and names no round.
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
        release.touch()
        outcome = cluster.outcome(90.0)
        assert outcome is not None
        assert outcome.exit_code == 0, outcome
        done = flightedl(own_etcd, "mode", "sync")
        assert (done.returncode != 0, "all epochs are done" in done.stderr or "runs at etcd" in done.stderr) == (
            True,
            True,
        )
