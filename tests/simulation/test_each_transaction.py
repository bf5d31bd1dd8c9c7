"""Jobs that are struck once, at each of their transactions of etcd, end with each batch applied once."""

from __future__ import annotations

import subprocess
import sys

import pytest

from .client import ROOT


@pytest.mark.seeds
@pytest.mark.storm
@pytest.mark.timeout(3600)
def test_a_kill_or_a_freeze_at_any_transaction_loses_nothing() -> None:
    command = [sys.executable, "-m", "tests.simulation.each_transaction"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-10_000:] + ran.stderr[-2_000:]
    assert " 0 struck" not in ran.stdout
