"""A record that kills every trainer: the queue finds and quarantines it, and all other records are trained."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flightedl.launch.forking import ForkServer

from .forked_launcher import ForkedCommand

pytestmark = [pytest.mark.etcd, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(330)]

RECORDS, BATCH, POISON = 400, 10, 123

SCRIPT = f"""
import os, sys
from flightedl.process.tuning import leave_out_pandas_and_scipy
leave_out_pandas_and_scipy()
import numpy as np
import flightedl as fe

with fe.connect() as job:
    data = job.dataset("data.parquet", batch_size={BATCH}, epochs=1, on_lost="continue")
    model = job.parameters({{"w": np.zeros({RECORDS}, np.float32)}}, optimizer=fe.SGD(lr=1.0), mode=fe.Async())
    for batch in data:
        k = batch["k"].to_numpy()
        if {POISON} in k:
            {{fault}}
        gradient = np.zeros({RECORDS}, np.float32)
        gradient[k] = -1
        model.step({{"w": gradient}})
    if job.once("save"):
        model.pull()
        np.save(job.output_dir / "w.npy", model["w"])
"""


@pytest.mark.parametrize(
    ("fault", "trainers"),
    [
        ("raise ValueError('bad record')", 2),
        ("os._exit(1)", 1),
        ("os.kill(os.getpid(), 11)", 2),
    ],
)
def test_a_poison_record_is_quarantined_and_all_others_are_trained(
    tmp_path: Path, forks: ForkServer, fault: str, trainers: int
) -> None:
    pq.write_table(pa.table({"k": np.arange(RECORDS)}), tmp_path / "data.parquet", row_group_size=100)
    (tmp_path / "train.py").write_text(SCRIPT.replace("{fault}", fault))
    options = ["--trainers", str(trainers), "--output", "out", "--lease-ttl-s", "3"]
    before = set(psutil.Process().children(recursive=True))
    with (
        (tmp_path / "log").open("wb") as log,
        ForkedCommand(
            forks, ["run", "train.py", *options], cwd=tmp_path, stdout=log, env={**os.environ, "TMPDIR": str(tmp_path)}
        ) as process,
    ):
        code = process.wait(300)
    output = (tmp_path / "log").read_text()
    assert code == 4, output
    expected = np.ones(RECORDS)
    first = POISON // BATCH * BATCH
    expected[first : first + BATCH] = 0
    assert np.array_equal(np.load(tmp_path / "out" / "w.npy"), expected)
    assert f"data.parquet chunk 1, records {first}-{first + BATCH - 1}" in output
    assert "3 of 4 tasks of the last epoch done, 1 tasks failed" in output
    if "ValueError" in fault:
        before_end = output.partition("flightedl: done in")[0]
        assert "ValueError: bad record" in before_end.splitlines()[-1]
    left = set(psutil.Process().children(recursive=True)) - before
    assert not [child for child in left if child.status() != "zombie"]
