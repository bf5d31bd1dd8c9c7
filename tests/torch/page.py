"""Runner of a page's unchanged code blocks, each in its own job with in-process servers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flightedl.client.arguments import metrics_of
from flightedl.client.data import dataset
from flightedl.client.data.dataset import Dataset
from flightedl.client.data.feed import TaskFeed
from flightedl.client.data.losses import LostData
from flightedl.coordination.checkpoint_places import write_model
from flightedl.domain.model.parameters import ParameterSpec

from ..client.loop_bench import _DECLARED, CLOCK, Master, waiting
from ..docs.pages import ROOT, examples
from ..docs.test_examples import data_of_one
from .bench import BenchJob, TorchBench


class JobOfOne(BenchJob):
    """A job with one trainer, whose data is read and whose pservers run in this process."""

    def __init__(self, bench: TorchBench) -> None:
        super().__init__(bench, 1)
        self.logged: list[float] = []

    def dataset(
        self, urls: object, *, epochs: int = 1, explicit_done: bool = False, steps_per_batch: int = 1, **given: Any
    ) -> Any:
        slices = None if self.trainer is None else self.trainer.parameters.slices
        if slices is not None:
            slices.size = given["batch_size"]
            given["batch_size"] = slices.size * slices.every
        data = data_of_one(urls, epochs=epochs, **given)
        batches = [batch for _ in range(epochs) for batch in data for _ in range(steps_per_batch)]
        return shared(batches) if explicit_done else OneByOne(self, batches, steps_per_batch, epochs)

    def deliver(self, batches: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(batches):
            if self.trainer is not None:
                self.begin(number, batch.num_rows)
            slices = None if self.trainer is None else self.trainer.parameters.slices
            yield from (batch,) if slices is None else slices.of(batch)
            if self.trainer is not None:
                self.end()
        if self.trainer is not None:
            self.trainer.parameters.pull()

    def evaluate(self, urls: object, measure: Any, *, name: str, **given: object) -> dict[str, float]:
        measured = [metrics_of(measure(batch)) for batch in data_of_one(urls, **given)]
        return {key: sum(each[key] for each in measured) / len(measured) for key in measured[0]}

    def log(self, **metrics: Any) -> None:
        self.logged.append(metrics_of(metrics)["loss"])

    def save_model(self, url: str) -> bool:
        assert self.trainer is not None
        model = self.trainer.parameters
        specs = [ParameterSpec(name, value.shape, value.dtype.name) for name, value in model.items()]
        write_model(url, "", specs, zip(specs, model.values(), strict=True))
        return True


@dataclass
class OneByOne:
    """Batches of the only trainer."""

    job: JobOfOne
    batches: list[pa.RecordBatch]
    steps_per_batch: int
    epochs: int = 1

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self.job.deliver(self.batches)

    @property
    def step_of_batch(self) -> int:
        return self.job.trainer.current.number % self.steps_per_batch

    @property
    def epoch(self) -> int:
        return self.job.trainer.current.number * self.epochs // len(self.batches)


def shared(batches: list[pa.RecordBatch]) -> Dataset:
    """Return one task with these batches, from a master in this process."""
    master = Master(1, len(batches))
    listener = Mock(lost=LostData())
    feed = partial(TaskFeed, master.fetch, lambda: None, CLOCK)
    return Dataset(_DECLARED, feed, lambda _: iter(batches), listener, waiting, 5.0, lambda: None, explicit_done=True)


def prepare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepare the folder in which the blocks run."""
    random = np.random.default_rng(0)
    (folder / "data").mkdir()
    for number in range(2):
        x, y = random.standard_normal((2, 500))
        table = pa.table({"x": x, "y": y, "label": (x + y > 0).astype(np.int64)})
        pq.write_table(table, folder / "data" / f"part-{number}.parquet", row_group_size=250)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(dataset, "_SLICE_S", 0.05)


def run_blocks(page: str, group: str, namespace: dict[str, object] | None = None, only: int | None = None) -> None:
    """Run the blocks of a group, or the first ones, each in its own job. Logged values must decrease."""
    names: dict[str, object] = {"__name__": "__main__"} if namespace is None else namespace
    for example in examples(ROOT / "docs" / page, group)[:only]:
        with TorchBench() as bench:
            names["job"] = job = JobOfOne(bench)
            example.run(names)
            few = len(job.logged) // 5
            assert sum(job.logged[:few]) >= sum(job.logged[-few:]), "logged losses must decrease"
