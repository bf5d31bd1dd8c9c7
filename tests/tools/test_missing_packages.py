"""Commands without optional packages: every command has help, and a missing package raises one sentence."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata

import pytest

from flightedl.process.importing import install_command

#: Program that blocks all optional packages, and prints every command's help.
BARE = """
import sys
from importlib import machinery, metadata
from packaging.requirements import Requirement

def needed(name, found):
    if name.lower() in found:
        return found
    found.add(name.lower().replace("_", "-"))
    for text in metadata.requires(name) or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            needed(requirement.name, found)
    return found

core = needed("flightedl", set())
tops = metadata.packages_distributions()

def is_absent(name):
    owners = tops.get(name.partition(".")[0])
    return owners and not any(owner.lower().replace("_", "-") in core for owner in owners)

find = machinery.PathFinder.find_spec
machinery.PathFinder.find_spec = lambda name, *more: None if is_absent(name) else find(name, *more)
"""
HELP = """
import click
from flightedl_tools.main import command, run_command_line

def paths(group, context, path):
    yield path
    if isinstance(group, click.Group):
        for name in group.list_commands(context):
            found = group.get_command(context, name)
            yield from paths(found, click.Context(found, parent=context), [*path, name])

for path in list(paths(command, click.Context(command), [])):
    assert run_command_line([*path, "--help"]) == 0, path
    print("help of", *path)
"""


def without_extras(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BARE + program, *arguments], capture_output=True, text=True, timeout=50, check=False
    )


def test_every_command_has_its_help_with_no_extra_installed() -> None:
    ran = without_extras(HELP)
    assert ran.returncode == 0, ran.stderr
    assert "help of bench recovery" in ran.stdout
    assert "help of certs create" in ran.stdout


@pytest.mark.parametrize(
    ("arguments", "package"),
    [
        (["bench", "torch"], "torch"),
        (["bench", "latency", "sync"], "torch"),
        (["dataset", "inspect", "kafka://broker:9092/clicks"], "confluent-kafka"),
        (["submit", "flightedl.examples.digits", "--image", "i", "--insecure", "--dry-run"], "pyyaml"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value[:3]),
)
def test_a_missing_package_raises_one_sentence(arguments: list[str], package: str) -> None:
    ran = without_extras("from flightedl_tools.main import main; main()", *arguments)
    assert (ran.returncode, "Traceback" in ran.stderr) == (2, False), ran.stderr
    assert re.search(rf"pip install .*\b{package}", ran.stderr)


@pytest.mark.parametrize(
    "extra", ["local", "s3", "torch", "tls", "kubernetes", "examples", "plot", "opentelemetry", "kafka"]
)
def test_install_commands_name_existing_packages(extra: str) -> None:
    command = install_command(extra)
    assert command.startswith("pip install ")
    assert len(command) > len("pip install ")
    assert "flightedl" not in command


def test_the_extras_contain_everything_that_commands_import() -> None:
    extras = set(metadata.metadata("flightedl").get_all("Provides-Extra") or [])
    assert {"local", "s3", "torch", "tls", "kubernetes", "examples", "plot", "tensorboard", "opentelemetry"} <= extras
