"""Embeddings on tables under accelerate and Lightning, whose gradient clipping includes the rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch import nn

import flightedl as fe

from ..torch.bench import TorchBench
from ..torch.page import JobOfOne, OneByOne

# Warnings of these packages are not ours to fix.
pytestmark = pytest.mark.filterwarnings("ignore")


def data_of(job: JobOfOne) -> OneByOne:
    return OneByOne(job, [pa.record_batch({"id": [n, 0]}) for n in range(5)], 1)


def by_accelerate(net: nn.Module, job: JobOfOne) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(net, fe.torch.Optimizer(net, job, fe.SGD(0.1)))
    for ids in fe.torch.batches(data_of(job), "id"):
        optimizer.zero_grad()
        accelerator.backward(prepared(ids).sum())
        accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
        optimizer.step()


def by_lightning(net: nn.Module, job: JobOfOne) -> None:
    import lightning

    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, dataloader_iter: Any) -> torch.Tensor:
            ids, *_ = next(dataloader_iter)
            return self.net(ids).sum()

        def configure_optimizers(self) -> Any:
            return fe.torch.Optimizer(self.net, job, fe.SGD(0.1))

    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, gradient_clip_val=1.0
    )
    trainer.fit(Lit(), fe.torch.IterableDataset(data_of(job), "id"))


@pytest.mark.parametrize("train", [by_accelerate, by_lightning])
def test_rows_are_trained_and_clipped(train: Callable[[nn.Module, JobOfOne], None]) -> None:
    with TorchBench() as bench:
        job = JobOfOne(bench)
        table = job.table("users", 2, optimizer=fe.SGD(1.0))
        head = nn.Linear(2, 1, bias=False)
        nn.init.constant_(head.weight, 100.0)
        train(nn.Sequential(fe.torch.Embedding(table), head), job)
        rows = table.pull(range(6))
        assert (rows[:5] < 0).all()
        assert not rows[5].any()
        # Without clipping, the first step alone would move it by 100.
        assert (abs(rows[1:5]) < 1).all()
