"""gRPC's own threads, which Python lists once they call it, may stay."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Tests run beside each other: threads of one that wait for each other take the cores from the others.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    def threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}

    before = threads()
    yield
    deadline = time.monotonic() + 5
    while not threads() <= before:
        assert time.monotonic() < deadline, f"left behind: {threads() - before}"
        time.sleep(0.01)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(item.path).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.torch)
