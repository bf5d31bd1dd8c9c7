"""A signal that arrives while the main thread is inside a call raises in the caller, and nowhere else."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from flightedl.rpc import Connection, FlightServer, Routes

from .rpc_support import IDENTITY, TIMEOUT_S

WORK_S = 0.05


@pytest.fixture
def terminated() -> Iterator[None]:
    """SIGUSR1 raises SystemExit, as SIGTERM does in a trainer."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise SystemExit(143)

    before = signal.signal(signal.SIGUSR1, end)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("terminated")
def test_a_signal_during_a_call_ends_the_caller_without_a_traceback(
    serve: Callable[..., FlightServer], capfd: pytest.CaptureFixture[str]
) -> None:
    is_called = threading.Event()

    def work(_body: bytes, _call: object) -> bytes:
        is_called.set()
        os.kill(os.getpid(), signal.SIGUSR1)
        threading.Event().wait(WORK_S)
        return b"done"

    server = serve(Routes(actions={"work": work}))
    with Connection(server.address, expected=IDENTITY) as connection:
        for _ in range(5):
            with pytest.raises(SystemExit):
                connection.action("work", b"", timeout_s=TIMEOUT_S)
            assert is_called.is_set()
    output = capfd.readouterr()
    assert "Traceback" not in output.err + output.out
    assert "Python client middleware failed" not in output.err
