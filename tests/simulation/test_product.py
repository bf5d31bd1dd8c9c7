"""The product's own processes, simulated: each batch is applied once, and a seed determines the whole run."""

from __future__ import annotations

import pytest

from .client import Simulation

pytestmark = [pytest.mark.seeds, pytest.mark.timeout(240)]


def test_calm_jobs_end_and_a_seed_determines_everything(simulation: Simulation) -> None:
    for seed in range(1, 6):
        first, second = simulation.run([seed, seed], faults=False)
        first.require_good()
        assert (second.trace, second.switches) == (first.trace, first.switches)


def test_each_batch_is_applied_once_whatever_strikes(simulation: Simulation) -> None:
    strikes = 0
    for ran in simulation.run(range(1, 21)):
        ran.require_good()
        strikes += ran.strikes
    assert strikes > 100


def test_groups_of_ranks_get_each_record_once_whatever_strikes(simulation: Simulation) -> None:
    strikes = 0
    for ran in simulation.run(range(1, 11), features={"groups": True}):
        ran.require_good()
        strikes += ran.strikes
    assert strikes > 50


def test_a_seed_with_faults_determines_everything(simulation: Simulation) -> None:
    for seed in (3, 8, 14):
        first, second = simulation.run([seed, seed])
        assert (second.trace, second.switches) == (first.trace, first.switches)
