"""The commands of CONTRIBUTING.md select tests that there are."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from .pages import ROOT

#: What follows ``make test-one``: files, and a name.
SELECTIONS = re.findall(
    r"^make (?:test-one|quick) t=(\S+)(?: k=(\S+))?", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.MULTILINE
)


def test_there_are_examples() -> None:
    assert any(name for _, name in SELECTIONS)


@pytest.mark.parametrize(("place", "name"), SELECTIONS)
def test_an_example_selects_a_test(place: str, name: str) -> None:
    program = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", place]
    ran = subprocess.run(
        [*program, *(["-k", name] if name else [])], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False
    )
    assert ran.returncode == 0, f"no test is selected: {ran.stdout[-500:]}{ran.stderr[-500:]}"
