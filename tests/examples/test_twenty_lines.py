import runpy
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import flightedl.examples

SCRIPT = Path(flightedl.examples.__file__).parent / "twenty_lines.py"


def test_it_learns_from_the_users_own_files(job, tmp_path, monkeypatch):
    random = np.random.default_rng(0)
    for number in range(2):
        x = random.standard_normal((8000, 2))
        label = x[:, 0] - 2 * x[:, 1] + 0.5 * random.standard_normal(8000) > 0
        table = pa.table({"label": label.astype(np.int64), "first": x[:, 0], "second": x[:, 1].astype(np.float32)})
        pq.write_table(table, tmp_path / f"part-{number}.parquet", row_group_size=2000)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(tmp_path)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert job.losses[-1] < 0.5 * job.losses[0]
    with np.load(job.output_dir / "model.npz", allow_pickle=False) as saved:
        assert saved["w"][0] > 0.5
        assert saved["w"][1] < -0.5


def test_it_has_about_twenty_lines():
    lines = [line for line in SCRIPT.read_text().splitlines() if line.strip() and not line.startswith('"""')]
    assert len(lines) <= 22
