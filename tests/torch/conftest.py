"""Fixtures for tests with PyTorch, which leave no threads behind, like tests of clients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flightedl.launch.forking import ForkServer

from ..client.conftest import nothing_left_behind
from ..launch.forked_launcher import import_first

__all__ = ["nothing_left_behind"]

# Tests run concurrently: spinning threads of one test would take the cores from the others.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(item.path).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.torch)


@pytest.fixture
def forks_with_torch(forks: ForkServer) -> ForkServer:
    """``forks`` with PyTorch imported once, which otherwise takes seconds in each trainer."""
    import_first(forks, "flightedl.torch")
    return forks
