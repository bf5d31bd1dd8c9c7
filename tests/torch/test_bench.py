"""``flightedl bench torch``: the network has the requested size and steps, and optimizer loops are measured."""

from __future__ import annotations

import pytest
import torch

from benchmarks import kernels
from flightedl_tools.bench.modules import network


@pytest.mark.parametrize("mb", [0.1, 1, 10])
def test_the_network_has_the_requested_size(mb: float) -> None:
    net = network(mb)
    size_bytes = sum(value.numel() * value.element_size() for value in net.parameters())
    assert size_bytes == pytest.approx(mb * (1 << 20), rel=0.25 if mb < 1 else 0.05)
    net(torch.randn(2, 1, 8, 8)).sum().backward()


def test_the_loops_of_optimizers_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    kernels.main(0.1)
    shown = capsys.readouterr().out
    assert all(rule in shown for rule in kernels.RULES)
