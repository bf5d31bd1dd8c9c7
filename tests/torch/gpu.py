"""Tests that require a GPU, which run only by name: ``make test-one t=tests/torch/gpu.py``."""

from __future__ import annotations

import torch
from torch import nn

import flightedl as fe
from flightedl.torch import Embedding, Optimizer

from .bench import TorchBench


def trained(device: str) -> dict[str, torch.Tensor]:
    with TorchBench() as bench:
        table = bench.job.table("users", 4, optimizer=fe.Adagrad(0.1), init=fe.Uniform(0.1))
        torch.manual_seed(0)
        net = nn.Sequential(Embedding(table), nn.Linear(4, 1024), nn.ReLU(), nn.Linear(1024, 1)).to(device)
        optimizer = Optimizer(net, bench.job, fe.SGD(0.1))
        for batch in range(20):
            ids = torch.arange(batch, batch + 8, device=device)
            bench.job.begin(batch, 8)
            optimizer.zero_grad()
            (net(ids) - 1).square().mean().backward()
            optimizer.step()
            bench.job.end()
        found = {name: value.detach().cpu() for name, value in net.named_parameters() if value.numel()}
        assert next(net[1].parameters()).device.type == torch.device(device).type
        return found | {"rows": torch.from_numpy(table.pull(range(30)))}


def test_gradients_from_a_gpu_equal_those_in_main_memory() -> None:
    on_gpu, here = trained("cuda"), trained("cpu")
    for name, values in here.items():
        torch.testing.assert_close(on_gpu[name], values, rtol=1e-4, atol=1e-5, msg=name)
