"""Saving the model of a running job, by a trainer or by the master alone; checkpoints on request."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import flightedl as fe
from flightedl.errors import UsageError
from flightedl_tools.main import command

pytestmark = [pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(180)]


def test_a_model_is_saved_by_a_trainer_and_by_the_master(tmp_path: Path) -> None:
    pq.write_table(pa.table({"k": np.arange(64)}), tmp_path / "data.parquet", row_group_size=16)
    checkpoints = str(tmp_path / "checkpoints")
    cluster = fe.local(pservers=2, checkpoint=checkpoints, output_dir=tmp_path / "out")
    with cluster, cluster.connect() as job:
        data = job.dataset(str(tmp_path / "data.parquet"), batch_size=16)
        model = job.parameters({"w": np.zeros(20_000, np.float32), "b": np.zeros(2, np.float32)})
        for _ in data:
            model.step({"w": np.ones(20_000, np.float32), "b": np.ones(2, np.float32)})
        assert job.save_model(f"{tmp_path}/by-trainer.npz")
        assert job.save_model(f"{tmp_path}/by-master.npz", server=True)
        with pytest.raises(UsageError, match="says no format"):
            job.save_model(f"{tmp_path}/model.bin")
        expected = {name: model[name].copy() for name in model}
        with cluster.connect() as other:
            rest = other.dataset(str(tmp_path / "data.parquet"), batch_size=16)
            other.parameters({"w": np.zeros(20_000, np.float32), "b": np.zeros(2, np.float32)})
            assert not list(rest)
            # Another trainer's first request is the same one; a second one is new.
            assert not other.save_model(f"{tmp_path}/by-trainer.npz")
            assert other.save_model(f"{tmp_path}/by-trainer.npz")
            assert not job.save_model(f"{tmp_path}/by-trainer.npz")
            assert job.save_model(f"{tmp_path}/elsewhere.npz")
        saved = CliRunner().invoke(command, ["checkpoint", "save", "--etcd", cluster.etcd_address, "--job", "local"])
        assert "is complete" in saved.output, saved.output
    for name in ("by-trainer.npz", "by-master.npz"):
        with np.load(tmp_path / name, allow_pickle=False) as found:
            assert {key: found[key].tolist() for key in found} == {k: v.tolist() for k, v in expected.items()}
    shown = CliRunner().invoke(command, ["checkpoint", "verify", checkpoints])
    assert shown.exit_code == 0, shown.output
    assert "good" in shown.output
