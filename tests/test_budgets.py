"""Tests of line budgets for each part of the project, and of the version's consistency.

After deleting code, lower the part's number, so that the saving is kept. To raise a number, change it in the commit
that needs the lines and give the reason in its message.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import flightedl

ROOT = Path(flightedl.__file__).resolve().parent.parent

#: Part -> (maximum of its lines of Python, planned lines, its directories, excluding directories that are parts).
BUDGETS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "domain": (22_593, 16_000, ("flightedl/domain",)),
    "client, torch": (13_136, 8_000, ("flightedl/client", "flightedl/torch")),
    "pserver, kernels": (13_475, 8_000, ("flightedl/pserver", "flightedl/kernels")),
    "rpc, wire, messages": (6_410, 4_500, ("flightedl/rpc", "flightedl/wire", "flightedl/messages")),
    "master, coordination, adapters, process": (
        9_039,
        7_500,
        ("flightedl/master", "flightedl/coordination", "flightedl/adapters", "flightedl/process"),
    ),
    "formats": (5_741, 4_700, ("flightedl/formats",)),
    "launch": (6_747, 4_800, ("flightedl/launch",)),
    "recording": (2_521, 1_500, ("flightedl/recording",)),
    "testing": (11_136, 8_000, ("flightedl/testing",)),
    "tools/bench": (3_435, 3_000, ("tools/bench",)),
    "commands, examples, curves, rest": (
        8_224,
        6_400,
        ("tools", "flightedl/examples", "flightedl/curves", "flightedl"),
    ),
    "pictures of the documentation": (383, 383, ("docs",)),
    "benchmarks": (1_887, 600, ("benchmarks",)),
}
_PARTS = {directory for _, _, directories in BUDGETS.values() for directory in directories}


def lines_of(directory: str) -> int:
    """Count the lines of a directory's Python files, excluding parts inside it."""
    inside = [ROOT / other for other in _PARTS if other.startswith(f"{directory}/")]
    files = (file for file in (ROOT / directory).rglob("*.py") if not any(map(file.is_relative_to, inside)))
    return sum(len(file.read_bytes().splitlines()) for file in files)


@pytest.mark.parametrize("part", BUDGETS)
def test_a_part_stays_within_its_budget(part: str) -> None:
    most, planned, directories = BUDGETS[part]
    found = sum(map(lines_of, directories))
    assert found <= most, f"{part} has {found:,} lines, but its budget is {most:,} (planned: {planned:,}): delete code"


def test_every_package_is_part_of_a_budget() -> None:
    for top in ("flightedl", "tools", "benchmarks"):
        assert top in _PARTS
    packages = {f"flightedl/{path.parent.name}" for path in (ROOT / "flightedl").glob("*/__init__.py")}
    assert packages <= _PARTS


def test_the_version_is_written_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert flightedl.__version__ == project["version"]
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert headings[:2] == ["Unreleased", flightedl.__version__]
