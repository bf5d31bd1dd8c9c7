"""Runs test files of ``rpc`` on the in-memory Flight, in virtual time: it has to behave as the real one does.

pytest itself runs as a logical thread, and everything that it imports uses the fakes.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from tests.simulation import flight, scheduler, threads
from tests.simulation.network import Network
from tests.simulation.scheduler import Pace, Process, Scheduler

#: A test session is not done after that many virtual seconds.
_LIMIT_S = 3600.0


class _Results:
    """Plugin of pytest that collects the names of tests."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.failed: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note a test's result."""
        name = report.nodeid.rpartition("/")[2]
        if report.failed:
            self.failed[name] = str(report.longrepr)
        elif report.when == "call" and report.passed:
            self.passed.append(name)

    def pytest_collectreport(self, report: Any) -> None:
        """Note a file that cannot be imported."""
        if report.failed:
            self.failed[report.nodeid] = str(report.longrepr)


def run(paths: Sequence[str], left_out: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Run test files, without tests whose names match. Return the tests that passed, and why others failed."""
    running = Scheduler(0, Pace(nap=0.0))
    scheduler.set_running(running)
    flight.set_network(Network(running))
    sys.modules.update(threads.REPLACED)
    sys.modules["pyarrow.flight"] = flight.fake_flight
    pa.flight = flight.fake_flight
    # Other plugins would import what the fakes lack.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    results, process = _Results(), Process("tests", 1, "tests")

    def work() -> None:
        import pytest

        options = ["-q", "-c", "/dev/null", "--rootdir", ".", "--import-mode=importlib", "-p", "no:cacheprovider"]
        with contextlib.redirect_stdout(io.StringIO()):
            pytest.main([*options, "-k", f"not ({' or '.join(left_out or ['nothing'])})", *paths], [results])

    main = running.spawn(process, "main", work)
    running.run(lambda: main.is_done, _LIMIT_S)
    return results.passed, results.failed
