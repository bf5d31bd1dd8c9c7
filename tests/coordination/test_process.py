"""The life of a server process: bugs in its threads end it, because a replacement can recover."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from flightedl.config import MasterSettings, settings
from flightedl.coordination.lives import JobCoordinator
from flightedl.errors import EXIT_START_AGAIN
from flightedl.master.main import MasterProcess
from tests.support.processes import closed_port


class Probe(MasterProcess):
    """A process whose only work is a thread that fails."""

    def _look_at(self, etcd: object) -> None:
        del etcd

    def _serve(self, coordinator: JobCoordinator) -> int:
        del coordinator
        thread = threading.Thread(target=[].pop, name="flightedl-probe")
        thread.start()
        thread.join()
        assert self._stop.wait(20.0)
        return self._exit_code


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Probe]:
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with closed_port() as port:
        yield Probe(settings(MasterSettings, etcd=f"127.0.0.1:{port}", job="demo"))
    for number, handler in before.items():
        signal.signal(number, handler)


def test_an_error_that_ends_a_thread_ends_the_process(probe: Probe, capsys: pytest.CaptureFixture[str]) -> None:
    assert probe.run() == EXIT_START_AGAIN
    assert probe._reason == "it cannot continue after a bug: IndexError('pop from empty list')"
    assert "Traceback" in capsys.readouterr().err


def test_threads_of_libraries_may_fail(probe: Probe, capsys: pytest.CaptureFixture[str]) -> None:
    error = ValueError("of a library")
    probe._thread_failed(threading.ExceptHookArgs((ValueError, error, None, threading.Thread(name="pool-1"))))
    assert not probe._stop.is_set()
    assert "of a library" in capsys.readouterr().err
