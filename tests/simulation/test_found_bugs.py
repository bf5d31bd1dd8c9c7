"""Bugs planted in drivers are found, each by the seed that found it before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .client import Simulation
from .cores.planted import planted
from .driver_bugs import DRIVER_BUGS, NEEDS

pytestmark = pytest.mark.timeout(240)

#: Bug -> the seed that found it, and what its scenario has to have; or the number of seeds that did not find it.
NOTED: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("found_bugs.json").read_text())
FOUND = [name for name, noted in NOTED.items() if "seed" in noted]
#: Found by every run of the tests.
QUICK = FOUND[:3]


def test_every_bug_changes_present_code() -> None:
    for each in DRIVER_BUGS.values():
        with planted([each]):
            pass


def test_what_the_others_need_is_stated_for_bugs_that_are_not_found() -> None:
    assert NEEDS.keys() | NOTED.keys() <= DRIVER_BUGS.keys()
    assert NEEDS.keys().isdisjoint(FOUND)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.seeds) for name in FOUND]
)
def test_a_bug_in_a_driver_is_found(simulation: Simulation, name: str) -> None:
    """If this fails because the simulation has changed, ``python -m tests.simulation.found_bugs`` finds other seeds."""
    seed, wanted = NOTED[name]["seed"], NOTED[name]["wanted"]
    (good,) = simulation.run([seed], **wanted)
    good.require_good()
    (found,) = simulation.run([seed], planted=[name], **wanted)
    assert not found.is_good
