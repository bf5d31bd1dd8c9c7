"""``flightedl checkpoint`` as users run it: for a running job, for an ended job, and for missing checkpoints."""

from __future__ import annotations

import re
from pathlib import Path

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.numpy
from click.testing import CliRunner, Result

import flightedl as fe
from flightedl.errors import NotFoundError, UsageError
from flightedl_tools.main import command

pytestmark = [pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(180)]

SIZE = 20_000
TASKS, STEPS = 8, 3


def checkpoint(*arguments: str, answer: str = "") -> Result:
    result = CliRunner().invoke(command, ["checkpoint", *arguments], input=answer, standalone_mode=False)
    if result.exception is not None and not isinstance(result.exception, click.Abort):
        raise result.exception
    return result


def numbers(url: str) -> list[int]:
    """Return the checkpoints that ``list`` shows, newest first."""
    shown = checkpoint("list", url).output
    return [int(found) for found in re.findall(r"^c-(\d+) .* 2 pservers .* MB", shown, re.MULTILINE)]


def loaded(path: Path) -> set[float]:
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as found:
            return set(found["w"].tolist())
    return set(safetensors.numpy.load_file(path)["w"].tolist())


@pytest.fixture
def place(tmp_path: Path) -> Path:
    pq.write_table(pa.table({"k": np.arange(TASKS)}), tmp_path / "data.parquet", row_group_size=1)
    return tmp_path


def test_checkpoints_are_created_listed_verified_exported_and_restored(place: Path) -> None:
    url = str(place / "checkpoints")
    settings = {"checkpoint": url, "output_dir": place / "out", "checkpoint_every_s": 1000.0, "checkpoint_keep": 100}
    saved: dict[int, float] = {}
    with fe.local(pservers=2, **settings) as cluster, cluster.connect() as job:
        data = iter(job.dataset(str(place / "data.parquet"), batch_size=1))
        model = job.parameters({"w": np.zeros(SIZE, np.float32)}, optimizer=fe.SGD(lr=1.0), mode=fe.Async())
        for _ in range(STEPS):
            next(data)
            model.step({"w": np.full(SIZE, -1, np.float32)})
            done = checkpoint("save", "--etcd", cluster.etcd_address, "--job", "local")
            assert done.return_value == 0, done.output
            (number,) = map(int, re.findall(r"checkpoint c-(\d+) is complete", done.output))
            saved[number] = float(model["w"][0])
        exported = checkpoint("export", url, str(place / "running.npz"))
        assert exported.exit_code == 0, exported.output
        assert loaded(place / "running.npz") == {float(STEPS)}
    assert sorted(saved.values()) == [1.0, 2.0, 3.0]
    assert set(saved) <= set(numbers(url))
    good = checkpoint("verify", url)
    assert good.return_value == 0
    assert good.output.count("good") == len(numbers(url))
    chosen = sorted(saved)[1]
    for name in ("one.npz", "one.safetensors"):
        checkpoint("export", url, str(place / name), "--number", str(chosen))
        assert loaded(place / name) == {saved[chosen]}

    before = numbers(url)
    assert isinstance(checkpoint("restore", url, str(chosen), answer="n\n").exception, click.Abort)
    assert numbers(url) == before
    restored = checkpoint("restore", url, str(chosen), answer="y\n")
    assert f"c-{chosen} is now the newest checkpoint" in restored.output
    assert max(numbers(url)) == chosen
    with fe.local(pservers=2, resume=True, **settings) as cluster, cluster.connect() as job:
        job.dataset(str(place / "data.parquet"), batch_size=1)
        model = job.parameters({"w": np.zeros(SIZE, np.float32)}, optimizer=fe.SGD(lr=1.0), mode=fe.Async())
        assert set(model["w"].tolist()) == {saved[chosen]}

    shard = next((place / "checkpoints" / "local").glob(f"c-{chosen}/shard-*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    bad = checkpoint("verify", url, "--number", str(chosen))
    assert bad.return_value == 1
    assert f"c-{chosen}" in bad.output
    assert "cannot be used" in bad.output


def test_missing_jobs_and_checkpoints_are_reported(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    for arguments in (("list", nowhere), ("verify", nowhere), ("restore", nowhere, "1"), ("export", nowhere, "x.npz")):
        with pytest.raises(NotFoundError, match="nowhere has no checkpoint"):
            checkpoint(*arguments)
    for name in ("a", "b"):
        (tmp_path / "two" / name / "c-1").mkdir(parents=True)
        (tmp_path / "two" / name / "c-1" / "manifest.json").write_text("{}")
    with pytest.raises(UsageError, match="a, b: choose a job with --job"):
        checkpoint("list", str(tmp_path / "two"))
