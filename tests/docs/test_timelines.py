"""The timelines of docs/recovery.md are those of the simulation. ``--rewrite`` writes them again."""

from __future__ import annotations

import re

import pytest

from tests.simulation.client import Simulation

from .pages import ROOT

pytestmark = [pytest.mark.seeds, pytest.mark.timeout(120)]

PAGE = ROOT / "docs" / "recovery.md"
SECTIONS = re.compile(r"(?<=\n### )([^\n]*)(\n[^#]*?```text\n)(.*?)(?=```\n)", re.DOTALL)
HEADINGS = [found[1] for found in SECTIONS.finditer(PAGE.read_text("utf-8"))]


@pytest.mark.parametrize("heading", HEADINGS)
def test_a_timeline_is_that_of_the_simulation(
    simulation: Simulation, request: pytest.FixtureRequest, heading: str
) -> None:
    told = simulation.timeline(heading) + "\n"
    text = PAGE.read_text("utf-8")
    if request.config.getoption("--rewrite"):
        text = SECTIONS.sub(lambda found: f"{found[1]}{found[2]}{told if found[1] == heading else found[3]}", text)
        PAGE.write_text(text, "utf-8")
    shown = {found[1]: found[3] for found in SECTIONS.finditer(text)}
    assert shown[heading] == told, "if this is intended, add --rewrite, and read the difference"


def test_the_page_has_all_timelines() -> None:
    assert len(HEADINGS) == 6
