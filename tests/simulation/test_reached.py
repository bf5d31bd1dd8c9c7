"""The paths that only faults reach are still reached."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.marks import all_marks

from .client import Simulation

#: Seeds, what their scenarios have to have, and the marks that each reaches.
NOTED: list[dict[str, Any]] = json.loads(Path(__file__).with_name("reached.json").read_text())


def test_expected_marks_exist() -> None:
    expected = {mark for each in NOTED for mark in each["marks"]}
    assert expected <= all_marks()
    assert len(expected) >= 22


@pytest.mark.seeds
@pytest.mark.timeout(240)
def test_seeds_reach_the_marks(simulation: Simulation) -> None:
    """If the simulation has changed, ``python -m tests.simulation.reached`` finds other seeds."""
    for each in NOTED:
        (ran,) = simulation.run([each["seed"]], **each["wanted"])
        ran.require_good()
        assert set(each["marks"]) <= ran.marks.keys(), f"seed {ran.seed}"
