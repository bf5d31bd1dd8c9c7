"""A script that leaves its loop by ``break`` and continues its session does not hold up other trainers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flightedl.launch.cluster import LocalCluster
from flightedl.launch.programs import TrainerProgram
from tests.support.etcd_server import EtcdServer

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(120)]

#: The trainer that creates the directory leaves its loop once both are at work, and waits until the other has ended.
SCRIPT = """
import pathlib, sys, time
import numpy as np
import flightedl as fe

path, place = sys.argv[1], pathlib.Path(sys.argv[2])
with fe.connect() as job:
    data = job.dataset(path, batch_size=5)
    model = job.parameters({"w": np.zeros(100, np.float32)}, optimizer=fe.SGD(lr=1.0), mode=fe.Sync(reduce="sum"))
    try:
        (place / "first").mkdir()
        leaves = True
    except FileExistsError:
        leaves = False
    count = 0
    for batch in data:
        model.step({"w": np.ones(100, np.float32)})
        count += 1
        (place / f"at-work-{leaves}").touch()
        if leaves and (place / "at-work-False").exists():
            break
    if leaves:
        deadline = time.monotonic() + 30.0
        while not (place / "through").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        (place / "seen").write_text(str((place / "through").exists()))
    else:
        (place / "through").touch()
    print("did", count, flush=True)
"""


def test_a_trainer_that_left_its_loop_holds_up_no_other(own_etcd: EtcdServer, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    pq.write_table(pa.table({"k": np.arange(2000)}), tmp_path / "k.parquet", row_group_size=20)
    program = TrainerProgram(str(tmp_path / "train.py"), (str(tmp_path / "k.parquet"), str(tmp_path)), 2)
    with LocalCluster(1, job="left", etcd=own_etcd.address, output_dir=tmp_path / "out", trainers=program) as cluster:
        outcome = cluster.outcome(90.0)
        assert outcome is not None
        assert outcome.exit_code == 0, outcome
    assert (tmp_path / "seen").read_text() == "True", "the other trainer waited for the one that had left its loop"
