"""Bugs planted in drivers and cores are found, each by the seed that found it before."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from .bugs import BUGS
from .bugs.drivers import NEEDS
from .client import Simulation

pytestmark = pytest.mark.timeout(240)

#: Bug -> the seed that found it, and what its scenario has to have; or the number of seeds that did not find it.
NOTED: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("found_bugs.json").read_text())
FOUND = [name for name, noted in NOTED.items() if "seed" in noted]
#: Bugs that unit tests find, too, at less cost.
BY_UNIT_TESTS = json.loads((Path(__file__).parents[1] / "domain" / "found_bugs.json").read_text()).keys()
#: Found by every run of the tests.
QUICK = FOUND[:1]


def of_one_seed() -> list[Any]:
    """Group the found bugs by scenario. Those whose jobs hang or loop, or that unit tests find, only run in storms."""
    groups: dict[tuple[str, bool], list[str]] = defaultdict(list)
    for name in FOUND:
        is_rare = name in BY_UNIT_TESTS or NOTED[name]["problem"].startswith(("hangs", "loops"))
        groups[json.dumps([NOTED[name]["seed"], NOTED[name]["wanted"]]), is_rare].append(name)
    marks = {False: pytest.mark.seeds, True: pytest.mark.storm}
    return [pytest.param(names, marks=marks[is_rare]) for (_, is_rare), names in groups.items()]


def test_what_the_others_need_is_stated_for_bugs_that_are_not_found() -> None:
    assert NEEDS.keys() | NOTED.keys() <= BUGS.keys()
    assert NEEDS.keys().isdisjoint(FOUND)


@pytest.mark.parametrize(
    "names",
    [QUICK, *of_one_seed()],
    ids=lambda names: f"{NOTED[names[0]]['seed']}-{names[0]}",
)
def test_the_bugs_of_a_seed_are_found(simulation: Simulation, names: list[str]) -> None:
    """If this fails because the simulation has changed, ``python -m tests.simulation.found_bugs`` finds other seeds."""
    seed, wanted = NOTED[names[0]]["seed"], NOTED[names[0]]["wanted"]
    (good,) = simulation.run([seed], **wanted)
    good.require_good()
    found = {name: next(simulation.run([seed], planted=[name], **wanted)).problems for name in names}
    assert [name for name in names if not found[name]] == []
    assert not [each for problems in found.values() for each in problems if each.startswith("the simulation failed")]
