"""Leak check that tolerates gRPC's own threads, which Python lists once they have called it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest


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
