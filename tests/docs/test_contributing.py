"""The commands of CONTRIBUTING.md exist and select tests, and ``make help`` lists them all."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from .pages import ROOT

#: Files and names that follow ``make test-one``.
SELECTIONS = re.findall(
    r"^make (?:test-one|quick) t=(\S+)(?: k=(\S+))?", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.MULTILINE
)


#: Targets that only install programs.
INSTALLED = {"programs", "etcd-server", "kubectl", "promtool", "chromium", "node-packages"}


def test_the_page_has_examples() -> None:
    assert any(name for _, name in SELECTIONS)


@pytest.mark.parametrize(("place", "name"), SELECTIONS)
def test_an_example_selects_a_test(place: str, name: str) -> None:
    program = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", place]
    ran = subprocess.run(
        [*program, *(["-k", name] if name else [])], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False
    )
    assert ran.returncode == 0, f"no test is selected: {ran.stdout[-500:]}{ran.stderr[-500:]}"


MAKEFILE = (ROOT / "Makefile").read_text("utf-8")
TOLD = (ROOT / "CONTRIBUTING.md").read_text("utf-8") + (ROOT / "README.md").read_text("utf-8")
#: Makefile targets named in the text or in a block of commands.
NAMED = sorted(set(re.findall(r"`make\s+([a-z-]+)", TOLD)) | set(re.findall(r"^make ([a-z-]+)", TOLD, re.MULTILINE)))


@pytest.mark.parametrize("target", NAMED)
def test_every_named_target_exists(target: str) -> None:
    program = ["make", "--dry-run", "--no-print-directory", "--assume-old", ".venv/.dev", target]
    ran = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert ran.returncode == 0, ran.stderr


def test_the_help_lists_every_target_for_people() -> None:
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, timeout=50, check=True).stdout
    listed = set(re.findall(r"^  make ([a-z-]+)", shown, re.MULTILINE))
    (phony,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert listed == set(phony.split()) - INSTALLED
    assert {target for target in listed if f"\n{target}:" in MAKEFILE} == listed


def test_programs_in_the_commands_exist() -> None:
    for module in re.findall(r"python -m ([\w.]+)", TOLD):
        if not module.startswith(("flightedl", "tests", "benchmarks")):
            continue
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
