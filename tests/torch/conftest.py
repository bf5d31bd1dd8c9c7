"""Tests of what is for PyTorch leave no threads behind, as those of clients do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flightedl.launch.forking import ForkServer

from ..client.conftest import nothing_left_behind
from ..launch.forked_launcher import import_first

__all__ = ["nothing_left_behind"]

# Tests run beside each other: threads of one that wait for each other take the cores from the others.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(item.path).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.torch)


@pytest.fixture
def forks_with_torch(forks: ForkServer) -> ForkServer:
    """``forks``, which import PyTorch but once: it takes seconds in each trainer else."""
    import_first(forks, "flightedl.torch")
    return forks
