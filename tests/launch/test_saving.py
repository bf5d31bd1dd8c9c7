"""Saving the model of a running job by a trainer or by the master, and checkpoints on request."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors
from click.testing import CliRunner

import flightedl as fe
from flightedl.errors import UsageError
from flightedl_tools.main import command

pytestmark = [pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(180)]


def test_a_trainer_and_the_master_save_the_model(tmp_path: Path) -> None:
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
        with pytest.raises(UsageError, match=r"the format of .* is unknown"):
            job.save_model(f"{tmp_path}/model.bin")
        expected = {name: model[name].copy() for name in model}
        with cluster.connect() as other:
            rest = other.dataset(str(tmp_path / "data.parquet"), batch_size=16)
            other.parameters({"w": np.zeros(20_000, np.float32), "b": np.zeros(2, np.float32)})
            assert not list(rest)
            # The first request of another trainer counts as the same request; its second request is new.
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


def test_a_model_of_16_bits_is_trained_and_saved_as_declared(tmp_path: Path) -> None:
    """Each of the 40 steps would be lost with 16 bits alone."""
    pq.write_table(pa.table({"k": np.arange(400)}), tmp_path / "data.parquet", row_group_size=50)
    small = 2.0**-10
    cluster = fe.local(pservers=2, checkpoint=str(tmp_path / "checkpoints"), output_dir=tmp_path / "out")
    with cluster, cluster.connect() as job:
        data = job.dataset(str(tmp_path / "data.parquet"), batch_size=10)
        first = {"w": np.ones(50_000, np.float32), "h": np.ones(3, np.float16)}
        mode = fe.Async(push_every=2, reduce="sum")
        model = job.parameters(first, dtypes={"w": "bfloat16"}, optimizer=fe.SGD(lr=small), mode=mode)
        for _ in data:
            model.step({"w": np.full(50_000, -1, ml_dtypes.bfloat16), "h": np.full(3, -1, np.float16)})
        model.pull()
        assert (model["w"].dtype.name, model["h"].dtype.name) == ("bfloat16", "float16")
        assert job.save_model(f"{tmp_path}/by-trainer.safetensors")
        assert job.save_model(f"{tmp_path}/by-master.safetensors", server=True)
        values = {name: {float(value) for value in model[name]} for name in model}
    master_copy = np.float32(1 + 40 * small)
    expected = {"w": {float(master_copy.astype(ml_dtypes.bfloat16))}, "h": {float(np.float16(master_copy))}}
    assert values == expected
    for who in ("by-trainer", "by-master"):
        with safetensors.safe_open(tmp_path / f"{who}.safetensors", "np") as found:
            assert [found.get_slice(name).get_dtype() for name in ("w", "h")] == ["BF16", "F16"]
            assert {float(value) for value in found.get_tensor("h")} == expected["h"]
