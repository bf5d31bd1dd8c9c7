"""The network of ``flightedl bench torch`` is as large as it is asked to be, and steps."""

from __future__ import annotations

import pytest
import torch

from flightedl_tools.bench.module_worker import network
from flightedl_tools.bench.modules import Spread


@pytest.mark.parametrize("mb", [0.1, 1, 10])
def test_the_network_has_the_size_that_is_asked_for(mb: float) -> None:
    net = network(mb)
    size_bytes = sum(value.numel() * value.element_size() for value in net.parameters())
    assert size_bytes == pytest.approx(mb * (1 << 20), rel=0.25 if mb < 1 else 0.05)
    net(torch.randn(2, 1, 8, 8)).sum().backward()


def test_the_spread_of_turns_is_where_half_of_them_lie() -> None:
    assert Spread.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Spread(median=3.0, low=2.0, high=4.0)
    assert str(Spread.of([1.0, 2.0])) == "1.5 (1.25 to 1.75)"
