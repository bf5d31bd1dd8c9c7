"""Tests of what is for PyTorch leave no threads behind, as those of clients do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ..client.conftest import nothing_left_behind

__all__ = ["nothing_left_behind"]

# Tests run beside each other: threads of one that wait for each other take the cores from the others.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(item.path).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.torch)
