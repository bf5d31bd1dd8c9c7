"""Tests of the size of the installed package, and of the version's consistency.

`LINES` is the number of lines of Python in the wheel. CONTRIBUTING.md says what to do when
the test fails.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import flightedl

ROOT = Path(flightedl.__file__).resolve().parent.parent
#: Lines of Python in the installed package when this number was last agreed on.
LINES = 96_160
#: Growth beyond `LINES` that needs no decision.
SLACK = 0.02
_INSTALLED = ("flightedl", "tools", "schemas")
_NOT_INSTALLED = "tools/generators/"


def lines_installed(root: Path) -> int:
    """Count the lines of the Python files that the wheel contains."""
    files = (file for top in _INSTALLED for file in (root / top).rglob("*.py"))
    return sum(len(file.read_bytes().splitlines()) for file in files if not file.is_relative_to(root / _NOT_INSTALLED))


def largest_changes(root: Path) -> list[str]:
    """List the ten files that grew most since the last release, or since `LINES` was last changed if there is none."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, check=False).stdout

    since = git("describe", "--tags", "--abbrev=0").strip()
    since = since or git("log", "-1", "--format=%h", "-G^LINES = ", "--", "tests/test_budgets.py").strip()
    if not since:
        return []
    changes = [
        line.split("\t")
        for line in git("diff", "--numstat", since, "--", *_INSTALLED, f":!{_NOT_INSTALLED}").splitlines()
    ]
    growth = {file: int(added) - int(deleted) for added, deleted, file in changes if file.endswith(".py")}
    largest = sorted(growth, key=growth.__getitem__, reverse=True)[:10]
    return [f"{growth[file]:+,} {file} since {since}" for file in largest if growth[file] > 0]


def test_the_installed_package_stays_within_its_size() -> None:
    found, most = lines_installed(ROOT), int(LINES * (1 + SLACK))
    if found > most:
        pytest.fail("\n".join([f"the installed package has {found:,} lines, {most:,} agreed", *largest_changes(ROOT)]))


def test_the_largest_changes_are_listed_by_their_growth(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", tmp_path, *identity, *arguments], capture_output=True, check=True)

    def write(name: str, lines: int) -> None:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x = 1\n" * lines, "utf-8")

    git("init")
    for name in ("flightedl/few.py", "tools/many.py", "flightedl/fewer.py", "tools/generators/not_counted.py"):
        write(name, 3)
    git("add", ".")
    git("commit", "-m", "begin")
    git("tag", "v1")
    write("flightedl/few.py", 5)
    write("tools/many.py", 1_200)
    write("flightedl/fewer.py", 1)
    write("tools/generators/not_counted.py", 90)
    assert lines_installed(tmp_path) == 1_206
    assert largest_changes(tmp_path) == ["+1,197 tools/many.py since v1", "+2 flightedl/few.py since v1"]


def test_the_version_is_written_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert flightedl.__version__ == project["version"]
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert headings[:2] == ["Unreleased", flightedl.__version__]
