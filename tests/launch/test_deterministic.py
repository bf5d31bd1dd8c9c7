"""Two runs in deterministic synchronous mode with the same trainers end with identical bytes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flightedl.launch.forking import ForkServer

from .forked_launcher import ForkedCommand

pytestmark = [pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(200)]

SCRIPT = """
import sys, time
import numpy as np
import flightedl as fe
with fe.connect() as job:
    data = job.dataset(sys.argv[1], batch_size=16, epochs=3, shuffle=True, seed=5)
    w0 = np.linspace(-1, 1, 20_000, dtype=np.float32)
    model = job.parameters(
        {"w": w0, "b": w0[:7].copy()}, optimizer=fe.Adam(lr=0.01), mode=fe.Sync(deterministic=sys.argv[2] == "yes")
    )
    for batch in data:
        x = batch["x"].to_numpy().astype(np.float32)
        time.sleep(float(abs(x[0])) * 0.01)
        w = model["w"]
        model.step({"w": np.tanh(w * x.mean()) + x.std() / 3, "b": np.sin(model["b"] * x.sum())})
    if job.once("save"):
        model.pull()
        np.savez(job.output_dir / "model.npz", w=model["w"], b=model["b"])
"""


def run(forks: ForkServer, directory: Path, data: str, *, deterministic: str) -> dict[str, bytes]:
    directory.mkdir()
    (directory / "script.py").write_text(SCRIPT)
    command = ["run", "script.py", "--trainers", "3", "--pservers", "2", "--output", "out", "--", data, deterministic]
    with (
        (directory / "log").open("wb") as log,
        ForkedCommand(forks, command, cwd=directory, stdout=log, env=os.environ) as process,
    ):
        assert process.wait(150) == 0, (directory / "log").read_text()
    with np.load(directory / "out" / "model.npz") as model:
        return {name: model[name].tobytes() for name in model}


def test_two_runs_are_bit_identical(tmp_path: Path, forks: ForkServer) -> None:
    values = np.random.default_rng(3).normal(size=1200)
    # Row groups have different sizes, so that trainers become idle in different rounds.
    with pq.ParquetWriter(tmp_path / "data.parquet", pa.schema([("x", pa.float64())])) as writer:
        start = 0
        for size in (100, 37, 64, 200, 90, 13, 150, 81, 120, 45, 200, 100):
            writer.write_table(pa.table({"x": values[start : start + size]}), row_group_size=size)
            start += size
    data = str(tmp_path / "data.parquet")
    first, second = (run(forks, tmp_path / name, data, deterministic="yes") for name in ("first", "second"))
    assert first == second
