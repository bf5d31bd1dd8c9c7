"""A job recovers from a single fault within the limits."""

from __future__ import annotations

import pytest

from . import bounds
from .client import Simulation
from .scenario import Scenario, Strike

FAULTS = [("kill", "trainer", 0.3), ("kill", "pserver", 0.3), ("kill", "master", 0.3), ("etcd down", "master", 30.0)]
STRUCK = "   4.0000 -              STRIKE  0: kill pserver 0 at 4.00 s for 0.30 -> pserver-0.102"
SETTLED = "master-0.101   INFO    master.state: pserver is settled index={} generation=36 checkpoint=1"


@pytest.mark.seeds
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("kind", "role", "extent"), FAULTS, ids=[f"{kind} {role}" for kind, role, _ in FAULTS])
def test_a_job_recovers_from_one_fault_in_time(simulation: Simulation, kind: str, role: str, extent: float) -> None:
    strike = {"number": 0, "at_s": 4.0, "kind": kind, "role": role, "extent": extent}
    features = dict.fromkeys(("stops", "standbys", "rollbacks", "groups"), False)
    changes = {"batch_s": 2.0}
    for ran in simulation.run((1, 2), faults=False, strikes=[strike], features=features, changes=changes):
        ran.require_good()
        assert ran.strikes == 1


@pytest.mark.parametrize(
    ("settled", "found"),
    [
        (f"   7.0000 {SETTLED.format(0)}", []),
        (f"   7.0100 {SETTLED.format(0)}", ["recovered after 3.01 s"]),
        (f"   7.0000 {SETTLED.format(1)}", ["never recovered"]),
    ],
)
def test_a_late_recovery_is_found(settled: str, found: list[str]) -> None:
    strike = Strike(0, 4.0, "kill", "pserver", extent=0.3)
    before = f"   0.1000 {SETTLED.format(0)}"
    problems = bounds.problems(Scenario(seed=1, strikes=(strike,)), [before, STRUCK, settled])
    assert [each.partition("0.30: ")[2] for each in problems] == found


def test_other_faults_have_no_limit() -> None:
    strikes = (Strike(0, 4.0, "kill", "pserver"), Strike(1, 5.0, "kill", "pserver"))
    assert not bounds.problems(Scenario(seed=1, strikes=strikes), [STRUCK])
