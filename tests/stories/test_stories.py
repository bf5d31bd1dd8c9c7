"""The page ``docs/stories.md`` tells what happens when something dies, as it is recorded today.

``pytest tests/stories --rewrite`` writes the stories of the page again. Read the difference before you commit it: each
changed line is a changed behavior, or a changed order of events that happen at the same time.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flightedl.recording.reader import recordings_in
from flightedl.recording.replay import replay

from .scenes import SCENES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "stories.md"


def pattern_of(row: str) -> re.Pattern[str]:
    """Return the pattern of a section: its heading and text, its story, and the end of the story."""
    heading = re.escape(f"## {row[0].upper()}{row[1:]}\n")
    return re.compile(rf"({heading}[^#]*?```text\n)(.*?)(\n```\n)", re.DOTALL)


@pytest.mark.parametrize("row", SCENES)
def test_the_story_is_as_it_is_told(row: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    told = SCENES[row].told(tmp_path)
    text = PAGE.read_text("utf-8")
    if request.config.getoption("--rewrite"):
        text, count = pattern_of(row).subn(lambda found: f"{found[1]}{told}{found[3]}", text)
        assert count == 1, f"{PAGE} has no section for {row!r}"
        PAGE.write_text(text, "utf-8")
    found = pattern_of(row).search(text)
    assert found is not None
    assert found[2] == told, "if this is intended, write the page again: pytest tests/stories --rewrite"
    # The story is that of the product's own decisions.
    assert not any(replay(each).difference for each in recordings_in(tmp_path))


def test_every_row_of_the_readme_has_a_story() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    table = readme.partition("## What happens when something dies")[2].partition("\n\n[")[0]
    rows = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(SCENES)
    assert all(row.startswith(name) for row, name in zip(rows, SCENES, strict=True))


def test_stories_end_well() -> None:
    text = PAGE.read_text("utf-8")
    for row, scene in SCENES.items():
        found = pattern_of(row).search(text)
        assert found is not None
        kind, identity = scene.subject
        end = f"settles {identity}" if kind == "batch" else f"completes {kind} {identity}"
        assert end in found[2].partition("***")[2]
