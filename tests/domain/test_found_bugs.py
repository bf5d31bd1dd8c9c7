"""Bugs planted in cores are found by unit tests. ``found_bugs.json`` names a test for each of them.

This module, as a program, runs the tests in processes in which their bugs are planted. They are forked from one process
that has collected all of these tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

from tests.simulation.bugs import CORE_BUGS
from tests.support.planting import Planted, planted

#: Bug -> the test that finds it.
FOUND: dict[str, str] = json.loads(Path(__file__).with_name("found_bugs.json").read_text())
ROOT = Path(__file__).parents[2]


class _Planting:
    """Plugin of pytest that plants bugs in collected tests, instead of running the tests once."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        tests = {item.nodeid: item for item in session.items}
        self.problems += [f"fails without a bug: {node}" for node, test in tests.items() if _fails(test, [])]
        self.problems += [f"not found: {name}" for name in FOUND if not _fails(tests[FOUND[name]], [CORE_BUGS[name]])]
        return True


def _fails(test: pytest.Item, bugs: Collection[Planted]) -> bool:
    """Run a test in a forked process in which these bugs are planted. Return True if it fails."""
    child = os.fork()
    if child == 0:
        has_failed = False
        try:
            with planted(bugs):
                has_failed = any(report.failed for report in runtestprotocol(test, log=False))
        finally:
            os._exit(has_failed)
    return os.waitpid(child, 0)[1] != 0


@pytest.mark.timeout(180)
def test_each_bug_is_found_by_the_test_that_is_named_for_it() -> None:
    command = [sys.executable, "-m", __name__]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_bug_of_a_core_is_found_by_a_test_or_by_a_seed() -> None:
    seeds = json.loads((ROOT / "tests/simulation/found_bugs.json").read_text())
    by_seed = {name for name, noted in seeds.items() if "seed" in noted}
    assert CORE_BUGS.keys() - FOUND.keys() - by_seed == set()


if __name__ == "__main__":
    planting = _Planting()
    # Nobody reads why a test fails, and explanations take longer than the tests.
    options = ["-p", "no:cacheprovider", "--tb=native", "--assert=plain"]
    code = pytest.main([*options, *sorted(set(FOUND.values()))], plugins=[planting])
    sys.exit(code or "\n".join(planting.problems) or 0)
